"""Where time comes from."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary, fixed point."""
        ...


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary, fixed point."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to; for tests and the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds since the clock was made, plus its start."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward; never back."""
        assert seconds >= 0
        self._now += seconds
