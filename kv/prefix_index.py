"""Which block holds the KV of which prefix.

A block is found by a chained strong hash: SHA-256 over its parent's hash and
its own token ids, the first parent being the hash of the salt. Equal hashes
therefore mean equal tokens from the start of the prompt and equal salt. Tenants
that have different salts never find each other's blocks.

This module is pure; it does not know which blocks are free.
"""

import hashlib
from array import array
from collections.abc import Collection, Iterable
from typing import Protocol


class KvOwner(Protocol):
    """What may own blocks: a request.

    Attributes:
        token_ids: prompt + output, append-only.
        block_hashes: hashes of the full blocks of ``token_ids``, extended here on demand.
        cache_rank: how dear its blocks are to the cache; 0 is dearest.
        block_table: blocks it holds, in order; written by the block manager, which
            puts a new list in its place when they are taken away.
        num_confirmed_blocks: how many of them are findable; written by the block manager.
    """

    token_ids: list[int]
    block_hashes: list[bytes]
    cache_rank: int
    block_table: list[int]
    num_confirmed_blocks: int

    @property
    def request_id(self) -> str:
        """Unique among owners."""
        ...

    @property
    def cache_salt(self) -> str:
        """Owners share prefixes only inside one salt."""
        ...


def extend_hashes(owner: KvOwner, num_blocks: int, block_size: int) -> None:
    """Make ``owner.block_hashes`` at least ``num_blocks`` long; its tokens must fill that many blocks.

    A block's hash, of 32 bytes, is that of the one before it and of its own tokens.
    """
    hashes = owner.block_hashes
    assert num_blocks * block_size <= len(owner.token_ids)
    if num_blocks <= len(hashes):
        return
    parent = hashes[-1] if hashes else hashlib.sha256(owner.cache_salt.encode()).digest()
    tokens = array("I", owner.token_ids[len(hashes) * block_size : num_blocks * block_size])
    content, num_bytes, sha256 = tokens.tobytes(), tokens.itemsize * block_size, hashlib.sha256
    for start in range(0, len(content), num_bytes):
        parent = sha256(parent + content[start : start + num_bytes]).digest()
        hashes.append(parent)


class PrefixIndex:
    """Maps block hashes to the blocks that hold such KV, and back.

    Several blocks may hold the same prefix (computed side by side); each stays
    findable until it is removed itself.

    Args:
        num_blocks: of the pool.

    Attributes:
        hash_of: by block; None for those that are not findable. Written here alone.
    """

    __slots__ = ("_block", "_copies", "hash_of")

    def __init__(self, num_blocks: int) -> None:
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self._block: dict[bytes, int] = {}  # the one known longest
        self._copies: dict[bytes, dict[int, None]] = {}  # all of them, where there are several

    def __len__(self) -> int:
        """Number of different prefixes."""
        return len(self._block)

    def find(self, block_hash: bytes) -> Collection[int]:
        """Blocks with this hash, the one known longest first; empty if there are none."""
        block = self._block.get(block_hash)
        if block is None:
            return ()
        return self._copies.get(block_hash) or (block,)

    def add(self, blocks: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Make blocks findable, each under its hash."""
        hash_of, first = self.hash_of, self._block
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            hash_of[block] = block_hash
            known = first.setdefault(block_hash, block)
            if known != block:
                self._copies.setdefault(block_hash, {known: None})[block] = None

    def remove(self, blocks: Iterable[int]) -> None:
        """Forget blocks, all findable; others with the same hash stay."""
        hash_of, first, copies = self.hash_of, self._block, self._copies
        for block in blocks:
            block_hash = hash_of[block]
            assert block_hash is not None
            hash_of[block] = None
            if block_hash not in copies:
                del first[block_hash]
                continue
            left = copies[block_hash]
            del left[block]
            first[block_hash] = next(iter(left))
            if len(left) == 1:
                del copies[block_hash]

    def check_integrity(self) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        num_findable = 0
        for block, block_hash in enumerate(self.hash_of):
            if block_hash is not None:
                num_findable += 1
                assert block in self.find(block_hash), "a hashed block is not findable"
        num_entries = len(self._block) - len(self._copies) + sum(map(len, self._copies.values()))
        assert num_findable == num_entries, "the index knows blocks that are not hashed"
        for block_hash, copies in self._copies.items():
            assert len(copies) > 1
            assert next(iter(copies)) == self._block[block_hash], "not the one known longest is found first"
