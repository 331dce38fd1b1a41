"""The parts of a decoder layer, on ``kernels.ops``. Which implementation runs is not known here."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.config import DecoderConfig, RopeConfig
from kernels import ops
from kernels.ops import PackedWeight


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the step's tokens are, in the words of ``kernels.ops``.

    Attributes:
        positions: ``[T]`` int64.
        slots: ``[T]`` int64.
        block_tables: ``[S, max_blocks]`` int64.
        query_start: ``[S + 1]`` int64.
        context_lens: ``[S]`` int64.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer: packed weight ``[n_out, n_in]``, bias ``[n_out]`` float32 or none."""

    weight: PackedWeight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, n_in]`` to ``[T, n_out]``."""
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer.

    Attributes:
        attention_norm: ``[hidden]``, before attention.
        qkv: query, key and value projections, fused in this order.
        attention_out: back to the residual stream.
        mlp_norm: ``[hidden]``, before the MLP.
        gate_up: gate and up projections, fused in this order.
        down: back to the residual stream.
    """

    attention_norm: Tensor
    qkv: Projection
    attention_out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


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
    qkv = weights.qkv(x).view(x.shape[0], -1, config.head_dim)
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
    return weights.attention_out(mixed.view(x.shape[0], -1))


def mlp(x: Tensor, weights: LayerWeights) -> Tensor:
    """Gated MLP of one layer, ``[T, hidden]`` to ``[T, hidden]``."""
    return weights.down(ops.silu_mul(weights.gate_up(x)))


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
