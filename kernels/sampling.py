"""Sampling in plain torch: cut the distribution, then a Gumbel argmax with counter-based noise.

The noise of token ``v`` is a pure function of (seed, output index, v). Nothing
is drawn from a generator with state, so a request that is batched otherwise,
preempted or started again meets the same noise.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.interface import LogitAdjustments, LogProbs, Sampled, SamplingInputs

_MASK = 2**64 - 1
# Constants of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The argmax of each row, the lowest id on ties, and whether all its logits are finite."""
    finite = logits.sum(dim=-1).isfinite()
    if not bool(finite.all()):  # or the sum of finite logits was too large
        finite = logits.isfinite().all(dim=-1)
    return logits.argmax(dim=-1), finite  # of equal maxima the first


def sample(
    logits: Tensor,
    inputs: SamplingInputs,
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]] = greedy,
) -> Sampled:
    """Choose a token for each row; ``logits`` is overwritten where ids are banned or adjusted.

    ``greedy`` stands for the function of that name where an implementation has a quicker one.
    """
    if inputs.adjustments is not None:
        adjust(logits, inputs.adjustments)
    token_ids, finite = greedy(logits)
    failed = ~finite
    if inputs.banned_ids.numel():
        logits[inputs.banned_rows, inputs.banned_ids] = float("-inf")
        rows = torch.tensor(sorted(set(inputs.banned_rows.tolist())), device=logits.device)
        left = logits[rows]
        token_ids[rows] = greedy(left)[0]
        failed[rows] |= left.amax(dim=-1) == float("-inf")
    drawing = ((inputs.temperature > 0) & ~failed).nonzero().flatten().tolist()
    if drawing:
        columns = (
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.min_p,
            inputs.seed,
            inputs.output_index,
        )
        settings = list(zip(*(column.tolist() for column in columns), strict=True))
        for row in drawing:
            token_ids[row] = _draw(logits[row], *settings[row])
    return Sampled(token_ids, failed)


def adjust(logits: Tensor, adjustments: LogitAdjustments) -> None:
    """Penalise and bias ``logits`` in place; ``LogitAdjustments`` says how."""
    rows, token_ids = adjustments.rows, adjustments.token_ids
    counts = adjustments.output_counts.to(logits.dtype)
    repetition = adjustments.repetition[rows]
    values = logits[rows, token_ids]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(adjustments.in_prompt | (counts > 0), repeated, values)
    penalty = adjustments.presence[rows] + counts * adjustments.frequency[rows]
    values = torch.where(counts > 0, values - penalty, values)
    logits[rows, token_ids] = values + adjustments.bias


def log_probs_of(logits: Tensor, token_ids: Tensor, num_top: int, log_sum_exp: Tensor) -> LogProbs:
    """What ``kernels.ops.log_probs`` returns, from what the exponentials of a row sum up to."""
    totals = log_sum_exp.unsqueeze(1)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - totals
    # Stable, so that equal ones stay in the order of their ids.
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return LogProbs(chosen.squeeze(1), ids[:, :num_top].contiguous(), values[:, :num_top] - totals)


def gumbel_noise(seed: int, output_index: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, one value a token.

    Args:
        seed: 0..2**64-1, or its two's complement.
        output_index: index of the sampled token in its output.
        token_ids: ``[n]`` int64.

    Returns:
        ``[n]`` float64, finite; the same for the same arguments everywhere.
    """
    key = _mix(_mix(seed & _MASK) + output_index)
    bits = _mix_tensor(token_ids * _signed(_GAMMA) + _signed(key))
    # 52 bits, moved by half a step: strictly between 0 and 1, so that both logarithms are finite.
    uniform = _shift(bits, 12).double().mul_(2.0**-52).add_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, output_index: int
) -> int:
    """One row's draw. ``logits`` is ``[vocab]``, banned ids at minus infinity, at least one finite."""
    # Relative to the maximum, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.max()).double().div_(temperature)
    kept = _keep(scaled, top_k, top_p, min_p)
    scores = gumbel_noise(seed, output_index, kept).add_(scaled[kept])
    best = scores == scores.max()
    return int(kept[best].min())


def _keep(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Ids left by top-k, top-p and min-p in turn, ``[n]`` int64 with n >= 1.

    ``scaled`` is ``[vocab]`` float64 with maximum 0.
    """
    vocab = scaled.shape[0]
    if 0 < top_k < vocab:
        kept = _likeliest(scaled, top_k)[:top_k]
        if top_p < 1:
            mass = scaled[kept].exp_().cumsum(0)
            kept = kept[: _num_needed(mass, top_p * mass[-1])]
    elif top_p < 1:
        kept = _nucleus(scaled, top_p)
    else:
        kept = torch.arange(vocab, device=scaled.device)
    return kept[scaled[kept] >= math.log(min_p)] if min_p > 0 else kept


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """The fewest of the likeliest whose mass reaches ``top_p``; ranks no more of the vocabulary than that."""
    vocab = scaled.shape[0]
    goal = top_p * scaled.exp().sum()
    count = 256
    while True:
        ranked = _likeliest(scaled, min(count, vocab))
        needed = _num_needed(scaled[ranked].exp_().cumsum(0), goal)
        if needed <= ranked.shape[0] or ranked.shape[0] == vocab:
            return ranked[:needed]
        count *= 8


def _num_needed(mass: Tensor, goal: Tensor) -> int:
    """How many terms of the running sum ``mass`` reach ``goal``; one more than there are when none does."""
    return int((mass < goal).sum()) + 1


def _likeliest(scaled: Tensor, count: int) -> Tensor:
    """At least the ``count`` likeliest ids, likeliest first, equal ones by id."""
    if count < scaled.shape[0] // 4:
        threshold = scaled.topk(count, sorted=False).values.min()
        candidates = (scaled >= threshold).nonzero().flatten()
    else:
        candidates = torch.arange(scaled.shape[0], device=scaled.device)
    order = scaled[candidates].sort(descending=True, stable=True).indices
    return candidates[order]


def _signed(value: int) -> int:
    """The two's complement of 64 unsigned bits."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def _mix(value: int) -> int:
    """One output of SplitMix64, for the state ``value``."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix_tensor(state: Tensor) -> Tensor:
    """The finaliser of SplitMix64 over int64, which wraps as 64 unsigned bits do. Overwrites ``state``."""
    state.bitwise_xor_(_shift(state, 30)).mul_(_signed(_MIX_1))
    state.bitwise_xor_(_shift(state, 27)).mul_(_signed(_MIX_2))
    return state.bitwise_xor_(_shift(state, 31))


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
