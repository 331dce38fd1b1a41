"""Whatever is simulated, under whatever configuration: the ways to make its steps agree to the last bit.

Configurations, workloads and commands are drawn (``tests.support.drawn``). A failure ends with the
line that makes its draw alone.
"""

import json
import random
import shlex

import pytest
from typer.testing import CliRunner

from engine.runner.simulated import SimulatedRunner
from engine.sim.configurations import parse_assignment, parse_configuration
from engine.sim.profiles import profile_named
from engine.sim.requests import BlockHashes
from engine.sim.simulator import simulate, simulate_engine
from engine.sim.sweep import Cell, Source, Sweep, run_sweep
from server.sim import app
from tests.support.drawn import differences, drawn, drawn_command, drawn_settings, draws, plain
from workloads.records import Run


def check_accounts(draw, recording):
    """What holds of every simulation, whoever made its steps."""
    pool_tokens = draw.runner.pool.num_blocks * draw.runner.pool.block_size
    num_once = 0
    assert len(recording.records) == len(draw.workload.requests)
    for record in recording.records.values():
        request, is_cut = record.request, record.reason == "capacity"
        assert record.ended_s is not None
        assert (record.reason is None) == (record.error is not None)
        if record.error is not None:
            assert record.num_output_tokens == 0
            continue
        longest = pool_tokens + 1 - request.num_prompt_tokens
        assert record.num_output_tokens == (longest if is_cut else request.num_output_tokens)
        num_once += request.num_prompt_tokens + record.num_output_tokens - 1
    if not draw.shares_prefixes:
        assert recording.num_computed_tokens == num_once + recording.num_recomputed_tokens


@pytest.mark.parametrize(("seed", "numbers"), draws(16, 500, 8))
def test_decodes_together_and_steps_at_once_give_what_steps_one_by_one_give(seed, numbers, replay):
    for number in numbers:
        with replay(number):
            draw, hashes = drawn(seed, number), BlockHashes()
            one_by_one, *at_once = (
                plain(
                    simulate(
                        draw.workload,
                        draw.runner,
                        draw.without_guesses(),
                        enable_prefix_cache=draw.prefix_cache,
                        check_integrity=hashed_before < 2,
                        step_by_step=not hashed_before,
                        sample_every_s=draw.sample_every_s,
                        hashes=hashes,
                    )
                )
                for hashed_before in range(3)  # the third finds all hashes made
            )
            check_accounts(draw, one_by_one)
            for other in at_once:
                assert not differences(one_by_one, other)


def decisions(plan):
    return [
        (g.request_id, g.start, len(g.token_ids), g.output_index, tuple(g.block_table)) for g in plan.grants
    ]


@pytest.mark.parametrize(("seed", "numbers"), draws(16, 500, 16))
def test_the_direct_driver_decides_what_the_engine_decides(seed, numbers, replay):
    for number in numbers:
        with replay(number):
            draw = drawn(seed, number)
            seen = []
            for drive in (simulate, simulate_engine):
                plans = []

                def keep(plan, plans=plans):
                    plans.append(decisions(plan))

                recording = drive(draw.workload, draw.runner, draw.config, on_plan=keep)
                seen.append((plans, recording))
            (plans, direct), (of_engine, engine) = seen
            assert plans == of_engine
            assert direct.preemptions == engine.preemptions
            assert direct.num_recomputed_tokens == engine.num_recomputed_tokens
            assert direct.num_inversions == engine.num_inversions
            for name, record in direct.records.items():
                other = engine.records[name]
                assert (record.reason, record.error) == (other.reason, other.error)
                assert record.num_output_tokens == other.num_output_tokens
                assert record.last_token_s == pytest.approx(other.last_token_s, abs=1e-6)
                assert record.longest_stall_s == pytest.approx(other.longest_stall_s, abs=1e-6)


@pytest.mark.parametrize(("seed", "numbers"), draws(3, 500, 3))
def test_a_command_reports_the_same_when_its_decisions_are_recorded(seed, numbers, replay, tmp_path):
    """Recording a run plans each of its steps."""
    for number in numbers:
        with replay(number):
            arguments = ["run", *drawn_command(seed, number), "--json", "-"]
            plainly = CliRunner().invoke(app, arguments)
            assert plainly.exit_code == 0, f"{shlex.join(arguments)}: {plainly.output} {plainly.exception!r}"
            recorded = CliRunner().invoke(app, [*arguments, "--record", str(tmp_path / "log")])
            (tmp_path / "log").unlink()
            assert json.loads(plainly.stdout) == json.loads(recorded.stdout), shlex.join(arguments)


def runner_of(sweep):
    return SimulatedRunner(sweep.hardware, num_blocks=sweep.num_blocks)


def whole(run: Run) -> Run:
    return run


def trace_lines(rng):
    """A trace in which prompts share their beginnings."""
    for _ in range(20):
        num_prompt_tokens = rng.randint(1, 900)
        hash_ids = [rng.randrange(2) for _ in range(-(-num_prompt_tokens // 512))]
        line = {
            "timestamp": rng.randrange(6000),
            "input_length": num_prompt_tokens,
            "output_length": rng.randint(1, 60),
            "hash_ids": hash_ids,
        }
        yield json.dumps(line) + "\n"


@pytest.mark.parametrize(("seed", "numbers"), draws(1, 60, 1))
def test_every_cell_of_a_sweep_is_what_its_run_alone_gives_step_by_step(seed, numbers, replay, tmp_path):
    """Runs of a sweep share hashes, and those that make the same steps are one."""
    for number in numbers:
        with replay(number):
            rng = random.Random(f"sweep {seed}/{number}")
            path = tmp_path / f"{number}.jsonl"
            path.write_text("".join(trace_lines(rng)))
            source = Source(
                rng.choice([str(path), str(path), "saturated"]),
                duration_s=10.0,
                limit=rng.choice([12, 20]),
                max_prompt_tokens=rng.choice([None, 700]),
                classes=rng.choice([(), (("interactive", 0.3), ("batch", 0.7))]),
                tenants=rng.choice([0, 1, 3]),
            )
            settings = {
                name: value for text in drawn_settings(rng) for name, value in parse_assignment(text).items()
            }
            presets = [*rng.sample(["fcfs", "static", "prefill-first", "vllm-like"], 1), "priority", "fair"]
            configs = [(name, parse_configuration(name, settings).config) for name in presets]
            rate, seeds = rng.choice([2.0, 8.0, 30.0]), rng.sample(range(9), 2)
            cells = [Cell(name, config, rate, s) for name, config in configs for s in seeds]
            sweep = Sweep(source, profile_named("rtx4090"), rng.choice([120, 300]), cells)
            for cell, run in run_sweep(sweep, whole, num_processes=1):
                alone = simulate(
                    source.make(cell.seed).at_rate(cell.rate_rps),
                    runner_of(sweep),
                    cell.config,
                    step_by_step=True,
                )
                assert run.records == list(alone.records.values())
                assert run.end_s == alone.end_s
                assert {name: getattr(alone, name) for name in run.figures} == run.figures
