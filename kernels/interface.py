"""What an implementation of the operations must offer, and the types that cross that border.

Shapes use the flat, padding-free layout of one step: ``T`` tokens of ``S``
requests, request ``s`` owning tokens ``query_start[s] .. query_start[s + 1]``;
``R`` rows sample. Knows no implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

#: How the elements of a weight are kept: exact, rounded, or integers or e4m3 with one scale a row.
WeightType = Literal["fp32", "bf16", "fp16", "int8", "fp8"]


class UnsupportedWeightType(ValueError):
    """An implementation does not keep weights like that.

    Args:
        kernels: name of the implementation.
        known: the types it knows.
        weight_type: what was asked for.
    """

    def __init__(self, kernels: str, known: tuple[str, ...], weight_type: str) -> None:
        super().__init__(
            f"weights must be one of {', '.join(known)} with {kernels} kernels, got {weight_type!r}"
        )
        self.weight_type = weight_type


class NotBatchInvariant(ValueError):
    """An implementation cannot promise that a row's bits do not depend on its neighbours.

    Args:
        kernels: name of the implementation.
    """

    def __init__(self, kernels: str) -> None:
        super().__init__(f"batch_invariant must be false with {kernels} kernels, got True")


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix ``[num_outputs, num_inputs]`` as the implementation that packed it wants it.

    Attributes:
        data: the elements; their layout is the implementation's own business.
        scales: ``[num_outputs]`` float32 where a row has a scale of its own, else None.
        num_outputs: rows of the matrix.
        num_inputs: columns of the matrix.
        weight_type: how the elements are kept.
    """

    data: Tensor
    scales: Tensor | None
    num_outputs: int
    num_inputs: int
    weight_type: WeightType

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear layer: packed weight ``[n_out, n_in]``, bias ``[n_out]`` float32 or none."""

    weight: PackedWeight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """A gated MLP: gate and up projections fused in this order, and the one back to the residual stream."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """A mixture of experts.

    Attributes:
        router: ``[num_experts, hidden]``, scores each expert.
        experts: one MLP each.
        per_token: how many of them compute a token.
        normalised: the shares of those add up to 1.
    """

    router: PackedWeight
    experts: tuple[MlpWeights, ...]
    per_token: int
    normalised: bool


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one decoder layer.

    Attributes:
        attention_norm: ``[hidden]``, before attention; None = not normed.
        qkv: query, key and value projections, fused in this order.
        attention_out: back to the residual stream.
        mlp_norm: ``[hidden]``, before the MLP; None = not normed.
        gate_up: gate and up projections, fused in this order; None = there are ``experts``.
        down: back to the residual stream; likewise.
        q_norm: of queries before they are rotated, ``[head_dim]`` for each head, or ``[Hq * head_dim]`` for
            all of them together; None = not normed.
        k_norm: likewise, of keys.
        attention_post_norm: ``[hidden]``, of what attention adds; None = not normed.
        mlp_post_norm: ``[hidden]``, of what the MLP adds; None = not normed.
        experts: in the place of the MLP.
    """

    attention_norm: Tensor | None
    qkv: Projection
    attention_out: Projection
    mlp_norm: Tensor | None
    gate_up: Projection | None
    down: Projection | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    experts: ExpertWeights | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """Where the step's tokens are.

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


@dataclass(frozen=True, slots=True, eq=False)
class LayerStack:
    """All layers of a decoder and what they share.

    Attributes:
        layers: one entry a layer, all of them plain: an attention norm and an MLP norm, one MLP, no more.
        rope: ``[max_positions, head_dim]``, see ``kernels.ops.rotary_write_kv``.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: elements of a head.
        norm_eps: added to the mean square.
        scale: of the attention scores.
    """

    layers: tuple[LayerWeights, ...]
    rope: Tensor
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float


class RunLayers(Protocol):
    """A stack of layers as one call."""

    def __call__(
        self, hidden: Tensor, inputs: AttentionInputs, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """Compute every layer and store the tokens' KV.

        Args:
            hidden: ``[T, hidden]``, overwritten.
            inputs: where the tokens are.
            keys: one layer's K cache each, always the same ones.
            values: likewise.

        Returns:
            The residual stream after the last layer, ``[T, hidden]``, not yet normed.

        Raises:
            IndexError: a position, slot or block does not exist; nothing was computed.
        """
        ...


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """Penalties and biases of ``R`` rows, as ``P`` pairs of row and id. No pair may come twice.

    The logit ``x`` of a pair becomes ``x + bias``; then, if it was seen in prompt or output,
    ``x / repetition`` where it is positive, else ``x * repetition``; then, if the output holds it
    ``n > 0`` times, ``x - presence - n * frequency``. Sources: Keskar et al., "CTRL", 2019; the OpenAI
    API's definition of the other two; the order is that of transformers and of vLLM.

    Attributes:
        rows: ``[P]`` int64.
        token_ids: ``[P]`` int64.
        in_prompt: ``[P]`` bool, the id is in the row's prompt.
        output_counts: ``[P]`` int64, how often it is in the row's output so far.
        bias: ``[P]`` float32, finite; 0 = none.
        repetition: ``[R]`` float32, greater than 0; 1 = off.
        presence: ``[R]`` float32; 0 = off.
        frequency: ``[R]`` float32; 0 = off.
    """

    rows: Tensor
    token_ids: Tensor
    in_prompt: Tensor
    output_counts: Tensor
    bias: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class AllowedIds:
    """Rows that may choose certain ids alone, as ``A`` pairs of row and id.

    Attributes:
        restricted_rows: ``[n]`` int64, those rows, each once.
        rows: ``[A]`` int64.
        token_ids: ``[A]`` int64.
    """

    restricted_rows: Tensor
    rows: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each of ``R`` rows chooses its token. One entry a row, on any device.

    Attributes:
        temperature: ``[R]`` float64; 0 = the exact argmax.
        top_k: ``[R]`` int64; 0 = off.
        top_p: ``[R]`` float64; 1 = off.
        min_p: ``[R]`` float64; 0 = off.
        seed: ``[R]`` int64, an unsigned 64-bit seed as two's complement.
        output_index: ``[R]`` int64, index of the sampled token in its output.
        banned_rows: ``[B]`` int64, row of each banned pair.
        banned_ids: ``[B]`` int64, token id of each banned pair.
        adjustments: penalties and biases, which come before everything else; None = none.
        allowed: rows that may choose certain ids alone; None = none.
        typical_p: ``[R]`` float64; 1 = off; None = off for all.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    output_index: Tensor
    banned_rows: Tensor
    banned_ids: Tensor
    adjustments: LogitAdjustments | None = None
    allowed: AllowedIds | None = None
    typical_p: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What ``R`` rows chose.

    Attributes:
        token_ids: ``[R]`` int64; without meaning where ``failed``.
        failed: ``[R]`` bool; the row's logits were not finite, or every id was banned.
    """

    token_ids: Tensor
    failed: Tensor


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log probabilities of ``R`` rows.

    Attributes:
        chosen: ``[R]`` float32, of the id asked about.
        top_ids: ``[R, n]`` int64, the likeliest ids, likeliest first, equal ones by id.
        top: ``[R, n]`` float32, theirs.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


class Implementation(Protocol):
    """One implementation of every operation; ``kernels.ops`` documents each of them.

    A module whose functions have these names and signatures is one.
    """

    def set_num_threads(self, num_threads: int) -> None:
        """See ``kernels.ops.set_num_threads``."""
        ...

    def set_batch_invariant(self, enabled: bool) -> None:
        """See ``kernels.ops.set_batch_invariant``."""
        ...

    def kv_cache_shapes(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See ``kernels.ops.kv_cache_shapes``."""
        ...

    def pack_linear(self, weight: Tensor, weight_type: WeightType) -> PackedWeight:
        """See ``kernels.ops.pack_linear``."""
        ...

    def embed(self, token_ids: Tensor, weight: PackedWeight) -> Tensor:
        """See ``kernels.ops.embed``."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``kernels.ops.rms_norm``."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``kernels.ops.add_rms_norm``."""
        ...

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """See ``kernels.ops.linear``."""
        ...

    def logits(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """See ``kernels.ops.logits``."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See ``kernels.ops.silu_mul``."""
        ...

    def gelu_mul(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        """See ``kernels.ops.gelu_mul``."""
        ...

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        """See ``kernels.ops.softcap``."""
        ...

    def route(self, scores: Tensor, num_chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
        """See ``kernels.ops.route``."""
        ...

    def rotary_write_kv(
        self,
        qkv: Tensor,
        rope: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """See ``kernels.ops.rotary_write_kv``."""
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See ``kernels.ops.paged_attention``."""
        ...

    def gather_last(self, x: Tensor, rows: Tensor) -> Tensor:
        """See ``kernels.ops.gather_last``."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """See ``kernels.ops.argmax``."""
        ...

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """See ``kernels.ops.log_sum_exp``."""
        ...

    def log_probs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> LogProbs:
        """See ``kernels.ops.log_probs``."""
        ...

    def fuse_layers(self, stack: LayerStack) -> RunLayers | None:
        """See ``kernels.ops.fuse_layers``."""
        ...

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        """See ``kernels.ops.sample``."""
        ...
