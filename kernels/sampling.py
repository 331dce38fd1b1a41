"""Sampling in plain torch: cut the distribution, then a Gumbel argmax with counter-based noise.

The noise of token ``v`` is a pure function of (seed, output index, v). Nothing
is drawn from a generator with state, so a request that is batched otherwise,
preempted or started again meets the same noise.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.interface import LogitAdjustments, LogProbs, Sampled, SamplingInputs, TokenMask

_MASK = 2**64 - 1
#: Vocabularies up to this size are sorted whole, all rows at once; of larger ones each row ranks no more than
#: it must. Rows that are sorted at once hold at most so many ids together.
MAX_SORTED_VOCAB, MAX_SORTED_IDS = 4096, 2**20
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
    restricted = restrict(logits, inputs)
    if restricted.numel():
        left = logits[restricted]
        token_ids[restricted] = greedy(left)[0]
        failed[restricted] |= left.amax(dim=-1) == float("-inf")
    drawing = ((inputs.temperature > 0) & ~failed).nonzero().flatten()
    if not drawing.numel():
        return Sampled(token_ids, failed)
    num_rows = max(1, MAX_SORTED_IDS // logits.shape[1])
    draw = _draw_sorted if logits.shape[1] <= MAX_SORTED_VOCAB else _draw_each
    for rows in drawing.split(num_rows):  # type: ignore[no-untyped-call]
        token_ids[rows] = draw(logits, inputs, rows)
    return Sampled(token_ids, failed)


def restrict(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Put minus infinity in the place of ids that may not be chosen; which rows have any, ``[n]`` int64."""
    allowed, restricted = inputs.allowed, inputs.banned_rows
    if allowed is not None:
        kept = logits[allowed.rows, allowed.token_ids]
        logits[allowed.restricted_rows] = float("-inf")
        logits[allowed.rows, allowed.token_ids] = kept
        restricted = torch.cat([restricted, allowed.restricted_rows])
    if inputs.mask is not None:
        apply_mask(logits, inputs.mask)
        restricted = torch.cat([restricted, inputs.mask.rows])
    if inputs.banned_ids.numel():
        logits[inputs.banned_rows, inputs.banned_ids] = float("-inf")
    if not restricted.numel():
        return restricted
    rows: Tensor = restricted.unique()  # type: ignore[no-untyped-call]
    return rows


def apply_mask(logits: Tensor, mask: TokenMask) -> None:
    """Put minus infinity in the place of ids whose bit is not set, in place. Waits for nothing on a card."""
    device, vocab = logits.device, logits.shape[1]
    rows = mask.rows.to(device, non_blocking=True)
    octets = mask.bits.to(device, non_blocking=True).contiguous().view(torch.uint8).unsqueeze(-1)
    places = torch.arange(8, device=device, dtype=torch.uint8)
    is_out = ((octets >> places) & 1 == 0).flatten(1)[:, :vocab]
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(is_out, float("-inf")))


def adjust(logits: Tensor, adjustments: LogitAdjustments) -> None:
    """Penalise and bias ``logits`` in place; ``LogitAdjustments`` says how."""
    rows, token_ids = adjustments.rows, adjustments.token_ids
    counts = adjustments.output_counts.to(logits.dtype)
    repetition = adjustments.repetition[rows]
    values = logits[rows, token_ids] + adjustments.bias
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(adjustments.in_prompt | (counts > 0), repeated, values)
    penalty = adjustments.presence[rows] + counts * adjustments.frequency[rows]
    logits[rows, token_ids] = torch.where(counts > 0, values - penalty, values)


def log_probs_of(logits: Tensor, token_ids: Tensor, num_top: int, log_sum_exp: Tensor) -> LogProbs:
    """What ``kernels.ops.log_probs`` returns, from what the exponentials of a row sum up to."""
    totals = log_sum_exp.unsqueeze(1)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - totals
    ids = torch.zeros(logits.shape[0], num_top, dtype=torch.int64, device=logits.device)
    if num_top:
        _fill_likeliest(ids, logits)
    return LogProbs(chosen.squeeze(1), ids, logits.gather(1, ids) - totals)


def _fill_likeliest(ids: Tensor, logits: Tensor) -> None:
    """Put the likeliest ids of each row into its row of ``ids``, likeliest first, equal ones by id.

    All rows together where no others are as likely as a row's last, which is nearly always; the rest by
    themselves, and none in a row of what is no number.
    """
    num_top = ids.shape[1]
    values, found = logits.topk(min(num_top, logits.shape[1]))
    found = found.sort(dim=1).values
    order = logits.gather(1, found).sort(dim=1, descending=True, stable=True).indices
    ids[:, : found.shape[1]] = found.gather(1, order)
    has_others = (logits >= values[:, -1:]).sum(dim=1) != num_top
    for index in has_others.nonzero().flatten().tolist():
        likeliest = _likeliest(logits[index], num_top)[:num_top]
        ids[index] = 0
        ids[index, : likeliest.shape[0]] = likeliest


def gumbel_noise(seed: int, output_index: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, one value a token.

    Args:
        seed: 0..2**64-1, or its two's complement.
        output_index: index of the sampled token in its output.
        token_ids: ``[n]`` int64.

    Returns:
        ``[n]`` float64, finite; the same for the same arguments everywhere.
    """
    return _noise(_signed(_mix(_mix(seed & _MASK) + output_index)), token_ids)


def _noise(key: int | Tensor, token_ids: Tensor) -> Tensor:
    """``gumbel_noise`` of a place in an output, or of several places that broadcast."""
    bits = _mix_tensor(token_ids * _signed(_GAMMA) + key)
    # 52 bits, moved by half a step: strictly between 0 and 1, so that both logarithms are finite.
    uniform = _shift(bits, 12).double().mul_(2.0**-52).add_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _draw_each(logits: Tensor, inputs: SamplingInputs, rows: Tensor) -> Tensor:
    """The draws of ``rows``, ``[n]`` int64, one after the other."""
    typical_p = inputs.typical_p
    columns = (
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        torch.ones_like(inputs.top_p) if typical_p is None else typical_p,
        inputs.seed,
        inputs.output_index,
    )
    settings = zip(*(column[rows].tolist() for column in columns), strict=True)
    drawn = [_draw(logits[row], *setting) for row, setting in zip(rows.tolist(), settings, strict=True)]
    return torch.tensor(drawn, device=logits.device)


def _draw_sorted(logits: Tensor, inputs: SamplingInputs, rows: Tensor) -> Tensor:
    """The same, all at once, by sorting the rows whole."""
    scaled = logits[rows]
    scaled = (scaled - scaled.amax(dim=1, keepdim=True)).double().div_(inputs.temperature[rows].unsqueeze(1))
    values, ids = scaled.sort(dim=1, descending=True, stable=True)
    vocab, weights = logits.shape[1], values.exp()
    rank = torch.arange(vocab, device=logits.device)
    top_k, top_p = inputs.top_k[rows].unsqueeze(1), inputs.top_p[rows].unsqueeze(1)
    kept = rank < torch.where(top_k > 0, top_k, vocab)
    mass = torch.where(kept, weights, 0.0).cumsum(1)
    kept &= (rank <= (mass < top_p * mass[:, -1:]).sum(1, keepdim=True)) | (top_p >= 1)
    kept &= values >= inputs.min_p[rows].log().unsqueeze(1)
    if inputs.typical_p is not None:
        typical_p = inputs.typical_p[rows].unsqueeze(1)
        kept &= _is_typical(values, torch.where(kept, weights, 0.0), typical_p) | (typical_p >= 1)
    state = _mix_tensor(inputs.seed[rows] + _signed(_GAMMA))
    key = _mix_tensor(state + inputs.output_index[rows] + _signed(_GAMMA)).unsqueeze(1)
    scores = torch.where(kept, _noise(key, ids) + values, float("-inf"))
    return torch.where(scores == scores.amax(dim=1, keepdim=True), ids, vocab).amin(dim=1)


def _draw(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    seed: int,
    output_index: int,
) -> int:
    """One row's draw. ``logits`` is ``[vocab]``, banned ids at minus infinity, at least one finite."""
    # Relative to the maximum, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.max()).double().div_(temperature)
    kept = _keep(scaled, top_k, top_p, min_p)
    if typical_p < 1:
        values = scaled[kept].unsqueeze(0)
        kept = kept[_is_typical(values, values.exp(), torch.tensor(typical_p)).squeeze(0)]
    scores = gumbel_noise(seed, output_index, kept).add_(scaled[kept])
    best = scores == scores.max()
    return int(kept[best].min())


def _is_typical(values: Tensor, weights: Tensor, typical_p: Tensor) -> Tensor:
    """Which ids are among the most typical: whose surprise ``-log p`` is closest to the entropy.

    They are the fewest whose mass reaches ``typical_p`` of all, with those that are equally close as the
    last of them. With ``p = exp(value) / Z`` both surprise and entropy have the same ``log Z``, so the
    distance is that of a value from the mean value.

    Args:
        values: ``[n, m]`` float64, scaled logits.
        weights: ``[n, m]``, their exponentials; 0 = that id is out.
        typical_p: ``[n, 1]`` or a scalar.
    """
    total = weights.sum(dim=1, keepdim=True)
    mean = torch.where(weights > 0, weights * values, 0.0).sum(dim=1, keepdim=True) / total
    distance = torch.where(weights > 0, (values - mean).abs(), float("inf"))
    ranked, order = distance.sort(dim=1, stable=True)
    mass = weights.gather(1, order).cumsum(1)
    last = (mass < typical_p * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=values.shape[1] - 1)
    return (distance <= ranked.gather(1, last)) & (weights > 0)


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
