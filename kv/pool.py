"""The tensors of the paged KV pool, and how many blocks fit a number of bytes.

Who owns which block is ``kv.block_manager``'s business; what lies where inside
a block is the kernels'.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from kernels import ops

DEFAULT_BYTES_MAX = 4 * 2**30
DEFAULT_FREE_SHARE = 0.5

_CGROUP = Path("/sys/fs/cgroup")


class PoolAllocationError(Exception):
    """The KV pool cannot be had: too small for one block, or larger than the memory there is."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What one token's KV needs.

    Attributes:
        num_layers: layers with attention.
        num_kv_heads: KV heads of a layer.
        head_dim: elements of a head.
        dtype: element type of the cache.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def free_bytes() -> int:
    """Memory this process could still get, by the machine and by its control group."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no control group of version 2, or no limit ("max")
        return free
    return max(0, min(free, limit - used))


def default_bytes() -> int:
    """Size of the pool nobody sized, on CPU: half of the free memory, at most 4 GiB."""
    return min(int(free_bytes() * DEFAULT_FREE_SHARE), DEFAULT_BYTES_MAX)


def num_blocks_for(num_bytes: int, layout: KvLayout, block_size: int) -> int:
    """Blocks of ``block_size`` tokens that fit ``num_bytes``.

    Raises:
        PoolAllocationError: not even one fits.
    """
    block_bytes = layout.token_bytes * block_size
    num_blocks = num_bytes // block_bytes
    if num_blocks < 1:
        raise PoolAllocationError(
            f"kv bytes must hold at least one block of {block_size} tokens, {block_bytes} bytes, "
            f"got {num_bytes}"
        )
    return num_blocks


class KvPool:
    """K and V of every layer for ``num_blocks`` blocks of ``block_size`` tokens.

    The memory is not initialised: nothing may read a slot that was not written.

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens of a block.
        num_bytes: size of all tensors.
        keys: one tensor a layer, in the shape the active kernels want.
        values: likewise.

    Raises:
        PoolAllocationError: fewer than one block or one token a block, a shape the kernels have no
            layout for, or not enough memory.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1:
            raise PoolAllocationError(f"kv num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1:
            raise PoolAllocationError(f"kv block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = layout.token_bytes * num_blocks * block_size
        device = torch.device(device)
        # Linux grants memory it does not have and kills later, so ask before, not after.
        if device.type == "cpu" and self.num_bytes > free_bytes():
            raise PoolAllocationError(
                f"kv pool of {num_blocks} blocks needs {self.num_bytes} bytes, but {free_bytes()} are free"
            )
        try:
            shapes = ops.kv_cache_shapes(num_blocks, block_size, layout.num_kv_heads, layout.head_dim)
        except ValueError as error:
            raise PoolAllocationError(f"kv {error}") from error
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        try:
            for _ in range(layout.num_layers):
                self.keys.append(torch.empty(shapes[0], dtype=layout.dtype, device=device))
                self.values.append(torch.empty(shapes[1], dtype=layout.dtype, device=device))
        except RuntimeError as error:  # torch has no type of its own for it on CPU
            raise PoolAllocationError(
                f"kv pool of {num_blocks} blocks needs {self.num_bytes} bytes, which {device} refused"
            ) from error
