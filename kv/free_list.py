"""An intrusive doubly linked list of free block ids: every operation is O(1)."""

from collections.abc import Iterator, Sequence


class FreeList:
    """Free block ids in the order in which they will be reused; all of 0..num_blocks-1 at first, or none.

    Two arrays hold the links, so nothing is allocated after construction.

    Invariant: a block is in the list at most once.
    """

    __slots__ = ("_end", "_len", "_next", "_previous")

    def __init__(self, num_blocks: int, *, filled: bool = True) -> None:
        end = num_blocks  # the sentinel: before the first and after the last
        self._end = end
        if filled:
            self._next: list[int] = [*range(1, num_blocks + 1), 0]
            self._previous: list[int] = [end, *range(num_blocks)]
        else:
            self._next = [end] * (num_blocks + 1)
            self._previous = [end] * (num_blocks + 1)
        self._len = num_blocks if filled else 0

    def __len__(self) -> int:
        """Number of free blocks."""
        return self._len

    def __iter__(self) -> Iterator[int]:
        """Blocks, next to be reused first."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def pop_some(self, num_blocks: int) -> list[int]:
        """Take up to ``num_blocks`` blocks, those to be reused next; fewer when there are fewer."""
        num_blocks = min(num_blocks, self._len)
        if not num_blocks:
            return []
        end, following = self._end, self._next
        taken = [block := following[end]]
        for _ in range(num_blocks - 1):
            block = following[block]
            taken.append(block)
        following[end] = block = following[block]
        self._previous[block] = end
        self._len -= num_blocks
        return taken

    def remove(self, block: int) -> None:
        """Take a block that is in the list, wherever it stands."""
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._len -= 1

    def append(self, blocks: Sequence[int]) -> None:
        """Put blocks last, in their order."""
        following, previous = self._next, self._previous
        before = previous[self._end]
        for block in blocks:
            following[before] = block
            previous[block] = before
            before = block
        following[before], previous[self._end] = self._end, before
        self._len += len(blocks)

    def prepend(self, blocks: Sequence[int]) -> None:
        """Put blocks first, one before the other: the last of them is reused next."""
        following, previous = self._next, self._previous
        after = following[self._end]
        for block in blocks:
            previous[after] = block
            following[block] = after
            after = block
        previous[after], following[self._end] = self._end, after
        self._len += len(blocks)
