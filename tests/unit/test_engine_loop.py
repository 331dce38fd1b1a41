"""The engine loop on the scripted runner."""

import asyncio
import functools

import pytest

from engine.errors import Draining, InternalError, InvalidRequest, PoolExceeded, QueueFull, SlowConsumer
from engine.events import Delta, Failed, Finished, LevelChanged, Preempted, Resumed, Started
from engine.request import FinishReason, PreemptReason, RequestId
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer, expected_output
from engine.scheduler.config import ClassConfig
from tests.support import engines
from tests.support.engines import collect, spec, tokens_of

pytestmark = pytest.mark.asyncio
serving = functools.partial(engines.serving, max_running_requests=2)


class GatedRunner(ScriptedRunner):
    """Computes a step only when told to."""

    def __init__(self, **more):
        super().__init__(**more)
        self.gate = asyncio.Semaphore(0)
        self.waits = asyncio.Event()
        self.error = None

    async def execute(self, plan):
        self.waits.set()
        await self.gate.acquire()
        self.waits.clear()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.run(plan)

    async def step(self):
        """Let one step happen; returns when the next one is about to be computed, or nothing runs."""
        await self.waits.wait()
        self.waits.clear()
        self.gate.release()
        for _ in range(5):
            await asyncio.sleep(0)


def text_of(events):
    return "".join(e.text for e in events if isinstance(e, Delta))


async def test_a_request_runs_to_its_end():
    async with serving() as engine:
        events = await collect(engine.submit(spec("a")))
    expected = expected_output(b"hello", 8)
    assert isinstance(events[0], Started)
    assert tokens_of(events) == expected
    assert text_of(events) == bytes(expected).decode()
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.LENGTH
    assert sum(isinstance(e, Finished | Failed) for e in events) == 1


async def test_many_requests_at_once_give_exactly_their_own_tokens():  # vLLM 60
    async with serving(max_running_requests=8, max_step_tokens=64) as engine:
        handles = [engine.submit(spec(f"r{i}", f"prompt {i}", level=i % 3)) for i in range(100)]
        outputs = await asyncio.gather(*map(collect, handles))
    for i, events in enumerate(outputs):
        assert tokens_of(events) == expected_output(f"prompt {i}".encode(), 8)


async def test_an_urgent_request_overtakes_within_one_step():
    runner = GatedRunner(num_blocks=32, block_size=4)
    async with serving(runner, max_running_requests=1) as engine:
        batch = engine.submit(spec("batch", level=10, max_tokens=12))
        for _ in range(3):
            await runner.step()
        urgent = engine.submit(spec("urgent", level=-10, max_tokens=2))
        await runner.step()  # the step in flight
        await runner.step()  # the first one planned after the arrival
        assert [type(e) for e in urgent.take()] == [Started, Delta]
        assert isinstance(batch.take()[-1], Preempted)
        while not batch.finished:
            await runner.step()
        events = batch.take()
    assert any(isinstance(e, Resumed) for e in events)
    assert events[-1].usage.preemptions == 1


async def test_cancel_takes_effect_before_the_next_step():
    runner = GatedRunner(num_blocks=32, block_size=4)
    async with serving(runner) as engine:
        handle = engine.submit(spec("a", max_tokens=30))
        await runner.step()
        await runner.step()
        handle.cancel()
        handle.cancel()
        await runner.step()
        events = handle.take()
        assert events[-1].reason is FinishReason.CANCELLED
        assert engine.statistics().num_free_blocks == 32
        handle.cancel()
        assert len(tokens_of(events)) == events[-1].usage.output_tokens == 3


async def test_a_cancel_overtakes_everything_else_in_the_inbox():
    runner = GatedRunner(num_blocks=32, block_size=4)
    async with serving(runner) as engine:
        handle = engine.submit(spec("a", max_tokens=30))
        await runner.step()
        handle.set_level(5)
        handle.cancel()
        await runner.step()
        assert not any(isinstance(e, LevelChanged) for e in handle.take())


async def test_cancelling_before_it_was_ever_planned():  # SGLang 44
    async with serving() as engine:
        handle = engine.submit(spec("a"))
        handle.cancel()
        events = await collect(handle)
    assert [type(e) for e in events] == [Finished]
    assert events[0].reason is FinishReason.CANCELLED


async def test_a_new_level_is_acknowledged():
    runner = GatedRunner(num_blocks=32, block_size=4)
    async with serving(runner) as engine:
        handle = engine.submit(spec("a", max_tokens=30))
        await runner.step()
        handle.set_level(7)
        await runner.step()
        assert LevelChanged(RequestId("a"), 7) in handle.take()
        assert handle.level == 7
        handle.cancel()
        await runner.step()


@pytest.mark.parametrize("at", range(8))
async def test_a_stop_string_ends_the_request_wherever_it_stands(at):  # vLLM 66
    whole = bytes(expected_output(b"hello", 8)).decode()
    stop = whole[at]
    async with serving() as engine:
        events = await collect(engine.submit(spec("a", stop_strings=(stop,))))
    cut = whole.index(stop)
    assert text_of(events) == whole[:cut]
    assert events[-1].reason is FinishReason.STOP_STRING
    assert events[-1].stop_string == stop
    assert len(tokens_of(events)) == cut + 1


async def test_text_held_back_is_flushed_at_the_end():
    whole = bytes(expected_output(b"hello", 8)).decode()
    async with serving() as engine:
        events = await collect(engine.submit(spec("a", stop_strings=(whole[-1] + "\x00",))))
    assert text_of(events) == whole
    assert events[-1].reason is FinishReason.LENGTH


async def test_the_text_of_a_stop_token_is_left_out():  # vLLM 66
    out = expected_output(b"hello", 8)
    async with serving() as engine:
        events = await collect(engine.submit(spec("a", stop_token_ids=(out[3],))))
    cut = out.index(out[3])
    assert tokens_of(events) == out[: cut + 1]
    assert text_of(events) == bytes(out[:cut]).decode()


class RaisingRunner(GatedRunner):
    """Raises whenever it computes a request of this name."""

    poison = ""

    def run(self, plan):
        if any(grant.request_id == self.poison for grant in plan.grants):
            raise RuntimeError("secret detail")
        return super().run(plan)


async def test_a_step_that_fails_once_is_made_again_and_nobody_fails():
    runner = GatedRunner(num_blocks=32, block_size=4)
    async with serving(runner, max_running_requests=2) as engine:
        handles = [engine.submit(spec(name, max_tokens=3)) for name in "ab"]
        await runner.step()
        runner.error = RuntimeError("secret detail")
        while not all(handle.finished for handle in handles):
            await runner.step()
        for handle in handles:
            events = handle.take()
            assert tokens_of(events) == expected_output(b"hello", 3)
            assert [e.reason for e in events if isinstance(e, Preempted)] == [PreemptReason.RUNNER]


async def test_who_makes_every_step_fail_fails_alone():
    runner = RaisingRunner(num_blocks=32, block_size=4)
    runner.poison = "bad"
    async with serving(runner, max_running_requests=3) as engine:
        bad = engine.submit(spec("bad"))
        good = [engine.submit(spec(name, max_tokens=5)) for name in "ab"]
        while not all(handle.finished for handle in (bad, *good)):
            await runner.step()
        (failed,) = bad.take()[-1:]
        assert isinstance(failed.error, InternalError)
        assert "secret" not in str(failed.error)
        for handle in good:
            assert tokens_of(handle.take()) == expected_output(b"hello", 5)
        assert engine.statistics().num_free_blocks == 32


class PoisonedTokenizer(ScriptedTokenizer):
    def stream_decoder(self, prompt_token_ids):
        decoder = super().stream_decoder(prompt_token_ids)
        if bytes(prompt_token_ids) == b"poison":
            decoder.push = lambda token_id: 1 / 0
        return decoder


async def test_a_request_whose_text_fails_fails_alone():
    async with serving(tokenizer=PoisonedTokenizer()) as engine:
        bad, good = engine.submit(spec("bad", "poison")), engine.submit(spec("good"))
        bad_events, good_events = await collect(bad), await collect(good)
    assert isinstance(bad_events[-1], Failed)
    assert good_events[-1].reason is FinishReason.LENGTH


async def test_a_reader_that_does_not_read_costs_only_itself():  # vLLM 65
    async with serving(max_buffered_tokens=10) as engine:
        slow, quick = engine.submit(spec("slow", max_tokens=50)), engine.submit(spec("quick", max_tokens=50))
        events = await collect(quick)
        assert len(tokens_of(events)) == 50
        slow_events = slow.take()
    assert isinstance(slow_events[-1].error, SlowConsumer)
    assert len(tokens_of(slow_events)) == 11
    assert len(slow_events) == 3  # started, one merged delta, failed


async def test_refusals_are_raised_at_once():
    async with serving() as engine:
        with pytest.raises(PoolExceeded):
            engine.submit(spec("a", "x" * 128))
        assert engine.statistics().num_alive == 0


async def test_draining_refuses_newcomers_and_finishes_the_others():  # vLLM 64: pause by waiting
    async with serving() as engine:
        handle = engine.submit(spec("a"))
        engine.drain()
        with pytest.raises(Draining):
            engine.submit(spec("b"))
        await asyncio.wait_for(engine.wait_until_idle(), 5)
        assert handle.finished


async def test_stopping_the_engine_fails_what_is_alive():
    async with serving(GatedRunner(num_blocks=32, block_size=4)) as engine:
        running, queued = (engine.submit(spec(n, max_tokens=30)) for n in ("a", "b"))
        await asyncio.sleep(0)
    for handle in (running, queued):
        assert isinstance(handle.take()[-1].error, Draining)


async def test_cancelling_all_ends_each_with_its_output():  # vLLM 64: pause by aborting
    async with serving() as engine:
        handles = [engine.submit(spec(f"r{i}", max_tokens=100)) for i in range(5)]
        engine.cancel_all(FinishReason.TIME_LIMIT)
        for events in await asyncio.gather(*map(collect, handles)):
            assert events[-1].reason is FinishReason.TIME_LIMIT


async def test_a_reader_that_is_cancelled_loses_no_event():
    runner = GatedRunner(num_blocks=32, block_size=4)
    async with serving(runner) as engine:
        handle = engine.submit(spec("a", max_tokens=3))
        reader = asyncio.create_task(collect(handle))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        while not handle.finished:
            await runner.step()
        assert tokens_of(handle.take()) == expected_output(b"hello", 3)


async def test_the_queue_position_counts_those_before():
    async with serving(max_running_requests=1) as engine:
        handles = [engine.submit(spec(f"r{i}", level=level)) for i, level in enumerate((0, 0, -10, 10))]
        assert [h.queue_position for h in handles] == [0, 1, 0, 3]
        await asyncio.gather(*map(collect, handles))


async def test_a_level_that_can_be_refused_is_answered_at_once_and_levels_keep_their_order():
    interactive = ClassConfig(30.0, 0.0, max_waiting_requests=1)
    async with serving(interactive=interactive) as engine:
        first, second = (engine.submit(spec(name, level=10)) for name in ("first", "second"))
        first.set_level(-10)
        with pytest.raises(QueueFull, match="class interactive"):
            second.set_level(-10)
        second.set_level(20)  # inside its class: waits for the next plan
        second.set_level(5)
        with pytest.raises(InvalidRequest):
            second.set_level(101)
        events = await collect(second)
        await collect(first)
    assert [event.level for event in events if isinstance(event, LevelChanged)] == [20, 5]
