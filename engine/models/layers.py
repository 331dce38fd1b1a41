"""The parts of a decoder layer, on ``kernels.ops``. Which implementation runs is not known here."""

import math

import torch
from torch import Tensor

from engine.models.config import DecoderConfig, RopeConfig
from kernels import ops
from kernels.ops import AttentionInputs, LayerWeights


def attention(
    x: Tensor,
    weights: LayerWeights,
    config: DecoderConfig,
    inputs: AttentionInputs,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Self-attention of one layer, ``[T, hidden]`` to ``[T, hidden]``; stores the tokens' KV."""
    qkv = ops.linear(x, weights.qkv.weight, weights.qkv.bias).view(x.shape[0], -1, config.head_dim)
    if weights.q_norm is not None and weights.k_norm is not None:
        q_end, k_end = config.num_q_heads, config.num_q_heads + config.num_kv_heads
        _norm_heads(qkv[:, :q_end], weights.q_norm, config.norm_eps)
        _norm_heads(qkv[:, q_end:k_end], weights.k_norm, config.norm_eps)
    q = ops.rotary_write_kv(qkv, rope, inputs.positions, inputs.slots, k_cache, v_cache)
    mixed = ops.paged_attention(
        q,
        k_cache,
        v_cache,
        inputs.block_tables,
        inputs.query_start,
        inputs.context_lens,
        config.head_dim**-0.5,
    )
    out = weights.attention_out
    return ops.linear(mixed.view(x.shape[0], -1), out.weight, out.bias)


def _norm_heads(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Root mean square norm of each head, in place; ``[T, H, D]``, a view of the fused projection."""
    rows = ops.rms_norm(heads.reshape(-1, heads.shape[-1]).contiguous(), weight, eps)
    heads.copy_(rows.view(heads.shape))


def mlp(x: Tensor, weights: LayerWeights) -> Tensor:
    """Gated MLP of one layer, ``[T, hidden]`` to ``[T, hidden]``."""
    gate_up = ops.linear(x, weights.gate_up.weight, weights.gate_up.bias)
    return ops.linear(ops.silu_mul(gate_up), weights.down.weight, weights.down.bias)


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Cosines and sines of every position, ``[num_positions, head_dim]`` float32, cosines first."""
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float32), _inverse_frequencies(rope, head_dim)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, ``[head_dim / 2]`` float32.

    ``linear`` divides every angle by the factor (Chen et al., "Extending Context
    Window of Large Language Models via Position Interpolation", 2023).
    ``llama3`` does so for waves longer than ``original / low``, leaves those
    shorter than ``original / high``, and blends in between (Llama 3.1 model
    card and reference code).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    stretched = frequencies / rope.factor
    if rope.kind == "linear":
        return stretched
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * keep + stretched * (1.0 - keep)
