"""The parts of a decoder layer, on ``kernels.ops``. Which implementation runs is not known here."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models import lora
from engine.models.config import Activation, DecoderConfig
from engine.models.lora import LayerRows
from kernels import ops
from kernels.ops import AttentionInputs, ExpertWeights, LayerWeights, Projection


def attention(
    x: Tensor,
    weights: LayerWeights,
    config: DecoderConfig,
    inputs: AttentionInputs,
    rope: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    window: int | None = None,
    adapters: Sequence[LayerRows] = (),
) -> Tensor:
    """Self-attention of one layer, ``[T, hidden]`` to ``[T, hidden]``; stores the tokens' KV.

    Args:
        x: its input, normed where the model does so.
        weights: of the layer.
        config: shape and options; of a rank, its share.
        inputs: where the tokens are.
        rope: cosines and sines of the layer.
        k_cache: the layer's keys.
        v_cache: the layer's values.
        window: tokens a query sees, itself included; None = all.
        adapters: what is added to which rows.
    """
    qkv = lora.linear(x, weights.qkv, "qkv", adapters).view(x.shape[0], -1, config.head_dim)
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
        config.score_scale,
        window,
        config.attention_softcap,
    )
    return lora.linear(mixed.view(x.shape[0], -1), weights.attention_out, "attention_out", adapters)


def _norm_heads(heads: Tensor, weight: Tensor, eps: float) -> None:
    """Root mean square norm in place: of each head, or of all of a token's, as the weight is long.

    ``heads`` is ``[T, H, D]``, a view of the fused projection; ``weight`` is ``[D]`` or ``[H * D]``.
    """
    rows = ops.rms_norm(heads.reshape(-1, weight.shape[0]).contiguous(), weight, eps)
    heads.copy_(rows.view(heads.shape))


def mlp(
    x: Tensor,
    weights: LayerWeights,
    activation: Activation = "silu",
    adapters: Sequence[LayerRows] = (),
) -> Tensor:
    """Gated MLP of one layer, or its mixture of experts: ``[T, hidden]`` to ``[T, hidden]``."""
    if weights.experts is not None:
        return experts(x, weights.experts, activation)
    assert weights.gate_up is not None
    assert weights.down is not None
    return _gated(x, weights.gate_up, weights.down, activation, adapters)


def _gated(
    x: Tensor,
    gate_up: Projection,
    down: Projection,
    activation: Activation,
    adapters: Sequence[LayerRows] = (),
) -> Tensor:
    both = lora.linear(x, gate_up, "gate_up", adapters)
    if activation == "silu":
        product = ops.silu_mul(both)
    else:
        product = ops.gelu_mul(both, tanh=activation == "gelu_tanh")
    return lora.linear(product, down, "down", adapters)


def experts(x: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Mixture of experts, ``[T, hidden]`` to ``[T, hidden]``, expert by expert over the rows that chose it.

    Invariant: a row's parts are added in the order of its own choice, likeliest first, so that no
    neighbour changes its bits, as far as the products' own do not depend on them.
    """
    ids, shares = ops.route(ops.logits(x, weights.router), weights.per_token, normalised=weights.normalised)
    chosen = ids.flatten()
    by_expert = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=len(weights.experts)).tolist()
    parts = torch.empty(chosen.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    for expert, places in zip(weights.experts, torch.split(by_expert, counts), strict=True):
        if places.shape[0]:
            rows = x.index_select(0, places // weights.per_token)
            parts.index_copy_(0, places, _gated(rows, expert.gate_up, expert.down, activation))
    parts = parts.view(x.shape[0], weights.per_token, -1).mul_(shares.to(x.dtype).unsqueeze(2))
    out = parts[:, 0].contiguous()
    for index in range(1, weights.per_token):
        out += parts[:, index]
    return out
