"""The engine loop with a step planned ahead: the same tokens, and a step in flight whatever happens."""

import asyncio
import functools
import threading

import pytest

from engine.errors import Draining
from engine.events import Delta, Failed, Finished, Preempted, Resumed
from engine.loop import Engine
from engine.request import FinishReason
from engine.runner.base import PipelinedRunner
from engine.runner.inline import InlineRunner
from engine.runner.process import ProcessRunner
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer, expected_output
from engine.runner.simulated import SimulatedRunner, SimulatedTokenizer
from engine.runner.sources import ScriptedModel, ScriptedSource
from engine.scheduler.config import SchedulerConfig
from engine.sim.profiles import profile_named
from tests.support import engines
from tests.support.decisions import MemoryLog
from tests.support.engines import GatedRunner, collect, spec

pytestmark = pytest.mark.asyncio
serving = functools.partial(engines.serving, depth=1)


def tokens_of(events):
    at, tokens = 0, []
    for event in events:
        if isinstance(event, Delta) and event.token_ids:
            assert event.first_index == at
            tokens += event.token_ids
            at += len(event.token_ids)
    assert sum(isinstance(e, Finished | Failed) for e in events) == 1
    return tokens


async def scripted():
    return ScriptedRunner(num_blocks=24, block_size=4)


async def inline():
    return InlineRunner(ScriptedModel(ScriptedSource(24, 4)))


async def process():
    return await ProcessRunner.start(ScriptedSource(24, 4))


@pytest.mark.parametrize("made", [scripted, inline, process])
@pytest.mark.parametrize("discipline", ["unified", "prefill_first"])
async def test_the_tokens_are_those_of_depth_0(made, discipline):
    outputs, num_preemptions = {}, 0
    log = MemoryLog()
    for depth in (0, 1):
        decisions = log if depth else None
        async with serving(await made(), depth=depth, discipline=discipline, decisions=decisions) as engine:
            assert engine.pipeline_depth == depth
            handles = []
            for i in range(24):
                sampling = {"max_tokens": 3 + i % 20, "temperature": float(i % 2), "seed": i}
                if i % 3 == 0:
                    sampling["stop_strings"] = (chr(40 + i),)
                if i % 4 == 0:
                    sampling["stop_token_ids"] = tuple(range(60 + i, 70 + i))
                handles.append(engine.submit(spec(f"r{i}", f"prompt {i % 7}", level=i % 5 - 2, **sampling)))
                await asyncio.sleep(0)
            found = await asyncio.gather(*map(collect, handles))
        outputs[depth] = [
            (
                tokens_of(e),
                "".join(d.text for d in e if isinstance(d, Delta)),
                e[-1].reason,
                e[-1].usage.output_tokens,
            )
            for e in found
        ]
        num_preemptions += depth and sum(isinstance(event, Preempted) for events in found for event in events)
    assert outputs[0] == outputs[1]
    assert num_preemptions > 0 or made is process  # there it depends on who comes when
    log.replay(1)


async def test_a_plan_is_handed_in_before_the_one_before_it_is_computed():
    runner = GatedRunner()
    async with serving(runner) as engine:
        handle = engine.submit(spec("a", max_tokens=3))
        await asyncio.sleep(0)
        assert [plan.step for plan in runner.handed_in] == [1, 2]
        assert runner.num_computed == 0
        assert runner.handed_in[1].grants[0].has_unknown_token
        await runner.step()
        assert [plan.step for plan in runner.handed_in] == [1, 2, 3]
        await runner.step(2)
        events = handle.take()
    assert tokens_of(events) == expected_output(b"hello", 3)
    assert [plan.step for plan in runner.handed_in] == [1, 2, 3]


async def test_at_most_two_plans_are_unanswered():
    runner = GatedRunner()
    async with serving(runner) as engine:
        handle = engine.submit(spec("a", max_tokens=30))
        for _ in range(5):
            await runner.step()
            assert len(runner.handed_in) - runner.num_computed == 2
        handle.cancel()
        await runner.step(3)


async def test_a_cancel_takes_effect_one_step_later_at_most():
    runner = GatedRunner()
    async with serving(runner) as engine:
        handle = engine.submit(spec("a", max_tokens=30))
        await runner.step(2)
        handle.cancel()
        assert len(runner.handed_in) == 4  # two of them without an answer
        await runner.step()
        events = handle.take()
        assert events[-1].reason is FinishReason.CANCELLED
        assert len(tokens_of(events)) == events[-1].usage.output_tokens == 3
        assert engine.statistics().num_free_blocks == 32
        await runner.step()
        assert len(runner.handed_in) == 4
        other = engine.submit(spec("b", max_tokens=2))
        await runner.step(3)
        assert tokens_of(other.take()) == expected_output(b"hello", 2)


async def test_an_urgent_request_overtakes_one_step_later_at_most():
    runner = GatedRunner()
    async with serving(runner, max_running_requests=1) as engine:
        batch = engine.submit(spec("batch", level=10, max_tokens=12))
        await runner.step(2)
        urgent = engine.submit(spec("urgent", level=-10, max_tokens=2))
        await runner.step()  # was in flight when it arrived; the next plan is made now
        assert runner.handed_in[-1].grants[0].request_id == "urgent"
        await runner.step(16)
        assert tokens_of(urgent.take()) == expected_output(b"hello", 2)
        events = batch.take()
    assert tokens_of(events) == expected_output(b"hello", 12)
    assert sum(isinstance(e, Preempted) for e in events) == sum(isinstance(e, Resumed) for e in events) == 1


async def test_stopping_with_two_steps_in_flight_fails_what_is_alive():
    runner = GatedRunner()
    async with serving(runner) as engine:
        handles = [engine.submit(spec(name, max_tokens=30)) for name in "ab"]
        await runner.step(2)
        assert len(runner.handed_in) == 4
    for handle in handles:
        assert isinstance(handle.take()[-1].error, Draining)
    assert runner.num_computed == 2


async def test_stopping_waits_for_the_computation_in_flight_on_a_thread():
    begun, gate, done = threading.Event(), threading.Event(), []

    class Slow(ScriptedModel):
        def run(self, plan):
            begun.set()
            assert gate.wait(10)
            done.append(plan.step)
            return super().run(plan)

    runner = InlineRunner(Slow(ScriptedSource(32, 4)))
    engine = Engine(runner, ScriptedTokenizer(), SchedulerConfig(), pipeline_depth=1)
    task = asyncio.create_task(engine.run())
    handle = engine.submit(spec("a", max_tokens=30))
    assert await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):  # however impatient
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1, 2]
    assert isinstance(handle.take()[-1].error, Draining)
    await runner.close()


async def test_a_step_that_fails_takes_the_one_behind_it_along_and_both_are_made_again():
    runner = GatedRunner()
    async with serving(runner, max_running_requests=2) as engine:
        first = engine.submit(spec("first", max_tokens=6))
        await runner.step()
        second = engine.submit(spec("second", max_tokens=3))
        runner.error = RuntimeError("secret detail")
        while not (first.finished and second.finished):
            await runner.step()
        assert tokens_of(first.take()) == expected_output(b"hello", 6)
        assert tokens_of(second.take()) == expected_output(b"hello", 3)


async def test_a_plan_that_cannot_be_handed_in_fails_its_requests_alone():
    class Picky(GatedRunner):
        def submit(self, plan):
            if any(grant.request_id == "bad" for grant in plan.grants):
                raise ValueError("it can't be pickled")
            return super().submit(plan)

    runner = Picky()
    async with serving(runner, max_running_requests=1) as engine:
        good = engine.submit(spec("good", max_tokens=2))
        bad = engine.submit(spec("bad", max_tokens=2))
        later = engine.submit(spec("later", max_tokens=2))
        while not (good.finished and bad.finished and later.finished):
            await runner.step()
        assert tokens_of(good.take()) == tokens_of(later.take()) == expected_output(b"hello", 2)
        assert isinstance(bad.take()[-1], Failed)


async def test_a_stop_string_drops_what_was_computed_beyond_it():
    whole = bytes(expected_output(b"hello", 8)).decode()
    async with serving() as engine:
        events = await collect(engine.submit(spec("a", stop_strings=(whole[3],))))
    cut = whole.index(whole[3])
    assert len(tokens_of(events)) == events[-1].usage.output_tokens == cut + 1
    assert events[-1].reason is FinishReason.STOP_STRING


async def test_a_runner_that_takes_one_plan_at_a_time_gets_one_plan_at_a_time():
    runner = SimulatedRunner(profile_named("h100"), num_blocks=64)
    assert not isinstance(runner, PipelinedRunner)
    async with serving(runner, SimulatedTokenizer()) as engine:
        assert engine.pipeline_depth == 0
        events = await collect(engine.submit(spec("a", max_tokens=2)))
    assert len(tokens_of(events)) == 2
