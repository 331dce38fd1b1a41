"""The operations as functions of ``cpu.cpp``: this module checks shapes, makes room for results, and calls.

Float32 activations on CPU. A row's result depends on that row alone, bit by
bit, whatever is computed beside it and by however many threads.

Importing builds the library where the cache has none and raises
``CpuKernelsUnavailable`` where that cannot be done. K pages are
``[num_blocks, block_size / 16, num_kv_heads, head_dim, 16]``, V pages
``[num_blocks, block_size / 16, num_kv_heads, 16, head_dim]``.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels import sampling
from kernels.cpu_layers import fuse_layers
from kernels.cpu_library import TYPES, address, function, is_plain
from kernels.interface import (
    LogProbs,
    PackedWeight,
    Sampled,
    SamplingInputs,
    UnsupportedWeightType,
    WeightType,
)
from kernels.weights import quantised, rounded

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

PAGE_TOKENS = 16
PANEL_OUTPUTS = 16
HEAD_DIM_MAX = 512
#: Elements of a weight that are converted at a time; bounds the memory that packing needs beside its result.
PACK_ELEMENTS = 2**20

_set_num_threads = function("set_num_threads", "i")
_num_threads = function("num_threads", result=ctypes.c_int64)
_pack = function("pack", "ipp", "ii")
_embed = function("embed", "i", "pp", "i", "pp", "i")
_linear = function("linear", "i", "pp", "ppp", "iii")
_rms_norm = function("rms_norm", "ppp", "ii", "f")
_add_rms_norm = function("add_rms_norm", "pppp", "ii", "f")
_silu_mul = function("silu_mul", "pp", "ii")
_gelu_mul = function("gelu_mul", "pp", "ii")
_gelu_tanh_mul = function("gelu_tanh_mul", "pp", "ii")
_softcap = function("softcap", "p", "ii", "f")
_route = function("route", "ppp", "iii", "i")
_rotary_write_kv = function("rotary_write_kv", "ppp", "pp", "pp", "iiii")
_paged_attention = function("paged_attention", "pppp", "ppp", "iii", "iiii", "i", "ff")
_argmax = function("argmax", "ppp", "ii")
_log_sum_exp = function("log_sum_exp", "pp", "ii")
_panel_bytes = function("panel_bytes", "ii", result=ctypes.c_int64)


def set_num_threads(num_threads: int) -> None:
    """For torch's operations too, which get fewer where a neighbour takes cores away: theirs wait for all."""
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    torch.set_num_threads(min(num_threads, _num_threads()))
    _set_num_threads(num_threads)


_set_num_threads(torch.get_num_threads())


def set_batch_invariant(enabled: bool) -> None:
    """A row's bits never depend on its neighbours here."""


def kv_cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Pages of 16 tokens; keys with the tokens side by side."""
    if block_size % PAGE_TOKENS:
        raise ValueError(f"block_size must be a multiple of {PAGE_TOKENS}, got {block_size}")
    if head_dim > HEAD_DIM_MAX or head_dim % 2:
        raise ValueError(f"head_dim must be even and at most {HEAD_DIM_MAX}, got {head_dim}")
    pages = (num_blocks, block_size // PAGE_TOKENS, num_kv_heads)
    return (*pages, head_dim, PAGE_TOKENS), (*pages, PAGE_TOKENS, head_dim)


def pack_linear(weight: Tensor, weight_type: WeightType) -> PackedWeight:
    """Panels of 16 rows, the last one filled up with zeros; some of them at a time."""
    if weight_type not in TYPES:
        raise UnsupportedWeightType("cpu", tuple(TYPES), weight_type)
    num_outputs, num_inputs = weight.shape
    code = TYPES[weight_type]
    panel_bytes = _panel_bytes(code, num_inputs)
    data = torch.empty(-(-num_outputs // PANEL_OUTPUTS) * panel_bytes, dtype=torch.uint8)
    scales = torch.empty(num_outputs) if weight_type == "int8" else None
    step = max(1, PACK_ELEMENTS // num_inputs // PANEL_OUTPUTS) * PANEL_OUTPUTS
    for begin in range(0, num_outputs, step):
        rows = weight[begin : begin + step]
        if scales is None:
            elements = rounded(rows, weight_type)
        else:
            elements, scales[begin : begin + len(rows)] = quantised(rows)
        elements = elements.contiguous()
        to = data.data_ptr() + begin // PANEL_OUTPUTS * panel_bytes
        _pack(code, to, elements.data_ptr(), len(rows), num_inputs)
    return PackedWeight(data, scales, num_outputs, num_inputs, weight_type)


def embed(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows of ``weight``, gathered from its panels; the ids must exist."""
    assert token_ids.dtype is torch.int64
    assert token_ids.is_contiguous()
    out = torch.empty(token_ids.shape[0], weight.num_inputs)
    _embed(
        TYPES[weight.weight_type],
        out.data_ptr(),
        token_ids.data_ptr(),
        token_ids.shape[0],
        weight.data.data_ptr(),
        address(weight.scales),
        weight.num_inputs,
    )
    return out


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """One chain of fused multiply-adds for each output."""
    num_rows, num_inputs = x.shape
    assert num_inputs == weight.num_inputs
    assert is_plain(x)
    out = torch.empty(num_rows, weight.num_outputs)
    _linear(
        TYPES[weight.weight_type],
        out.data_ptr(),
        x.data_ptr(),
        weight.data.data_ptr(),
        address(weight.scales),
        address(bias),
        num_rows,
        num_inputs,
        weight.num_outputs,
    )
    return out


def logits(x: Tensor, weight: PackedWeight) -> Tensor:
    """Activations are float32, so that ``linear`` will do."""
    return linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of each row."""
    assert is_plain(x)
    assert is_plain(weight)
    out = torch.empty_like(x)
    _rms_norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add and norm in one pass. The sum lands in ``residual``."""
    assert is_plain(x)
    assert is_plain(residual)
    assert is_plain(weight)
    out = torch.empty_like(x)
    _add_rms_norm(
        out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps
    )
    return out, residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """Silu of the first half times the second."""
    return _gated(_silu_mul, gate_up)


def gelu_mul(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """Gelu of the first half times the second."""
    return _gated(_gelu_tanh_mul if tanh else _gelu_mul, gate_up)


def _gated(gate: Any, gate_up: Tensor) -> Tensor:
    assert is_plain(gate_up)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    gate(out.data_ptr(), gate_up.data_ptr(), *out.shape)
    return out


def softcap(logits: Tensor, cap: float) -> Tensor:
    """In place, by the same arithmetic in every place of a row."""
    assert is_plain(logits)
    _softcap(logits.data_ptr(), *logits.shape, cap)
    return logits


def route(scores: Tensor, num_chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Row by row."""
    assert is_plain(scores)
    num_rows, num_experts = scores.shape
    assert 1 <= num_chosen <= num_experts
    ids = torch.empty(num_rows, num_chosen, dtype=torch.int64)
    shares = torch.empty(num_rows, num_chosen)
    _route(
        ids.data_ptr(), shares.data_ptr(), scores.data_ptr(), num_rows, num_experts, num_chosen, normalised
    )
    return ids, shares


def rotary_write_kv(
    qkv: Tensor, rope: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Rotate q and k, scatter k and v into their pages."""
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv_heads = k_cache.shape[2]
    num_q_heads = num_heads - 2 * num_kv_heads
    assert is_plain(qkv)
    out = torch.empty(num_tokens, num_q_heads, head_dim)
    _rotary_write_kv(
        out.data_ptr(),
        qkv.data_ptr(),
        rope.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        num_tokens,
        num_q_heads,
        num_kv_heads,
        head_dim,
    )
    return out


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
    """Each query visits its pages in order."""
    num_tokens, num_q_heads, head_dim = q.shape
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    assert q.dtype is torch.float32
    assert block_tables.is_contiguous()
    out = torch.empty(num_tokens, num_q_heads, head_dim)
    _paged_attention(
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        context_lens.shape[0],
        block_tables.shape[1],
        k_cache.shape[1],
        q.stride(0),
        num_q_heads,
        k_cache.shape[2],
        head_dim,
        window or 0,
        scale,
        softcap or 0.0,
    )
    return out


def gather_last(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``x``; once a step, so torch's own will do."""
    return x.index_select(0, rows)


def argmax(logits: Tensor) -> Tensor:
    """Of equal maxima the first."""
    return _greedy(logits)[0]


def log_sum_exp(logits: Tensor) -> Tensor:
    """Relative to the row's maximum."""
    assert is_plain(logits)
    out = torch.empty(logits.shape[0])
    _log_sum_exp(out.data_ptr(), logits.data_ptr(), *logits.shape)
    return out


def log_probs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogProbs:
    """Asked for seldom, so torch's own sort will do."""
    return sampling.log_probs_of(logits, token_ids, num_top, log_sum_exp(logits))


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax of each row, and whether all its logits are finite."""
    assert is_plain(logits)
    ids = torch.empty(logits.shape[0], dtype=torch.int64)
    finite = torch.empty(logits.shape[0], dtype=torch.bool)
    _argmax(ids.data_ptr(), finite.data_ptr(), logits.data_ptr(), *logits.shape)
    return ids, finite


def sample(logits: Tensor, inputs: SamplingInputs) -> Sampled:
    """Greedy rows here, draws in torch."""
    return sampling.sample(logits, inputs, _greedy)
