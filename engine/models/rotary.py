"""Rotary positions as tensors: the table that the kernels read, and the order of a head's elements."""

import math

import torch
from torch import Tensor

from engine.models.rope import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Cosines and sines of every position, ``[num_positions, head_dim]`` float32, cosines first.

    Where only a part of each head is rotated, the other pairs do not turn: the heads' elements must
    be in the order of ``element_order``.
    """
    pairs, rotated = head_dim // 2, rope.rotary_dim(head_dim) // 2
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, head_dim, num_positions)
    )
    table = torch.zeros(num_positions, head_dim)
    table[:, rotated:pairs] = 1.0
    table[:, :rotated] = angles.cos().mul_(rope.scale)
    table[:, pairs : pairs + rotated] = angles.sin().mul_(rope.scale)
    return table


def element_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Which element of a checkpoint's head goes where, so that all pairs lie half a head apart; None = as is.

    Queries and keys ordered alike have the same products, so nothing else changes. ``[head_dim]`` int64.
    """
    rotated, pairs = rope.rotary_dim(head_dim), head_dim // 2
    if rotated == head_dim:
        return None
    elements, turning = torch.arange(head_dim), rotated // 2
    still = elements[rotated:]
    firsts = torch.cat((elements[:turning], still[: pairs - turning]))
    return torch.cat((firsts, elements[turning:rotated], still[pairs - turning :]))


def inverse_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Angle per position of each rotated pair, ``[rotary_dim / 2]`` float32.

    ``linear`` divides every angle by the factor (Chen et al., "Extending Context
    Window of Large Language Models via Position Interpolation", 2023).
    ``llama3`` does so for waves longer than ``original / low``, leaves those
    shorter than ``original / high``, and blends in between (Llama 3.1 model
    card and reference code). ``yarn`` blends over dimensions, from those that turn
    ``beta_fast`` times in the original context to those that turn ``beta_slow`` times (Peng et al.,
    "YaRN", 2023, section 3.2). ``longrope`` has a divisor for each pair, one set for the
    original context and one for a longer one (Ding et al., "LongRoPE", 2024).
    """
    size = rope.rotary_dim(head_dim)
    waves: Tensor = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    frequencies = 1.0 / waves
    match rope.kind:
        case "default" | "dynamic":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "longrope":
            # By what is served, not by what a request holds: its keys are kept and shared as they were made.
            is_long = num_positions > rope.original_max_positions
            return 1.0 / (torch.tensor(rope.long_factors if is_long else rope.short_factors) * waves)
        case "llama3":
            turns = rope.original_max_positions * frequencies / (2 * math.pi)
            keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        case _:
            keep = 1.0 - _yarn_ramp(rope, size)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * keep + frequencies / rope.factor * (1.0 - keep)


def _yarn_ramp(rope: RopeConfig, size: int) -> Tensor:
    """0 for pairs that are kept, 1 for those that are stretched, ``[size / 2]``, not yet clamped."""

    def dimension(turns: float) -> float:
        waves = rope.original_max_positions / (turns * 2 * math.pi)
        return size * math.log(waves) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    return (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)
