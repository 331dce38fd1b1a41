"""The decoder's configuration, from the ``config.json`` of a Hugging Face checkpoint."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.errors import InvalidCheckpoint, UnsupportedModel

QWEN3 = "Qwen3ForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", QWEN3)
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions.

    Attributes:
        theta: base of the geometric row of wave lengths.
        kind: ``default``, ``linear`` or ``llama3``.
        factor: by how much the context was stretched; 1 for ``default``.
        low_freq_factor: ``llama3`` only, waves longer than original / this are stretched.
        high_freq_factor: ``llama3`` only, waves shorter than original / this are kept.
        original_max_positions: ``llama3`` only, context before stretching.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and constants of a decoder of the Llama family.

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
        attention_bias: the four attention projections have a bias.
        mlp_bias: the three projections of the MLP have one.
        qk_norm: queries and keys are normed head by head before they are rotated (Qwen3).
        rope: rotary positions.
        eos_token_ids: from ``config.json`` and ``generation_config.json``.

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
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig = RopeConfig()
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for field in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads",
            "head_dim", "max_positions",
        ):  # fmt: skip
            if getattr(self, field) < 1:
                raise InvalidCheckpoint(f"config {field} must be at least 1, got {getattr(self, field)}")
        if self.num_q_heads % self.num_kv_heads:
            raise InvalidCheckpoint(
                f"config num_kv_heads must divide {self.num_q_heads} query heads, got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InvalidCheckpoint(f"config head_dim must be even, got {self.head_dim}")

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> "DecoderConfig":
        """Read ``config.json`` and, where there is one, ``generation_config.json``.

        Raises:
            InvalidCheckpoint: a file is missing or malformed, or a value breaks a rule.
            UnsupportedModel: another architecture, activation or rope scaling.
        """
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = _token_ids(config.get("eos_token_id"))
        if generation.is_file():
            eos |= _token_ids(read_json(generation).get("eos_token_id"))
        return cls.from_dict(config, eos_token_ids=eos)

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], *, eos_token_ids: frozenset[int] = frozenset()
    ) -> "DecoderConfig":
        """Read the content of a ``config.json``.

        Raises:
            InvalidCheckpoint: a value is missing, of the wrong type, or breaks a rule.
            UnsupportedModel: another architecture, activation or rope scaling.
        """
        architectures = config.get("architectures") or [config.get("model_type")]
        if architectures[0] not in ARCHITECTURES:
            raise UnsupportedModel("architecture", " or ".join(ARCHITECTURES), architectures[0])
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel("hidden_act", "silu", config["hidden_act"])
        if config.get("quantization_config"):
            raise UnsupportedModel("quantization_config", "absent", config["quantization_config"])
        if config.get("use_sliding_window") or set(config.get("layer_types") or ()) - {"full_attention"}:
            raise UnsupportedModel("attention", "full in every layer", config.get("layer_types") or "sliding")
        qwen3 = architectures[0] == QWEN3
        num_q_heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        # Transformers' own defaults where a checkpoint leaves a value out.
        return cls(
            architecture=architectures[0],
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=_integer(config, "num_key_value_heads", num_q_heads),
            head_dim=_integer(config, "head_dim", 128 if qwen3 else hidden_size // max(num_q_heads, 1)),
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            max_positions=_integer(config, "max_position_embeddings", 2048),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qwen3,
            rope=_rope(config),
            eos_token_ids=eos_token_ids,
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InvalidCheckpoint: the file is missing, no JSON, or no object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"{path.name} is missing in {path.parent}") from error
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{path} cannot be read as JSON") from error
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: ``rope_parameters`` of transformers 5, ``rope_theta`` + ``rope_scaling`` before."""
    settings = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = _number(settings, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel("rope type", " or ".join(ROPE_TYPES), kind)
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel("partial_rotary_factor", "1.0", partial)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = _number(settings, "factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=_number(settings, "low_freq_factor"),
        high_freq_factor=_number(settings, "high_freq_factor"),
        original_max_positions=_integer(settings, "original_max_position_embeddings"),
    )


def _integer(source: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = source.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidCheckpoint(f"config {field} must be an integer, got {value!r}")
    return value


def _number(source: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = source.get(field)
    if value is None:
        value = default
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise InvalidCheckpoint(f"config {field} must be a positive number, got {value!r}")
    return float(value)


def _token_ids(value: object) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise InvalidCheckpoint(f"config eos_token_id must be an id or a list of ids, got {value!r}")
    return frozenset(ids)
