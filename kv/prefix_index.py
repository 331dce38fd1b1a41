"""Which block holds the KV of which prefix.

A block is found by a chained strong hash: SHA-256 over its parent's hash and
its own token ids, the first parent being the hash of the salt. Equal hashes
therefore mean equal tokens from the start of the prompt and equal salt. Tenants
that have different salts never find each other's blocks.

This module is pure; it does not know which blocks are free.
"""

import hashlib
from array import array
from collections.abc import Collection, Sequence
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


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block that follows ``parent``; 32 bytes."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


def extend_hashes(owner: KvOwner, num_blocks: int, block_size: int) -> None:
    """Make ``owner.block_hashes`` at least ``num_blocks`` long; its tokens must fill that many blocks."""
    hashes = owner.block_hashes
    assert num_blocks * block_size <= len(owner.token_ids)
    if num_blocks <= len(hashes):
        return
    parent = hashes[-1] if hashes else hashlib.sha256(owner.cache_salt.encode()).digest()
    tokens = array("I", owner.token_ids[len(hashes) * block_size : num_blocks * block_size])
    content, num_bytes, sha256 = tokens.tobytes(), tokens.itemsize * block_size, hashlib.sha256
    for start in range(0, len(content), num_bytes):  # ``hash_block`` of each, without a list of its own
        parent = sha256(parent + content[start : start + num_bytes]).digest()
        hashes.append(parent)


class PrefixIndex:
    """Maps block hashes to the blocks that hold such KV.

    Several blocks may hold the same prefix (computed side by side); each stays
    findable until it is removed itself.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[bytes, dict[int, None]] = {}

    def __len__(self) -> int:
        """Number of different prefixes."""
        return len(self._blocks)

    @property
    def num_entries(self) -> int:
        """Number of findable blocks."""
        return sum(map(len, self._blocks.values()))

    def find(self, block_hash: bytes) -> Collection[int]:
        """Blocks with this hash, the one known longest first; empty if there are none."""
        return self._blocks.get(block_hash, ())

    def add(self, block_hash: bytes, block: int) -> None:
        """Make ``block`` findable."""
        self._blocks.setdefault(block_hash, {})[block] = None

    def remove(self, block_hash: bytes, block: int) -> None:
        """Forget ``block``; others with the same hash stay.

        Raises:
            KeyError: it was not there.
        """
        blocks = self._blocks[block_hash]
        del blocks[block]
        if not blocks:
            del self._blocks[block_hash]

    def holds(self, block_hash: bytes, block: int) -> bool:
        """Whether ``block`` is findable under ``block_hash``."""
        return block in self._blocks.get(block_hash, ())
