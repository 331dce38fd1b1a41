"""Every operation in plain torch, float32, on any device.

The oracle of the other implementations' tests and what runs where they cannot.
KV caches are ``[num_blocks, block_size, num_kv_heads, head_dim]``.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.interface import (
    LayerStack,
    LogProbs,
    NotBatchInvariant,
    PackedWeight,
    RunLayers,
    WeightType,
)
from kernels.sampling import log_probs_of, sample
from kernels.weights import quantised, quantised_fp8, rounded

__all__ = [
    "add_rms_norm",
    "argmax",
    "embed",
    "fuse_layers",
    "gather_last",
    "gelu_mul",
    "kv_cache_shapes",
    "linear",
    "log_probs",
    "log_sum_exp",
    "logits",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary_write_kv",
    "route",
    "sample",
    "set_batch_invariant",
    "set_num_threads",
    "silu_mul",
    "softcap",
]

#: Up to this many rows the weight is split into one part per thread and multiplied from the left: the
#: BLAS of torch gives a matrix times one vector, or a few, to a single thread, and a batch of them to all.
SPLIT_ROWS_MAX = 96

#: Queries of one request whose scores exist at the same time; bounds memory and skips most of what
#: the causal mask hides.
QUERY_TILE_TOKENS = 128


def kv_cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """K and V alike: one row of heads per token."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return shape, shape


def set_num_threads(num_threads: int) -> None:
    """Torch's own, on the calling thread."""
    torch.set_num_threads(num_threads)


def set_batch_invariant(enabled: bool) -> None:
    """The BLAS of torch computes a row otherwise in another batch."""
    if enabled:
        raise NotBatchInvariant("reference")


def pack_linear(weight: Tensor, weight_type: WeightType) -> PackedWeight:
    """The values that ``weight_type`` leaves, as float32; float32 itself stays where it is."""
    if weight_type == "int8":
        integers, scales = quantised(weight)
        data = integers.float().mul_(scales.unsqueeze(1))
    elif weight_type == "fp8":
        numbers, scales = quantised_fp8(weight)
        data = numbers.float().mul_(scales.unsqueeze(1))
    else:
        data = rounded(weight, weight_type).float()
    return PackedWeight(data, None, weight.shape[0], weight.shape[1], weight_type)


def embed(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows of ``weight``."""
    return weight.data.index_select(0, token_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension."""
    wide = x.float()
    scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then norm. The sum lands in ``residual``."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Matrix product with the transposed weight, plus the bias."""
    matrix = weight.data
    num_rows, num_outputs = x.shape[0], weight.num_outputs
    parts = max(2, torch.get_num_threads())
    if (
        x.device.type != "cpu"
        or num_rows > SPLIT_ROWS_MAX
        or num_outputs % parts
        or not matrix.is_contiguous()
    ):
        return F.linear(x, matrix, bias)
    split = matrix.view(parts, num_outputs // parts, -1)
    out = torch.bmm(split, x.t().expand(parts, -1, num_rows)).view(num_outputs, num_rows).t().contiguous()
    return out if bias is None else out.add_(bias)


def logits(x: Tensor, weight: PackedWeight) -> Tensor:
    """Activations are float32, so that ``linear`` will do."""
    return linear(x, weight)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Silu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """Gelu of the first half times the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """In place."""
    return logits.div_(cap).tanh_().mul_(cap)


def route(scores: Tensor, num_chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """By a stable sort, so that the lower number wins where scores are equal."""
    shares, ids = scores.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    shares, ids = shares[:, :num_chosen], ids[:, :num_chosen]
    return ids.contiguous(), shares / shares.sum(dim=-1, keepdim=True) if normalised else shares.contiguous()


def rotary_write_kv(
    qkv: Tensor, rope: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Rotate q and k together, scatter k and v."""
    num_kv_heads, head_dim = k_cache.shape[-2:]
    half = head_dim // 2
    num_q_heads = qkv.shape[1] - 2 * num_kv_heads
    angles = rope.index_select(0, positions).unsqueeze(1)
    cos, sin = angles[..., :half], angles[..., half:]
    both = qkv[:, : num_q_heads + num_kv_heads]
    first, second = both[..., :half], both[..., half:]
    rotated = torch.empty(both.shape, dtype=qkv.dtype, device=qkv.device)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, rotated[:, num_q_heads:])
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots, qkv[:, num_q_heads + num_kv_heads :])
    return rotated[:, :num_q_heads]


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
) -> Tensor:
    """Request by request: gather its blocks, then plain attention. One request's KV exists at a time."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts = query_start.tolist()
    scaled = (q * scale).view(q.shape[0], num_kv_heads, group, head_dim)
    for index, context in enumerate(context_lens.tolist()):
        blocks = block_tables[index, : -(-context // block_size)]
        keys = k_cache.index_select(0, blocks).view(-1, num_kv_heads, head_dim)[:context].permute(1, 2, 0)
        values = v_cache.index_select(0, blocks).view(-1, num_kv_heads, head_dim)[:context].transpose(0, 1)
        begin, end = starts[index], starts[index + 1]
        if end - begin == 1:
            first = 0 if window is None else max(0, context - window)
            weights = _capped(torch.bmm(scaled[begin], keys[:, :, first:]), softcap).softmax(dim=-1)
            out[begin] = torch.bmm(weights, values[:, first:]).view(-1, head_dim)
        else:
            _attend_chunk(scaled[begin:end], keys, values, out[begin:end], window, softcap)
    return out


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else (scores / softcap).tanh_().mul_(softcap)


def _attend_chunk(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, window: int | None, softcap: float | None
) -> None:
    """Causal attention of the last ``n`` of ``context`` tokens.

    Args:
        q: ``[n, Hkv, group, D]``, scaled.
        keys: ``[Hkv, D, context]``.
        values: ``[Hkv, context, D]``.
        out: ``[n, Hq, D]``, written.
        window: tokens a query sees, itself included.
        softcap: bound of the scores.
    """
    num_queries, num_kv_heads, group, head_dim = q.shape
    before = keys.shape[2] - num_queries
    for begin in range(0, num_queries, QUERY_TILE_TOKENS):
        end = min(begin + QUERY_TILE_TOKENS, num_queries)
        rows, last = end - begin, before + end
        first = 0 if window is None else max(0, before + begin + 1 - window)
        seen = last - first
        tile = q[begin:end].permute(1, 2, 0, 3).reshape(num_kv_heads, group * rows, head_dim)
        scores = _capped(torch.bmm(tile, keys[:, :, first:last]), softcap)
        scores = scores.view(num_kv_heads, group, rows, seen)
        # Without a window only the tile's own square on the diagonal holds anything hidden.
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., before + begin - first :].masked_fill_(hidden, float("-inf"))
        if window is not None:
            passed = torch.ones(rows, seen, dtype=torch.bool, device=q.device)
            scores.masked_fill_(passed.tril_(before + begin - first - window), float("-inf"))
        weights = scores.softmax(dim=-1).view(num_kv_heads, group * rows, seen)
        mixed = torch.bmm(weights, values[:, first:last]).view(num_kv_heads, group, rows, head_dim)
        out[begin:end] = mixed.permute(2, 0, 1, 3).reshape(rows, num_kv_heads * group, head_dim)


def fuse_layers(stack: LayerStack) -> RunLayers | None:
    """The operations one by one will do."""
    return None


def gather_last(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``x``."""
    return x.index_select(0, rows)


def argmax(logits: Tensor) -> Tensor:
    """Of equal maxima torch takes the first on CPU."""
    return logits.argmax(dim=-1)


def log_sum_exp(logits: Tensor) -> Tensor:
    """Torch's own."""
    return logits.logsumexp(dim=-1)


def log_probs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogProbs:
    """By a stable sort of the whole row."""
    return log_probs_of(logits, token_ids, num_top, log_sum_exp(logits))
