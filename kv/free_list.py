"""An intrusive doubly linked list of free block ids: every operation is O(1)."""

from collections.abc import Iterator


class FreeList:
    """Free block ids in the order in which they will be reused; all of 0..num_blocks-1 at first, or none.

    Two arrays hold the links, so nothing is allocated after construction.

    Invariant: a block is in the list at most once.
    """

    __slots__ = ("_end", "_len", "_next", "_previous")

    def __init__(self, num_blocks: int, *, filled: bool = True) -> None:
        end = num_blocks  # the sentinel: before the first and after the last
        self._end = end
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [end, *range(num_blocks)]
        self._len = num_blocks
        if not filled:
            self._next[end] = self._previous[end] = end
            self._len = 0

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
        end, following = self._end, self._next
        taken: list[int] = []
        block = following[end]
        while block != end and len(taken) < num_blocks:
            taken.append(block)
            block = following[block]
        following[end] = block
        self._previous[block] = end
        self._len -= len(taken)
        return taken

    def remove(self, block: int) -> None:
        """Take a block that is in the list, wherever it stands."""
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._len -= 1

    def append(self, block: int) -> None:
        """Put a block last."""
        self._insert(block, self._previous[self._end], self._end)

    def prepend(self, block: int) -> None:
        """Put a block first."""
        self._insert(block, self._end, self._next[self._end])

    def _insert(self, block: int, before: int, after: int) -> None:
        self._previous[block], self._next[block] = before, after
        self._next[before] = block
        self._previous[after] = block
        self._len += 1
