"""Weights of the decoder, from a folder of safetensors files: which tensor goes where, and a rank's part."""

from pathlib import Path

import torch
from torch import Tensor

from engine.models.checkpoint import Auto, Part, TensorSource
from engine.models.config import DecoderConfig
from engine.models.decoder import DecoderWeights
from engine.models.progress import progress
from engine.models.rotary import element_order
from engine.models.sharding import Shard
from kernels.ops import ExpertWeights, LayerWeights, MlpWeights, Projection, WeightType

_WHOLE = Shard()


def load_weights(
    folder: Path,
    config: DecoderConfig,
    weight_type: WeightType | Auto = "auto",
    *,
    shard: Shard = _WHOLE,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Read the weights of ``config`` from ``folder``, or one rank's share of them.

    Only the share is read from the mapped file, as far as pages of the file allow.

    Args:
        folder: with the safetensors files.
        config: what they must match: of the whole model, for a rank, too.
        weight_type: how matrices are kept; ``auto`` = exactly, in the dtype of the file. Norms
            and biases are float32.
        shard: whose share.
        device: where they are to be packed and kept.

    Raises:
        InvalidCheckpoint: a file is missing or damaged, or a tensor is missing,
            unknown or of another shape than the configuration says.
    """
    source = TensorSource(folder, weight_type, torch.device(device))
    parts = Parts(config, shard)
    with progress("Loading weights", source.num_bytes) as source.advance:
        embedding = source.matrix("model.embed_tokens.weight", parts.vocabulary)
        if config.tie_embeddings:
            source.ignore("lm_head.weight")
            lm_head = embedding
        else:  # here, not at the end: its memory in the file is large, and comes on top of what is packed
            lm_head = source.matrix("lm_head.weight", parts.vocabulary)
        decoder_layers = tuple(_layer(source, index, config, parts) for index in range(config.num_layers))
        norm = source.vector("model.norm.weight", config.hidden_size).add_(config.norm_offset)
        source.check_all_taken()
    return DecoderWeights(embedding, decoder_layers, norm, lm_head)


class Parts:
    """What one rank takes of each matrix: rows where its results are its own, columns where they are summed.

    A bias that is summed belongs to rank 0, or it would be added by every rank.
    """

    def __init__(self, config: DecoderConfig, shard: Shard) -> None:
        self._config, self._shard = config, shard
        hidden = config.hidden_size
        self.vocabulary = Part((config.vocab_size, hidden), shard.part(config.vocab_size))
        columns = self._elements(shard.q_heads(config))
        self.attention_out = Part((hidden, config.num_q_heads * config.head_dim), columns=columns)
        self.adds_bias = shard.rank == 0
        self.order = element_order(config.rope, config.head_dim)

    def qkv(self) -> list[tuple[str, Part]]:
        """Of the query, key and value projections, by name."""
        config, shard = self._config, self._shard
        q_heads, kv_heads = shard.q_heads(config), shard.kv_heads(config)
        return self._stacked(
            config.names.qkv,
            [
                (config.num_q_heads * config.head_dim, self._elements(q_heads), self._rotated(q_heads)),
                (config.num_kv_heads * config.head_dim, self._elements(kv_heads), self._rotated(kv_heads)),
                (config.num_kv_heads * config.head_dim, self._elements(kv_heads), None),
            ],
        )

    def gate_up(self, names: tuple[str, ...], intermediate: int) -> list[tuple[str, Part]]:
        """Of the gate and up projections of an MLP, by name."""
        return self._stacked(names, [(intermediate, self._shard.part(intermediate), None)] * 2)

    def down(self, intermediate: int) -> Part:
        """Of the last projection of an MLP."""
        return Part((self._config.hidden_size, intermediate), columns=self._shard.part(intermediate))

    def _stacked(
        self, names: tuple[str, ...], pieces: list[tuple[int, slice, Tensor | None]]
    ) -> list[tuple[str, Part]]:
        """The rows that are taken of projections of these sizes: one tensor each, or all in one."""
        hidden = self._config.hidden_size
        if len(names) == len(pieces):
            return [
                (name, Part((size, hidden), rows, order=order))
                for name, (size, rows, order) in zip(names, pieces, strict=True)
            ]
        total, begin, found = sum(size for size, _, _ in pieces), 0, []
        for size, rows, order in pieces:
            moved = slice(begin + rows.start, begin + rows.stop)
            found.append((names[0], Part((total, hidden), moved, order=order)))
            begin += size
        return found

    def _elements(self, heads: slice) -> slice:
        return slice(heads.start * self._config.head_dim, heads.stop * self._config.head_dim)

    def _rotated(self, heads: slice) -> Tensor | None:
        """The order of these heads' elements in which the kernels rotate them."""
        if self.order is None:
            return None
        firsts = torch.arange(heads.stop - heads.start).mul_(self._config.head_dim)
        return (firsts.unsqueeze(1) + self.order).flatten()


def _layer(source: TensorSource, index: int, config: DecoderConfig, parts: Parts) -> LayerWeights:
    name, names = f"model.layers.{index}.", config.names
    has_experts = config.has_experts(index)

    def norm(which: str | None) -> Tensor | None:
        if which is None:
            return None
        return source.vector(f"{name}{which}.weight", config.hidden_size).add_(config.norm_offset)

    def qk_norm(which: str, num_heads: int) -> Tensor | None:
        if config.qk_norm is None:
            return None
        heads = num_heads if config.qk_norm == "all" else 1
        vector = source.vector(f"{name}self_attn.{which}.weight", heads * config.head_dim)
        if parts.order is not None:
            vector = vector.view(heads, -1).index_select(1, parts.order).flatten()
        return vector.add_(config.norm_offset)

    gate_up = down = None
    if not has_experts:
        gate_up, down = _mlp(
            source, name, names.gate_up, "mlp.down_proj", config.intermediate_size, config, parts
        )
    return LayerWeights(
        attention_norm=norm(names.attention_norm),
        qkv=source.project(name, parts.qkv(), bias=config.attention_bias),
        attention_out=source.project(
            name,
            [("self_attn.o_proj", parts.attention_out)],
            bias=config.attention_out_bias,
            adds_bias=parts.adds_bias,
        ),
        mlp_norm=norm(names.mlp_norm),
        gate_up=gate_up,
        down=down,
        q_norm=qk_norm("q_norm", config.num_q_heads),
        k_norm=qk_norm("k_norm", config.num_kv_heads),
        attention_post_norm=norm(names.attention_post_norm),
        mlp_post_norm=norm(names.mlp_post_norm),
        experts=_experts(source, name, config, parts) if has_experts else None,
    )


def _mlp(
    source: TensorSource,
    prefix: str,
    gate_up: tuple[str, ...],
    down: str,
    intermediate: int,
    config: DecoderConfig,
    parts: Parts,
) -> tuple[Projection, Projection]:
    bias = config.mlp_bias
    return (
        source.project(prefix, parts.gate_up(gate_up, intermediate), bias=bias),
        source.project(prefix, [(down, parts.down(intermediate))], bias=bias, adds_bias=parts.adds_bias),
    )


def _experts(source: TensorSource, name: str, config: DecoderConfig, parts: Parts) -> ExpertWeights:
    """Every rank has its columns of every expert, and the whole router."""
    moe, names = config.moe, config.names
    assert moe is not None
    router = source.matrix(
        f"{name}{names.router}.weight", Part((moe.num_experts, config.hidden_size)), exact=True
    )
    found = []
    for expert in range(moe.num_experts):
        prefix = f"{name}{names.experts.format(expert)}."
        width = moe.intermediate_size
        mlp = _mlp(source, prefix, names.expert_gate_up, names.expert_down, width, config, parts)
        found.append(MlpWeights(*mlp))
    return ExpertWeights(router, tuple(found), moe.experts_per_token, moe.normalised)
