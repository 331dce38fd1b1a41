"""The operations a model is made of. Public and typed; which implementation runs is the registry's business.

Layout: flat and padding-free. A step computes ``T`` tokens of ``S`` requests;
request ``s`` owns the tokens ``query_start[s] .. query_start[s + 1]``. A *slot*
is a token's place in the KV cache, ``block * block_size + offset``. ``Hq`` and
``Hkv`` count query and KV heads, ``D`` is the size of one head.

Activations are float32 on a CPU, float16 or bfloat16 on a card: the
implementation's choice, which ``embed`` makes and every other operation keeps.
Sums, norms and scores are float32 inside, logits everywhere.
"""

from torch import Tensor

from kernels import registry
from kernels.interface import (
    AllowedIds,
    AttentionInputs,
    ExpertWeights,
    LayerStack,
    LayerWeights,
    LogitAdjustments,
    LogProbs,
    MlpWeights,
    NotBatchInvariant,
    PackedWeight,
    Projection,
    RunLayers,
    Sampled,
    SamplingInputs,
    UnsupportedWeightType,
    WeightType,
)

__all__ = [
    "AllowedIds",
    "AttentionInputs",
    "ExpertWeights",
    "LayerStack",
    "LayerWeights",
    "LogProbs",
    "LogitAdjustments",
    "MlpWeights",
    "NotBatchInvariant",
    "PackedWeight",
    "Projection",
    "RunLayers",
    "Sampled",
    "SamplingInputs",
    "UnsupportedWeightType",
    "WeightType",
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


def set_num_threads(num_threads: int) -> None:
    """Threads that one operation may use from now on, torch's own on the calling thread included.

    Invariant: on CPU no result depends on it, but for the reference's.
    """
    registry.active().set_num_threads(num_threads)


def set_batch_invariant(enabled: bool) -> None:
    """Whether a row's bits must not depend on what is computed beside it, from now on.

    Off, an implementation may compute as is quickest for the step at hand. Costs nothing on a CPU, where
    ``cpu`` always does so; on a card matrix products get slower.

    Raises:
        NotBatchInvariant: ``enabled``, and the active implementation can't.
    """
    registry.active().set_batch_invariant(enabled)


def kv_cache_shapes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's K and V cache; the layout inside belongs to the implementation.

    Invariant: both hold ``num_blocks * block_size * num_kv_heads * head_dim``
    elements, and their first dimension counts blocks.

    Raises:
        ValueError: the implementation has no layout for blocks of this size.
    """
    return registry.active().kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)


def pack_linear(weight: Tensor, weight_type: WeightType) -> PackedWeight:
    """Bring a matrix into the form that ``linear`` and ``embed`` want. Once, when a model is loaded.

    ``bf16`` and ``fp16`` round to nearest even, which loses nothing when the
    weight has that dtype already. ``int8`` divides each row by its largest
    magnitude / 127 and rounds; ``fp8`` by its largest magnitude / 448 and rounds
    to e4m3.

    Args:
        weight: ``[n_out, n_in]``, floating point, any strides, on the device where the result is to be;
            not needed afterwards, unless the result shares its memory (it does where it can).
        weight_type: how the elements are to be kept.

    Raises:
        UnsupportedWeightType: the active implementation does not keep weights like that.
    """
    return registry.active().pack_linear(weight, weight_type)


def embed(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    """Rows of the embedding: ``[T]`` int64 and ``[vocab, hidden]`` to ``[T, hidden]`` activations."""
    return registry.active().embed(token_ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, float32 inside.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        x: ``[T, hidden]``.
        weight: ``[hidden]`` float32.
        eps: added to the mean square.

    Returns:
        ``[T, hidden]``, a new tensor of the dtype of ``x``.
    """
    return registry.active().rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``s = x + residual``; returns ``(rms_norm(s), s)``, both ``[T, hidden]``.

    ``x`` and ``residual`` may be overwritten; use neither afterwards.
    """
    return registry.active().add_rms_norm(x, residual, weight, eps)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[T, n_in]`` and ``[n_out, n_in]`` to ``[T, n_out]`` of the dtype of ``x``.

    The bias is ``[n_out]`` float32.
    """
    return registry.active().linear(x, weight, bias)


def logits(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ weight.T`` of the LM head: ``[R, hidden]`` and ``[vocab, hidden]`` to ``[R, vocab]`` float32.

    Float32 whatever the activations are, for rounded logits would tie.
    """
    return registry.active().logits(x, weight)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gated activation: ``[T, 2 * n]``, gate then up, to ``silu(gate) * up`` of ``[T, n]``.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
    """
    return registry.active().silu_mul(gate_up)


def gelu_mul(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """Gated activation: ``[T, 2 * n]``, gate then up, to ``gelu(gate) * up`` of ``[T, n]``.

    ``gelu(x) = x * Phi(x)`` with the normal distribution function, or its
    approximation by ``tanh``. Source: Hendrycks and Gimpel, "Gaussian Error
    Linear Units", 2016.
    """
    return registry.active().gelu_mul(gate_up, tanh=tanh)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)``, which bounds them smoothly: ``[R, vocab]`` float32, may be overwritten.

    Source: Gemma 2 (2024).
    """
    return registry.active().softcap(logits, cap)


def route(scores: Tensor, num_chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """Which experts compute each token, and what share of the result each of them has.

    The likeliest by the softmax of the scores, equal ones by number. Source: Shazeer et al., "Outrageously
    Large Neural Networks", 2017; without noise, the softmax before the choice.

    Args:
        scores: ``[T, num_experts]`` float32.
        num_chosen: experts of a token, 1 to num_experts.
        normalised: divide a token's shares by their sum.

    Returns:
        Ids ``[T, num_chosen]`` int64, the likeliest first, and shares ``[T, num_chosen]`` float32.
    """
    return registry.active().route(scores, num_chosen, normalised=normalised)


def rotary_write_kv(
    qkv: Tensor, rope: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Rotate q and k by their positions, then store k and v in their slots.

    The pair ``(x[i], x[i + D/2])`` turns by the angle of ``i``: with ``c, s`` the
    cosine and sine, ``x[i] * c - x[i + D/2] * s`` and ``x[i + D/2] * c + x[i] * s``.
    Source: Su et al., "RoFormer", 2021, in the half-split order of Llama
    checkpoints of Hugging Face.

    Args:
        qkv: ``[T, Hq + 2 * Hkv, D]``, query heads, then key heads, then value heads.
        rope: ``[max_positions, D]`` float32, ``D/2`` cosines, then ``D/2`` sines.
        positions: ``[T]`` int64, position of each token in its request.
        slots: ``[T]`` int64, where each token's KV goes.
        k_cache: one layer's keys, written in place.
        v_cache: one layer's values, written in place.

    Returns:
        The rotated queries, ``[T, Hq, D]``.
    """
    return registry.active().rotary_write_kv(qkv, rope, positions, slots, k_cache, v_cache)


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
    """Causal attention of each request's newest tokens over all its KV so far.

    One operation serves decodes (one token), prefill chunks and mixed batches:
    the tokens of request ``s`` are the last of its ``context_lens[s]`` tokens,
    and each sees itself and everything before. Query head ``h`` reads KV head
    ``h // (Hq / Hkv)``. Slots past a request's context are never read, whatever
    they hold. Source of the block tables: Kwon et al., "Efficient Memory
    Management for Large Language Model Serving with PagedAttention", 2023.

    Args:
        q: ``[T, Hq, D]``, rotated.
        k_cache: one layer's keys, the granted tokens' included.
        v_cache: one layer's values, likewise.
        block_tables: ``[S, max_blocks]`` int64; entries past the context are not read.
        query_start: ``[S + 1]`` int64, from 0 to T, strictly increasing.
        context_lens: ``[S]`` int64, tokens with KV, the granted ones included.
        scale: multiplies the scores, usually ``D ** -0.5``.
        window: tokens a query sees, itself included (sliding window); None = all.
        softcap: bounds the scaled scores smoothly, ``cap * tanh(score / cap)``
            (Gemma 2, 2024); None = off.

    Returns:
        ``[T, Hq, D]``.
    """
    return registry.active().paged_attention(
        q, k_cache, v_cache, block_tables, query_start, context_lens, scale, window, softcap
    )


def fuse_layers(stack: LayerStack) -> RunLayers | None:
    """All layers of a decoder as one call, where the implementation has such a thing; else None.

    Worth it where a step's work is small beside the cost of some hundred calls.

    Invariant: the same bits as the operations one by one.
    """
    return registry.active().fuse_layers(stack)


def gather_last(x: Tensor, rows: Tensor) -> Tensor:
    """The rows that sample: ``[T, hidden]`` and ``[R]`` int64 to ``[R, hidden]``."""
    return registry.active().gather_last(x, rows)


def argmax(logits: Tensor) -> Tensor:
    """The likeliest id of each row, the lowest on ties: ``[R, vocab]`` float32 to ``[R]`` int64."""
    return registry.active().argmax(logits)


def log_sum_exp(logits: Tensor) -> Tensor:
    """``log(sum(exp(row)))``, which turns logits into log probabilities: ``[R, vocab]`` to ``[R]``."""
    return registry.active().log_sum_exp(logits)


def log_probs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogProbs:
    """Log probabilities of one id a row, and of each row's likeliest ids.

    Of the logits as they are: without temperature, penalties or cuts, so before ``sample``, which
    overwrites.

    Args:
        logits: ``[R, vocab]`` float32.
        token_ids: ``[R]`` int64, the ids asked about.
        num_top: how many of the likeliest, 0 to vocab; meant for 20 at most.
    """
    return registry.active().log_probs(logits, token_ids, num_top)


def sample(logits: Tensor, inputs: SamplingInputs) -> Sampled:
    """Choose a token for each row.

    In this order: logits are adjusted (``LogitAdjustments``); ids leave that are banned or not
    among the allowed ones; logits are divided by the temperature; the ``top_k`` likeliest stay;
    of those the smallest set of likeliest whose mass reaches ``top_p``; of those the ones with at
    least ``min_p`` times the likeliest one's probability; of those the most typical ones whose
    mass reaches ``typical_p`` (surprise closest to the entropy of what is left, equally close ones
    together; Meister et al., "Locally Typical Sampling", 2023); then the argmax of logit + Gumbel
    noise, a draw from the softmax (Gumbel 1954; Maddison et al., "A* Sampling", 2014). Equal logits
    rank by id, the lowest first. Temperature 0 is the argmax of the logits, the lowest id on ties.

    Invariant: a row's choice depends on its logits, its parameters and
    (seed, output index) alone, never on the other rows.

    Args:
        logits: ``[R, vocab]`` float32. May be overwritten.
        inputs: one entry a row.

    Returns:
        One id a row, and which rows failed.
    """
    return registry.active().sample(logits, inputs)
