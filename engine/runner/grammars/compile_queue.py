"""Whose grammar is compiled next. Pure: it knows neither processes nor a clock.

Two lanes, as in a multi-level feedback queue (Corbató et al., 1962). A grammar begins in the
quick lane, where it may stay for a moment; one that takes longer goes on in the slow lane, or
is paused until there is room. So whatever is compiled, the quick lane has room again soon.
In both lanes the tenant that takes the least of it comes first, then urgency, then order.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    tenant: str
    level: int
    order: int


class CompileQueue:
    """Grammars by number: waiting, in the quick lane, in the slow lane, or paused.

    Args:
        num_quick: that may be compiled in the quick lane.
        num_slow: that may be compiled in the slow lane.
        max_waiting: that may wait for the quick lane.
        max_paused: that may be paused; one more is given up.
    """

    def __init__(
        self, num_quick: int = 2, num_slow: int = 1, *, max_waiting: int = 128, max_paused: int = 8
    ) -> None:
        self._num_quick, self._num_slow = num_quick, num_slow
        self._max_waiting, self._max_paused = max_waiting, max_paused
        self._entries: dict[int, _Entry] = {}
        self._num_pushed = 0
        self._waiting: set[int] = set()
        self._paused: set[int] = set()
        self.quick: set[int] = set()
        self.slow: set[int] = set()

    def __contains__(self, number: object) -> bool:
        """Whether a grammar is being compiled, or is to be."""
        return number in self._entries

    @property
    def num_waiting(self) -> int:
        """Grammars whose compilation has not begun."""
        return len(self._waiting)

    @property
    def max_waiting(self) -> int:
        """How many these may be."""
        return self._max_waiting

    def has_room(self, tenant: str) -> bool:
        """Whether one more of a tenant may wait: half of the places are kept for the others."""
        own = sum(self._entries[number].tenant == tenant for number in self._waiting)
        num_waiting = len(self._waiting)
        return num_waiting < self._max_waiting and (
            own < self._max_waiting // 2 or own == num_waiting < self._max_waiting // 2
        )

    def push(self, number: int, tenant: str, level: int) -> None:
        """A grammar is to be compiled."""
        self._num_pushed += 1
        self._entries[number] = _Entry(tenant, level, self._num_pushed)
        self._waiting.add(number)

    def hurry(self, number: int, level: int) -> None:
        """Somebody at ``level`` waits for it, too."""
        entry = self._entries.get(number)
        if entry is not None:
            entry.level = min(entry.level, level)

    def begin(self) -> int | None:
        """The next one that enters the quick lane; None when it is full, or nothing waits."""
        if len(self.quick) >= self._num_quick or not self._waiting:
            return None
        number = self._first(self._waiting, self.quick)
        self._waiting.remove(number)
        self.quick.add(number)
        return number

    def demote(self, number: int) -> bool:
        """A grammar has had its moment in the quick lane; it is paused until ``go_on`` names it.

        Returns:
            False = as many are paused as may be; it is to be given up.
        """
        self.quick.discard(number)
        if len(self._paused) >= self._max_paused:
            del self._entries[number]
            return False
        self._paused.add(number)
        return True

    def go_on(self) -> int | None:
        """The next paused one that may go on in the slow lane; None when there is no room, or none."""
        if len(self.slow) >= self._num_slow or not self._paused:
            return None
        number = self._first(self._paused, self.slow)
        self._paused.remove(number)
        self.slow.add(number)
        return number

    def rotate(self, number: int) -> bool:
        """Pause one of the slow lane for the sake of another one; whether there is another one."""
        if not self._paused or number not in self.slow:
            return False
        self.slow.remove(number)
        entry = self._entries[number]
        self._num_pushed += 1
        entry.order = self._num_pushed
        self._paused.add(number)
        return True

    def remove(self, number: int) -> None:
        """A grammar is compiled, or nobody wants it any more; harmless when it is not there."""
        self._entries.pop(number, None)
        for lane in (self._waiting, self._paused, self.quick, self.slow):
            lane.discard(number)

    def _first(self, among: set[int], lane: set[int]) -> int:
        taken = Counter(self._entries[number].tenant for number in lane)

        def turn(number: int) -> tuple[int, int, int]:
            entry = self._entries[number]
            return taken[entry.tenant], entry.level, entry.order

        return min(among, key=turn)
