"""Sampling: the cuts, ties, bans, failures, the distribution, and noise that nothing can shift."""

import math

import pytest
import torch

from kernels import ops
from kernels.sampling import gumbel_noise
from tests.support.sampling_inputs import sampling_inputs

INF = float("inf")


def _choose(logits, **settings):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    sampled = ops.sample(logits.clone(), sampling_inputs(len(logits), **settings))
    assert not sampled.failed.any()
    return sampled.token_ids.tolist()


def _reachable(logits, *, draws=300, **settings):
    """Every id that comes up in many draws of one row."""
    rows = torch.tensor(logits, dtype=torch.float32).repeat(draws, 1)
    return set(_choose(rows, index=list(range(draws)), **settings))


def test_greedy_takes_the_maximum_and_the_lowest_id_on_ties():
    assert _choose([[0.0, 2.0, 1.0], [3.0, 3.0, 3.0], [-5.0, -1.0, -1.0]], temperature=0.0) == [1, 0, 1]


@pytest.mark.parametrize("vocab", [7, 64, 49152])
def test_greedy_ties_far_apart_go_to_the_lowest_id(vocab):
    logits = torch.zeros(3, vocab)
    for row, ids in enumerate(([vocab // 2, vocab - 1], [3, vocab - 2], [vocab - 2, vocab - 1])):
        logits[row, ids] = 4.0

    assert _choose(logits, temperature=0.0) == [vocab // 2, 3, vocab - 2]


def test_greedy_ignores_the_cuts_and_the_seed():
    logits = [[0.0, 2.0, 1.0]]
    assert _choose(logits, temperature=0.0, top_k=2, top_p=0.01, min_p=1.0, seed=99) == [1]


def test_banned_ids_are_never_chosen_by_greedy_or_by_draw():
    logits = [[9.0, 5.0, 1.0, 0.0]]
    assert _choose(logits, temperature=0.0, banned=[(0, 0)]) == [1]
    draws = 200
    banned = [(row, token) for row in range(draws) for token in (0, 1)]
    assert _choose(logits * draws, index=list(range(draws)), banned=banned).count(0) == 0
    assert set(_choose(logits * draws, index=list(range(draws)), banned=banned)) == {2, 3}


def test_a_ban_counts_before_top_k():
    assert _choose([[9.0, 5.0, 1.0, 0.0]], top_k=1, banned=[(0, 0)]) == [1]


def test_a_ban_holds_for_its_own_row_alone():
    assert _choose([[9.0, 5.0], [9.0, 5.0]], temperature=0.0, banned=[(1, 0)]) == [0, 1]


def test_top_k_keeps_the_k_likeliest():
    assert _reachable([0.0, 0.1, 0.2, 0.3, 0.4], top_k=2) == {3, 4}
    assert _reachable([0.0, 0.1, 0.2, 0.3, 0.4], top_k=1) == {4}
    assert _reachable([0.0, 0.1, 0.2], top_k=3) == {0, 1, 2}
    assert _reachable([0.0, 0.1, 0.2], top_k=999) == {0, 1, 2}


def test_top_k_breaks_ties_at_the_border_by_the_lowest_id():
    assert _reachable([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}
    logits = [0.0] * 100
    logits[50] = logits[60] = logits[70] = 0.5
    assert _reachable(logits, top_k=2) == {50, 60}


def _logits_of(*probabilities):
    return [math.log(p) for p in probabilities]


def test_top_p_keeps_the_fewest_likeliest_whose_mass_reaches_p():
    logits = _logits_of(0.1, 0.5, 0.15, 0.25)
    assert _reachable(logits, top_p=0.45) == {1}
    assert _reachable(logits, top_p=0.55) == {1, 3}
    assert _reachable(logits, top_p=0.8) == {1, 2, 3}
    assert _reachable(logits, top_p=0.95) == {0, 1, 2, 3}
    assert _reachable(logits, top_p=1e-9) == {1}


def test_top_p_searches_past_its_first_guess_in_a_flat_distribution():
    vocab = 5000
    kept = _reachable([0.0] * vocab, top_p=0.5, draws=600)
    assert max(kept) == pytest.approx(vocab // 2, abs=40)
    assert max(kept) < vocab // 2
    falling = [-token / 500 for token in range(vocab)]
    kept = _reachable(falling, top_p=0.9, draws=600)
    border = math.log(1 / (1 - 0.9 * (1 - math.exp(-10)))) * 500
    assert border * 0.8 < max(kept) <= border + 1


def test_top_p_cuts_what_top_k_left():
    # 0.4 of everything is 0.5 of the two likeliest, so the first of them is enough for top_p 0.45.
    logits = _logits_of(0.2, 0.4, 0.4 - 1e-3, 1e-3)
    assert _reachable(logits, top_p=0.45) == {1, 2}
    assert _reachable(logits, top_k=2, top_p=0.45) == {1}


def test_min_p_keeps_a_share_of_the_likeliest():
    logits = _logits_of(0.5, 0.3, 0.15, 0.05)
    assert _reachable(logits, min_p=0.2) == {0, 1, 2}
    assert _reachable(logits, min_p=0.5) == {0, 1}
    assert _reachable(logits, min_p=1.0) == {0}
    assert _reachable([1.0, 0.0, 1.0], min_p=1.0) == {0, 2}


def test_min_p_cuts_what_top_k_and_top_p_left():
    logits = _logits_of(0.4, 0.3, 0.2, 0.1)
    assert _reachable(logits, top_k=3, min_p=0.6) == {0, 1}
    assert _reachable(logits, top_p=0.65, min_p=0.2) == {0, 1}


def test_temperature_divides_before_the_cuts():
    logits = _logits_of(0.6, 0.3, 0.1)
    assert _reachable(logits, top_p=0.55) == {0}
    assert _reachable(logits, temperature=10.0, top_p=0.55) == {0, 1}
    assert _reachable(logits, temperature=1e-300, top_p=1.0) == {0}


def _chi_square(counts, probabilities):
    total = counts.sum()
    return float((((counts - total * probabilities) ** 2) / (total * probabilities)).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["seed", "index"])
def test_draws_follow_the_softmax(vary, temperature):
    draws, logits = 2000, torch.tensor([0.3, -1.0, 1.5, 0.0, 0.7, -0.4])
    settings = {vary: list(range(draws))}

    ids = _choose(logits.repeat(draws, 1), temperature=temperature, **settings)

    counts = torch.bincount(torch.tensor(ids), minlength=6).double()
    # 5 degrees of freedom: 20.5 is passed once in a thousand, and the seeds are fixed.
    assert _chi_square(counts, (logits.double() / temperature).softmax(0)) < 20.5


def test_draws_follow_the_distribution_that_the_cuts_left():
    draws, logits = 2000, torch.tensor(_logits_of(0.4, 0.3, 0.2, 0.1))

    ids = _choose(logits.repeat(draws, 1), index=list(range(draws)), seed=7, top_k=3, top_p=0.999)

    counts = torch.bincount(torch.tensor(ids), minlength=4)
    assert counts[3] == 0
    assert _chi_square(counts[:3].double(), torch.tensor([4 / 9, 3 / 9, 2 / 9])) < 13.8  # 2 degrees


def test_neighbouring_seeds_and_positions_draw_independently():
    draws, logits = 1000, torch.zeros(2 * 1000, 2)
    for settings in ({"seed": [5] * draws + [6] * draws}, {"seed": list(range(2 * draws)), "index": 3}):
        settings.setdefault("index", list(range(draws)) * 2)
        ids = torch.tensor(_choose(logits, **settings))
        agree = (ids[:draws] == ids[draws:]).double().mean().item()
        assert abs(agree - 0.5) < 0.055  # 3.5 standard deviations


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(3, 1, torch.arange(100_000))

    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.015)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.04)
    assert len(noise.unique()) > 99_990


def test_noise_is_pinned_across_versions_and_machines():
    """A change here changes every seeded output; it must be wanted and written in the changelog."""
    noise = gumbel_noise(2**64 - 1, 12, torch.tensor([0, 1, 49151]))

    assert noise.tolist() == pytest.approx(
        [1.250692971737584, 0.6699449871684785, 0.1547774625531421], rel=1e-12
    )


def test_a_seed_counts_as_unsigned_64_bits():
    ids = torch.arange(8)
    assert torch.equal(gumbel_noise(2**64 - 1, 0, ids), gumbel_noise(-1, 0, ids))
    assert not torch.equal(gumbel_noise(2**63, 0, ids), gumbel_noise(0, 0, ids))


def test_noise_of_a_token_does_not_depend_on_which_others_are_left():
    everyone = gumbel_noise(11, 4, torch.arange(1000))
    some = torch.tensor([3, 999, 500])
    assert torch.equal(gumbel_noise(11, 4, some), everyone[some])


def test_a_row_draws_the_same_alone_and_in_any_batch():  # vLLM 69: in draws
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 400, generator=generator) * 2
    settings = {
        "temperature": [0.0, 0.7, 1.0, 1.3] * 5,
        "top_k": [0, 5, 0, 50, 300] * 4,
        "top_p": [1.0, 0.9, 0.5, 1.0] * 5,
        "min_p": [0.0, 0.1] * 10,
        "seed": [seed * 7 for seed in range(20)],
        "index": list(range(20)),
    }
    together = _choose(logits, **settings)

    alone = [
        _choose(logits[row : row + 1], **{name: [column[row]] for name, column in settings.items()})[0]
        for row in range(20)
    ]
    order = torch.randperm(20, generator=generator).tolist()
    shuffled = _choose(logits[order], **{name: [col[row] for row in order] for name, col in settings.items()})
    assert alone == together
    assert [shuffled[order.index(row)] for row in range(20)] == together


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(poison, temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    healthy = ops.sample(logits.clone(), sampling_inputs(3, temperature=temperature, top_p=0.9))
    logits[1, 17] = poison

    sampled = ops.sample(logits, sampling_inputs(3, temperature=temperature, top_p=0.9))

    assert sampled.failed.tolist() == [False, True, False]
    assert sampled.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()


def test_infinities_of_both_signs_do_not_cancel():
    logits = torch.zeros(1, 4)
    logits[0, 0], logits[0, 1] = INF, -INF
    assert ops.sample(logits, sampling_inputs(1)).failed.tolist() == [True]


def test_finite_logits_whose_sum_is_not_are_fine():
    assert _choose([[3e38, 2e38, 3.1e38]], temperature=0.0) == [2]


def test_a_row_whose_every_id_is_banned_fails_alone():
    sampled = ops.sample(
        torch.zeros(2, 2), sampling_inputs(2, temperature=[0.0, 1.0], banned=[(1, 0), (1, 1)])
    )
    assert sampled.failed.tolist() == [False, True]
