"""Rotate q and k by their positions, and scatter k and v into the paged cache, in one pass.

The pair ``(x[i], x[i + D/2])`` turns by the angle of ``i`` at the token's position:
with ``c, s`` the cosine and sine, ``x[i] * c - x[i + D/2] * s`` and
``x[i + D/2] * c + x[i] * s``, in float32, rounded once.

A program takes one token and up to ``HEADS`` of its heads, queries, keys and
values alike. A negative slot writes no KV, so rows that only fill up a captured
graph need no scratch block.

Source: Su et al., "RoFormer", 2021, in the half-split order of Llama checkpoints
of Hugging Face.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.aot import AotEntry
from kernels.gpu.device import TARGETS, TYPE_NAMES, check_device, next_power_of_2
from kernels.gpu.kv_layout import CACHE_DTYPES, HEAD_DIMS, check_caches

#: Heads of one program, by padded half of a head: about 1,024 pairs, eight for each of 128 threads.
HEADS = {32: 32, 64: 16, 128: 8}
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["num_q_heads", "num_kv_heads", "block_shift"],
    # They may lie anywhere in one buffer that a step's integers are sent in.
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def rotary_write_kv_kernel(
    out_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_q_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    block_shift: tl.tensor,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Some heads of one token; see ``rotary_write_kv``."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_heads = num_q_heads + 2 * num_kv_heads
    pairs = tl.arange(0, HALF_PAD)
    in_head = pairs < HALF
    there = (heads < num_heads)[:, None] & in_head[None, :]
    offsets = (token * num_heads + heads)[:, None] * (2 * HALF) + pairs[None, :]
    first = tl.load(qkv_ptr + offsets, mask=there, other=0.0)
    second = tl.load(qkv_ptr + offsets + HALF, mask=there, other=0.0)

    angles_ptr = rope_ptr + tl.load(positions_ptr + token) * (2 * HALF) + pairs
    cos = tl.load(angles_ptr, mask=in_head, other=0.0)[None, :]
    sin = tl.load(angles_ptr + HALF, mask=in_head, other=0.0)[None, :]
    first_wide = first.to(tl.float32)
    second_wide = second.to(tl.float32)
    turned_first = (first_wide * cos - second_wide * sin).to(out_ptr.dtype.element_ty)
    turned_second = (second_wide * cos + first_wide * sin).to(out_ptr.dtype.element_ty)

    is_query = there & (heads < num_q_heads)[:, None]
    out_offsets = (token * num_q_heads + heads)[:, None] * (2 * HALF) + pairs[None, :]
    tl.store(out_ptr + out_offsets, turned_first, mask=is_query)
    tl.store(out_ptr + out_offsets + HALF, turned_second, mask=is_query)

    slot = tl.load(slots_ptr + token)
    block = slot >> block_shift
    row = slot & ((1 << block_shift) - 1)
    kept = there & (slot >= 0)
    key_heads = heads - num_q_heads
    is_key = kept & ((key_heads >= 0) & (key_heads < num_kv_heads))[:, None]
    key_rows = ((block * num_kv_heads + key_heads) << block_shift) + row
    key_offsets = key_rows[:, None] * (2 * HALF) + pairs[None, :]
    tl.store(k_cache_ptr + key_offsets, turned_first, mask=is_key)
    tl.store(k_cache_ptr + key_offsets + HALF, turned_second, mask=is_key)
    value_heads = key_heads - num_kv_heads
    is_value = kept & (value_heads >= 0)[:, None]
    value_rows = ((block * num_kv_heads + value_heads) << block_shift) + row
    value_offsets = value_rows[:, None] * (2 * HALF) + pairs[None, :]
    tl.store(v_cache_ptr + value_offsets, first, mask=is_value)
    tl.store(v_cache_ptr + value_offsets + HALF, second, mask=is_value)


def rotary_write_kv(
    qkv: Tensor, rope: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """See ``kernels.ops.rotary_write_kv``; ``qkv`` has the data type of the caches.

    Args:
        qkv: ``[T, Hq + 2 * Hkv, D]``, made contiguous where it is not.
        rope: ``[max_positions, D]`` float32, ``D/2`` cosines, then ``D/2`` sines.
        positions: ``[T]`` int64.
        slots: ``[T]`` int64; a negative one writes nothing.
        k_cache: see ``kv_layout``; written in place.
        v_cache: likewise.

    Returns:
        The rotated queries, ``[T, Hq, D]``, contiguous.

    Raises:
        ValueError: a shape, data type or device that the kernel was not made for.
    """
    check_caches(k_cache, v_cache)
    check_device("qkv", qkv)
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_q_heads = num_heads - 2 * num_kv_heads
    if qkv.dtype != k_cache.dtype or head_dim != k_cache.shape[3] or num_q_heads < 1:
        raise ValueError(
            f"qkv must be {k_cache.dtype} with head_dim {k_cache.shape[3]} and more than "
            f"{2 * num_kv_heads} heads, got {qkv.dtype} {tuple(qkv.shape)}"
        )
    if rope.dtype != torch.float32 or rope.shape[1] != head_dim or not rope.is_contiguous():
        raise ValueError(
            f"rope must be contiguous float32 [positions, {head_dim}], got {rope.dtype} {tuple(rope.shape)}"
        )
    for name, tensor in (("positions", positions), ("slots", slots)):
        if tensor.dtype != torch.int64 or tensor.shape != (num_tokens,):
            raise ValueError(f"{name} must be int64 [{num_tokens}], got {tensor.dtype} {tuple(tensor.shape)}")
    out = torch.empty(num_tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    half_pad = next_power_of_2(head_dim // 2)
    rotary_write_kv_kernel[(num_tokens, -(-num_heads // HEADS[half_pad]))](
        out,
        k_cache,
        v_cache,
        qkv.contiguous(),
        rope,
        positions,
        slots,
        num_q_heads,
        num_kv_heads,
        block_size.bit_length() - 1,
        HALF=head_dim // 2,
        HALF_PAD=half_pad,
        HEADS=HEADS[half_pad],
        num_warps=NUM_WARPS,
    )
    return out


def aot_entries() -> tuple[AotEntry, ...]:
    """Every data type and head size."""
    return tuple(_entry(TYPE_NAMES[dtype], head_dim) for dtype in CACHE_DTYPES for head_dim in HEAD_DIMS)


def _entry(dtype: str, head_dim: int) -> AotEntry:
    half_pad = next_power_of_2(head_dim // 2)
    pointers = (
        *((name, f"*{dtype}") for name in ("out_ptr", "k_cache_ptr", "v_cache_ptr", "qkv_ptr")),
        ("rope_ptr", "*fp32"),
        ("positions_ptr", "*i64"),
        ("slots_ptr", "*i64"),
    )
    return AotEntry(
        kernel="kernels.gpu.rotary_write_kv:rotary_write_kv_kernel",
        case=f"{dtype}, head {head_dim}",
        arguments=(*pointers, ("num_q_heads", "i32"), ("num_kv_heads", "i32"), ("block_shift", "i32")),
        constants=(("HALF", head_dim // 2), ("HALF_PAD", half_pad), ("HEADS", HEADS[half_pad])),
        divisible=("out_ptr", "k_cache_ptr", "v_cache_ptr", "qkv_ptr", "rope_ptr"),
        num_warps=NUM_WARPS,
        num_stages=3,
        targets=TARGETS,
    )
