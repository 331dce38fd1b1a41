"""The decoder's configuration, from the ``config.json`` of a Hugging Face checkpoint. Knows no torch."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.models.errors import InvalidCheckpoint, UnsupportedModel
from engine.models.families import FAMILIES, Family, QkNorm, TensorNames
from engine.models.rope import RopeConfig
from engine.models.values import integer, number, optional_number, read_json, token_ids, understood

Activation = Literal["silu", "gelu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
#: Most layers and most experts of one, most tokens of context: several times what any model has.
_LAYERS_MAX, _EXPERTS_MAX, _POSITIONS_MAX = 4096, 16_384, 2**24
_WINDOWED, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """MLPs that are mixtures of experts.

    Attributes:
        num_experts: of a layer.
        experts_per_token: how many of them compute a token.
        intermediate_size: width of an expert's gated activation.
        normalised: the chosen experts' shares add up to 1.
        dense_layers: layers with one plain MLP instead.

    Raises:
        InvalidCheckpoint: a value breaks a rule.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalised: bool
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.intermediate_size < 1:
            raise InvalidCheckpoint(
                "config num_experts and the experts' intermediate size must be at least 1, "
                f"got {self.num_experts} and {self.intermediate_size}"
            )
        if self.num_experts > _EXPERTS_MAX:
            raise InvalidCheckpoint(
                f"config num_experts must be at most {_EXPERTS_MAX}, got {self.num_experts}"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise InvalidCheckpoint(
                f"config num_experts_per_tok must be 1 to {self.num_experts}, got {self.experts_per_token}"
            )


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape, constants and options of a decoder. The options are independent of each other.

    Attributes:
        architecture: class name in the checkpoint, such as ``LlamaForCausalLM``.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated activation.
        num_layers: decoder layers.
        num_q_heads: query heads.
        num_kv_heads: KV heads; divides ``num_q_heads``.
        head_dim: elements of a head; even.
        norm_eps: added to the mean square.
        max_positions: longest context, tokens.
        tie_embeddings: the LM head is the embedding.
        attention_bias: query, key and value projections have a bias.
        attention_out_bias: attention's output projection has one.
        mlp_bias: the three projections of the MLP have one.
        qk_norm: queries and keys are normed before they are rotated: each head (Qwen3), or
            all heads of a token together (OLMo 2).
        norm_offset: added to the weights of norms when they are loaded (Gemma).
        activation: of the MLP's gate.
        embedding_scale: multiplies embeddings.
        residual_scale: multiplies what attention and MLP add.
        attention_scale: multiplies attention's scores; None = ``head_dim ** -0.5``.
        attention_softcap: bounds attention's scores smoothly (Gemma 2).
        logit_scale: multiplies logits.
        logit_softcap: bounds logits smoothly, after the scale.
        windows: tokens that a query sees, itself included, one entry a layer, None = all; empty = all layers
            see all.
        rope: rotary positions.
        local_rope: those of layers with a window, where they have their own (Gemma 3).
        moe: MLPs that are mixtures of experts.
        eos_token_ids: from ``config.json`` and ``generation_config.json``.
        names: of the tensors in the checkpoint; also says which norms there are.

    Raises:
        InvalidCheckpoint: a value breaks a rule above.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tie_embeddings: bool
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    norm_offset: float = 0.0
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    moe: MoeConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()
    names: TensorNames = field(default_factory=TensorNames)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads",
            "head_dim", "max_positions",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidCheckpoint(f"config {name} must be at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise InvalidCheckpoint(
                f"config num_kv_heads must divide {self.num_q_heads} query heads, got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InvalidCheckpoint(f"config head_dim must be even, got {self.head_dim}")
        if len(self.windows) not in (0, self.num_layers):
            raise InvalidCheckpoint(
                f"config layer_types must have {self.num_layers} entries, got {len(self.windows)}"
            )

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def score_scale(self) -> float:
        """What multiplies attention's scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def is_plain(self) -> bool:
        """Whether the layers are Llama's, with none of the options that only single operations know."""
        return (
            self.qk_norm is None
            and self.activation == "silu"
            and self.residual_scale == 1.0
            and self.attention_softcap is None
            and not any(self.windows)
            and self.moe is None
            and self.names.attention_norm is not None
            and self.names.mlp_norm is not None
            and self.names.attention_post_norm is None
            and self.names.mlp_post_norm is None
        )

    def within(self, num_positions: int) -> "DecoderConfig":
        """The same model for contexts up to this: without the windows that hide nothing of them."""
        if self.local_rope is not None or not self.windows:  # layers with a window rotate otherwise
            return self
        windows = tuple(
            None if window is None or window >= num_positions else window for window in self.windows
        )
        return dataclasses.replace(self, windows=windows if any(windows) else ())

    def window(self, layer: int) -> int | None:
        """Tokens that a query of this layer sees; None = all."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @classmethod
    def from_folder(cls, folder: Path) -> "DecoderConfig":
        """Read ``config.json`` and, where there is one, ``generation_config.json``.

        Raises:
            InvalidCheckpoint: a file is missing or malformed, or a value breaks a rule.
            UnsupportedModel: another architecture, activation or rope scaling.
        """
        config = read_json(folder / "config.json")
        return cls.from_dict(config, eos_token_ids=eos_token_ids(folder, config))

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], *, eos_token_ids: frozenset[int] = frozenset()
    ) -> "DecoderConfig":
        """Read the content of a ``config.json``.

        Raises:
            InvalidCheckpoint: a value is missing, of the wrong type, or breaks a rule.
            UnsupportedModel: another architecture, activation or rope scaling.
        """
        with understood("config"):
            return cls._from_dict(config, eos_token_ids)

    @classmethod
    def _from_dict(cls, config: Mapping[str, Any], eos_token_ids: frozenset[int]) -> "DecoderConfig":
        architecture = (config.get("architectures") or [config.get("model_type")])[0]
        if architecture not in FAMILIES:
            raise UnsupportedModel("architecture", " or ".join(FAMILIES), architecture)
        family = FAMILIES[architecture]
        config = {**family.defaults, **config}
        if config.get("quantization_config"):
            raise UnsupportedModel("quantization_config", "absent", config["quantization_config"])
        if config.get("use_bidirectional_attention"):
            raise UnsupportedModel("use_bidirectional_attention", "false", True)
        activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise UnsupportedModel("hidden_act", " or ".join(_ACTIVATIONS), activation)
        has_bias = bool(config.get("attention_bias", False))
        num_q_heads = integer(config, "num_attention_heads")
        hidden_size, num_layers = integer(config, "hidden_size"), integer(config, "num_hidden_layers")
        if num_layers > _LAYERS_MAX:
            raise InvalidCheckpoint(
                f"config num_hidden_layers must be at most {_LAYERS_MAX}, got {num_layers}"
            )
        head_dim = integer(config, "head_dim", hidden_size // max(num_q_heads, 1))
        rope, local_rope = _ropes(config, head_dim)
        # Transformers' own defaults where a checkpoint leaves a value out.
        longest = max(integer(config, "max_position_embeddings", 2048), rope.stretched_max_positions)
        if longest > _POSITIONS_MAX:
            raise InvalidCheckpoint(
                f"config max_position_embeddings must be at most {_POSITIONS_MAX}, got {longest}"
            )
        root = max(hidden_size, 0) ** 0.5 if family.scales_embedding else 1.0
        return cls(
            architecture=architecture,
            vocab_size=integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=integer(config, "num_key_value_heads", num_q_heads),
            head_dim=head_dim,
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            max_positions=longest,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
            attention_out_bias=has_bias if family.out_bias is None else family.out_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            norm_offset=family.norm_offset,
            activation=_ACTIVATIONS[activation],
            embedding_scale=number(config, "embedding_multiplier", root),
            residual_scale=number(config, "residual_multiplier", 1.0),
            attention_scale=_attention_scale(config),
            attention_softcap=optional_number(config, "attn_logit_softcapping"),
            logit_scale=1.0 / number(config, "logits_scaling", 1.0),
            logit_softcap=optional_number(config, "final_logit_softcapping"),
            windows=_windows(config, family, num_layers),
            rope=rope,
            local_rope=local_rope,
            moe=_moe(config, num_layers) if family.has_experts else None,
            eos_token_ids=eos_token_ids,
            names=family.names,
        )


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an output, from the content of ``config.json`` and from ``generation_config.json``.

    Raises:
        InvalidCheckpoint: a file is malformed.
    """
    ids = token_ids(config.get("eos_token_id"))
    generation = folder / "generation_config.json"
    return ids | token_ids(read_json(generation).get("eos_token_id")) if generation.is_file() else ids


def _attention_scale(config: Mapping[str, Any]) -> float | None:
    if config.get("query_pre_attn_scalar") is not None:
        return 1.0 / math.sqrt(number(config, "query_pre_attn_scalar"))
    return optional_number(config, "attention_multiplier")


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    """What each layer sees: as ``layer_types`` says, or else by the family's rule."""
    types = config.get("layer_types")
    if types is None:
        has_window = [family.has_window(config, layer) for layer in range(num_layers)]
    else:
        if not isinstance(types, list) or set(types) - {_WINDOWED, _FULL}:
            raise UnsupportedModel("layer_types", f"a list of {_FULL} and {_WINDOWED}", types)
        if _WINDOWED in types and not family.may_have_windows:
            raise UnsupportedModel("layer_types", f"{_FULL} in every layer", types)
        has_window = [kind == _WINDOWED for kind in types]
    if not any(has_window):
        return ()
    window = integer(config, "sliding_window")
    if window < 1:
        raise InvalidCheckpoint(f"config sliding_window must be at least 1, got {window}")
    return tuple(window if windowed else None for windowed in has_window)


def _ropes(config: Mapping[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary positions, and those of layers with a window.

    ``rope_parameters`` of transformers 5, which may hold them by type of layer; before,
    ``rope_theta`` with ``rope_scaling``, and ``rope_local_base_freq`` for the others.
    """
    theta = number(config, "rope_theta", 10000.0)
    old = dict(config.get("rope_scaling") or {})
    new = dict(config.get("rope_parameters") or {})
    if not new.keys() & {_FULL, _WINDOWED}:
        rope = RopeConfig.from_dict(old | new, config, theta=theta, head_dim=head_dim)
        if config.get("rope_local_base_freq") is None:
            return rope, None
        local = {"rope_theta": config["rope_local_base_freq"]}
        return rope, RopeConfig.from_dict(local, config, theta=theta, head_dim=head_dim)
    full, windowed = (new.get(kind) or {} for kind in (_FULL, _WINDOWED))
    local_theta = number(config, "rope_local_base_freq", 10000.0)
    return (
        RopeConfig.from_dict(old | full, config, theta=theta, head_dim=head_dim),
        RopeConfig.from_dict(windowed, config, theta=local_theta, head_dim=head_dim),
    )


def _moe(config: Mapping[str, Any], num_layers: int) -> MoeConfig:
    step, plain = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return MoeConfig(
        num_experts=integer(config, "num_local_experts", config.get("num_experts")),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size", config.get("intermediate_size")),
        normalised=bool(config.get("norm_topk_prob", False)),
        dense_layers=frozenset(
            layer for layer in range(num_layers) if layer in plain or (layer + 1) % max(step, 1)
        ),
    )
