"""The runner in a process of its own: computes, dies, comes back."""

import asyncio
import dataclasses
import gc
import io
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import structlog

from engine.decisions.file import DecisionLog
from engine.decisions.replay import replay
from engine.errors import InternalError
from engine.events import Delta, Failed, Finished, Preempted, Resumed
from engine.loop import Engine
from engine.models.errors import InvalidCheckpoint
from engine.request import FinishReason, RequestId, RequestSpec
from engine.runner.base import MortalRunner, PipelinedRunner, RunnerDead, RunnerLost
from engine.runner.child import ChildDied, RunnerLimits
from engine.runner.inline import InlineRunner
from engine.runner.process import ProcessRunner
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer, expected_output
from engine.runner.sources import ScriptedModel, ScriptedSource
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Grant, Plan
from tests.support.decisions import MemoryLog
from tests.support.engines import collect, tokens_of
from tests.support.grants import grant
from tests.support.process import children, environment
from tests.support.runners import (
    ABORTS,
    EXITS,
    FAILS,
    HANG_LIMITS,
    KILLS_ITSELF,
    LIMITS,
    RAISES,
    SLEEPS,
    STOPS_ITSELF,
    FailingSource,
    FatalSource,
    is_running,
)
from tests.support.wire import settled

pytestmark = pytest.mark.asyncio


def deep(*values):
    """A case that takes the way of another one."""
    return pytest.param(*values, marks=pytest.mark.deep)


@asynccontextmanager
async def process_runner(source=None, limits=LIMITS):
    runner = await ProcessRunner.start(source or FatalSource(64, 4), limits)
    try:
        yield runner
    finally:
        await runner.close()
        await runner.close()
    assert runner.pid is None
    assert not children(), "a process was left behind"


@asynccontextmanager
async def serving(source=None, limits=LIMITS, *, decisions=None, depth=0, **config):
    config = {"max_running_requests": 8, "max_step_tokens": 64, "max_chunk_tokens": 16} | config
    async with process_runner(source or FatalSource(128, 4), limits) as runner:
        engine = Engine(
            runner, ScriptedTokenizer(), SchedulerConfig(**config), check_integrity=True, decisions=decisions,
            pipeline_depth=depth,
        )  # fmt: skip
        task = asyncio.create_task(engine.run())
        try:
            yield engine, runner
        finally:
            task.cancel()
            await asyncio.wait([task])
        statistics = engine.statistics()
        assert statistics.num_alive == 0
        assert statistics.num_free_blocks == statistics.num_blocks


def spec(name, prompt=b"hello", *, level=0, **sampling):
    sampling = {"max_tokens": 20, "temperature": 0} | sampling
    return RequestSpec(RequestId(name), tuple(prompt), SamplingParams(**sampling), level)


def check(events, prompt=b"hello", num_tokens=20, depth=0):
    """Exactly the tokens of an undisturbed run, each once, in order.

    At depth 1 one may be preempted while its last token is in flight, and need not resume.
    """
    assert isinstance(events[-1], Finished), events[-1]
    deltas = [e for e in events if isinstance(e, Delta) and e.token_ids]
    at = 0
    for delta in deltas:
        assert delta.first_index == at
        at += len(delta.token_ids)
    assert tokens_of(events) == expected_output(prompt, num_tokens)
    num_unresumed = sum(isinstance(e, Preempted) for e in events) - sum(
        isinstance(e, Resumed) for e in events
    )
    assert 0 <= num_unresumed <= depth


async def test_it_computes_what_an_inline_runner_computes():
    async with process_runner(ScriptedSource(8, 4)) as runner:
        inline = InlineRunner(ScriptedModel(ScriptedSource(8, 4)))
        assert isinstance(runner, MortalRunner)
        assert not isinstance(inline, MortalRunner)
        assert (runner.info, runner.pool) == (inline.info, inline.pool)
        for step, grants in enumerate(
            [
                [grant("a", 0, 4, token_ids=[1, 2, 3, 4], block_table=[5])],
                [grant("b", 0, 3, 0, token_ids=[1, 2, 3], block_table=[1])],
            ]
        ):
            plan = Plan(step, tuple(grants))
            assert await runner.execute(plan) == await inline.execute(plan)
        await inline.close()


def two_plans(*names):
    """A prefill each, then a decode each whose token nobody here knows."""
    first = [grant(name, 0, 3, 0, token_ids=[1, 2, 3 + i], block_table=[i]) for i, name in enumerate(names)]
    second = [Grant(g.request, 3, 1, g.block_table, 1) for g in first]
    return Plan(1, tuple(first)), Plan(2, tuple(second))


@pytest.mark.parametrize("made", ["process", "inline", "scripted"])
async def test_a_second_plan_takes_its_unknown_tokens_from_what_the_first_samples(made):
    source = ScriptedSource(8, 4)
    async with process_runner(source) as process:
        inline = InlineRunner(ScriptedModel(source))
        runner = {"process": process, "inline": inline, "scripted": ScriptedRunner(8, 4)}[made]
        assert isinstance(runner, PipelinedRunner)
        plans = two_plans("a", "b")
        assert all(grant.has_unknown_token for grant in plans[1].grants)
        first, second = await asyncio.gather(*(runner.submit(plan) for plan in plans))
        for i, name in enumerate("ab"):
            assert [first.sampled[name], second.sampled[name]] == expected_output([1, 2, 3 + i], 2)
        await inline.close()


async def test_a_plan_after_a_failed_one_computes_the_others_in_it():
    async with process_runner() as runner:
        bad = grant("bad", 0, 1, 0, token_ids=[RAISES], block_table=[5])
        unknown = Grant(bad.request, 1, 1, [5], 1)
        other = grant("b", 0, 3, 0, token_ids=[1, 2, 3], block_table=[6])
        results = [runner.submit(Plan(1, (bad,))), runner.submit(Plan(2, (unknown, other)))]
        with pytest.raises(ValueError, match="a bug in the model"):
            await results[0]
        second = await results[1]
        assert (second.sampled, set(second.failures)) == ({"b": expected_output([1, 2, 3], 1)[0]}, {"bad"})


async def test_a_death_loses_both_plans_in_flight_and_is_blamed_on_the_older_one():
    async with process_runner(ScriptedSource(8, 4, step_s=60.0)) as runner:
        results = [runner.submit(plan) for plan in two_plans("a")]
        os.kill(runner.pid, signal.SIGKILL)
        await asyncio.wait(results)
        losses = [result.exception() for result in results]
        assert [type(loss) for loss in losses] == [RunnerLost, RunnerLost]
        assert [loss.step_begun for loss in losses] == [True, False]
        assert losses[0].recovery is losses[1].recovery
        assert runner.take_loss() is None
        await losses[0].recovery


async def test_a_death_after_the_first_answer_is_blamed_on_the_second_plan():
    async with process_runner() as runner:
        first = grant("a", 0, 1, 0, token_ids=[1], block_table=[0])
        fatal = grant("b", 0, 1, 0, token_ids=[EXITS], block_table=[1])
        results = [runner.submit(Plan(1, (first,))), runner.submit(Plan(2, (fatal,)))]
        assert set((await results[0]).sampled) == {"a"}
        with pytest.raises(RunnerLost) as lost:
            await results[1]
        assert lost.value.step_begun
        await lost.value.recovery


async def test_requests_run_to_their_end():
    async with serving() as (engine, runner):
        assert runner.pid != os.getpid()
        outputs = await asyncio.gather(
            *(collect(engine.submit(spec(f"r{i}", b"prompt %d" % i))) for i in range(30))
        )
    for i, events in enumerate(outputs):
        check(events, b"prompt %d" % i)
    assert engine.statistics().num_runner_losses == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
async def test_a_death_is_a_pause(number):
    limits = HANG_LIMITS if number is signal.SIGSTOP else LIMITS
    async with serving(ScriptedSource(128, 4, step_s=0.005), limits) as (engine, runner):
        handles = [engine.submit(spec(f"r{i}", b"prompt %d" % i, max_tokens=40)) for i in range(6)]
        reading = [asyncio.ensure_future(collect(handle)) for handle in handles]
        await settled(lambda: engine.statistics().num_steps > 10)
        first = runner.pid
        os.kill(first, number)
        outputs = await asyncio.gather(*reading)
        assert runner.pid != first
        assert not is_running(first)
        assert runner.statistics().num_restarts == engine.statistics().num_runner_losses == 1
        assert engine.statistics().last_resume_s > 0
    for i, events in enumerate(outputs):
        check(events, b"prompt %d" % i, 40)
        assert events[-1].usage.preemptions == 1


@pytest.mark.parametrize("number", [signal.SIGINT, deep(signal.SIGTERM), deep(signal.SIGHUP)])
async def test_signals_meant_for_the_server_do_not_touch_it(number):
    async with serving() as (engine, runner):
        pid = runner.pid
        assert os.getpgid(pid) == pid  # where a terminal's Ctrl-C does not reach it
        os.kill(pid, number)
        check(await collect(engine.submit(spec("a"))))
        assert runner.pid == pid


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "depth"), [(0, 0), deep(1, 0), deep(2, 0), (3, 1), deep(4, 1)])
async def test_random_kills_change_no_token(seed, depth):
    dice = random.Random(seed)
    decisions = MemoryLog()
    source = ScriptedSource(40, 4, step_s=0.001)
    async with serving(source, max_running_requests=5, decisions=decisions, depth=depth) as (engine, runner):
        sizes = [(bytes(dice.choices(range(1, 200), k=dice.randint(1, 50))), dice.randint(1, 30))
                 for _ in range(25)]  # fmt: skip
        handles = [
            engine.submit(spec(f"r{i}", prompt, level=dice.choice((-10, 0, 10)), max_tokens=n))
            for i, (prompt, n) in enumerate(sizes)
        ]
        reading = asyncio.gather(*map(collect, handles))
        for _ in range(5):
            await asyncio.sleep(dice.uniform(0, 0.15))
            if reading.done():
                break
            if runner.pid is not None:
                os.kill(runner.pid, signal.SIGKILL)
        outputs = await reading
    for (prompt, n), events in zip(sizes, outputs, strict=True):
        check(events, prompt, n, depth)
    replayed = replay(DecisionLog(Path("memory"), io.BytesIO(decisions.text())))
    assert replayed.difference is None, str(replayed.difference)
    assert '"LoseKv"' in decisions.text().decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token_id", "depth"),
    [
        (EXITS, 0),
        deep(ABORTS, 0),
        (KILLS_ITSELF, 0),
        (STOPS_ITSELF, 0),
        (EXITS, 1),
        deep(KILLS_ITSELF, 1),
    ],
)
async def test_a_request_that_kills_the_runner_fails_alone(token_id, depth):
    limits = HANG_LIMITS if token_id == STOPS_ITSELF else LIMITS
    async with serving(limits=limits, depth=depth) as (engine, runner):
        handles = [engine.submit(spec(f"r{i}", b"prompt %d" % i)) for i in range(5)]
        bad = engine.submit(spec("bad", bytes([1, 2, token_id])))
        outputs = await asyncio.gather(*map(collect, handles))
        (*_, failed) = await collect(bad)
        from_outside = token_id in (KILLS_ITSELF, STOPS_ITSELF)
        assert runner.statistics().num_restarts == (4 if from_outside else 2)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InternalError)
    for i, events in enumerate(outputs):
        check(events, b"prompt %d" % i)


async def test_a_step_that_takes_too_long_counts_as_a_death():
    limits = RunnerLimits(hang_s=2.0, step_s_max=0.6, backoff_s=0.01)
    async with serving(limits=limits) as (engine, _):
        bad, good = engine.submit(spec("bad", bytes([SLEEPS]))), engine.submit(spec("good"))
        check(await collect(good))
        assert isinstance((await collect(bad))[-1], Failed)


@pytest.mark.parametrize("depth", [0, 1])
async def test_who_makes_the_model_raise_fails_alone_and_the_process_lives(depth):
    async with serving(depth=depth) as (engine, runner):
        pid = runner.pid
        good = [engine.submit(spec(f"good {i}", b"prompt %d" % i)) for i in range(3)]
        bad = engine.submit(spec("bad", bytes([RAISES])))
        assert isinstance((await collect(bad))[-1], Failed)
        for i, handle in enumerate(good):
            check(await collect(handle), b"prompt %d" % i)
        assert runner.pid == pid
        assert engine.statistics().num_runner_losses == 0


async def test_a_request_whose_row_fails_fails_alone_and_the_log_says_it_here():
    with structlog.testing.capture_logs() as lines:
        async with serving() as (engine, _):
            good, bad = engine.submit(spec("good")), engine.submit(spec("bad", bytes([FAILS])))
            (*_, failed) = await collect(bad)
            check(await collect(good))
    assert isinstance(failed.error, InternalError)
    assert (failed.error.incident_id, str(failed.error)) == ("f00d", "internal error, incident f00d")
    (line,) = [line for line in lines if line["event"] == "row.failed"]
    assert line == {"event": "row.failed", "why": "ValueError('not plain')", "step": 1, "log_level": "error"}


async def test_a_respawn_is_logged_with_cause_and_seconds():
    with structlog.testing.capture_logs() as lines:
        async with serving(ScriptedSource(128, 4, step_s=0.005)) as (engine, runner):
            handles = [engine.submit(spec(f"r{i}", max_tokens=40)) for i in range(3)]
            await settled(lambda: engine.statistics().num_steps > 5)
            first = runner.pid
            os.kill(first, signal.SIGSEGV)
            await asyncio.gather(*map(collect, handles))
    by_event = {line["event"]: line for line in lines}
    assert by_event["runner.started"]["pid"] == first
    died, respawned, resumed = (by_event[f"runner.{what}"] for what in ("died", "respawned", "resumed"))
    assert (died["cause"], died["pid"], died["log_level"]) == ("killed by SIGSEGV", first, "error")
    assert respawned["restart_s"] > 0
    assert (resumed["cause"], resumed["num_recomputed"]) == ("killed by SIGSEGV", 3)
    assert resumed["resume_s"] > 0


async def test_a_death_between_steps_is_repaired_before_the_next_request():
    async with serving() as (engine, runner):
        check(await collect(engine.submit(spec("a"))))
        os.kill(runner.pid, signal.SIGKILL)
        await settled(lambda: runner.statistics().num_restarts == 1 and runner.pid is not None)
        events = await collect(engine.submit(spec("b")))
        check(events)
        assert not any(isinstance(e, Preempted) for e in events)
        assert engine.statistics().num_runner_losses == 1


async def test_the_same_prompt_after_a_death_is_computed_and_not_looked_up():
    async with serving() as (engine, runner):
        check(await collect(engine.submit(spec("a", bytes(range(40))))), bytes(range(40)))
        os.kill(runner.pid, signal.SIGKILL)
        events = await collect(engine.submit(spec("b", bytes(range(40)))))
        check(events, bytes(range(40)))


async def test_a_cancel_during_a_respawn_takes_effect_at_once():
    async with serving(ScriptedSource(128, 4, step_s=0.01)) as (engine, runner):
        handle = engine.submit(spec("a", max_tokens=500))
        await settled(lambda: engine.statistics().num_steps > 3)
        os.kill(runner.pid, signal.SIGKILL)
        await settled(lambda: engine.statistics().num_runner_losses == 1)
        assert runner.pid is None
        handle.cancel()
        events = await collect(handle)
        assert runner.pid is None, "it took effect before another process was there"
        assert isinstance(events[-1], Finished)
        check(await collect(engine.submit(spec("b"))))


async def test_a_deadline_is_kept_while_there_is_no_runner(tmp_path):
    source = FailingSource("sleep", str(tmp_path / "loads"), from_load=1)
    async with serving(source) as (engine, runner):
        timed = dataclasses.replace(spec("a", max_tokens=500), total_deadline=time.monotonic() + 0.6)
        handle = engine.submit(timed)
        await settled(lambda: engine.statistics().num_steps > 3)
        os.kill(runner.pid, signal.SIGKILL)
        (*_, finished) = await collect(handle)
        assert finished.reason is FinishReason.TIME_LIMIT
        assert runner.pid is None


@pytest.mark.parametrize(
    ("when", "depth"), [("step", 0), deep("respawn", 0), ("hang", 0), deep("step", 1), ("respawn", 1)]
)
async def test_stopping_the_engine_does_not_wait_for_the_process(when, depth):
    async with serving(ScriptedSource(128, 4, step_s=0.2), depth=depth) as (engine, runner):
        handle = engine.submit(spec("a", max_tokens=500))
        await settled(lambda: engine.statistics().num_steps >= 1)
        if when == "hang":
            os.kill(runner.pid, signal.SIGSTOP)
        elif when == "respawn":
            os.kill(runner.pid, signal.SIGKILL)
            await settled(lambda: runner.pid is None)
        began = time.monotonic()
    assert time.monotonic() - began < 8
    assert handle.finished


async def test_a_runner_that_never_comes_back_is_given_up(tmp_path):
    limits = RunnerLimits(max_restarts=2, backoff_s=0.01)
    source = FailingSource("raise", str(tmp_path / "loads"), from_load=1)
    async with process_runner(source, limits) as runner:
        engine = Engine(runner, ScriptedTokenizer(), SchedulerConfig(), check_integrity=True)
        task = asyncio.create_task(engine.run())
        handle = engine.submit(spec("a", max_tokens=500))
        await settled(lambda: engine.statistics().num_steps > 3)
        os.kill(runner.pid, signal.SIGKILL)
        with pytest.raises(RunnerDead, match=r"2 restarts .* damaged"):
            await task
        assert isinstance((await collect(handle))[-1], Failed)
        with pytest.raises(RunnerLost):
            await runner.execute(Plan(1, ()))


async def test_a_runner_that_is_given_up_while_idle_ends_the_engine(tmp_path):
    limits = RunnerLimits(max_restarts=2, backoff_s=0.01)
    source = FailingSource("exit", str(tmp_path / "loads"), from_load=1)
    async with process_runner(source, limits) as runner:
        engine = Engine(runner, ScriptedTokenizer(), SchedulerConfig())
        task = asyncio.create_task(engine.run())
        await asyncio.sleep(0)
        os.kill(runner.pid, signal.SIGKILL)
        with pytest.raises(RunnerDead, match="exited with status 7"):
            await task


@pytest.mark.slow
async def test_a_model_that_can_not_be_loaded_is_the_same_error_as_inline():
    with pytest.raises(InvalidCheckpoint) as caught:
        await ProcessRunner.start(FailingSource("raise"), LIMITS)
    assert str(caught.value) == "model.safetensors is damaged"
    assert "Traceback" in caught.value.__notes__[0]
    with pytest.raises(Exception, match="Local: made here"):
        await ProcessRunner.start(FailingSource("lambda"), LIMITS)
    with pytest.raises(ChildDied, match="exited with status 7"):
        await ProcessRunner.start(FailingSource("exit"), LIMITS)
    with pytest.raises(ChildDied, match=r"within 0\.7 s"):
        await ProcessRunner.start(FailingSource("sleep"), RunnerLimits(start_s_max=0.7))
    assert not children()


async def test_a_process_that_can_not_be_started_is_an_error_and_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        await ProcessRunner.start(FatalSource(8, 4), LIMITS)
    gc.collect()  # a socket left open would warn, and a warning is an error


async def test_a_start_that_is_cancelled_leaves_nothing_behind():
    starting = asyncio.ensure_future(ProcessRunner.start(FailingSource("sleep"), LIMITS))
    await settled(children)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not children()


@pytest.mark.slow
async def test_ten_deaths_leave_no_memory_descriptors_threads_or_zombies():
    async with serving() as (engine, runner):
        process = psutil.Process()
        for death in range(11):
            check(await collect(engine.submit(spec(f"r{death}"))))
            if death == 1:
                before = process.num_fds(), process.num_threads(), process.memory_info().rss
            os.kill(runner.pid, signal.SIGKILL)
        check(await collect(engine.submit(spec("last"))))
        assert len(children()) == 1
        assert process.num_fds() <= before[0]
        assert process.num_threads() <= before[1]
        assert process.memory_info().rss - before[2] < 8 * 2**20
        assert engine.statistics().num_runner_losses == 11


_PARENT = """
import asyncio, sys, time
from engine.runner.process import ProcessRunner
from tests.support.runners import FatalSource, SLEEPS
from engine.scheduler.plan import Plan
from tests.support.decisions import MemoryLog
from tests.support.grants import grant

async def main():
    runner = await ProcessRunner.start(FatalSource(8, 4))
    print(runner.pid, flush=True)
    if sys.argv[1] == "busy":
        await runner.execute(Plan(1, (grant("a", 0, 1, token_ids=[SLEEPS], block_table=[0]),)))
    time.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy"])
async def test_it_ends_with_the_process_that_started_it(state):
    command = [sys.executable, "-c", _PARENT, state]
    with subprocess.Popen(  # noqa: ASYNC220
        command, env=environment(), stdout=subprocess.PIPE, text=True
    ) as parent:
        await asyncio.to_thread(parent.stdout.readline)  # the log says that it started
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        await asyncio.sleep(0.2 if state == "busy" else 0)
        assert is_running(pid)
        parent.kill()
    await settled(lambda: not is_running(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def test_nothing_of_ours_stays_open_there():
    secret, other = os.pipe()
    os.set_inheritable(secret, True)
    try:
        async with process_runner() as runner:
            files = os.listdir(f"/proc/{runner.pid}/fd")
            assert len(files) <= 5, files  # standard streams and the socket
    finally:
        os.close(secret)
        os.close(other)


async def test_the_scripted_runner_is_not_mortal():
    assert not isinstance(ScriptedRunner(), MortalRunner)
