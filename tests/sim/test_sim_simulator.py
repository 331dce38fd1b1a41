import asyncio
import dataclasses
import functools
import time

import pytest

from engine.runner.simulated import SimulatedRunner
from engine.scheduler.config import InvalidSetting
from engine.sim.configurations import available_presets, parse_assignment, parse_configuration
from engine.sim.metrics import report
from engine.sim.profiles import fixed_step, profile_named
from engine.sim.simulator import simulate, simulate_engine
from engine.sim.virtual_time import TimeStandsStill, VirtualTimeLoop, run_in_virtual_time
from workloads.arrivals import Arrival, Workload
from workloads.mixes import synthetic

RTX = profile_named("rtx4090")
DRIVERS = pytest.mark.parametrize("drive", [simulate, simulate_engine])


def runner(num_blocks=400):
    return SimulatedRunner(RTX, num_blocks=num_blocks)


def config(text="priority"):
    return parse_configuration(text).config


def mixed(num_requests=45, *, seed=0, mix="saturated"):
    """Both classes, crowded enough for preemptions in a small pool."""
    return synthetic(mix, duration_s=100, seed=seed, max_tokens=2000).scaled(3.0).limited(num_requests)


def decisions(plan):
    return [
        (g.request_id, g.start, len(g.token_ids), g.output_index, tuple(g.block_table)) for g in plan.grants
    ]


def recorder_of(plans):
    return lambda plan: plans.append(decisions(plan))


@DRIVERS
def test_every_request_gets_exactly_the_tokens_it_asked_for(drive):
    workload = mixed()
    recording = drive(workload, runner(), config(), check_integrity=True)
    assert recording.preemptions.total() > 0
    assert len(recording.records) == len(workload.requests)
    for record in recording.records.values():
        assert record.num_output_tokens == record.request.num_output_tokens
    # Every token but the last of each request goes through the model, and nothing else does
    # but what was lost: tokens of prompts are unique here, so nothing is shared.
    once = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in workload.requests)
    assert recording.num_computed_tokens == once + recording.num_recomputed_tokens


@DRIVERS
def test_an_hour_passes_in_no_time(drive):
    workload = Workload("sparse", tuple(Arrival(i, 600.0 * i, 100, 5) for i in range(7)))
    start = time.monotonic()
    recording = drive(workload, runner(), config())
    assert time.monotonic() - start < 5
    assert recording.end_s > 3600
    first, last = recording.records["request-0"], recording.records["request-6"]
    assert last.first_token_s - 3600 == pytest.approx(first.first_token_s)


def test_a_request_alone_takes_what_the_cost_model_says():
    workload = Workload("one", (Arrival(0, 5.0, 1000, 3),))
    record = simulate(workload, SimulatedRunner(profile_named("h100")), config()).records["request-0"]
    prefill_s = (3.1 + 16.3) / 1e3 + 1000 * 0.049e-6
    decodes_s = 2 * 6.1e-3 + (1001 + 1002) * 0.049e-6
    assert record.first_token_s == pytest.approx(5.0 + prefill_s)
    assert record.last_token_s == pytest.approx(5.0 + prefill_s + decodes_s)


def test_an_arrival_is_seen_before_the_next_step_and_with_planning_ahead_one_step_later():
    workload = Workload("two", (Arrival(0, 0.0, 10, 50), Arrival(1, 0.001, 10, 2)))
    h100 = SimulatedRunner(profile_named("h100"))
    ends = []
    for plans_ahead in (0, 1):
        starts = []
        simulate(workload, h100, config(), plans_ahead=plans_ahead, on_plan=starts.append)
        ends.append(next(plan.step for plan in starts if len(plan.grants) == 2))
    assert ends == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("fcfs", 0),
        pytest.param("priority", 0, marks=pytest.mark.deep),
        ("priority", 1),
        ("priority-no-arrivals:max_running_requests=3", 1),
    ],
)
def test_the_direct_driver_decides_exactly_what_the_engine_decides(name, seed):
    seen = []
    for drive in (simulate, simulate_engine):
        plans = []
        recording = drive(mixed(seed=seed), runner(), config(name), on_plan=recorder_of(plans))
        seen.append((plans, recording))
    (direct, of_direct), (engine, of_engine) = seen
    assert direct == engine
    assert len(direct) > 1000
    assert of_direct.preemptions == of_engine.preemptions
    assert of_direct.num_recomputed_tokens == of_engine.num_recomputed_tokens
    assert of_direct.num_inversions == of_engine.num_inversions
    for request_id, record in of_direct.records.items():
        other = of_engine.records[request_id]
        assert record.first_token_s == pytest.approx(other.first_token_s, abs=1e-6)
        assert record.last_token_s == pytest.approx(other.last_token_s, abs=1e-6)
        assert record.longest_stall_s == pytest.approx(other.longest_stall_s, abs=1e-6)


@pytest.mark.parametrize("drive", [simulate, functools.partial(simulate, step_by_step=True), simulate_engine])
def test_who_arrives_in_a_step_joins_the_queue_before_its_tokens_are_charged(drive):
    """Under ``fair`` the counters at that moment decide who comes first."""
    workload = Workload(
        "tenants",
        (
            Arrival(0, 0.0, 4, 5, tenant="a"),
            Arrival(1, 0.0, 4, 5, tenant="a"),
            Arrival(2, 4.5, 4, 5, tenant="b"),
        ),
    )
    every_second = SimulatedRunner(fixed_step(1.0, 100))
    recording = drive(workload, every_second, config("fair:max_running_requests=1"))
    assert [record.queued_s for record in recording.records.values()] == pytest.approx([0.0, 10.0, 0.5])


@DRIVERS
def test_who_arrives_at_the_same_time_is_looked_at_together(drive):
    workload = Workload("pair", (Arrival(0, 2.5, 4, 1, level=10), Arrival(1, 2.5, 4, 1, level=-10)))
    recording = drive(
        workload, SimulatedRunner(fixed_step(1.0, 100)), config("priority:max_running_requests=1")
    )
    assert [record.queued_s for record in recording.records.values()] == pytest.approx([1.0, 0.0])


@pytest.mark.slow
@DRIVERS
def test_the_same_seed_gives_the_same_report_and_another_another(drive):
    def run(seed):
        return report("x", drive(mixed(seed=seed, num_requests=30), runner(), config()))

    assert run(1) == run(1)
    assert run(1) != run(2)


@DRIVERS
def test_a_request_that_can_never_fit_is_refused_and_the_others_are_served(drive):
    workload = Workload("w", (Arrival(0, 0.0, 7000, 5), Arrival(1, 0.0, 70, 5)))
    recording = drive(workload, runner(num_blocks=400), config())
    refused = recording.records["request-0"]
    assert refused.error is not None
    assert refused.num_output_tokens == 0
    assert recording.records["request-1"].num_output_tokens == 5


@DRIVERS
def test_an_output_that_outgrows_the_pool_is_cut(drive):
    recording = drive(Workload("w", (Arrival(0, 0.0, 60, 100),)), runner(num_blocks=5), config())
    assert 0 < recording.records["request-0"].num_output_tokens < 100
    assert report("x", recording).num_cut == 1


def test_shared_prefixes_of_a_trace_are_found_in_the_cache():
    requests = tuple(Arrival(i, float(i), 1000, 2, hash_ids=(1, 2)) for i in range(2))
    recording = simulate(Workload("w", requests), runner(), config())
    assert recording.num_cached_tokens == 992  # 62 blocks of 16; a token is left for the logits
    apart = tuple(dataclasses.replace(r, tenant=str(r.index)) for r in requests)
    assert simulate(Workload("w", apart), runner(), config()).num_cached_tokens == 0


@functools.cache
def saturated(name):
    return simulate(mixed(90), runner(), config(name))


def test_urgent_requests_overtake_under_saturation():
    def urgent_ttft(name):
        (interactive, _) = report(name, saturated(name)).classes
        return interactive.ttft_s.p50

    assert urgent_ttft("priority") * 5 < urgent_ttft("fcfs")
    assert urgent_ttft("priority") * 2 < urgent_ttft("priority-no-arrivals")


def test_preempting_for_arrivals_ends_nearly_all_inversions():
    priority, fcfs = saturated("priority"), saturated("fcfs")
    assert fcfs.num_inversions > 20
    # What is left at most: rules that protect a request that has just resumed.
    assert priority.num_inversions < fcfs.num_inversions / 4
    assert priority.inversion_s < fcfs.inversion_s / 10


def test_virtual_time_jumps_from_timer_to_timer():
    loop = VirtualTimeLoop()
    order = []

    async def nap(seconds):
        await asyncio.sleep(seconds)
        order.append((seconds, loop.clock.now()))

    async def main():
        await asyncio.gather(nap(7200.0), nap(0.5), nap(60.0))

    run_in_virtual_time(main(), loop)
    assert order == [(s, pytest.approx(s)) for s in (0.5, 60.0, 7200.0)]


def test_virtual_time_says_when_nothing_can_happen_any_more():
    async def main():
        await asyncio.Event().wait()

    loop = VirtualTimeLoop()
    with pytest.raises(TimeStandsStill):
        run_in_virtual_time(main(), loop)


def test_settings_are_read_by_their_type_and_unknown_ones_refused_by_name():
    got = config("fcfs:max_running_requests=7,max_step_tokens=99")
    assert (got.policy, got.max_running_requests, got.max_step_tokens) == ("fcfs", 7, 99)
    assert parse_assignment("watermark=0.25") == {"watermark": 0.25}
    for wrong in ("fcfs:speed=3", "fcfs:max_running_requests=many", "fcfs:watermark", "nonsense"):
        with pytest.raises(InvalidSetting):
            config(wrong)
    with pytest.raises(InvalidSetting, match="nonsense"):
        config("priority:policy=nonsense")


def test_presets_of_this_version_can_be_run_and_the_others_say_why_not():
    assert {"fcfs", "priority", "priority-no-arrivals", "vllm-like"} <= set(available_presets())
    for name in ("fair", "prefill-first", "static"):
        if name not in available_presets():
            with pytest.raises(InvalidSetting):
                config(name)
