"""Work that can wait until the readers of tokens have had their turn.

Books, metrics and log lines of a step are made when its tokens are on their way: what
the loop does between the end of a step and the next plan is what every token waits for.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from engine.failure import trace_of

log = structlog.get_logger("vorrang.engine")


class Afterwards:
    """Calls made, in order, once whoever is woken in this turn of the event loop has run.

    For the event loop's thread.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def __call__(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call ``function`` afterwards; it must be quick. When it raises, that is logged and all goes on."""
        if not self._calls:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.make)  # two turns: others are woken after this one
        self._calls.append((function, arguments))

    def make(self) -> None:
        """Make all calls that were put off, now."""
        while self._calls:
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception as error:
                what, trace = getattr(function, "__qualname__", ""), trace_of(error, with_text=False)
                log.error("afterwards.failed", what=what, exception=trace)
