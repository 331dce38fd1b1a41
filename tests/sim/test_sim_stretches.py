"""Steps made at once give what steps made one by one give."""

import pytest

from engine.runner.simulated import SimulatedRunner
from engine.sim.configurations import parse_configuration
from engine.sim.profiles import profile_named
from engine.sim.simulator import simulate
from workloads.arrivals import Arrival, Workload
from workloads.mixes import synthetic

NAMES = (
    "fcfs", "priority", "fair", "prefill-first", "static", "vllm-like",
    "priority:max_running_requests=6", "fcfs:max_running_requests=6", "fair:max_running_requests=6",
    "prefill-first:max_running_requests=6", "priority:max_running_requests=6,batch.max_wait_s=3",
    "static:max_running_requests=6,batch.max_wait_s=3",
)  # fmt: skip


def both(workload, name, num_blocks, *, check_integrity=False):
    config = parse_configuration(name).config
    runner = SimulatedRunner(profile_named("rtx4090"), num_blocks=num_blocks)
    return [
        simulate(workload, runner, config, step_by_step=one_by_one, check_integrity=check_integrity)
        for one_by_one in (True, False)
    ]


def crowded(num_requests, scale, seed=3, max_tokens=1500):
    workload = synthetic("saturated", duration_s=60, seed=seed, max_tokens=max_tokens).scaled(scale)
    return workload.limited(num_requests).with_tenants(3, seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_the_same_to_the_last_bit(name):
    one_by_one, at_once = both(crowded(20, 4.0, max_tokens=400), name, num_blocks=80)
    assert one_by_one == at_once
    assert one_by_one.num_steps > 200


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_blocks", "scale"), [(300, 2.0), (2000, 0.5), (150, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_every_figure_of_longer_runs_is_the_same_to_the_last_bit(name, num_blocks, scale, seed):
    one_by_one, at_once = both(crowded(80, scale, seed), name, num_blocks, check_integrity=True)
    assert one_by_one == at_once


def test_most_steps_of_a_lone_request_are_not_planned():
    plans = []
    workload = Workload("one", (Arrival(0, 0.0, 100, 1000),))
    runner, config = SimulatedRunner(profile_named("h100")), parse_configuration("priority").config

    class Counting(SimulatedRunner):
        def run(self, plan):
            plans.append(plan)
            return super().run(plan)

    recording = simulate(workload, Counting(profile_named("h100")), config)
    assert recording.num_steps == 1000
    assert len(plans) < 10
    assert recording == simulate(workload, runner, config, step_by_step=True)
