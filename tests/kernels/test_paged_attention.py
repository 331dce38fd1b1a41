"""Paged attention against dense attention in float64, over ragged batches with poisoned neighbours."""

import pytest
import torch

from kernels import ops, reference

#: (tokens granted, context with them) of each request.
BATCHES = {
    "one token, first of all": [(1, 1)],
    "one decode": [(1, 123)],
    "one whole prompt": [(123, 123)],
    "one block, full": [(4, 4)],
    "last block holds one": [(1, 5)],
    "chunk in the middle": [(5, 77)],
    "decodes, ragged": [(1, 1), (1, 123), (1, 4), (1, 5)],
    "decodes and chunks": [(1, 9), (1, 64), (5, 5), (123, 200), (7, 40)],
    "longer than a tile": [(300, 431)],
}


def _cache_of(keys, values, block_tables, block_size, num_blocks):
    """Caches that hold the given KV and are poisoned everywhere else."""
    shapes = ops.kv_cache_shapes(num_blocks, block_size, keys[0].shape[1], keys[0].shape[2])
    caches = [torch.full(shape, float("nan")) for shape in shapes]
    for cache, contexts in zip(caches, (keys, values), strict=True):
        flat = cache.view(-1, *cache.shape[2:])
        for table, context in zip(block_tables, contexts, strict=True):
            for position in range(len(context)):
                flat[table[position // block_size] * block_size + position % block_size] = context[position]
    return caches


def _dense(q, keys, values, scale, window=None, softcap=None):
    """``[n, Hq, D]`` queries, the last n of ``[context, Hkv, D]``; float64."""
    group = q.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, dim=1)
    values = values.double().repeat_interleave(group, dim=1)
    out = torch.empty_like(q, dtype=torch.float64)
    before = len(keys) - len(q)
    for token in range(len(q)):
        seen = before + token + 1
        first = 0 if window is None else max(0, seen - window)
        scores = torch.einsum("hd,chd->hc", q[token].double() * scale, keys[first:seen])
        weights = (scores if softcap is None else softcap * (scores / softcap).tanh()).softmax(-1)
        out[token] = torch.einsum("hc,chd->hd", weights, values[first:seen])
    return out


def _problem(batch, num_q_heads, num_kv_heads, head_dim, block_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    needs = [-(-context // block_size) for _, context in batch]
    num_blocks = sum(needs) + 5
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(batch), max(needs)), num_blocks + 99)  # reading past the context fails
    for row, need in enumerate(needs):
        tables[row, :need] = torch.tensor([order.pop() for _ in range(need)])
    keys = [torch.randn(context, num_kv_heads, head_dim, generator=generator) for _, context in batch]
    values = [torch.randn(context, num_kv_heads, head_dim, generator=generator) for _, context in batch]
    q = torch.randn(sum(n for n, _ in batch), num_q_heads, head_dim, generator=generator)
    k_cache, v_cache = _cache_of(keys, values, tables.tolist(), block_size, num_blocks)
    query_start = torch.tensor([0] + [n for n, _ in batch]).cumsum(0)
    contexts = torch.tensor([context for _, context in batch])
    return q, k_cache, v_cache, tables, query_start, contexts, keys, values


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_dense_attention_of_each_request(name, num_q_heads, num_kv_heads, block_size):
    batch = BATCHES[name]
    q, k_cache, v_cache, tables, query_start, contexts, keys, values = _problem(
        batch, num_q_heads, num_kv_heads, 8, block_size
    )

    out = ops.paged_attention(q, k_cache, v_cache, tables, query_start, contexts, 8**-0.5)

    assert out.shape == q.shape
    for row in range(len(batch)):
        begin, end = query_start[row : row + 2].tolist()
        wanted = _dense(q[begin:end], keys[row], values[row], 8**-0.5)
        torch.testing.assert_close(out[begin:end].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, None), (500, None), (None, 3.0), (37, 2.0)])
@pytest.mark.parametrize("name", ["decodes and chunks", "longer than a tile"])
def test_a_window_hides_what_is_far_and_a_softcap_bounds_scores(name, window, softcap):
    batch = BATCHES[name]
    q, k_cache, v_cache, tables, query_start, contexts, keys, values = _problem(batch, 4, 2, 8, 16)

    out = ops.paged_attention(
        q, k_cache, v_cache, tables, query_start, contexts, 1.0, window=window, softcap=softcap
    )

    for row in range(len(batch)):
        begin, end = query_start[row : row + 2].tolist()
        wanted = _dense(q[begin:end], keys[row], values[row], 1.0, window, softcap)
        torch.testing.assert_close(out[begin:end].double(), wanted, rtol=1e-4, atol=1e-5)


def test_large_scores_do_not_overflow():
    q, k_cache, v_cache, tables, query_start, contexts, keys, values = _problem([(5, 20)], 2, 1, 8, 4)

    out = ops.paged_attention(q * 1e4, k_cache, v_cache, tables, query_start, contexts, 1.0)

    torch.testing.assert_close(out.double(), _dense(q * 1e4, keys[0], values[0], 1.0), rtol=1e-3, atol=1e-3)


def test_a_chunk_is_the_same_in_tiles_of_any_size(monkeypatch):
    q, k_cache, v_cache, tables, query_start, contexts, *_ = _problem([(61, 90)], 4, 2, 8, 4)
    outs = []
    for tile in (1, 7, 61, 500):
        monkeypatch.setattr(reference, "QUERY_TILE_TOKENS", tile)
        outs.append(ops.paged_attention(q, k_cache, v_cache, tables, query_start, contexts, 0.3))

    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-6)


def test_queries_need_not_be_contiguous():
    q, k_cache, v_cache, tables, query_start, contexts, *_ = _problem([(1, 9), (3, 11)], 4, 2, 8, 4)
    wide = torch.randn(4, 8, 8)
    wide[:, :4] = q

    out = ops.paged_attention(wide[:, :4], k_cache, v_cache, tables, query_start, contexts, 0.3)

    torch.testing.assert_close(
        out,
        ops.paged_attention(q, k_cache, v_cache, tables, query_start, contexts, 0.3),
        rtol=1e-6,
        atol=1e-7,
    )
