"""Choosing a token of each row of logits: cut the distribution, then argmax of logit + Gumbel noise.

The contract is that of ``kernels.ops.sample``, and ``kernels.sampling`` its
oracle. One program computes one row, so a choice depends on that row alone.

Nothing is sorted. Let ``d = max - logit``, which is not negative, so that its
bits order as the number does. A cut keeps the ids with ``d < border`` and, of
those at the border, the lowest few: top-k and top-p both end like that. The
border is found digit by digit, sixteen pivots for each pass over the row; the
measure of a pivot is a count for top-k and a mass for top-p. Source of the idea
to search for a threshold instead of sorting: Ye et al., "FlashInfer", 2025,
and its note "Sorting-Free GPU Kernels for LLM Sampling"; to do it digit by
digit is radix selection.

Typical sampling looks for the same kind of border, over the distance of
``d / temperature`` from its mean, once what the other cuts removed is written
over with minus infinity.

What may differ from the oracle, which computes in float64: masses and
probabilities here are float32 sums, so an id whose mass ends within some 1e-6 of
``top_p`` may fall on the other side; noise is float32, with an error of some
1e-6 (on a card; the interpreter's is smaller), so two ids whose scores are that
close may change places. Top-k, min-p, bans, ties, greedy choices and failures
are the same. The random bits are the same integers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.adjust_logits import adjust_logits
from kernels.gpu.aot import AotEntry
from kernels.gpu.rows import NO_ID, best_of, row_argmax
from kernels.gpu.units import UNITS, unit_of
from kernels.interface import Sampled, SamplingInputs


@dataclass(frozen=True, slots=True)
class Config:
    """How a row is read.

    Attributes:
        argmax: ids at a time, for the maximum.
        search: ids at a time, for a border: each has sixteen sums.
        unroll: such blocks whose loads are under way at once.
        draw: ids at a time, for the noise: each takes several registers of 64 bits.
        num_warps: warps of a program.
    """

    argmax: int
    search: int
    unroll: int
    draw: int
    num_warps: int


#: Not timed on a card yet.
CONFIG = Config(argmax=4096, search=512, unroll=8, draw=1024, num_warps=8)
#: The loops over a row hold no matrix product, which alone is pipelined.
NUM_STAGES = 1

# Constants of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
GAMMA: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
#: Above the bits of any ``d``, infinity included: a border that cuts nothing.
NO_BORDER: tl.constexpr = tl.constexpr(0xFFFFFFFF)
LARGEST: tl.constexpr = tl.constexpr(3.0e38)


@triton.jit
def _finish(state: tl.tensor) -> tl.tensor:
    """The finaliser of SplitMix64; ``state`` is uint64, which wraps."""
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    return state ^ (state >> 31)


@triton.jit
def noise_key(seed: tl.tensor, output_index: tl.tensor) -> tl.tensor:
    """What the noise of all tokens at this place of an output begins with; int64 in, uint64 out."""
    state = _finish(seed.to(tl.uint64, bitcast=True) + GAMMA)
    return _finish(state + output_index.to(tl.uint64, bitcast=True) + GAMMA)


@triton.jit
def gumbel_noise(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise ``-log(-log(u))``, float32, finite.

    ``u = (bits + 1/2) / 2**52``. The large values, which decide, come from ``u`` near 1, where neither
    float32 nor the quick logarithm of a card can tell one from the next: there ``-log(u)`` is a series in
    ``v = 1 - u``, exact as an integer. ``-log(1 - v) = 2 artanh(v / (2 - v))``.
    """
    bits = _finish(token.to(tl.uint64) * GAMMA + key) >> 12
    u = bits.to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    v = (0xFFFFFFFFFFFFF - bits).to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    s = v / (2.0 - v)
    s2 = s * s
    series = 1.0 / 13 + s2 * (1.0 / 15)
    series = 1.0 / 9 + s2 * (1.0 / 11 + s2 * series)
    series = 1.0 / 5 + s2 * (1.0 / 7 + s2 * series)
    series = 2.0 * s * (1.0 + s2 * (1.0 / 3 + s2 * series))
    exponential = tl.where(v <= 0.5, series, -tl.log(u))
    return -tl.log(exponential)


@triton.jit
def _bits_of(distance: tl.tensor) -> tl.tensor:
    return distance.to(tl.uint32, bitcast=True)


@triton.jit
def _border(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    sharpness: tl.tensor,
    goal: tl.tensor,
    limit: tl.tensor,
    limit_mass: tl.tensor,
    mean: tl.tensor,
    MASS: tl.constexpr,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
) -> tl.tuple:
    """The smallest bits of ``d`` up to which ids measure at least ``goal``.

    Ids count one each, or with ``MASS`` their ``exp(-d * sharpness)``, and ``goal`` is a share of all.
    Banned ids, and those past the vocabulary that fill up a block, are infinitely far from the maximum:
    they weigh nothing, come last in a count, and are never the best score.
    Ids with bits above ``limit`` do not exist; those at it measure ``limit_mass`` together. With
    ``TYPICAL`` the bits are those of ``|d * sharpness - mean|`` instead.

    Returns:
        The border, what is before it, and the goal as a measure. Where rounding leaves the goal out of
        reach, the border is ``NO_BORDER``.
    """
    pivot = tl.arange(0, 16)
    border = tl.full((), 0, tl.uint32)
    before = tl.full((), 0.0, tl.float32)
    shift = tl.full((), 28, tl.uint32)
    for digit in range(8):
        ends = border + ((pivot.to(tl.uint32) + 1) << shift) - 1
        sums = tl.zeros((16, BLOCK), tl.float32)
        for begin in range(0, vocab, BLOCK * UNROLL):
            for block in tl.static_range(UNROLL):
                token = begin + block * BLOCK + tl.arange(0, BLOCK)
                logit = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
                distance = top - logit
                bits = _bits_of(tl.abs(distance * sharpness - mean) if TYPICAL else distance)
                measure = tl.exp(-distance * sharpness) if MASS else tl.full((BLOCK,), 1.0, tl.float32)
                measure = tl.where(bits < limit, measure, 0.0)
                sums += tl.where(bits[None, :] <= ends[:, None], measure[None, :], 0.0)
        measures = tl.sum(sums, axis=1) + tl.where(ends >= limit, limit_mass, 0.0)
        if MASS and digit == 0:
            goal = goal * tl.max(measures, axis=0)
        chosen = tl.min(tl.where(measures >= goal, pivot, 15), axis=0)
        if chosen > 0:
            before = tl.sum(tl.where(pivot == chosen - 1, measures, 0.0), axis=0)
        border += chosen.to(tl.uint32) << shift
        shift -= 4
    return border, before, goal


@triton.jit
def _is_kept(
    distance: tl.tensor,
    border: tl.tensor,
    num_ties: tl.tensor,
    cutoff: tl.tensor,
    ties_seen: tl.tensor,
) -> tl.tuple:
    """Which ids of a block are before the border, the first ``num_ties`` at it included; all ties so far."""
    bits = _bits_of(distance)
    tie = (bits == border).to(tl.int32)
    rank = ties_seen + tl.cumsum(tie, axis=0)
    kept = (bits < border) | ((tie == 1) & (rank <= num_ties))
    return kept & (distance <= cutoff), ties_seen + tl.sum(tie, axis=0)


@triton.jit
def _cut(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    sharpness: tl.tensor,
    border: tl.tensor,
    num_ties: tl.tensor,
    cutoff: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Minus infinity in the place of all that is not kept; the mean of ``d * sharpness`` of what is."""
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    ties_seen = tl.full((), 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        distance = top - tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        kept, ties_seen = _is_kept(distance, border, num_ties, cutoff, ties_seen)
        tl.store(row_ptr + token, float("-inf"), mask=(token < vocab) & (kept == 0))
        weight = tl.where(kept, tl.exp(-distance * sharpness), 0.0)
        total += weight
        moment += weight * (tl.where(weight > 0, distance, 0.0) * sharpness)
    tl.debug_barrier()  # other threads read what these have written
    return tl.sum(moment, axis=0) / tl.sum(total, axis=0)


@triton.jit
def _draw(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    top: tl.tensor,
    sharpness: tl.tensor,
    border: tl.tensor,
    num_ties: tl.tensor,
    cutoff: tl.tensor,
    mean: tl.tensor,
    typical_border: tl.tensor,
    key: tl.tensor,
    TYPICAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The id with the best score of those that are kept, and typical enough."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), NO_ID, tl.int32)
    ties_seen = tl.full((), 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        distance = top - tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        kept, ties_seen = _is_kept(distance, border, num_ties, cutoff, ties_seen)
        if TYPICAL:
            kept = kept & (_bits_of(tl.abs(distance * sharpness - mean)) <= typical_border)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            score = gumbel_noise(key, token) - distance * sharpness
            better = kept & (score > best)
            best, best_id = tl.where(better, score, best), tl.where(better, token, best_id)
    return best_of(best, best_id)[1]


@triton.jit(do_not_specialize=["vocab"])
def sample_kernel(
    ids_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    typical_p_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    output_index_ptr: tl.tensor,
    vocab: tl.tensor,
    BANNED: tl.constexpr,
    TYPICAL: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_ARGMAX: tl.constexpr,
    BLOCK_SEARCH: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_DRAW: tl.constexpr,
) -> None:
    """One row. ``vocab`` counts ``UNIT`` logits; with ``BANNED`` minus infinity is no failure.

    ``typical_p_ptr`` is read with ``TYPICAL`` alone.
    """
    vocab = vocab * UNIT
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocab
    top, choice, num_strange = row_argmax(row_ptr, vocab, BANNED, BLOCK_ARGMAX)
    failed = (num_strange > 0) | (top == float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & (failed == 0):
        # A tiny temperature must not make infinities that meet zeros.
        sharpness = tl.minimum(1.0 / temperature, LARGEST).to(tl.float32)
        border = tl.full((), NO_BORDER, tl.uint32)
        num_ties = tl.full((), 0, tl.int32)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            goal = top_k.to(tl.float32)
            border, before, goal = _border(
                row_ptr, vocab, top, sharpness, goal, border, 0.0, 0.0, False, False, BLOCK_SEARCH, UNROLL
            )
            num_ties = (goal - before).to(tl.int32)
        top_p = tl.load(top_p_ptr + row).to(tl.float32)
        if top_p < 1.0:
            limit, limit_ties = border, num_ties
            limit_mass = tl.exp(-limit.to(tl.float32, bitcast=True) * sharpness)
            limit_mass = tl.where(limit_ties > 0, limit_mass * limit_ties.to(tl.float32), 0.0)
            border, before, goal = _border(
                row_ptr,
                vocab,
                top,
                sharpness,
                top_p,
                limit,
                limit_mass,
                0.0,
                True,
                False,
                BLOCK_SEARCH,
                UNROLL,
            )
            mass = tl.exp(-border.to(tl.float32, bitcast=True) * sharpness)
            # What it takes of equal ids to reach the goal; all of them where they weigh nothing.
            needed = tl.where(mass > 0, tl.ceil((goal - before) / mass), LARGEST)
            num_ties = tl.maximum(tl.minimum(needed, vocab.to(tl.float32)), 1.0).to(tl.int32)
            if border >= limit:
                border, num_ties = limit, tl.minimum(num_ties, limit_ties)
        min_p = tl.load(min_p_ptr + row)
        cutoff = tl.full((), float("inf"), tl.float32)
        if min_p > 0:
            exact = -tl.log(min_p) * temperature
            cutoff = exact.to(tl.float32)
            if cutoff.to(tl.float64) > exact:  # the next smaller float32, for the rounded one lets in more
                cutoff = (cutoff.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
        mean = tl.full((), 0.0, tl.float32)
        typical_border = tl.full((), NO_BORDER, tl.uint32)
        if TYPICAL:
            typical_p = tl.load(typical_p_ptr + row).to(tl.float32)
            if typical_p < 1.0:
                mean = _cut(row_ptr, vocab, top, sharpness, border, num_ties, cutoff, BLOCK_DRAW)
                border = tl.full((), NO_BORDER, tl.uint32)
                typical_border, before, goal = _border(
                    row_ptr, vocab, top, sharpness, typical_p, border, 0.0, mean, True, True,
                    BLOCK_SEARCH, UNROLL,
                )  # fmt: skip
        key = noise_key(tl.load(seed_ptr + row), tl.load(output_index_ptr + row))
        choice = _draw(
            row_ptr, vocab, top, sharpness, border, num_ties, cutoff, mean, typical_border, key, TYPICAL,
            BLOCK_DRAW,
        )  # fmt: skip
    # Failed rows name an id that exists, too: it may be looked up before anybody asks.
    tl.store(ids_ptr + row, tl.minimum(choice, vocab - 1).to(tl.int64))
    tl.store(failed_ptr + row, failed)


def sample(logits: Tensor, inputs: SamplingInputs) -> Sampled:
    """Choose a token for each row; see ``kernels.ops.sample``. Waits for nothing on a card.

    Args:
        logits: ``[R, vocab]`` float32, contiguous. Overwritten where ids are cut, banned or adjusted.
        inputs: one entry a row, on any device.

    Returns:
        Tensors on the device of ``logits``. Rows that failed name an id that exists.
    """
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    num_rows, vocab = logits.shape
    device = logits.device
    ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    failed = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return Sampled(ids, failed)
    if inputs.adjustments is not None:
        adjust_logits(logits, inputs.adjustments)
    banned = inputs.banned_ids.numel() > 0 or inputs.allowed is not None
    strange = None
    if banned:  # from then on minus infinity means banned, so look for others before
        strange = ~logits.isfinite().all(dim=-1)
        _restrict(logits, inputs)
    unit = unit_of(vocab)
    columns = (
        inputs.temperature,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        inputs.min_p if inputs.typical_p is None else inputs.typical_p,
        inputs.seed,
        inputs.output_index,
    )
    sample_kernel[(num_rows,)](
        ids,
        failed,
        logits,
        *(column.to(device, non_blocking=True) for column in columns),
        vocab // unit,
        BANNED=banned,
        TYPICAL=inputs.typical_p is not None,
        UNIT=unit,
        BLOCK_ARGMAX=CONFIG.argmax,
        BLOCK_SEARCH=CONFIG.search,
        UNROLL=CONFIG.unroll,
        BLOCK_DRAW=CONFIG.draw,
        num_warps=CONFIG.num_warps,
        num_stages=NUM_STAGES,
    )
    return Sampled(ids, failed if strange is None else failed | strange)


def _restrict(logits: Tensor, inputs: SamplingInputs) -> None:
    """Minus infinity in the place of ids that may not be chosen; torch's own, waiting for nothing."""
    device, allowed = logits.device, inputs.allowed
    if allowed is not None:
        place = (
            allowed.rows.to(device, non_blocking=True),
            allowed.token_ids.to(device, non_blocking=True),
        )
        kept = logits[place]
        logits.index_fill_(0, allowed.restricted_rows.to(device, non_blocking=True), float("-inf"))
        logits.index_put_(place, kept)
    if inputs.banned_ids.numel():
        logits[inputs.banned_rows.to(device), inputs.banned_ids.to(device)] = float("-inf")


def aot_entries() -> list[AotEntry]:
    """With and without bans and typical sampling, in both units."""
    switches = (False, True)
    return [
        _aot_entry(unit, banned, typical) for unit in UNITS for banned in switches for typical in switches
    ]


def _aot_entry(unit: int, banned: bool, typical: bool) -> AotEntry:
    pointers = {
        "ids_ptr": "i64",
        "failed_ptr": "i1",
        "logits_ptr": "fp32",
        "temperature_ptr": "fp64",
        "top_k_ptr": "i64",
        "top_p_ptr": "fp64",
        "min_p_ptr": "fp64",
        "typical_p_ptr": "fp64",
        "seed_ptr": "i64",
        "output_index_ptr": "i64",
    }
    return AotEntry(
        kernel="kernels.gpu.sample:sample_kernel",
        case=f"unit {unit}{', banned' if banned else ''}{', typical' if typical else ''}",
        arguments=(*((pointer, f"*{name}") for pointer, name in pointers.items()), ("vocab", "i32")),
        constants=(
            ("BANNED", banned),
            ("TYPICAL", typical),
            ("UNIT", unit),
            ("BLOCK_ARGMAX", CONFIG.argmax),
            ("BLOCK_SEARCH", CONFIG.search),
            ("UNROLL", CONFIG.unroll),
            ("BLOCK_DRAW", CONFIG.draw),
        ),
        divisible=tuple(pointers),
        num_warps=CONFIG.num_warps,
        num_stages=NUM_STAGES,
    )
