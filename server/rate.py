"""How often something may be done: a bucket of tokens that fills at a steady rate. Pure."""


class RateLimit:
    """A bucket for one thing.

    Args:
        per_s: rate that is possible for long.
        burst: how often at once.
    """

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._at: float | None = None

    def take(self, now: float) -> float:
        """Do it once.

        Returns:
            0 when it may be done; otherwise the seconds until it may, and nothing was taken.
        """
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) / self._per_s
