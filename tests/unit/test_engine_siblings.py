"""Several outputs of one prompt: shared blocks, seeds of their own, one end."""

import asyncio
import dataclasses
import functools

import pytest

from engine.errors import InternalError, InvalidRequest, QueueFull
from engine.events import (
    Delta,
    Failed,
    Finished,
    LevelChanged,
    OutputFinished,
    Preempted,
    PromptLogProbs,
    Resumed,
    Started,
)
from engine.request import FinishReason, RequestStatus, Usage
from engine.runner.scripted import ScriptedRunner, expected_output
from engine.sampling import SEED_MAX, sibling_seed
from engine.scheduler.config import ClassConfig
from engine.siblings import GRAVITY, sibling_spec, submit_siblings, usage_of_all
from tests.support import engines
from tests.support.decisions import MemoryLog
from tests.support.engines import GatedRunner, spec, tokens_of
from tests.support.wire import settled

pytestmark = pytest.mark.asyncio
serving = functools.partial(engines.serving, depth=1)

PROMPT = "a prompt of thirty-eight bytes, exactly"[:38]
DRAWN = {"temperature": 1.0, "seed": 5}


def four(engine, name="a", num_outputs=4, prompt=PROMPT, level=0, on_ready=None, **sampling):
    return submit_siblings(
        engine, spec(name, prompt, level=level, **(DRAWN | sampling)), num_outputs, on_ready
    )


async def collect(handle):
    """Events by output, and the terminal one."""
    outputs, end = {}, None
    async for event in handle.events():
        if isinstance(event, Finished | Failed):
            end = event
        else:
            outputs.setdefault(handle.output_index(event), []).append(event)
    return outputs, end


def wanted(num_tokens=8, num_outputs=4, seed=5, prompt=PROMPT):
    ids = list(prompt.encode())
    return [expected_output(ids, num_tokens, sibling_seed(seed, index)) for index in range(num_outputs)]


async def test_four_outputs_use_the_blocks_of_their_prompt_once():
    runner = GatedRunner(num_blocks=32, block_size=4)
    async with serving(runner, depth=0) as engine:
        handle = four(engine)
        collected = asyncio.create_task(collect(handle))
        while not all(h.num_output_tokens > 1 for h in handle._handles):
            await runner.step()
        tables = [list(request.block_table) for request in engine._scheduler.running()]
        blocks = engine._scheduler.blocks
        assert len(tables) == 4
        # 38 tokens in blocks of 4: nine are full. What follows is each one's own.
        assert len({tuple(table[:9]) for table in tables}) == 1
        assert [blocks._references[block] for block in tables[0][:9]] == [4] * 9
        own = [block for table in tables for block in table[9:]]
        assert len(own) == len(set(own))
        assert blocks.num_blocks - blocks.num_free_blocks == 9 + len(own)
        assert sum(request.num_cached_tokens for request in engine._scheduler.running()) == 3 * 36
        while not collected.done():
            await runner.step()
        outputs, _ = await collected
    assert [tokens_of(outputs[index]) for index in range(4)] == wanted()


@pytest.mark.parametrize("depth", [0, 1])
async def test_each_has_a_seed_of_its_own_and_the_first_that_of_the_request(depth):
    async with serving(depth=depth) as engine:
        alone = await collect(engine.submit(spec("alone", PROMPT, **DRAWN)))
        outputs, end = await collect(four(engine))
    found = [tokens_of(outputs[index]) for index in range(4)]
    assert found == wanted()
    assert found[0] == tokens_of(alone[0][0])
    assert len({tuple(tokens) for tokens in found}) == 4
    for events in outputs.values():
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], OutputFinished)
        assert events[-1].finished.reason is FinishReason.LENGTH
    assert end.request_id == "a"
    assert (end.usage.prompt_tokens, end.usage.output_tokens, end.reason) == (38, 32, FinishReason.LENGTH)


async def test_seeds_are_pinned():
    """A change here changes every output but the first; it must be wanted and be in the changelog."""
    assert [sibling_seed(7, index) for index in range(3)] == [7, 7191089600892374487, 309689372594955804]
    assert 0 <= sibling_seed(SEED_MAX, 15) <= SEED_MAX


async def test_they_are_cancelled_together():
    async with serving() as engine:
        handle = four(engine, max_tokens=60)
        await settled(lambda: handle.num_output_tokens > 0)
        handle.cancel()
        outputs, end = await collect(handle)
        assert end.reason is FinishReason.CANCELLED
        assert {events[-1].finished.reason for events in outputs.values()} == {FinishReason.CANCELLED}
        assert engine.statistics().num_alive == 0


async def test_pause_and_priority_hold_for_all_and_one_event_tells_of_it():
    async with serving() as engine:
        handle = four(engine, max_tokens=90)
        await settled(lambda: handle.num_output_tokens > 0)
        handle.park()
        handle.set_level(7)
        for _ in range(20):
            await asyncio.sleep(0)
        found = engine.look()
        assert {(look.status, look.level) for look in found} == {(RequestStatus.PARKED, 7)}
        assert len(found) == 4
        assert handle.level == 7
        handle.unpark()
        outputs, _ = await collect(handle)
    assert sum(isinstance(e, LevelChanged) for events in outputs.values() for e in events) == 1
    assert [len(tokens_of(events)) for events in outputs.values()] == [90] * 4


@pytest.mark.parametrize("depth", [0, 1])
async def test_each_is_preempted_by_itself_and_goes_on_without_a_gap(depth):
    log = MemoryLog()
    async with serving(
        ScriptedRunner(num_blocks=26, block_size=4), depth=depth, decisions=log, max_running_requests=8
    ) as engine:
        handle = four(engine, max_tokens=24)
        await settled(lambda: handle.num_output_tokens >= 8)
        urgent = engine.submit(spec("urgent", "x" * 20, level=-5, max_tokens=8))
        await collect(urgent)
        outputs, end = await collect(handle)
    preempted = [any(isinstance(e, Preempted) for e in events) for events in outputs.values()]
    assert any(preempted)
    assert not all(preempted)
    assert [tokens_of(outputs[index]) for index in range(4)] == wanted(24)
    assert end.usage.preemptions == sum(isinstance(e, Preempted) for es in outputs.values() for e in es)
    assert sum(isinstance(e, Resumed) for es in outputs.values() for e in es) == end.usage.preemptions
    log.replay(num_steps=5)


async def test_when_one_fails_all_do_and_nothing_else_is_the_end():
    async with serving() as engine:
        handle = four(engine, max_tokens=90)
        await settled(lambda: handle.num_output_tokens > 0)
        error = InternalError("f00d")
        handle._handles[2].fail(error)
        outputs, end = await collect(handle)
        assert isinstance(end, Failed)
        assert end.error is error
        assert not any(isinstance(e, OutputFinished) for events in outputs.values() for e in events)
        assert engine.statistics().num_alive == 0


async def test_all_of_them_are_queued_or_none():
    async with serving(max_waiting_requests=3) as engine:
        with pytest.raises(InvalidRequest, match="num_outputs must be at most 3"):
            four(engine)
        await settled(lambda: engine.statistics().num_alive == 0)
        outputs, _ = await collect(four(engine, num_outputs=3))
    assert len(outputs) == 3


class Told:
    """An observer that keeps what was submitted and what ended."""

    def __init__(self):
        self.submitted_ids, self.ended_ids = [], []

    def submitted(self, spec):
        self.submitted_ids.append(spec.request_id)

    def ended(self, spec, event, ttft_s, total_s):
        self.ended_ids.append(spec.request_id)

    def produced(self, spec, num_tokens, gap_s):
        pass

    def step_made(self, plan, duration_s):
        pass

    def happened(self, spec, event):
        pass


async def test_for_outputs_that_can_not_all_be_queued_nobody_is_displaced_or_told():
    told, log = Told(), MemoryLog()
    async with serving(max_waiting_requests=6, decisions=log) as engine:
        engine._delivery._observer = told
        # Nothing is planned before the first await, so all of these wait.
        waiting = [engine.submit(spec(f"i{i}", PROMPT, level=-10)) for i in range(3)]
        waiting += [engine.submit(spec(f"b{i}", PROMPT, level=10)) for i in range(3)]
        before, num_calls = list(told.submitted_ids), len(log.lines)
        with pytest.raises(QueueFull):
            four(engine, level=-10)
        assert told.submitted_ids == before
        assert len(log.lines) == num_calls
        assert engine.statistics().num_alive == 6
        assert not any(handle.finished for handle in waiting)
        outputs = four(engine, name="fits", num_outputs=3, level=-10)
        assert engine.statistics().num_alive == 6
        assert [handle.finished for handle in waiting] == [False] * 3 + [True] * 3
        for handle in waiting:
            handle.cancel()
        outputs.cancel()
        await engine.wait_until_idle()


async def test_all_of_them_get_another_level_or_none():
    interactive = ClassConfig(30.0, 0.0, max_waiting_requests=3)
    async with serving(interactive=interactive) as engine:
        handle = four(engine, level=10)
        with pytest.raises(InvalidRequest, match="num_outputs must be at most 3"):
            handle.set_level(-10)
        one = engine.submit(spec("one", PROMPT, level=-10))
        three = four(engine, name="three", num_outputs=3, level=10)
        with pytest.raises(QueueFull, match="class interactive"):
            three.set_level(-10)
        assert {look.level for look in engine.look() if look.request_id != "one"} == {10}
        one.cancel()
        handle.cancel()
        three.cancel()
        await engine.wait_until_idle()


async def test_the_reason_is_the_gravest_whichever_ends_last():
    ends = set()
    for preempted in (None, 0, 1, 2):
        async with serving(ScriptedRunner(num_blocks=64, block_size=4)) as engine:
            stop = chr(wanted(8, 3)[1][2])
            handle = four(engine, num_outputs=3, stop_strings=(stop,))
            if preempted is not None:
                late, others = handle._handles[preempted], handle._handles.copy()
                others.remove(late)
                late.park()
                await settled(lambda others=others: all(other.finished for other in others))
                handle.unpark()
            outputs, end = await collect(handle)
            own = {
                index: event.finished.reason
                for index, events in outputs.items()
                for event in events
                if isinstance(event, OutputFinished)
            }
            assert len(set(own.values())) == 2, "it takes two reasons to tell"
            ends.add((end.reason, tuple(sorted(own.items(), key=lambda item: item[0]))))
    assert len(ends) == 1
    assert ends.pop()[0] is FinishReason.LENGTH


async def test_a_cancel_is_the_reason_even_if_an_output_had_ended():
    async with serving(max_running_requests=1) as engine:
        handle = four(engine, num_outputs=2, max_tokens=4)
        await settled(lambda: handle._handles[0].finished)
        handle.cancel()
        _, end = await collect(handle)
    assert end.reason is FinishReason.CANCELLED


async def test_every_reason_has_its_place():
    assert sorted(GRAVITY, key=lambda r: r.value) == sorted(FinishReason, key=lambda r: r.value)


async def test_the_prompt_is_scored_once():
    async with serving() as engine:
        outputs, _ = await collect(four(engine, prompt_logprobs=1, logprobs=2))
    scored = [[e for e in events if isinstance(e, PromptLogProbs)] for events in outputs.values()]
    assert [sum(len(e.positions) for e in each) for each in scored] == [37, 0, 0, 0]
    deltas = [e for events in outputs.values() for e in events if isinstance(e, Delta)]
    assert all(len(e.logprobs) == len(e.token_ids) for e in deltas)


async def test_whoever_is_told_of_events_is_told_of_all():
    told = []
    async with serving() as engine:
        handle = four(engine, num_outputs=2, on_ready=told.append)
        await collect(handle)
    assert set(told) == {handle}


async def test_what_a_sibling_asks_for():
    base = spec("a", PROMPT, prompt_logprobs=2, **DRAWN)
    first, second = sibling_spec(base, 0), sibling_spec(base, 1)
    assert (first.request_id, first.family, first.shares_prompt) == ("a", "a", False)
    assert (second.request_id, second.family, second.shares_prompt) == ("a.1", "a", True)
    assert first.sampling == base.sampling
    assert second.sampling.prompt_logprobs is None
    assert dataclasses.replace(second.sampling, seed=5, prompt_logprobs=2) == base.sampling


async def test_what_several_cost():
    numbers = {field.name: 3 for field in dataclasses.fields(Usage)}
    for name, both in dataclasses.asdict(usage_of_all([Usage(**numbers)] * 2)).items():
        assert both == (3 if name in ("prompt_tokens", "cached_tokens") or name.endswith("_s") else 6), name
    usage = usage_of_all([
        Usage(prompt_tokens=9, cached_tokens=4, output_tokens=3, preemptions=1, queued_s=0.5, decode_s=2.0),
        Usage(prompt_tokens=9, cached_tokens=8, output_tokens=5, recomputed_tokens=7, decode_s=3.0),
    ])  # fmt: skip
    assert usage == Usage(9, 4, 8, 7, 1, queued_s=0.5, decode_s=3.0)
