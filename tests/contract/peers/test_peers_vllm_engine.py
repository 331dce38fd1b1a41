"""What vLLM's tests of its engine and its output path pin down, held against this engine.

Every test names the behaviour's number in docs/PEERS.md, and says where ours differs on purpose.
"""

import asyncio
from itertools import pairwise

import pytest

from engine.events import Delta, Finished
from engine.handle import RequestHandle
from engine.request import FinishReason, RequestId
from engine.runner.base import ModelInfo
from engine.runner.scripted import expected_output
from engine.text import PromptLimit
from server import convert
from tests.support.drive import Driver
from tests.support.engines import serving, spec, tokens_of
from tests.support.wire import spec as wire_spec


async def collect(handle, cancel_after=None):
    """All events; cancels the request when it has that many tokens."""
    events = []
    async for event in handle.events():
        events.append(event)
        if cancel_after is not None and len(tokens_of(events)) >= cancel_after:
            handle.cancel()
    return events


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("ignore_eos", "reason", "num_tokens"), [(False, FinishReason.STOP, 2), (True, FinishReason.LENGTH, 8)]
)
async def test_whether_the_end_token_ends_the_output_is_the_requests_choice(ignore_eos, reason, num_tokens):
    """vLLM 10: under ignore_eos a request has no end tokens."""
    out = expected_output(b"hello", 8)
    info = ModelInfo("scripted", "Scripted", 257, 2048, frozenset({out[1]}))
    message = wire_spec("hello", max_tokens=8, ignore_eos=ignore_eos)
    draft = convert.draft_of(message, info=info, limit=PromptLimit(2048, 1), default_max_tokens=16)
    made = convert.request_spec(draft, b"hello", RequestId("a"), 0, info=info, context_tokens=2048)
    async with serving() as engine:
        events = await collect(engine.submit(made))
    assert tokens_of(events) == out[:num_tokens]
    assert events[-1].reason is reason


@pytest.mark.asyncio
async def test_cancelling_every_tenth_of_a_hundred_disturbs_nobody_and_frees_its_id():
    """vLLM 61: the long ones are as long as the context here, not 50,000 tokens."""
    async with serving() as engine:

        async def one(i):
            name, prompt = f"r{i}", f"prompt {i}"
            if i % 10:
                return tokens_of(await collect(engine.submit(spec(name, prompt))))
            long = await collect(engine.submit(spec(name, prompt, max_tokens=2000)), cancel_after=1)
            assert long[-1].reason is FinishReason.CANCELLED
            assert 1 <= len(tokens_of(long)) < 2000
            return tokens_of(await collect(engine.submit(spec(name, prompt))))  # the same id at once

        outputs = await asyncio.gather(*(one(i) for i in range(100)))
    for i, tokens in enumerate(outputs):
        assert tokens == expected_output(f"prompt {i}".encode(), 8)


@pytest.mark.asyncio
async def test_aborting_five_of_fifty_returns_what_they_had():
    """vLLM 62: the end says that it was cancelled, and nothing about a stop."""
    async with serving() as engine:
        aborted = {3, 11, 19, 27, 42}
        handles = [engine.submit(spec(f"r{i}", f"prompt {i}", max_tokens=40)) for i in range(50)]
        outputs = await asyncio.gather(
            *(collect(handle, 3 if i in aborted else None) for i, handle in enumerate(handles))
        )
    for i, events in enumerate(outputs):
        end, tokens, whole = events[-1], tokens_of(events), expected_output(f"prompt {i}".encode(), 40)
        assert isinstance(end, Finished)
        assert tokens == whole[: end.usage.output_tokens]
        if i in aborted:
            assert end.reason is FinishReason.CANCELLED
            assert end.stop_token_id is end.stop_string is None
            assert 3 <= len(tokens) < 40
        else:
            assert (end.reason, len(tokens)) == (FinishReason.LENGTH, 40)


def test_a_pause_shows_as_a_gap_and_costs_no_token():
    """vLLM 64: its mode that keeps what runs is parking here, a request at a time."""
    driver = Driver(num_blocks=32)
    driver.submit("a", 8, max_tokens=30)
    times = []
    while driver.scheduler.has_requests:
        before = len(driver.tokens("a"))
        driver.step()
        times += [driver.now] * (len(driver.tokens("a")) - before)
        if len(times) == 10 and not driver.scheduler.parked():
            driver.park("a")
            driver.step()
            driver.now += 200
            driver.unpark("a")
    assert len(times) == 30
    assert max(b - a for a, b in pairwise(times)) >= 0.8 * (times[-1] - times[0])
    assert driver.preemptions("a") == 0


def test_deltas_that_wait_are_merged_into_one():
    """vLLM 65: a reader that comes late gets one delta, and what came between deltas stays between."""
    commands = []
    handle = RequestHandle(spec("a"), 0, commands.append)
    a = RequestId("a")
    handle.put(Delta(a, 0, (1, 2), "ab"))
    handle.put(Delta(a, 2, (3,), "c"))
    assert handle.num_buffered_tokens == 3
    assert handle.take() == [Delta(a, 0, (1, 2, 3), "abc")]
    assert (handle.num_buffered_tokens, handle.take()) == (0, [])
    handle.put(Delta(a, 3, (4,), "d"))
    assert handle.take() == [Delta(a, 3, (4,), "d")]
