"""Causal attention of many queries a request over its paged KV, the chunk's own keys included.

``out_i = sum_{j <= i} softmax_j(s_ij) v_j`` with ``s_ij = scale * q_i . k_j`` or,
soft-capped, ``cap * tanh(scale * q_i . k_j / cap)``; with a window only over
``j > i - window``.

A program takes one KV head and a tile of queries of one request: the query heads
of the group times as many tokens as fit into ``tile_rows`` rows of a matrix.
Which request and which of its tiles it finds from ``query_start`` by itself, so
the host knows only a bound of the grid, ``T // tokens + S``, and never waits.

Invariant: keys are visited in tiles that begin at multiples of ``tile_keys``, in
ascending order, whichever queries share the tile; a tile of which a row sees
nothing leaves the row's bits alone; masked and plain tiles compute what is seen
with the same instructions. So a row's bits depend on its own keys alone: not on
the batch, nor on how a prompt was cut into chunks, nor on whether it came as a
chunk or as a decode of this same kernel. This holds on a card as far as a row of
a matrix product does not depend on the product's other rows.

Source: Dao, "FlashAttention-2", 2023; softmax in pieces after Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018; group and tokens as
one matrix after Ainslie et al., "GQA", 2023.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.aot import AotEntry
from kernels.gpu.device import INTERPRETING, TARGETS, TYPE_NAMES, TargetName, next_power_of_2, target_of
from kernels.gpu.kv_layout import CACHE_DTYPES, HEAD_DIMS
from kernels.gpu.paged_decode import NO_WINDOW, score_factors

#: Requests looked through at a time for the one that a program's tile is of.
SEARCH = 256


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How a program works. One for each target and head size, or rows would depend on the batch.

    Attributes:
        tile_rows: rows of its query matrix.
        tile_keys: keys it reads at a time.
        num_warps: warps it has.
        num_stages: reads in flight, in tiles.
    """

    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


#: By target and padded head size. Not measured on a card yet.
CONFIGS: dict[TargetName, dict[int, PrefillConfig]] = {
    "sm_80": {
        64: PrefillConfig(128, 64, 8, 3),
        128: PrefillConfig(128, 32, 8, 3),
        256: PrefillConfig(64, 32, 8, 2),
    },
    "sm_90": {
        64: PrefillConfig(128, 64, 8, 3),
        128: PrefillConfig(128, 64, 8, 3),
        256: PrefillConfig(64, 32, 8, 3),
    },
    "sm_100": {
        64: PrefillConfig(128, 64, 8, 3),
        128: PrefillConfig(128, 64, 8, 3),
        256: PrefillConfig(64, 32, 8, 3),
    },
    "gfx942": {
        64: PrefillConfig(128, 64, 4, 2),
        128: PrefillConfig(128, 32, 4, 2),
        256: PrefillConfig(64, 32, 4, 2),
    },
}


@triton.jit
def _visit(
    q: tl.tensor,
    positions: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    num_keys: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    factor: tl.tensor,
    cap_factor: tl.tensor,
    window: tl.tensor,
    block_shift: tl.tensor,
    num_kv_heads: tl.tensor,
    kv_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tuple:
    """The key tiles ``begin .. end``: all of their keys seen by all rows, or ``MASKED``.

    Masks act on what is computed, never on what goes into the multiply-adds, so that
    both forms give a key the same bits: left to the compiler, a fused multiply-add
    would appear in one of them only.
    """
    dims = tl.arange(0, HEAD_PAD)
    block_mask = (1 << block_shift) - 1
    # Which blocks hold a tile is read one tile ahead; the reads of the keys then wait for nothing.
    keys = begin * KEYS + tl.arange(0, KEYS)
    next_blocks = tl.load(table_ptr + (keys >> block_shift), mask=keys < num_keys, other=0)
    for tile in range(begin, end):
        blocks = next_blocks
        keys = tile * KEYS + tl.arange(0, KEYS)
        there = keys < num_keys
        next_keys = keys + KEYS
        next_blocks = tl.load(table_ptr + (next_keys >> block_shift), mask=next_keys < num_keys, other=0)
        slots = ((blocks * num_kv_heads + kv_head) << block_shift) + (keys & block_mask)
        offsets = slots[:, None] * HEAD_DIM + dims[None, :]
        if MASKED:
            read = there[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + offsets, mask=read, other=0.0)
            v = tl.load(v_ptr + offsets, mask=read, other=0.0)
        elif HEAD_DIM < HEAD_PAD:
            k = tl.load(k_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            # The hyperbolic tangent; exp2 to infinity or zero gives its limits.
            scores = 1.0 - 2.0 / (tl.exp2(scores * factor) + 1.0)
            weight = cap_factor
        else:
            weight = factor
        if MASKED:
            seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
            best = tl.max(tl.where(seen, scores, float("-inf")), axis=1)
            new_highest = tl.maximum(highest, best * weight)
            # A row that has seen nothing yet has no maximum; zero keeps its sums at zero.
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(tl.fma(scores, weight, -base[:, None]))
            weights = tl.where(seen, weights, 0.0)
        else:
            new_highest = tl.maximum(highest, tl.max(scores, axis=1) * weight)
            base = new_highest
            weights = tl.exp2(tl.fma(scores, weight, -base[:, None]))
        fade = tl.exp2(highest - base)
        total = tl.fma(total, fade, tl.sum(weights, axis=1))
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, mixed


@triton.jit(
    do_not_specialize=[
        "window",
        "block_shift",
        "num_kv_heads",
        "group",
        "num_requests",
        "queries_min",
        "tables_stride",
    ],
    # They may lie anywhere in one buffer that a step's integers are sent in.
    do_not_specialize_on_alignment=["tables_ptr", "query_start_ptr", "context_lens_ptr"],
)
def prefill_kernel(
    out_ptr: tl.tensor,
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
    num_requests: tl.tensor,
    queries_min: tl.tensor,
    q_stride: tl.tensor,
    tables_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SEARCH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One tile of one request's queries for the query heads of one KV head; see ``paged_prefill``."""
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile_tokens = ROWS // group

    # Request r's tiles have the numbers from query_start[r] // tile_tokens + r on; some stay unused.
    found = 0
    for first in range(0, num_requests, SEARCH):
        candidates = first + tl.arange(0, SEARCH)
        exists = candidates < num_requests
        starts = tl.load(query_start_ptr + candidates, mask=exists, other=0).to(tl.int32)
        found += tl.sum((exists & (starts // tile_tokens + candidates <= number)).to(tl.int32), axis=0)
    request = tl.cast(found - 1, tl.int64)
    first_row = tl.load(query_start_ptr + request)
    num_queries = (tl.load(query_start_ptr + request + 1) - first_row).to(tl.int32)
    first_query = (number - (first_row.to(tl.int32) // tile_tokens + request.to(tl.int32))) * tile_tokens
    if (num_queries < queries_min) | (first_query >= num_queries):
        return
    last_query = tl.minimum(first_query + tile_tokens, num_queries) - 1
    before = tl.load(context_lens_ptr + request).to(tl.int32) - num_queries

    rows = tl.arange(0, ROWS)
    queries = first_query + rows // group
    positions = before + queries
    dims = tl.arange(0, HEAD_PAD)
    heads = kv_head * group + rows % group
    mine = ((rows < tile_tokens * group) & (queries < num_queries))[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = (first_row + queries) * q_stride + heads * HEAD_DIM
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mine, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    table_ptr = tables_ptr + request * tables_stride

    # Key tiles in three runs: cut by the window, seen whole by every row, cut by causality.
    num_keys = before + last_query + 1
    begin = tl.maximum(before + first_query + 1 - window, 0) // KEYS
    end = tl.cdiv(num_keys, KEYS)
    whole_from = tl.minimum(tl.cdiv(tl.maximum(num_keys - window, 0), KEYS), end)
    whole_to = tl.maximum((before + first_query + 1) // KEYS, whole_from)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    highest, total, mixed = _visit(
        q, positions, highest, total, mixed, begin, whole_from, num_keys, k_ptr, v_ptr, table_ptr,
        factor, cap_factor, window, block_shift, num_kv_heads, kv_head,
        HEAD_DIM, HEAD_PAD, KEYS, True, SOFTCAP, UPCAST,
    )  # fmt: skip
    highest, total, mixed = _visit(
        q, positions, highest, total, mixed, whole_from, whole_to, num_keys, k_ptr, v_ptr, table_ptr,
        factor, cap_factor, window, block_shift, num_kv_heads, kv_head,
        HEAD_DIM, HEAD_PAD, KEYS, False, SOFTCAP, UPCAST,
    )  # fmt: skip
    highest, total, mixed = _visit(
        q, positions, highest, total, mixed, whole_to, end, num_keys, k_ptr, v_ptr, table_ptr,
        factor, cap_factor, window, block_shift, num_kv_heads, kv_head,
        HEAD_DIM, HEAD_PAD, KEYS, True, SOFTCAP, UPCAST,
    )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)  # rows that only fill up the matrix may have seen nothing
    out_offsets = ((first_row + queries) * (num_kv_heads * group) + heads) * HEAD_DIM
    tl.store(
        out_ptr + out_offsets[:, None] + dims[None, :],
        (mixed / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=mine,
    )


def group_max(q: Tensor) -> int:
    """Query heads a KV head may have: they must fit into one tile."""
    return CONFIGS[target_of(q)][next_power_of_2(q.shape[2])].tile_rows


def paged_prefill(
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
    queries_min: int,
) -> None:
    """Attend for the requests of the step with ``queries_min`` queries or more; other rows stay as they are.

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
        queries_min: requests with fewer queries are another kernel's.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_requests = block_tables.shape[0]
    group = num_q_heads // num_kv_heads
    head_pad = next_power_of_2(head_dim)
    config = CONFIGS[target_of(q)][head_pad]
    factor, cap_factor = score_factors(scale, softcap)
    prefill_kernel[(num_tokens // (config.tile_rows // group) + num_requests, num_kv_heads)](
        out,
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        context_lens,
        factor,
        cap_factor,
        NO_WINDOW if window is None else window,
        block_size.bit_length() - 1,
        num_kv_heads,
        group,
        num_requests,
        queries_min,
        q.stride(0),
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        ROWS=config.tile_rows,
        KEYS=config.tile_keys,
        SEARCH=SEARCH,
        SOFTCAP=softcap is not None,
        UPCAST=INTERPRETING,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def aot_entries() -> tuple[AotEntry, ...]:
    """Every data type and head size, with and without soft-cap."""
    return tuple(
        _entry(target, TYPE_NAMES[dtype], head_dim, softcap)
        for target in TARGETS
        for dtype in CACHE_DTYPES
        for head_dim in HEAD_DIMS
        for softcap in (False, True)
    )


def _entry(target: TargetName, dtype: str, head_dim: int, softcap: bool) -> AotEntry:
    head_pad = next_power_of_2(head_dim)
    config = CONFIGS[target][head_pad]
    pointers = (
        *((name, f"*{dtype}") for name in ("out_ptr", "q_ptr", "k_ptr", "v_ptr")),
        *((name, "*i64") for name in ("tables_ptr", "query_start_ptr", "context_lens_ptr")),
    )
    numbers = (
        "window", "block_shift", "num_kv_heads", "group", "num_requests", "queries_min", "q_stride",
        "tables_stride",
    )  # fmt: skip
    return AotEntry(
        kernel="kernels.gpu.paged_prefill:prefill_kernel",
        case=f"{dtype}, head {head_dim}" + (", soft-cap" if softcap else ""),
        arguments=(
            *pointers,
            ("factor", "fp32"),
            ("cap_factor", "fp32"),
            *((name, "i32") for name in numbers),
        ),
        constants=(
            ("HEAD_DIM", head_dim),
            ("HEAD_PAD", head_pad),
            ("ROWS", config.tile_rows),
            ("KEYS", config.tile_keys),
            ("SEARCH", SEARCH),
            ("SOFTCAP", softcap),
            ("UPCAST", False),
        ),
        divisible=("out_ptr", "q_ptr", "k_ptr", "v_ptr", "q_stride"),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        targets=(target,),
        needs_wgmma=True,
    )
