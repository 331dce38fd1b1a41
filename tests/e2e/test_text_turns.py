"""Tokenising is paid for, and waits its turn, in a real server."""

import contextlib
from collections.abc import AsyncIterator, Callable
from threading import Event
from typing import Any, NamedTuple

import grpc.aio
import pytest

from engine.runner.scripted import ScriptedTokenizer
from server.identity import hash_of
from server.slots import SlotsStatistics
from tests.support import canaries
from tests.support.process import HANGS_S
from tests.support.server import running_server
from tests.support.wire import WireSession, open_session, reason_in, refused, settled, spec, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(HANGS_S)]
TOKEN = canaries.TOKEN
DEBTOR = {
    "tenants.a.token_hashes": [hash_of(TOKEN)],
    "tenants.a.tokens_per_s": 1,
    "tenants.a.burst_tokens": 10,
}
AUTH = (("authorization", f"Bearer {TOKEN}"),)


class HeldTokenizer(ScriptedTokenizer):
    """Waits with every text that begins with ``held``; writes down what it was given."""

    def __init__(self) -> None:
        self.go = Event()
        self.seen: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.seen.append(text)
        if text.startswith("held"):
            assert self.go.wait(HANGS_S)
        return super().encode(text)


def tokenize(text: str) -> gen.TokenizeRequest:
    return gen.TokenizeRequest(prompt=types.Prompt(text=text))


@pytest.mark.parametrize("first", ["Tokenize", "Detokenize", "Generate too long"])
async def test_work_on_texts_counts_against_the_rate_of_a_tenant(first: str) -> None:
    tokenizer = HeldTokenizer()
    async with (
        running_server(DEBTOR, tokenizer=tokenizer) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        call = stub(channel)
        if first == "Tokenize":
            assert len((await call.Tokenize(tokenize("x" * 500), metadata=AUTH)).token_ids) == 500
        elif first == "Detokenize":
            request = gen.DetokenizeRequest(token_ids=[97] * 500)
            assert (await call.Detokenize(request, metadata=AUTH)).text == "a" * 500
        else:  # tokenised, and refused for it
            asked = gen.GenerateRequest(spec=spec("x" * 1000, max_tokens=4000))
            assert reason_in(await refused(call.Generate(asked, metadata=AUTH))) == "CONTEXT_EXCEEDED"
        tokenizer.seen.clear()
        calls: list[Any] = [
            call.Tokenize(tokenize("y"), metadata=AUTH),
            call.Detokenize(gen.DetokenizeRequest(token_ids=[1]), metadata=AUTH),
            call.Generate(gen.GenerateRequest(spec=spec("y")), metadata=AUTH),
        ]
        for refusal in calls:
            assert reason_in(await refused(refusal)) == "TENANT_QUOTA_EXCEEDED"
        assert tokenizer.seen == []


class Held(NamedTuple):
    """A server both of whose workers are busy with a text until the tokenizer lets them go."""

    tokenizer: HeldTokenizer
    turns: Callable[[], SlotsStatistics]
    channel: grpc.aio.Channel
    session: WireSession


@contextlib.asynccontextmanager
async def held_server() -> AsyncIterator[Held]:
    tokenizer = HeldTokenizer()
    async with (
        running_server(tokenizer=tokenizer) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        for name in ("held-0", "held-1"):
            await session.start(name, spec(name, level=-100))
        held = Held(tokenizer, lambda: app.backend.text.statistics().short, channel, session)
        await settled(lambda: held.turns().num_running == 2)
        yield held


async def test_the_most_urgent_text_is_next_and_a_cancelled_one_leaves() -> None:
    async with held_server() as (tokenizer, turns, channel, session):
        for name, level in (("late", 50), ("gone", 0), ("moved", 90), ("urgent", -50)):
            await session.start(name, spec(name, level=level))
        call = stub(channel).Tokenize(tokenize("left"))
        await settled(lambda: turns().num_waiting == 5)
        await session.cancel("gone")
        call.cancel()
        await session.reprioritize("moved", -90)
        end = await session.end_of("gone")
        await settled(lambda: turns().num_waiting == 3)
        tokenizer.go.set()
        await session.half_close()
        await session.to_the_end()
    for name in ("late", "moved", "urgent", "held-0", "held-1", "gone"):
        session.check(name)
    assert end.finished.reason == types.FINISH_REASON_CANCELLED
    assert set(tokenizer.seen) == {"held-0", "held-1", "late", "moved", "urgent"}
    assert tokenizer.seen.index("moved") < tokenizer.seen.index("late")


async def test_a_text_that_waits_longer_than_its_request_may_costs_the_request() -> None:
    async with held_server() as (tokenizer, turns, channel, session):
        late = spec("late", level=7, temperature=1.0)
        late.num_outputs = 2
        late.queue_timeout.FromMilliseconds(50)
        await session.start("late", late)
        session_end = await session.end_of("late")
        answer = await stub(channel).Generate(gen.GenerateRequest(spec=late))
        late.ClearField("queue_timeout")
        late.total_timeout.FromMilliseconds(50)
        frames = [f async for f in stub(channel).GenerateStream(gen.GenerateStreamRequest(spec=late))]
        assert turns().num_waiting == 0
        tokenizer.go.set()
        await session.half_close()
        await session.to_the_end()
    session.check("late")
    assert [f.WhichOneof("event") for f in frames] == ["accepted", "finished"]
    assert answer.accepted.level == frames[0].accepted.level == session.of("late")[0].accepted.level == 7
    ends = (session_end.finished, answer.finished, frames[1].finished)
    for end in (*ends, *(output.finished for output in answer.outputs)):
        assert end.reason == types.FINISH_REASON_TIME_LIMIT
        assert (end.usage.prompt_tokens, end.usage.output_tokens) == (0, 0)
    assert len(answer.outputs) == 2
    assert tokenizer.seen == ["held-0", "held-1"]


async def test_one_that_ends_while_it_waits_for_its_turn_lets_none_behind_it_pass_those_before() -> None:
    tokenizer = HeldTokenizer()
    async with (
        running_server(tokenizer=tokenizer) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        await session.start("first", spec("held"))  # on one of the two workers
        late = spec("late")
        late.queue_timeout.FromMilliseconds(50)
        await session.start("late", late)
        assert (await session.end_of("late")).finished.reason == types.FINISH_REASON_TIME_LIMIT
        await session.start("third", spec("third"))
        await settled(lambda: app.backend.text.statistics().short.num_done == 2)
        tokenizer.go.set()
        await session.half_close()
        await session.to_the_end()
    accepted = [f.request_id for f in session.frames if f.HasField("accepted")]
    assert accepted == ["late", "first", "third"]


async def test_what_no_context_holds_is_refused_before_it_is_tokenised() -> None:
    tokenizer = HeldTokenizer()
    async with running_server(tokenizer=tokenizer) as app, grpc.aio.insecure_channel(app.address) as channel:
        call, text = stub(channel), "1" * 3_900_000
        for refusal in (
            call.Tokenize(tokenize(text)),
            call.Generate(gen.GenerateRequest(spec=spec(text))),
            call.Detokenize(gen.DetokenizeRequest(token_ids=[1] * 10_000)),
        ):
            status = await refused(refusal)
            assert reason_in(status) in ("CONTEXT_EXCEEDED", "INVALID_REQUEST")
        assert tokenizer.seen == []
