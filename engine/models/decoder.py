"""The decoder of the Llama family: embedding, layers, final norm, LM head.

One class computes every step. It calls ``kernels.ops`` and never asks which
implementation runs; it knows nothing of requests, sampling or scheduling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.models import layers
from engine.models.config import DecoderConfig
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
            for projection in (layer.qkv, layer.attention_out, layer.gate_up, layer.down):
                packed[id(projection.weight)] = projection.weight
        return sum(weight.num_bytes for weight in packed.values())


class Decoder:
    """A decoder with its weights.

    Of several ranks each has one of these: all of them are given the same steps,
    in the same order, and rank 0 gets the logits.

    Args:
        config: shape and constants; of a rank, ``Shard.config``.
        weights: on one device, packed by the active kernels.
        num_positions: positions to prepare, at most the longest context that will be served.
        peers: the other ranks.

    Attributes:
        peers: likewise.
    """

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, num_positions: int, peers: Peers | None = None
    ) -> None:
        self.config = config
        self.peers: Peers = Alone() if peers is None else peers
        self._vocabulary = self.peers.shard.part(config.vocab_size)
        self.weights = weights
        self.num_positions = num_positions
        self._rope = layers.rope_table(config.rope, config.head_dim, num_positions).to(weights.norm.device)
        self._run_layers: RunLayers | None = None
        # One call for all layers can neither stop for the other ranks nor norm heads.
        if self.peers.shard.size == 1 and not config.qk_norm:
            self._run_layers = ops.fuse_layers(
                LayerStack(
                    weights.layers,
                    self._rope,
                    config.num_q_heads,
                    config.num_kv_heads,
                    config.head_dim,
                    config.norm_eps,
                    config.head_dim**-0.5,
                )
            )

    def forward(
        self, token_ids: Tensor, inputs: AttentionInputs, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """Compute the step's tokens and store their KV.

        Args:
            token_ids: ``[T]`` int64.
            inputs: where the tokens are.
            keys: the KV pool's keys, one tensor a layer.
            values: likewise.

        Returns:
            The residual stream after the last layer, ``[T, hidden]``, not yet normed.
        """
        residual = self._embed(token_ids)
        if self._run_layers is not None:
            return self._run_layers(residual, inputs, keys, values)
        eps = self.config.norm_eps
        branch: Tensor | None = None
        for layer, k_cache, v_cache in zip(self.weights.layers, keys, values, strict=True):
            if branch is None:
                normed = ops.rms_norm(residual, layer.attention_norm, eps)
            else:
                normed, residual = ops.add_rms_norm(branch, residual, layer.attention_norm, eps)
            mixed = layers.attention(normed, layer, self.config, inputs, self._rope, k_cache, v_cache)
            branch = self.peers.add(mixed)
            normed, residual = ops.add_rms_norm(branch, residual, layer.mlp_norm, eps)
            branch = self.peers.add(layers.mlp(normed, layer))
        assert branch is not None
        return residual.add_(branch)

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
        return self.peers.gather(logits, self.config.vocab_size)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding. Each id is one rank's; the others add zeros, which changes no bit."""
        if self.peers.shard.size == 1:
            return ops.embed(token_ids, self.weights.embedding)
        first, end = self._vocabulary.start, self._vocabulary.stop
        foreign = (token_ids < first) | (token_ids >= end)
        rows = ops.embed((token_ids - first).masked_fill(foreign, 0), self.weights.embedding)
        return self.peers.add(rows.masked_fill_(foreign.unsqueeze(1), 0.0))
