"""An asyncio event loop whose time jumps to the next timer instead of waiting for it.

Code written for asyncio runs unchanged: ``asyncio.sleep(3600)`` ends at once, one
hour later. Nothing outside the process may be waited for, since no real time
passes. (The idea is that of trio's ``MockClock(autojump_threshold=0)``.)
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from engine.clock import ManualClock

T = TypeVar("T")


class TimeStandsStill(RuntimeError):
    """Everything waits and no timer is set: in virtual time nothing can ever happen again."""


class _JumpingSelector(selectors.DefaultSelector):
    """Where an event loop would wait, it moves the clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise TimeStandsStill("every task waits and no timer is set")
        self._clock.advance(max(0.0, timeout))
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock that moves only when nothing is ready to run.

    Attributes:
        clock: its time; give it to whatever needs a ``Clock``.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(_JumpingSelector(self.clock))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.clock.now()


def run_in_virtual_time(main: Coroutine[Any, Any, T], loop: VirtualTimeLoop) -> T:
    """Run a coroutine to its end on ``loop``, and close the loop.

    Raises:
        TimeStandsStill: everything waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
