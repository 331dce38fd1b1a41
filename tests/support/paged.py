"""Ragged steps over a paged KV cache in the layout of the GPU kernels, with the reference's answer."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import reference
from kernels.gpu.kv_layout import kv_cache_shapes


@dataclass(frozen=True)
class Step:
    """Inputs of ``paged_attention``, and the tokens of each request as (queries, context)."""

    batch: list[tuple[int, int]]
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    query_start: Tensor
    contexts: Tensor

    def arguments(self):
        return self.q, self.k_cache, self.v_cache, self.tables, self.query_start, self.contexts

    def rows(self, request):
        """Where a request's rows are."""
        return slice(*self.query_start[request : request + 2].tolist())

    def alone(self, request, num_queries=None):
        """The step of one request, with its last ``num_queries`` queries."""
        queries, context = self.batch[request]
        take = queries if num_queries is None else num_queries
        end = self.rows(request).stop
        return replace(
            self,
            batch=[(take, context)],
            q=self.q[end - take : end],
            tables=self.tables[request : request + 1],
            query_start=torch.tensor([0, take], device=self.q.device),
            contexts=self.contexts[request : request + 1],
        )

    def chunk(self, begin, end):
        """Of a step with one request: its queries ``begin .. end``, as the chunk they once were."""
        queries, context = self.batch[0]
        return replace(
            self,
            batch=[(end - begin, context - queries + end)],
            q=self.q[begin:end],
            query_start=torch.tensor([0, end - begin], device=self.q.device),
            contexts=torch.tensor([context - queries + end], device=self.q.device),
        )


def step(batch, num_q_heads=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, device="cpu"):
    """Blocks in random order, NaN in every slot that no context holds; tables end in a poisoned block."""
    generator = torch.Generator().manual_seed(len(batch) * 1000 + num_q_heads + head_dim)
    needs = [-(-context // block_size) for _, context in batch]
    num_blocks = 2 * sum(needs) + 1
    order = 2 * torch.randperm(sum(needs), generator=generator)  # a block of NaN follows each
    poisoned = num_blocks - 1
    tables = torch.full((len(batch), max(needs, default=0) + 2), poisoned)
    shape, _ = kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    used = 0
    for row, ((_, context), need) in enumerate(zip(batch, needs, strict=True)):
        tables[row, :need] = order[used : used + need]
        used += need
        for cache in caches:
            content = torch.randn(num_kv_heads, need * block_size, head_dim, generator=generator).to(dtype)
            content[:, context:] = float("nan")
            blocks = content.view(num_kv_heads, need, block_size, head_dim).transpose(0, 1)
            cache[tables[row, :need]] = blocks
    num_tokens = sum(queries for queries, _ in batch)
    q = torch.randn(num_tokens, num_q_heads, head_dim, generator=generator).to(dtype)
    query_start = torch.tensor([0] + [queries for queries, _ in batch]).cumsum(0)
    contexts = torch.tensor([context for _, context in batch], dtype=torch.int64)
    found = Step(batch, q, *caches, tables, query_start, contexts)
    return replace(
        found,
        **{name: getattr(found, name).to(device) for name in found.__dataclass_fields__ if name != "batch"},
    )


def expected(wanted, scale, window=None, softcap=None):
    """What the reference makes of it, float32 on CPU."""
    caches = [cache.cpu().float().transpose(1, 2).contiguous() for cache in (wanted.k_cache, wanted.v_cache)]
    places = (wanted.tables.cpu(), wanted.query_start.cpu(), wanted.contexts.cpu())
    return reference.paged_attention(wanted.q.cpu().float(), *caches, *places, scale, window, softcap)
