"""The decoder: embedding, layers, final norm, LM head, with the options of ``DecoderConfig``.

One class computes every step of every family. It calls ``kernels.ops`` and never asks which
implementation runs; it knows nothing of requests, sampling or scheduling.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.models import layers, lora
from engine.models.config import DecoderConfig
from engine.models.lora import Adapter, AdapterRows
from engine.models.rotary import rope_table
from engine.models.sharding import Alone, Peers
from kernels import ops
from kernels.ops import AttentionInputs, LayerStack, LayerWeights, PackedWeight, RunLayers


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, or one rank's share of them.

    Attributes:
        embedding: ``[vocab, hidden]``, packed; of a rank, its part of the vocabulary.
        layers: one entry a layer.
        norm: ``[hidden]`` float32, after the last layer.
        lm_head: ``[vocab, hidden]``, packed; the embedding itself when they are tied.
    """

    embedding: PackedWeight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: PackedWeight

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights."""
        packed = {id(self.embedding): self.embedding, id(self.lm_head): self.lm_head}
        for layer in self.layers:
            packed |= {id(weight): weight for weight in _matrices(layer)}
        return sum(weight.num_bytes for weight in packed.values())


def _matrices(layer: LayerWeights) -> Iterator[PackedWeight]:
    for projection in (layer.qkv, layer.attention_out, layer.gate_up, layer.down):
        if projection is not None:
            yield projection.weight
    if layer.experts is not None:
        yield layer.experts.router
        for expert in layer.experts.experts:
            yield expert.gate_up.weight
            yield expert.down.weight


class StepDecoder(Protocol):
    """What a runner asks of a decoder, whoever computes it."""

    @property
    def peers(self) -> Peers:
        """The other ranks."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        inputs: AttentionInputs,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """See ``Decoder.forward``."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """See ``Decoder.logits``."""
        ...


class Decoder:
    """A decoder with its weights.

    Of several ranks each has one of these: all of them are given the same steps,
    in the same order, and rank 0 gets the logits.

    Args:
        config: shape and constants; of a rank, ``Shard.config``.
        weights: on one device, packed by the active kernels.
        num_positions: positions to prepare, at most the longest context that will be served.
        peers: the other ranks.
        adapters: by name; only a single rank can have any.

    Attributes:
        peers: likewise.
        adapters: likewise.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        num_positions: int,
        peers: Peers | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.config = config = config.within(num_positions)
        self.peers: Peers = Alone() if peers is None else peers
        self._vocabulary = self.peers.shard.part(config.vocab_size)
        self.weights = weights
        self.adapters: Mapping[str, Adapter] = adapters or {}
        assert not self.adapters or self.peers.shard.size == 1
        self.num_positions = num_positions
        device = weights.norm.device
        self._rope = rope_table(config.rope, config.head_dim, num_positions).to(device)
        self._local_rope = self._rope
        if config.local_rope is not None:
            self._local_rope = rope_table(config.local_rope, config.head_dim, num_positions).to(device)
        self._run_layers: RunLayers | None = None
        # One call for all layers can neither stop for the other ranks nor knows it any option.
        if self.peers.shard.size == 1 and config.is_plain:
            self._run_layers = ops.fuse_layers(
                LayerStack(
                    weights.layers,
                    self._rope,
                    config.num_q_heads,
                    config.num_kv_heads,
                    config.head_dim,
                    config.norm_eps,
                    config.score_scale,
                )
            )

    def forward(
        self,
        token_ids: Tensor,
        inputs: AttentionInputs,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """Compute the step's tokens and store their KV.

        Args:
            token_ids: ``[T]`` int64.
            inputs: where the tokens are.
            keys: the KV pool's keys, one tensor a layer.
            values: likewise.
            adapters: which tokens are computed with which adapter; those of none are left out.

        Returns:
            The residual stream after the last layer, ``[T, hidden]``, not yet normed.
        """
        residual = self._embed(token_ids)
        if self._run_layers is not None and not adapters:
            return self._run_layers(residual, inputs, keys, values)
        config = self.config
        branch: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            window = config.window(index)
            rope = self._rope if window is None else self._local_rope
            added = lora.of_layer(self.adapters, adapters, index)
            x, residual = self._entered(branch, residual, layer.attention_norm)
            mixed = layers.attention(
                x, layer, config, inputs, rope, keys[index], values[index], window, added
            )
            branch = self._branch(mixed, layer.attention_post_norm)
            x, residual = self._entered(branch, residual, layer.mlp_norm)
            branch = self._branch(layers.mlp(x, layer, config.activation, added), layer.mlp_post_norm)
        assert branch is not None
        return residual.add_(branch)

    def _entered(self, branch: Tensor | None, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the next part of a layer reads, and the residual stream with the last branch added."""
        eps = self.config.norm_eps
        if norm is None:
            if branch is not None:
                residual.add_(branch)
            return residual, residual
        if branch is None:
            return ops.rms_norm(residual, norm, eps), residual
        return ops.add_rms_norm(branch, residual, norm, eps)

    def _branch(self, x: Tensor, post_norm: Tensor | None) -> Tensor:
        """What attention or MLP adds to the residual stream: the ranks' sum, normed and scaled."""
        branch = self.peers.add(x)
        if post_norm is not None:
            branch = ops.rms_norm(branch, post_norm, self.config.norm_eps)
        return branch if self.config.residual_scale == 1.0 else branch.mul_(self.config.residual_scale)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Final norm and LM head of the rows that sample.

        Args:
            hidden: ``[T, hidden]`` from ``forward``.
            rows: ``[R]`` int64.

        Returns:
            ``[R, vocab]`` float32, contiguous; on ranks other than 0 their own columns alone.
        """
        normed = ops.rms_norm(ops.gather_last(hidden, rows), self.weights.norm, self.config.norm_eps)
        logits = ops.logits(normed, self.weights.lm_head)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if self.config.logit_softcap is not None:
            logits = ops.softcap(logits, self.config.logit_softcap)
        return self.peers.gather(logits, self.config.vocab_size)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding. Each id is one rank's; the others add zeros, which changes no bit."""
        if self.peers.shard.size == 1:
            return self._scaled(ops.embed(token_ids, self.weights.embedding))
        first, end = self._vocabulary.start, self._vocabulary.stop
        foreign = (token_ids < first) | (token_ids >= end)
        rows = ops.embed((token_ids - first).masked_fill(foreign, 0), self.weights.embedding)
        return self._scaled(self.peers.add(rows.masked_fill_(foreign.unsqueeze(1), 0.0)))

    def _scaled(self, rows: Tensor) -> Tensor:
        return rows if self.config.embedding_scale == 1.0 else rows.mul_(self.config.embedding_scale)
