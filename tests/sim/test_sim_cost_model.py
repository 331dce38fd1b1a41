import pytest

from engine.runner.simulated import SimulatedRunner, size_of
from engine.scheduler.plan import Plan
from engine.sim.profiles import PROFILES, HardwareProfile, StepSize, UnknownProfile, profile_named
from tests.support.grants import grant

PLAIN = HardwareProfile(
    name="plain",
    description="for arithmetic",
    weights_ms=10.0,
    base_ms=2.0,
    token_ms=0.1,
    kv_token_us=0.5,
    num_blocks=64,
    source="made up",
)
FULL = HardwareProfile(
    name="full",
    description="for arithmetic",
    weights_ms=10.0,
    base_ms=2.0,
    token_ms=0.1,
    kv_token_us=0.5,
    num_blocks=64,
    source="made up",
    overhead_ms=0.25,
    sequences_ms=((1, 0.5), (3, 1.5)),
    attention_pair_ns=4.0,
    mixed_kv_token_us=0.25,
)


def plan(*grants):
    return Plan(1, grants)


def test_a_small_step_costs_one_read_of_the_weights():
    assert PLAIN.step_s(StepSize(1, 1, 0)) == pytest.approx(0.010)
    assert PLAIN.step_s(StepSize(80, 1, 0)) == pytest.approx(0.010)


def test_a_large_step_costs_its_tokens():
    assert PLAIN.step_s(StepSize(1000, 1, 0)) == pytest.approx(0.002 + 1000 * 0.0001)


def test_context_costs_whatever_the_size_of_the_step():
    assert PLAIN.step_s(StepSize(1, 1, 2000)) == pytest.approx(0.010 + 2000 * 0.5e-6)


def test_all_terms_add_up():
    size = StepSize(
        num_tokens=200,
        num_sequences=2,
        num_kv_tokens=1000,
        num_attention_pairs=50_000,
        num_mixed_kv_tokens=400,
    )
    ms = 0.25 + (2.0 + 20.0) + 1.0 + 0.5 + 0.2 + 0.1
    assert FULL.step_s(size) == pytest.approx(ms / 1e3)


@pytest.mark.parametrize(("num_sequences", "ms"), [(1, 0.5), (2, 1.0), (3, 1.5), (100, 1.5)])
def test_sequences_are_interpolated_between_points_and_constant_beyond(num_sequences, ms):
    size = StepSize(num_tokens=1, num_sequences=num_sequences, num_kv_tokens=0)
    assert FULL.step_s(size) == pytest.approx((0.25 + 10.0 + ms) / 1e3)


def test_an_empty_step_costs_nothing():
    assert FULL.step_s(size_of(plan().grants)) == 0.0


def test_a_plan_of_decodes_reads_every_context_once():
    size = size_of(plan(grant("a", 99, 1, 5), grant("b", 49, 1, 1)).grants)
    assert size == StepSize(num_tokens=2, num_sequences=2, num_kv_tokens=150)


def test_a_chunk_attends_to_what_came_before_it_and_to_itself():
    size = size_of(plan(grant("a", 10, 4)).grants)
    assert size.num_attention_pairs == 11 + 12 + 13 + 14
    assert size.num_kv_tokens == 14


def test_decodes_beside_a_chunk_are_counted_as_mixed():
    assert size_of(plan(grant("a", 99, 1, 5), grant("b", 0, 8)).grants).num_mixed_kv_tokens == 100


@pytest.mark.parametrize(
    ("name", "size", "ms"),
    [
        ("h100", StepSize(64, 64, 10_000), 6.1 + 0.49),
        ("h100", StepSize(1000, 1, 0), 3.1 + 16.3),
        ("a100", StepSize(1000, 1, 10_000), 5.7 + 67.1 + 0.82),
        ("rtx4090", StepSize(32, 32, 40_000), 16.6 + 2.55 + 5.72),
    ],
)
def test_profiles_have_their_published_constants(name, size, ms):
    assert profile_named(name).step_s(size) == pytest.approx(ms / 1e3)


def test_an_unknown_profile_is_refused_with_the_known_ones():
    with pytest.raises(UnknownProfile, match="rtx4090"):
        profile_named("tpu")


def test_every_profile_says_where_it_is_from():
    assert all(profile.source and profile.name == name for name, profile in PROFILES.items())


def test_the_runner_samples_exactly_what_is_due_and_always_the_same():
    runner = SimulatedRunner(PLAIN)
    both = plan(grant("a", 0, 8), grant("b", 8, 1, 0))
    first, second = runner.run(both), runner.run(both)
    assert set(first.sampled) == {"b"}
    assert first.sampled == second.sampled
    assert first.sampled["b"] != runner.run(plan(grant("b", 9, 1, 1))).sampled["b"]
