"""Who owns which KV block.

Blocks have a fixed size and a reference count. A freed block keeps its hash and
stays findable until it is reused, so a preempted or finished request can hit its
own blocks; reuse takes blocks without a hash first, then those of the least dear
owners, the longest unused of them first. Eviction from the cache is lazy: it
happens when a block is allocated.

This module is pure; it knows neither tensors nor scheduling.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kv.free_list import FreeList
from kv.prefix_index import KvOwner, PrefixIndex, extend_hashes


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks found for the start of an owner's tokens. It takes no references.

    Attributes:
        blocks: in order; all full.
        num_tokens: tokens they hold; at most the owner's tokens - 1, so that logits exist.
        num_free_blocks: how many of them nobody holds; taking those consumes free blocks.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    num_free_blocks: int


class BlockManager:
    """Allocates, shares and frees blocks.

    Invariant (``check_integrity``): free + held = total; a block's reference
    count is the number of tables that hold it; a block is free exactly when that
    is 0; hashes and index agree.

    Attributes:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        num_free_blocks: blocks nobody holds, cached ones included.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True, num_ranks: int = 3
    ) -> None:
        assert num_blocks >= 1 and block_size >= 1  # noqa: PT018
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        # Blocks without a hash, then those of the least dear owners .. those of the dearest.
        self._free = [FreeList(num_blocks), *(FreeList(num_blocks, filled=False) for _ in range(num_ranks))]
        self._rank = [num_ranks - 1] * num_blocks
        self.num_free_blocks = num_blocks
        self._references = [0] * num_blocks
        self._index = PrefixIndex(num_blocks)
        self._pending: dict[bytes, KvOwner] = {}  # full blocks that are held, but not computed yet
        self._owners: dict[str, KvOwner] = {}

    @property
    def num_owners(self) -> int:
        """Owners that hold a table."""
        return len(self._owners)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def holds(self, request_id: str) -> bool:
        """Whether an owner has a table."""
        return request_id in self._owners

    def table(self, request_id: str) -> Sequence[int]:
        """Blocks of an owner, in order; a live view."""
        return self._owners[request_id].block_table

    def match(self, owner: KvOwner, max_tokens: int | None = None) -> PrefixHit:
        """Find the longest prefix of the owner's tokens that is in the pool. Takes nothing.

        It is at most ``max_tokens`` long, whatever is there.

        Of several copies of a block one that is held is preferred: taking it costs no free block.
        """
        blocks: list[int] = []
        num_free = 0
        if self.enable_prefix_cache:
            num_usable = (len(owner.token_ids) - 1) // self.block_size
            extend_hashes(owner, num_usable, self.block_size)
            if max_tokens is not None:
                num_usable = min(num_usable, max_tokens // self.block_size)
            for block_hash in owner.block_hashes[:num_usable]:
                copies = self._index.find(block_hash)
                if not copies:
                    break
                block = next(iter(copies))
                if self._references[block] == 0 and len(copies) > 1:
                    block = max(copies, key=self._references.__getitem__)
                blocks.append(block)
                num_free += self._references[block] == 0
        return PrefixHit(tuple(blocks), len(blocks) * self.block_size, num_free)

    def being_computed(self, owner: KvOwner, hit: PrefixHit) -> tuple[KvOwner, int] | None:
        """Who holds the blocks that follow the owner's hit, without having computed them yet.

        Returns:
            That owner, and how many blocks both would fill alike; None when there is nobody.
        """
        first, num_usable = len(hit.blocks), (len(owner.token_ids) - 1) // self.block_size
        if first >= num_usable or not self.enable_prefix_cache:
            return None
        other = self._pending.get(owner.block_hashes[first])
        if other is None:
            return None
        mine, theirs = owner.block_hashes, other.block_hashes
        longest = min(num_usable, len(theirs))
        # Hashes are chained, so where two differ they differ from there on.
        end = bisect_left(range(longest), True, lo=first, key=lambda i: mine[i] != theirs[i])
        return other, end - first

    def num_blocks_to_admit(self, owner: KvOwner, hit: PrefixHit, num_tokens: int | None = None) -> int:
        """Free blocks that admitting the owner, with room for ``num_tokens`` (its known ones), consumes."""
        num_tokens = len(owner.token_ids) if num_tokens is None else num_tokens
        return self.blocks_for(num_tokens) - len(hit.blocks) + hit.num_free_blocks

    def admit(self, owner: KvOwner, hit: PrefixHit, num_tokens: int | None = None) -> bool:
        """Give a new owner the hit's blocks, and fresh ones up to ``num_tokens`` (its known ones).

        Returns:
            False, with nothing changed, when the free blocks do not suffice.
        """
        assert owner.request_id not in self._owners
        num_tokens = len(owner.token_ids) if num_tokens is None else num_tokens
        if self.num_blocks_to_admit(owner, hit, num_tokens) > self.num_free_blocks:
            return False
        for block in hit.blocks:
            if self._references[block] == 0:
                self._free_list(block).remove(block)
                self.num_free_blocks -= 1
            self._references[block] += 1
            self._rank[block] = min(self._rank[block], owner.cache_rank)
        owner.block_table = list(hit.blocks)
        owner.num_confirmed_blocks = len(hit.blocks)
        self._owners[owner.request_id] = owner
        self._extend(owner.block_table, self.blocks_for(num_tokens))
        claim = self._pending.setdefault
        for block_hash in owner.block_hashes[len(hit.blocks) :]:
            claim(block_hash, owner)
        return True

    def grow(self, owner: KvOwner, num_tokens: int | None = None) -> bool:
        """Make the owner's table cover ``num_tokens`` (its known ones).

        Returns:
            False, with nothing changed, when the free blocks do not suffice.
        """
        table = owner.block_table
        num_blocks = self.blocks_for(len(owner.token_ids) if num_tokens is None else num_tokens)
        if num_blocks - len(table) > self.num_free_blocks:
            return False
        self._extend(table, num_blocks)
        return True

    def grow_each(self, owners: Sequence[KvOwner]) -> None:
        """One more block for each of these, handed out in their order; the free blocks must suffice."""
        assert len(owners) <= self.num_free_blocks
        for owner, block in zip(owners, self._taken(len(owners)), strict=True):
            owner.block_table.append(block)

    def confirm(self, owner: KvOwner, num_computed_tokens: int) -> None:
        """Make the owner's full computed blocks findable."""
        if not self.enable_prefix_cache:
            return
        num_full = num_computed_tokens // self.block_size
        if num_full <= owner.num_confirmed_blocks:
            return
        extend_hashes(owner, num_full, self.block_size)
        first = owner.num_confirmed_blocks
        blocks, block_hashes = owner.block_table[first:num_full], owner.block_hashes[first:num_full]
        self._index.add(blocks, block_hashes)
        ranks, rank = self._rank, owner.cache_rank
        for block in blocks:
            ranks[block] = rank
        self._forget_pending(owner, block_hashes)
        owner.num_confirmed_blocks = num_full

    def free(self, owner: KvOwner) -> int:
        """Drop the owner's table.

        Returns:
            Blocks that nobody holds any more.
        """
        del self._owners[owner.request_id]
        table, num_confirmed = owner.block_table, owner.num_confirmed_blocks
        self._forget_pending(owner, owner.block_hashes[num_confirmed:])
        references = self._references
        for block in table:
            references[block] -= 1
        # Tail first: the start of a prefix is worth most.
        freed = [block for block in reversed(table) if not references[block]]
        # Only confirmed blocks have a hash, and only those may be shared.
        num_unhashed = len(table) - num_confirmed
        self._free[0].prepend(freed[:num_unhashed])
        hashed = freed[num_unhashed:]
        for rank in set(map(self._rank.__getitem__, hashed)):
            self._free[-1 - rank].append([block for block in hashed if self._rank[block] == rank])
        owner.block_table = []
        owner.num_confirmed_blocks = 0
        self.num_free_blocks += len(freed)
        return len(freed)

    def forget_all(self) -> None:
        """The memory behind the blocks is gone: none is findable any more.

        Nobody may hold a block. The order of reuse starts anew.
        """
        assert not self._owners
        assert not self._pending
        self._free = [FreeList(self.num_blocks, filled=not i) for i in range(len(self._free))]
        self._index = PrefixIndex(self.num_blocks)

    def num_shared_prefix_blocks(self, owner: KvOwner, keep: Collection[int] = ()) -> int:
        """Leading blocks of the owner that outlive its eviction: others hold them too, or ``keep`` them.

        Found by bisection: requests share prefixes, so blocks of the owner's alone come
        after those it shares. Where several copies of a prefix were computed side by side
        that need not be so, and the number is an estimate; ``reclaim`` is exact.
        """
        references, table = self._references, owner.block_table
        if table and references[table[0]] == 1 and table[0] not in keep:
            return 0  # as with most
        return bisect_left(table, True, key=lambda block: references[block] == 1 and block not in keep)

    def reclaim(self, keep: Collection[int] = ()) -> "Reclaim":
        """A what-if count over this manager's tables; ``keep`` are blocks that would be taken at once."""
        return Reclaim(self._references, self.table, keep)

    def _forget_pending(self, owner: KvOwner, block_hashes: Sequence[bytes]) -> None:
        pending = self._pending
        if not pending:
            return
        for block_hash in block_hashes:
            other = pending.pop(block_hash, None)
            if other is not None and other is not owner:
                pending[block_hash] = other

    def _free_list(self, block: int) -> FreeList:
        """Where a block stands, or would stand, when nobody holds it."""
        return self._free[0 if self._index.hash_of[block] is None else -1 - self._rank[block]]

    def _extend(self, table: list[int], num_blocks: int) -> None:
        if num_blocks > len(table):
            table += self._taken(num_blocks - len(table))

    def _taken(self, num_blocks: int) -> list[int]:
        """Free blocks, those to be reused next, which are held from now on and no longer findable."""
        self.num_free_blocks -= num_blocks
        references = self._references
        all_taken: list[int] = []
        for free in self._free:
            if not (taken := free.pop_some(num_blocks - len(all_taken))):
                continue
            for block in taken:
                references[block] = 1
            if free is not self._free[0]:
                self._index.remove(taken)
            all_taken += taken
            if len(all_taken) == num_blocks:
                break
        return all_taken

    def check_integrity(self) -> None:
        """Recount everything; an ``AssertionError`` here is a bug of ours."""
        counted = [0] * self.num_blocks
        for owner in self._owners.values():
            table = owner.block_table
            assert len(set(table)) == len(table), "a block twice in one table"
            assert owner.num_confirmed_blocks <= len(table)
            hashed = [self._index.hash_of[block] is not None for block in table]
            assert hashed == [position < owner.num_confirmed_blocks for position in range(len(table))]
            for block in table:
                counted[block] += 1
        assert counted == self._references, "reference counts differ from a recount"
        free = [block for part in self._free for block in part]
        assert len(free) == len(set(free)) == self.num_free_blocks, "the free lists are broken"
        for part in self._free:
            assert all(self._free_list(block) is part for block in part), "a free block in the wrong list"
        assert sorted(free) == [b for b, n in enumerate(counted) if n == 0], "free and held differ"
        self._index.check_integrity()
        for block_hash, owner in self._pending.items():
            assert self._owners[owner.request_id] is owner, "a pending block of nobody"
            assert block_hash in owner.block_hashes[owner.num_confirmed_blocks : len(owner.block_table)]


class Reclaim:
    """Counts what freeing a set of owners would give back, without freeing them.

    Blocks shared inside the set count once all their holders are in it; blocks
    in ``keep`` never count.
    """

    __slots__ = ("_dropped", "_keep", "_references", "_table", "num_blocks")

    def __init__(
        self, references: Sequence[int], table: Callable[[str], Sequence[int]], keep: Collection[int]
    ) -> None:
        self._references = references
        self._table = table
        self._keep = frozenset(keep)
        self._dropped: dict[int, int] = {}
        self.num_blocks = 0

    def add(self, request_id: str) -> None:
        """Count this owner as freed."""
        for block in self._countable(request_id):
            self.num_blocks += self._last_holder(block)
            self._dropped[block] = self._dropped.get(block, 0) + 1

    def remove(self, request_id: str) -> None:
        """Undo ``add``."""
        for block in self._countable(request_id):
            self._dropped[block] -= 1
            self.num_blocks -= self._last_holder(block)

    def _countable(self, request_id: str) -> Iterable[int]:
        return (block for block in self._table(request_id) if block not in self._keep)

    def _last_holder(self, block: int) -> bool:
        return self._references[block] - self._dropped.get(block, 0) == 1
