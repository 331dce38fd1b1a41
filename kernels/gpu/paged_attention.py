"""Attention of a step over the paged KV: decodes, chunks of prompts, or both at once.

Requests with one query go to ``paged_decode``, which splits long contexts over
the card; the others to ``paged_prefill``, which has the tensor cores' full tiles.
Each kernel passes over the other's requests by itself: lengths stay on the card.

What is guaranteed about bits:

- A row's result never depends on the other requests of the step, nor on how many
  there are; in either mode, for either kernel.
- A chunk's rows do not depend on where the prompt was cut, while the chunks have
  two tokens or more.
- ``batch_invariant=True`` sends every request to ``paged_prefill``: then a row has
  the same bits whether it was decoded or computed as part of a chunk of any size,
  which is what recomputing a preempted request does. Long contexts decode slower
  so, because nothing is split.
- ``batch_invariant=False`` does **not** promise that a decoded row has the bits of
  the same row in a chunk: the kernels add in different orders.

Tests hold this with the interpreter, where a row of a matrix product depends on
that row alone. Whether it is so on a card's tensor cores only a card can show.
"""

import torch
from torch import Tensor

from kernels.gpu.device import check_device
from kernels.gpu.kv_layout import check_caches
from kernels.gpu.paged_decode import paged_decode
from kernels.gpu.paged_prefill import group_max, paged_prefill


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """See ``kernels.ops.paged_attention``; ``q`` has the data type of the caches. Never waits for the card.

    Args:
        q: ``[T, Hq, D]``; a view into ``qkv`` will do.
        k_cache: see ``kv_layout``.
        v_cache: likewise.
        block_tables: ``[S, max_blocks]`` int64.
        query_start: ``[S + 1]`` int64, strictly increasing.
        context_lens: ``[S]`` int64.
        scale: of the scores, positive.
        window: tokens a query sees, itself included; None = all.
        softcap: bound of the scores; None = off.
        batch_invariant: whether decodes must have the bits of chunks, see above.

    Returns:
        ``[T, Hq, D]``, contiguous.

    Raises:
        ValueError: a shape, data type, device or number that the kernels were not made for.
    """
    check_caches(k_cache, v_cache)
    _check(q, k_cache, block_tables, query_start, context_lens, scale, window, softcap)
    head_dim = q.shape[2]
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tokens, num_requests = q.shape[0], block_tables.shape[0]
    places = (block_tables, query_start, context_lens, scale, window, softcap)
    if num_tokens == 0:
        return out
    if batch_invariant:
        paged_prefill(out, q, k_cache, v_cache, *places, queries_min=1)
        return out
    # Every request has a query, so these counts tell at once when all of them are decodes, or none is.
    if num_tokens == num_requests or num_requests > 1:
        paged_decode(out, q, k_cache, v_cache, *places)
    if num_tokens > num_requests:
        paged_prefill(out, q, k_cache, v_cache, *places, queries_min=2)
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    check_device("q", q)
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    if q.dtype != k_cache.dtype or head_dim != k_cache.shape[3]:
        raise ValueError(
            f"q must have the caches' {k_cache.dtype} and head_dim {k_cache.shape[3]}, "
            f"got {q.dtype} and {head_dim}"
        )
    if num_q_heads % num_kv_heads or num_q_heads // num_kv_heads > group_max(q):
        raise ValueError(
            f"query heads must be 1 to {group_max(q)} times the {num_kv_heads} KV heads, got {num_q_heads}"
        )
    num_requests = block_tables.shape[0]
    if query_start.shape != (num_requests + 1,) or context_lens.shape != (num_requests,):
        raise ValueError(
            f"query_start and context_lens must have {num_requests + 1} and {num_requests} entries, "
            f"got {tuple(query_start.shape)} and {tuple(context_lens.shape)}"
        )
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_start", query_start),
        ("context_lens", context_lens),
    ):
        if tensor.dtype != torch.int64 or tensor.device != q.device:
            raise ValueError(f"{name} must be int64 on {q.device}, got {tensor.dtype} on {tensor.device}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
