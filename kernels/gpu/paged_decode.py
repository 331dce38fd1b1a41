"""Attention of one query a request over its paged KV, split along the context.

``out = sum_j softmax_j(s_j) v_j`` with ``s_j = scale * q . k_j`` or, soft-capped,
``cap * tanh(scale * q . k_j / cap)``, over the keys a query sees: all of its
context, or the last ``window`` of it.

Two passes. ``split_kernel``: a program takes one request, one KV head with up to
16 of its query heads, and one piece of the context; it leaves the piece's own
result and the logarithm of its sum of weights. ``merge_kernel``: a program takes
one request and query head and weighs the pieces, ``out = sum_i 2^(l_i - l) o_i``
with ``2^l = sum_i 2^(l_i)``.

Invariant: how a request's context is cut depends on its length and the window
alone, and nothing else of the batch enters, so a row's bits do not depend on its
neighbours. They are not the bits of ``paged_prefill`` for the same row.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023; softmax in
pieces after Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; the query heads of a group as one matrix after Ainslie et al., "GQA", 2023.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.aot import AotEntry
from kernels.gpu.device import INTERPRETING, TARGETS, TYPE_NAMES, TargetName, next_power_of_2, target_of
from kernels.gpu.kv_layout import CACHE_DTYPES, HEAD_DIMS

#: Query heads of one program: rows of a matrix for the tensor cores, which take 16.
GROUP_PAD = 16
#: No piece is shorter, so that what it costs to merge stays a few percent of what it costs to read.
SPLIT_TOKENS_MIN = 256
#: Pieces a context may have; longer contexts have longer pieces.
SPLITS_MAX = 32
#: Stands for no window; larger than any context.
NO_WINDOW = 2**31 - 1
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a program of ``split_kernel`` works.

    Attributes:
        tile_tokens: keys it reads at a time.
        num_warps: warps it has.
        num_stages: reads in flight, in tiles.
    """

    tile_tokens: int
    num_warps: int
    num_stages: int


#: By target and padded head size. Not measured on a card yet.
CONFIGS: dict[TargetName, dict[int, DecodeConfig]] = {
    "sm_80": {64: DecodeConfig(64, 4, 3), 128: DecodeConfig(64, 4, 3), 256: DecodeConfig(32, 4, 3)},
    "sm_90": {64: DecodeConfig(64, 4, 4), 128: DecodeConfig(64, 4, 3), 256: DecodeConfig(32, 4, 3)},
    "sm_100": {64: DecodeConfig(64, 4, 4), 128: DecodeConfig(64, 4, 3), 256: DecodeConfig(32, 4, 3)},
    "gfx942": {64: DecodeConfig(64, 4, 2), 128: DecodeConfig(64, 4, 2), 256: DecodeConfig(32, 4, 2)},
}


@triton.jit
def _pieces(
    context: tl.tensor,
    window: tl.tensor,
    TILE: tl.constexpr,
    PIECE_TILES_MIN: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
) -> tl.tuple:
    """How a context is cut: first tile, end of the tiles, tiles of a piece. Of the row's length alone."""
    first_tile = tl.maximum(context - window, 0) // TILE
    end_tile = tl.cdiv(context, TILE)
    piece_tiles = tl.maximum(tl.cdiv(end_tile - first_tile, SPLITS_MAX), PIECE_TILES_MIN)
    return first_tile, end_tile, piece_tiles


@triton.jit(
    do_not_specialize=["window", "block_shift", "num_kv_heads", "group", "num_splits", "tables_stride"]
)
def split_kernel(
    partial_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    factor: tl.tensor,
    cap_factor: tl.tensor,
    window: tl.tensor,
    block_shift: tl.tensor,
    num_kv_heads: tl.tensor,
    group: tl.tensor,
    num_splits: tl.tensor,
    q_stride: tl.tensor,
    tables_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    TILE: tl.constexpr,
    PIECE_TILES_MIN: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One piece of one request's context for the query heads of one KV head; see ``paged_decode``."""
    request = tl.program_id(0).to(tl.int64)
    head_tile = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(query_start_ptr + request)
    if tl.load(query_start_ptr + request + 1) - row != 1:
        return
    context = tl.load(context_lens_ptr + request).to(tl.int32)
    first_tile, end_tile, piece_tiles = _pieces(context, window, TILE, PIECE_TILES_MIN, SPLITS_MAX)
    begin = first_tile + split * piece_tiles
    end = tl.minimum(begin + piece_tiles, end_tile)
    if begin >= end:
        return
    head_tiles = tl.cdiv(group, GROUP_PAD)
    kv_head = head_tile // head_tiles
    in_group = (head_tile % head_tiles) * GROUP_PAD + tl.arange(0, GROUP_PAD)
    heads = kv_head * group + in_group
    dims = tl.arange(0, HEAD_PAD)
    q_seen = (in_group < group)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=q_seen, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    first_seen = tl.maximum(context - window, 0)
    table_ptr = tables_ptr + request * tables_stride
    block_mask = (1 << block_shift) - 1

    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    # Which blocks hold a tile is read one tile ahead; the reads of the keys then wait for nothing.
    positions = begin * TILE + tl.arange(0, TILE)
    seen = (positions >= first_seen) & (positions < context)
    next_blocks = tl.load(table_ptr + (positions >> block_shift), mask=seen, other=0)
    for tile in range(begin, end):
        blocks = next_blocks
        positions = tile * TILE + tl.arange(0, TILE)
        seen = (positions >= first_seen) & (positions < context)
        next_positions = positions + TILE
        next_blocks = tl.load(
            table_ptr + (next_positions >> block_shift), mask=next_positions < context, other=0
        )
        rows = ((blocks * num_kv_heads + kv_head) << block_shift) + (positions & block_mask)
        offsets = rows[:, None] * HEAD_DIM + dims[None, :]
        read = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offsets, mask=read, other=0.0)
        v = tl.load(v_ptr + offsets, mask=read, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        if SOFTCAP:
            # The hyperbolic tangent, times the cap; exp2 to infinity or zero gives its limits.
            scores = cap_factor - 2.0 * cap_factor / (tl.exp2(scores) + 1.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Every tile holds a key that is seen, so the maximum is finite from the first one on.
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        fade = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        highest = new_highest

    rows_out = (request * num_kv_heads * group + heads) * num_splits + split
    keep = in_group < group
    tl.store(log_sum_ptr + rows_out, highest + tl.log2(total), mask=keep)
    tl.store(partial_ptr + rows_out[:, None] * HEAD_DIM + dims[None, :], mixed / total[:, None], mask=q_seen)


@triton.jit(
    do_not_specialize=["window", "num_splits"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_lens_ptr"],
)
def merge_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    PIECE_TILES_MIN: tl.constexpr,
    SPLITS_MAX: tl.constexpr,
) -> None:
    """The pieces of one request and query head as one result; see ``paged_decode``."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    row = tl.load(query_start_ptr + request)
    if tl.load(query_start_ptr + request + 1) - row != 1:
        return
    context = tl.load(context_lens_ptr + request).to(tl.int32)
    first_tile, end_tile, piece_tiles = _pieces(context, window, TILE, PIECE_TILES_MIN, SPLITS_MAX)
    splits = tl.arange(0, SPLITS_MAX)
    there = splits < tl.cdiv(end_tile - first_tile, piece_tiles)
    dims = tl.arange(0, HEAD_PAD)
    rows = (request * num_heads + head) * num_splits + splits
    log_sums = tl.load(log_sum_ptr + rows, mask=there, other=float("-inf"))
    weights = tl.exp2(log_sums - tl.max(log_sums, axis=0))
    pieces = tl.load(
        partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :],
        mask=there[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(pieces * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(
        out_ptr + (row * num_heads + head) * HEAD_DIM + dims,
        out.to(out_ptr.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )


def splits_max(num_slots: int, window: int | None, tile_tokens: int) -> int:
    """Most pieces that a context of at most ``num_slots`` tokens is cut into: the grid's size."""
    tiles = -(-num_slots // tile_tokens)
    if window is not None:
        tiles = min(tiles, -(-window // tile_tokens) + 1)
    return max(1, min(SPLITS_MAX, -(-tiles // (SPLIT_TOKENS_MIN // tile_tokens))))


def paged_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Attend for the requests of the step that have exactly one query; the others' rows are not touched.

    Shapes and types were checked by ``paged_attention``. Never waits for the card.

    Args:
        out: ``[T, Hq, D]``, contiguous, written.
        q: ``[T, Hq, D]``, the heads of a token contiguous.
        k_cache: see ``kv_layout``.
        v_cache: likewise.
        block_tables: ``[S, max_blocks]`` int64, its rows contiguous.
        query_start: ``[S + 1]`` int64.
        context_lens: ``[S]`` int64.
        scale: of the scores, positive.
        window: tokens a query sees, itself included; None = all.
        softcap: bound of the scores; None = off.
    """
    num_requests, max_blocks = block_tables.shape
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    head_pad = next_power_of_2(head_dim)
    config = CONFIGS[target_of(q)][head_pad]
    num_splits = splits_max(max_blocks * block_size, window, config.tile_tokens)
    partial = torch.empty(
        num_requests, num_q_heads, num_splits, head_dim, dtype=torch.float32, device=q.device
    )
    log_sums = torch.empty(num_requests, num_q_heads, num_splits, dtype=torch.float32, device=q.device)
    shape = {
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "TILE": config.tile_tokens,
        "PIECE_TILES_MIN": SPLIT_TOKENS_MIN // config.tile_tokens,
        "SPLITS_MAX": SPLITS_MAX,
    }
    seen = NO_WINDOW if window is None else window
    factor, cap_factor = score_factors(scale, softcap)
    split_kernel[(num_requests, num_kv_heads * -(-group // GROUP_PAD), num_splits)](
        partial,
        log_sums,
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        context_lens,
        factor,
        cap_factor,
        seen,
        block_size.bit_length() - 1,
        num_kv_heads,
        group,
        num_splits,
        q.stride(0),
        block_tables.stride(0),
        GROUP_PAD=GROUP_PAD,
        SOFTCAP=softcap is not None,
        UPCAST=INTERPRETING,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **shape,
    )
    merge_kernel[(num_requests, num_q_heads)](
        out, partial, log_sums, query_start, context_lens, seen, num_splits, num_warps=4, **shape
    )


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What the kernels multiply with, base 2: a score before the tangent, and the cap after it."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2.0 * LOG2_E * scale / softcap, softcap * LOG2_E


def aot_entries() -> tuple[AotEntry, ...]:
    """Both passes for every data type and head size, the first with and without soft-cap."""
    return tuple(
        entry
        for target in TARGETS
        for dtype in CACHE_DTYPES
        for head_dim in HEAD_DIMS
        for entry in _entries(target, TYPE_NAMES[dtype], head_dim)
    )


def _entries(target: TargetName, dtype: str, head_dim: int) -> list[AotEntry]:
    head_pad = next_power_of_2(head_dim)
    config = CONFIGS[target][head_pad]
    shape = (
        ("HEAD_DIM", head_dim),
        ("HEAD_PAD", head_pad),
        ("TILE", config.tile_tokens),
        ("PIECE_TILES_MIN", SPLIT_TOKENS_MIN // config.tile_tokens),
        ("SPLITS_MAX", SPLITS_MAX),
    )
    places = (("query_start_ptr", "*i64"), ("context_lens_ptr", "*i64"))
    pieces = (("partial_ptr", "*fp32"), ("log_sum_ptr", "*fp32"))
    numbers = ("window", "block_shift", "num_kv_heads", "group", "num_splits", "q_stride", "tables_stride")
    case = f"{dtype}, head {head_dim}"
    found = [
        AotEntry(
            kernel="kernels.gpu.paged_decode:split_kernel",
            case=case + (", soft-cap" if softcap else ""),
            arguments=(
                *pieces,
                *((name, f"*{dtype}") for name in ("q_ptr", "k_ptr", "v_ptr")),
                ("tables_ptr", "*i64"),
                *places,
                ("factor", "fp32"),
                ("cap_factor", "fp32"),
                *((name, "i32") for name in numbers),
            ),
            constants=(*shape, ("GROUP_PAD", GROUP_PAD), ("SOFTCAP", softcap), ("UPCAST", False)),
            divisible=("partial_ptr", "log_sum_ptr", "q_ptr", "k_ptr", "v_ptr", "q_stride"),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            targets=(target,),
        )
        for softcap in (False, True)
    ]
    found.append(
        AotEntry(
            kernel="kernels.gpu.paged_decode:merge_kernel",
            case=case,
            arguments=(
                ("out_ptr", f"*{dtype}"),
                *pieces,
                *places,
                ("window", "i32"),
                ("num_splits", "i32"),
            ),
            constants=shape,
            divisible=("out_ptr", "partial_ptr", "log_sum_ptr"),
            num_warps=4,
            num_stages=3,
            targets=(target,),
        )
    )
    return found
