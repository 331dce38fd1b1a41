"""How keys and values lie in the paged cache of the GPU kernels, and what the launchers check of it.

Keys and values alike are ``[num_blocks, num_kv_heads, block_size, head_dim]``: the
tokens that one program reads of one block are one contiguous piece of
``block_size * head_dim`` elements, 2 KiB or more, and a token's head is a whole
number of 32-byte sectors. Slot ``s`` is row ``s % block_size`` of block
``s // block_size``.
"""

import torch
from torch import Tensor

from kernels.gpu.device import INTERPRETING, check_device

#: Elements of a head that the attention kernels can have.
HEAD_DIMS = (64, 80, 96, 128, 256)
#: Tokens of a block.
BLOCK_SIZES = (16, 32, 64)
#: Elements of the caches on a card. Under the interpreter float32 as well, for tests of the arithmetic.
CACHE_DTYPES = (torch.float16, torch.bfloat16)


def kv_cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's K and V cache.

    Raises:
        ValueError: the kernels have no layout for blocks or heads of this size.
    """
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {head_dim}")
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return shape, shape


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """What every kernel takes for granted about a cache.

    Raises:
        ValueError: shape, strides, data type or device are others than the kernels were made for.
    """
    check_device("k_cache", k_cache)
    kv_cache_shapes(k_cache.shape[0], k_cache.shape[2], k_cache.shape[1], k_cache.shape[3])
    allowed = (*CACHE_DTYPES, torch.float32) if INTERPRETING else CACHE_DTYPES
    if k_cache.dtype not in allowed:
        raise ValueError(f"k_cache dtype must be one of {allowed}, got {k_cache.dtype}")
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype or v_cache.device != k_cache.device:
        raise ValueError(
            f"v_cache must be like k_cache, {tuple(k_cache.shape)} {k_cache.dtype}, "
            f"got {tuple(v_cache.shape)} {v_cache.dtype}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
