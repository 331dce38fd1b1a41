"""Rotary positions, as a checkpoint describes them. Knows no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.errors import InvalidCheckpoint, UnsupportedModel
from engine.models.values import integer, number, numbers

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions.

    Attributes:
        theta: base of the geometric row of wave lengths.
        kind: one of ``ROPE_TYPES``.
        factor: by how much the context was stretched; 1 for ``default``.
        low_freq_factor: ``llama3`` only, waves longer than original / this are stretched.
        high_freq_factor: ``llama3`` only, waves shorter than original / this are kept.
        original_max_positions: context before stretching; ``llama3``, ``yarn`` and ``longrope`` only.
        rotary_share: part of each head that is rotated, its first elements; 1 = all of it.
        scale: cosines and sines are multiplied by this; ``yarn`` and ``longrope`` only.
        beta_fast: ``yarn`` only, waves that turn more often than this in the original context are kept.
        beta_slow: ``yarn`` only, waves that turn less often than this are stretched.
        truncate: ``yarn`` only, the ends of the blend are whole dimensions.
        short_factors: ``longrope`` only, one a rotated pair, while the original context is served.
        long_factors: likewise, where a longer one is.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    rotary_share: float = 1.0
    scale: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head that are rotated."""
        return int(head_dim * self.rotary_share)

    @property
    def stretched_max_positions(self) -> int:
        """The context that the stretching alone makes, where a checkpoint names only the original one."""
        return int(self.original_max_positions * self.factor) if self.kind == "yarn" else 0

    @classmethod
    def from_dict(
        cls, settings: Mapping[str, Any], config: Mapping[str, Any], *, theta: float, head_dim: int
    ) -> "RopeConfig":
        """Read the values of ``rope_parameters`` or ``rope_scaling``.

        Args:
            settings: those values.
            config: the ``config.json`` around them, where old checkpoints keep some.
            theta: for where neither names one.
            head_dim: elements of a head.

        Raises:
            InvalidCheckpoint: a value is missing, of the wrong type, or breaks a rule.
            UnsupportedModel: another kind of scaling.
        """
        kind = settings.get("rope_type", settings.get("type", "default"))
        kind = _OLD_NAMES.get(kind, kind)
        if kind not in ROPE_TYPES:
            raise UnsupportedModel("rope type", " or ".join(ROPE_TYPES), kind)
        share = number(settings, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
        rotated = int(head_dim * share)
        if share > 1 or (share < 1 and (rotated % 2 or rotated < 2)):
            raise InvalidCheckpoint(
                "config partial_rotary_factor must leave an even number of a head's "
                f"{head_dim} elements, got {share}"
            )
        values: dict[str, Any] = {"theta": number(settings, "rope_theta", theta), "rotary_share": share}
        if kind in ("default", "dynamic"):  # dynamic: the default until the model's own context is exceeded
            return cls(kind=kind, **values)
        read = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}[kind]
        found = cls(kind=kind, **values, **read(settings, config))
        pairs = found.rotary_dim(head_dim) // 2
        for field, factors in (("short_factor", found.short_factors), ("long_factor", found.long_factors)):
            if kind == "longrope" and len(factors) != pairs:
                raise InvalidCheckpoint(f"config {field} must hold {pairs} numbers, got {len(factors)}")
        return found


def _linear(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": number(settings, "factor")}


def _llama3(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "factor": number(settings, "factor"),
        "low_freq_factor": number(settings, "low_freq_factor"),
        "high_freq_factor": number(settings, "high_freq_factor"),
        "original_max_positions": integer(settings, "original_max_position_embeddings"),
    }


def _original(settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, float]:
    """The context before stretching, and by how much it was stretched."""
    field = "original_max_position_embeddings"
    longest = integer(config, "max_position_embeddings", 2048)
    original = integer(settings, field, integer(config, field, longest))
    return original, number(settings, "factor", longest / original)


def _yarn(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    original, factor = _original(settings, config)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = temperature(1.0)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        scale = temperature(number(settings, "mscale")) / temperature(number(settings, "mscale_all_dim"))
    return {
        "factor": factor,
        "original_max_positions": original,
        "scale": number(settings, "attention_factor", scale),
        "beta_fast": number(settings, "beta_fast", 32.0),
        "beta_slow": number(settings, "beta_slow", 1.0),
        "truncate": bool(settings.get("truncate", True)),
    }


def _longrope(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    original, factor = _original(settings, config)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "factor": factor,
        "original_max_positions": original,
        "scale": number(settings, "attention_factor", scale),
        "short_factors": numbers(settings, "short_factor"),
        "long_factors": numbers(settings, "long_factor"),
    }
