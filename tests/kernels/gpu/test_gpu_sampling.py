"""Sampling on rows of logits against the oracle: the same noise, the same cuts, the same choices."""

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl

from kernels import reference, sampling
from kernels.gpu import log_probs as row_kernels
from kernels.gpu import sample as sampler
from kernels.gpu.adjust_logits import adjust_logits
from kernels.interface import LogitAdjustments
from tests.support.sampling_inputs import sampling_inputs

INF = float("inf")
NAN = float("nan")

#: At a tiny temperature scores are minus infinity, as they should be; numpy warns of it, a card does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks in a row of some hundred logits, as in real ones of a hundred thousand."""
    small = dataclasses.replace(sampler.CONFIG, argmax=256, search=64, unroll=2, draw=128)
    monkeypatch.setattr(sampler, "CONFIG", small)
    monkeypatch.setattr(row_kernels, "BLOCK", 128)


def _poisoned(logits, device, poison=NAN):
    """Rows of logits between rows of poison."""
    room = torch.full((len(logits) + 2, logits.shape[1]), poison, device=device)
    return room[1:-1].copy_(logits)


def _logits(rows, vocab, seed=0, ties=False):
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.round() if ties else logits


def _both(logits, device, *, poison=NAN, **settings):
    """What the kernel chose and failed, after checking that the oracle says the same."""
    inputs = sampling_inputs(len(logits), **settings)
    wanted = sampling.sample(logits.clone(), inputs)
    got = sampler.sample(_poisoned(logits, device, poison), inputs)
    assert got.failed.cpu().tolist() == wanted.failed.tolist()
    chosen = [
        -1 if failed else token
        for token, failed in zip(got.token_ids.tolist(), wanted.failed.tolist(), strict=True)
    ]
    assert chosen == [
        -1 if failed else token
        for token, failed in zip(wanted.token_ids.tolist(), wanted.failed.tolist(), strict=True)
    ]
    assert ((got.token_ids >= 0) & (got.token_ids < logits.shape[1])).all()
    return chosen


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, index_ptr, first, size: tl.constexpr):
    token = first + tl.arange(0, size)
    key = sampler.noise_key(tl.load(seed_ptr), tl.load(index_ptr))
    tl.store(out_ptr + tl.arange(0, size), sampler.gumbel_noise(key, token))


@pytest.mark.parametrize("first", [0, 128 * 1024])
@pytest.mark.parametrize(("seed", "index"), [(0, 0), (-1, 12), (2**63 - 1, 2**40), (-(2**63), 1)])
def test_noise_is_that_of_the_oracle_also_where_it_is_largest(seed, index, first, device):
    size = 32768
    out = torch.empty(size, device=device)
    _noise_kernel[(1,)](
        out, torch.tensor([seed], device=device), torch.tensor([index], device=device), first, size
    )

    wanted = sampling.gumbel_noise(seed, index, torch.arange(first, first + size))

    assert wanted.max() > 9
    # Half a unit in the last place of numbers up to 16, and as much again for the logarithms.
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=0, atol=2e-6)


CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 9999},
    {"top_p": 0.5},
    {"top_p": 0.97},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 3, "top_p": 0.999},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 10.0, "top_k": 50, "min_p": 0.5},
    {"temperature": 1e-300, "top_p": 0.9},
    {"typical_p": 0.5},
    {"typical_p": 0.05},
    {"typical_p": [0.9, 1.0, 0.2], "temperature": 1.7},
    {"typical_p": 0.6, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1e-300, "typical_p": 0.5},
]


@pytest.mark.parametrize("settings", CUTS, ids=str)
@pytest.mark.parametrize(
    ("vocab", "ties"),
    [
        (5, False),
        pytest.param(303, True, marks=pytest.mark.slow),
        pytest.param(5, True, marks=pytest.mark.deep),
        pytest.param(303, False, marks=pytest.mark.deep),
    ],
)
def test_cuts_and_choices_are_the_oracles(vocab, settings, ties, device):
    logits = _logits(3, vocab, seed=vocab, ties=ties)
    _both(logits, device, seed=[1, 2, 3], index=[0, 7, 9], **settings)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.4}], ids=str)
@pytest.mark.parametrize("poison", [NAN, INF, 1e6, 50.0])
def test_nothing_behind_the_last_logit_is_read(poison, settings, device):
    """Not even where it would win: rows of 303 logits end inside a block."""
    _both(_logits(1, 303, seed=5), device, poison=poison, index=[3], **settings)


def _reachable(logits, device, *, draws=12, **settings):
    rows = torch.tensor(logits, dtype=torch.float32).repeat(draws, 1)
    return set(_both(rows, device, index=list(range(draws)), **settings))


@pytest.mark.slow
def test_ties_at_a_border_go_to_the_lowest_ids(device):
    assert _reachable([1.0, 1.0, 1.0, 1.0], device, top_k=2, draws=8) == {0, 1}
    assert _reachable([0.0] * 8, device, top_p=0.25, draws=8) == {0, 1}
    assert _reachable([0.0] * 8, device, top_p=0.26) == {0, 1, 2}
    assert _reachable([0.0] * 8, device, top_k=4, top_p=0.5, draws=8) == {0, 1}


@pytest.mark.slow
def test_ties_are_counted_across_blocks(device):
    logits = torch.full((1, 303), -1.0)
    logits[0, [5, 130, 131, 300]] = 2.0
    chosen = {_both(logits, device, top_k=3, index=index, temperature=5.0)[0] for index in range(12)}
    assert chosen == {5, 130, 131}


def test_top_p_cuts_what_top_k_left(device):
    logits = [math.log(p) for p in (0.2, 0.4, 0.4 - 1e-3, 1e-3)]
    assert _reachable(logits, device, top_p=0.45, draws=8) == {1, 2}
    assert _reachable(logits, device, top_k=2, top_p=0.45, draws=4) == {1}


@pytest.mark.slow
def test_a_cut_keeps_exactly_so_many_and_not_one_more(device):
    """A border moved by one id shows here: all that is kept is drawn at a high temperature."""
    logits = [float(-token) / 8 for token in range(12)]
    assert _reachable(logits, device, top_k=5, temperature=10.0, draws=25) == {0, 1, 2, 3, 4}
    assert _reachable(logits, device, min_p=math.exp(-4.01 / 80), temperature=10.0, draws=25) == {
        0,
        1,
        2,
        3,
        4,
    }


def test_greedy_takes_the_lowest_id_of_equal_logits_in_any_block(device):
    logits = torch.zeros(5, 600)
    for row, ids in enumerate(([300, 599], [3, 598], [255, 256], [44, 300, 556], [0])):
        logits[row, ids] = 4.0
    assert _both(logits, device, temperature=0.0, top_k=2, top_p=0.1, min_p=1.0) == [300, 3, 255, 44, 0]


def test_bans_hold_for_their_row_and_count_before_the_cuts(device):
    logits = torch.tensor([[9.0, 5.0, 1.0], [9.0, 5.0, 1.0], [9.0, 5.0, 1.0]])
    banned = [(0, 0), (2, 0), (2, 1)]
    assert _both(logits, device, temperature=0.0, banned=banned) == [1, 0, 2]
    assert _both(logits, device, top_k=1, banned=banned) == [1, 0, 2]


def test_allowed_ids_hold_for_their_row_and_count_before_the_cuts(device):
    logits = torch.tensor([[9.0, 5.0, 1.0], [9.0, 5.0, 1.0], [9.0, 5.0, 1.0]])
    assert _both(logits, device, top_k=1, allowed={2: [1, 2], 0: [2]}) == [2, 0, 1]
    assert _both(logits, device, temperature=0.0, allowed={0: [1, 2]}, banned=[(0, 1)]) == [2, 0, 0]
    assert _both(logits, device, allowed={1: [1]}, banned=[(1, 1)])[1] == -1


@pytest.mark.slow
def test_typical_keeps_what_is_no_more_surprising_than_the_whole(device):
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]  # surprises 0.92, 1.2, 1.61, 2.3; entropy 1.28
    assert _reachable(logits, device, typical_p=0.2, draws=4) == {1}
    assert _reachable(logits, device, typical_p=0.45, draws=8) == {1, 2}
    assert _reachable(logits, device, typical_p=0.85, draws=16) == {0, 1, 2}
    assert _reachable(logits, device, top_k=2, typical_p=0.3, draws=4) == {0}  # 0.57 and 0.43: entropy 0.68


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("banned", [(), [(0, 2)]])
def test_a_row_that_is_not_finite_fails_alone(poison, temperature, banned, device):
    logits = _logits(3, 303, seed=1)
    logits[1, 290] = poison
    chosen = _both(logits, device, temperature=temperature, top_p=0.9, banned=banned)
    assert [token == -1 for token in chosen] == [False, True, False]


def test_infinities_of_both_signs_do_not_cancel_and_huge_logits_are_fine(device):
    logits = torch.zeros(2, 5)
    logits[0, 0], logits[0, 1] = INF, -INF
    logits[1, :3] = torch.tensor([3e38, -3e38, 3.1e38])
    assert _both(logits, device, temperature=0.0) == [-1, 2]


def test_a_row_whose_every_id_is_banned_fails_alone(device):
    banned = [(1, token) for token in range(5)]
    assert _both(torch.zeros(2, 5), device, temperature=[0.0, 1.0], banned=banned) == [0, -1]


def test_a_row_chooses_the_same_alone_and_in_any_batch(device):
    logits = _logits(6, 303)
    settings = {
        "temperature": [0.0, 0.7, 1.0, 1.3, 1.0, 2.0],
        "top_k": [0, 5, 0, 50, 300, 0],
        "top_p": [1.0, 0.9, 0.5, 1.0, 0.3, 1.0],
        "min_p": [0.0, 0.1, 0.0, 0.0, 0.1, 0.0],
        "seed": [seed * 7 for seed in range(6)],
        "index": list(range(6)),
    }
    together = _both(logits, device, **settings)
    alone = [
        _both(logits[row : row + 1], device, **{name: [column[row]] for name, column in settings.items()})[0]
        for row in range(6)
    ]
    assert alone == together


@pytest.mark.slow
def test_draws_follow_the_softmax(device):
    draws, probabilities = 150, [0.5, 0.3, 0.2]
    logits = torch.tensor([[math.log(p) for p in probabilities]]).repeat(draws, 1)

    ids = _both(logits, device, index=list(range(draws)), seed=3)

    counts = torch.bincount(torch.tensor(ids), minlength=3).double()
    expected = torch.tensor(probabilities).double() * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 13.8  # 2 degrees: once in a thousand


def _adjustments(rows, pairs, repetition=1.0, presence=0.0, frequency=0.0):
    """``pairs``: row, id, in the prompt, times in the output, bias."""
    columns = list(zip(*pairs, strict=True)) or [(), (), (), (), ()]
    return LogitAdjustments(
        rows=torch.tensor(columns[0], dtype=torch.int64),
        token_ids=torch.tensor(columns[1], dtype=torch.int64),
        in_prompt=torch.tensor(columns[2], dtype=torch.bool),
        output_counts=torch.tensor(columns[3], dtype=torch.int64),
        bias=torch.tensor(columns[4], dtype=torch.float32),
        repetition=torch.full((rows,), repetition),
        presence=torch.full((rows,), presence),
        frequency=torch.full((rows,), frequency),
    )


def test_adjustments_are_the_oracles_and_touch_nothing_else(device):
    logits = _logits(5, 303)
    generator = torch.Generator().manual_seed(2)
    places = torch.randperm(5 * 303, generator=generator)[:300].tolist()
    pairs = [
        (place // 303, place % 303, place % 3 == 0, place % 4, (place % 7 - 3) / 2.0) for place in places
    ]
    adjustments = _adjustments(5, pairs, repetition=1.3, presence=0.25, frequency=0.5)
    wanted = logits.clone()
    sampling.adjust(wanted, adjustments)
    got = _poisoned(logits, device)

    adjust_logits(got, adjustments)

    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)
    untouched = torch.ones(5 * 303, dtype=torch.bool)
    untouched[places] = False
    assert torch.equal(got.cpu().flatten()[untouched], logits.flatten()[untouched])


def test_without_pairs_nothing_is_adjusted(device):
    logits = _logits(2, 16).to(device)
    before = logits.clone()
    adjust_logits(logits, _adjustments(2, [], repetition=2.0))
    assert torch.equal(logits, before)


def test_sampling_adjusts_before_it_chooses(device):
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    for pair, chosen in (((0, 0, True, 0, 0.0), 1), ((0, 2, False, 0, 5.0), 2), ((0, 1, False, 1, 0.0), 0)):
        adjust = _adjustments(1, [pair], repetition=2.0)
        assert _both(logits, device, temperature=0.0, adjust=adjust) == [chosen]


@pytest.mark.parametrize("poison", [NAN, 50.0])
@pytest.mark.parametrize("vocab", [5, 303])
def test_log_probs_are_the_oracles_with_the_lowest_ids_first_on_ties(vocab, poison, device):
    logits = _logits(3, vocab, ties=True)
    logits[1, 1:] = -INF
    ids = torch.tensor([0, vocab - 1, 3])
    wanted = reference.log_probs(logits, ids, 5)

    got = row_kernels.log_probs(_poisoned(logits, device, poison), ids.to(device), 5)

    assert torch.equal(got.top_ids.cpu(), wanted.top_ids)
    torch.testing.assert_close(got.top.cpu(), wanted.top)
    torch.testing.assert_close(got.chosen.cpu(), wanted.chosen)


def test_log_probs_of_none_but_the_chosen(device):
    got = row_kernels.log_probs(torch.zeros(2, 8, device=device), torch.tensor([1, 7], device=device), 0)
    assert got.top_ids.shape == got.top.shape == (2, 0)
    torch.testing.assert_close(got.chosen.cpu(), torch.full((2,), -math.log(8)))


@pytest.mark.parametrize("vocab", [1, 129, 303])
def test_argmax_and_log_sum_exp(vocab, device):
    logits = _logits(5, vocab, ties=True)

    assert torch.equal(row_kernels.argmax(_poisoned(logits, device)).cpu(), logits.argmax(dim=-1))
    total = row_kernels.log_sum_exp(_poisoned(logits + 100, device))
    torch.testing.assert_close(total.cpu(), (logits + 100).logsumexp(dim=-1))


def test_no_rows_choose_nothing(device):
    empty = torch.empty(0, 16, device=device)
    assert sampler.sample(empty, sampling_inputs(0)).token_ids.shape == (0,)
    assert row_kernels.argmax(empty).shape == (0,)
    assert row_kernels.log_sum_exp(empty).shape == (0,)
