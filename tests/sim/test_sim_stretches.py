"""Decodes made together, and steps made at once, give what steps planned one by one give.

``test_sim_drawn`` holds any configuration and workload to that; here are cases of their own.
"""

import pytest

from engine.runner.simulated import SimulatedRunner
from engine.sim.configurations import parse_configuration
from engine.sim.profiles import profile_named
from engine.sim.requests import BlockHashes
from engine.sim.simulator import simulate
from workloads.arrivals import Arrival, Workload
from workloads.mixes import synthetic


def run(workload, name, num_blocks, **more):
    config = parse_configuration(name).config
    runner = SimulatedRunner(profile_named("rtx4090"), num_blocks=num_blocks)
    return simulate(workload, runner, config, sample_every_s=0.7, **more)


def runs(workload, name, num_blocks):
    hashes = BlockHashes()  # a third run finds all of them made
    return [
        run(workload, name, num_blocks, step_by_step=one_by_one, hashes=hashes)
        for one_by_one in (True, False, False)
    ]


def crowded(num_requests, scale, seed=3, max_tokens=1500):
    workload = synthetic("saturated", duration_s=60, seed=seed, max_tokens=max_tokens).scaled(scale)
    return workload.limited(num_requests).with_tenants(3, seed=1)


@pytest.mark.parametrize("chunk", [1, 64])
def test_a_resume_whose_chunks_leave_a_single_token_is_booked_from_there_on(chunk):
    """Then a decode begins without a token before it."""
    workload = crowded(12, 4.0, max_tokens=200)
    one_by_one, at_once, again = runs(workload, f"priority:max_chunk_tokens={chunk}", num_blocks=40)
    assert one_by_one.preemptions.total() > 0
    assert one_by_one == at_once == again
    for record in at_once.records.values():
        assert record.num_output_tokens == record.request.num_output_tokens


def test_prompts_that_share_a_prefix_find_it_whoever_made_their_hashes():
    requests = tuple(
        Arrival(i, 0.3 * i, 520 + 16 * (i % 3), 30, tenant=f"t{i % 2}", hash_ids=(i % 4, i))
        for i in range(24)
    )
    one_by_one, at_once, again = runs(Workload("shared", requests), "priority", num_blocks=400)
    assert one_by_one == at_once == again
    assert one_by_one.num_cached_tokens > 16 * 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fair", "fair:max_running_requests=6,batch.max_wait_s=3"])
@pytest.mark.parametrize("num_blocks", [80, 2000])
def test_with_a_single_tenant_fair_makes_the_steps_of_priority(name, num_blocks):
    workload = synthetic("saturated", duration_s=60, seed=3, max_tokens=400).scaled(4.0).limited(25)
    fair = run(workload, name, num_blocks)
    assert fair == run(workload, name.replace("fair", "priority"), num_blocks)


def test_with_several_tenants_it_does_not():
    workload = crowded(25, 4.0, max_tokens=400)
    fair, priority = (run(workload, name, num_blocks=80) for name in ("fair", "priority"))
    assert fair != priority


def test_hardly_any_step_of_a_lone_request_is_decided():
    decided = []
    workload = Workload("one", (Arrival(0, 0.0, 100, 1000),))
    runner, config = SimulatedRunner(profile_named("h100")), parse_configuration("priority").config

    class Counting(SimulatedRunner):
        def mixed_s(self, num_decodes, num_kv_tokens, grants):
            decided.append(num_decodes)
            return super().mixed_s(num_decodes, num_kv_tokens, grants)

    recording = simulate(workload, Counting(profile_named("h100")), config)
    assert recording.num_steps == 1000
    assert decided == [0]
    assert recording == simulate(workload, runner, config, step_by_step=True)
