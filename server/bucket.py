"""How much may be done in a time: a bucket that fills at a steady rate. Pure."""


class Bucket:
    """Full at first. What is spent may be more than it holds; then it is in debt.

    Args:
        per_s: what flows in a second.
        size: what it can hold, so how much may be done at once.
    """

    __slots__ = ("_at", "_left", "_per_s", "_size")

    def __init__(self, per_s: float, size: float) -> None:
        self._per_s = per_s
        self._size = size
        self._left = float(size)
        self._at: float | None = None

    def level(self, now: float) -> float:
        """What it holds at ``now``, in seconds of a monotonic clock; negative = in debt."""
        if self._at is not None:
            self._left = min(self._size, self._left + (now - self._at) * self._per_s)
        self._at = now
        return self._left

    def spend(self, amount: float) -> None:
        """Take out so much, whether it is there or not."""
        self._left -= amount

    def take(self, now: float) -> float:
        """Take out one, if it is there.

        Returns:
            0 when it was; otherwise the seconds until it will be, and nothing was taken.
        """
        level = self.level(now)
        if level >= 1:
            self._left -= 1
            return 0.0
        return (1 - level) / self._per_s
