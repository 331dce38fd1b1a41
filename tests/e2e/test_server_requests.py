"""What a server does that needs a known model and known seats: order, limits, faults, clients that leave."""

import asyncio
from collections.abc import Sequence
from threading import Event
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.errors import InternalError
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer, expected_output
from engine.scheduler.plan import Plan, StepResult
from tests.support.server import HeldRunner, running_server
from tests.support.wire import (
    open_session,
    reason_in,
    refused,
    settled,
    spec,
    status_in,
    stub,
)
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio

ONE_SEAT = {"scheduler.max_running_requests": 1}


async def test_tokens_are_those_of_the_model_with_and_without_a_seed() -> None:
    async with (
        running_server() as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        await session.start("greedy", spec([1, 2, 3], max_tokens=40))
        await session.start("seeded", spec([1, 2, 3], max_tokens=40, temperature=0.7, seed=2**64 - 1))
        await session.half_close()
        await session.to_the_end()
    assert session.tokens("greedy") == expected_output([1, 2, 3], 40)
    assert session.tokens("seeded") == expected_output([1, 2, 3], 40, 2**64 - 1)


async def test_reprioritize_overtakes_and_the_overtaken_stream_goes_on_unchanged() -> None:
    runner = HeldRunner(64, 16)
    async with (
        running_server(ONE_SEAT, runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("first", spec([1], max_tokens=30))
        await session.event("started", "first")
        await session.start("second", spec([2], max_tokens=5))
        accepted = await session.event("accepted", "second")
        await session.reprioritize("second", -20)
        await session.event("priority_changed", "second")
        runner.release()
        await session.end_of("first")
    order = [frame.request_id for frame in session.frames if frame.HasField("finished")]
    assert order == ["second", "first"]
    assert accepted.queue_position == 0
    for request_id, prompt, size in (("first", [1], 30), ("second", [2], 5)):
        session.check(request_id)
        assert session.tokens(request_id) == expected_output(prompt, size)
    kinds = session.kinds("first")
    assert kinds.index("preempted") < kinds.index("resumed")
    preempted = next(frame.preempted for frame in session.of("first") if frame.HasField("preempted"))
    assert (preempted.reason, preempted.count) == (types.PREEMPT_REASON_SEATS, 1)
    assert session.of("first")[-1].finished.usage.preemptions == 1
    changed = next(
        frame.priority_changed for frame in session.of("second") if frame.HasField("priority_changed")
    )
    assert (changed.level, changed.priority_ignored) == (-20, False)


async def test_first_come_first_served_says_that_it_ignores_priority() -> None:
    settings = ONE_SEAT | {"scheduler.policy": "fcfs"}
    runner = HeldRunner(64, 16)
    async with (
        running_server(settings, runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("first", spec([1], level=10))
        await session.event("started", "first")
        await session.start("second", spec([2], level=-10))
        accepted = await session.event("accepted", "second")
        await session.reprioritize("second", -50)
        await settled(lambda: bool(app.backend.engine._commands))
        runner.release()
        changed = await session.event("priority_changed", "second")
        await session.half_close()
        await session.to_the_end()
    assert "preempted" not in session.kinds("first")
    assert accepted.priority_ignored
    assert changed.priority_ignored


class SlowTokenizer(ScriptedTokenizer):
    """Takes as long as a test likes over texts that begin with "slow"."""

    def __init__(self) -> None:
        self.go = Event()
        self.begun = Event()

    def encode(self, text: str) -> list[int]:
        if text.startswith("slow"):
            self.begun.set()
            assert self.go.wait(30)
        return super().encode(text)


async def test_slow_tokenising_delays_its_own_request_alone_and_commands_wait_for_it() -> None:
    tokenizer = SlowTokenizer()
    async with (
        running_server(tokenizer=tokenizer) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        await session.start("slow", spec("slow", level=1, max_tokens=500))
        await session.reprioritize("slow", 5)
        await session.cancel("slow")
        await session.start("quick", spec("quick"))
        await session.end_of("quick")
        assert tokenizer.begun.is_set()
        assert session.of("slow") == []
        await session.start("slow")
        rejected = await session.event("command_rejected")
        tokenizer.go.set()
        end = await session.end_of("slow")
    assert reason_in(rejected.status) == "DUPLICATE_REQUEST_ID"
    session.check("slow")
    assert session.of("slow")[0].accepted.level == 1
    assert end.finished.reason == types.FINISH_REASON_CANCELLED


async def test_starts_of_one_level_keep_their_order_though_the_first_is_slow_to_tokenise() -> None:
    tokenizer, runner = SlowTokenizer(), HeldRunner(64, 16)
    async with (
        running_server(ONE_SEAT, runner, tokenizer) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        await session.start("one", spec("slow"))
        await session.start("two", spec([1]))
        await session.start("urgent", spec([1], level=-1))
        await session.end_of("urgent")
        assert session.of("two") == []
        tokenizer.go.set()
        await session.end_of("two")
    order = [frame.request_id for frame in session.frames if frame.HasField("accepted")]
    assert order == ["urgent", "one", "two"]


async def test_a_client_that_leaves_while_its_prompt_is_tokenised_leaves_nothing() -> None:
    tokenizer = SlowTokenizer()
    async with running_server(tokenizer=tokenizer) as app, grpc.aio.insecure_channel(app.address) as channel:
        async with open_session(channel) as session:
            await session.start("slow", spec("slow"))
            await settled(tokenizer.begun.is_set)
        await settled(lambda: app.statistics().num_calls == 0)
        tokenizer.go.set()
        assert app.backend.engine.statistics().num_alive == 0


async def test_a_session_holds_as_many_requests_as_it_may() -> None:
    runner = HeldRunner(64, 16)
    settings = {"server.max_session_requests": 3}
    async with (
        running_server(settings, runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
        open_session(channel) as other,
    ):
        runner.hold()
        for number in range(4):
            await session.start(f"r{number}")
        failed = (await session.end_of("r3")).failed
        await other.start("r0")  # another session has places of its own
        await other.event("accepted", "r0")
        runner.release()
        await session.end_of("r0")
        await session.start("r4")  # a place is free again
        await session.end_of("r4")
        await other.end_of("r0")
    assert failed.retryable
    assert (failed.status.code, reason_in(failed.status)) == (8, "SESSION_LIMIT")
    assert session.kinds("r4")[-1] == "finished"


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    runner = HeldRunner(64, 16)
    settings = ONE_SEAT | {"scheduler.max_waiting_requests": 1}
    async with (
        running_server(settings, runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("runs")
        await session.event("started", "runs")
        await session.start("waits")
        await session.event("accepted", "waits")
        await session.start("too much")
        failed = (await session.end_of("too much")).failed
        status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec())))
        runner.release()
        await session.end_of("waits")
    assert failed.retryable
    assert session.of("too much")[0].sequence == 1
    for refusal in (failed.status, status):
        assert (refusal.code, reason_in(refusal)) == (8, "QUEUE_FULL")
        assert len(refusal.details) == 3


async def test_a_reader_that_is_too_slow_costs_itself_alone() -> None:
    """Twenty tokens wait, then it is parked; what waits too long for its reader fails."""
    settings = {"engine.max_buffered_tokens": 20, "session.slow_client_timeout_s": 0.1}
    async with (
        running_server(settings) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as stalled,
    ):
        (served,) = app.backend.sessions
        blocked = asyncio.Event()
        _block_writes(served, blocked, "slow")
        async with open_session(channel) as session:
            await stalled.start("slow", spec([1], max_tokens=1000))
            await session.start("quick", spec([2], max_tokens=300))
            await session.end_of("quick")
            await settled(lambda: app.backend.engine.statistics().num_alive == 0)
            blocked.set()
            failed = (await stalled.end_of("slow")).failed
    session.check("quick")
    stalled.check("slow")
    assert reason_in(failed.status) == "SLOW_CONSUMER"
    tokens = stalled.tokens("slow")
    assert tokens == expected_output([1], len(tokens))
    assert failed.usage.output_tokens == len(tokens)
    assert 20 <= len(tokens) <= 21, "the first of them was written at once"
    assert failed.usage.parked.ToMilliseconds() >= 50


def _block_writes(served: Any, until: asyncio.Event, request_id: str) -> None:
    """Let writes of a request's events wait, as they do when the transport is full."""
    write = served._writer._write

    async def slow_write(frame: bytes) -> None:
        if gen.SessionResponse.FromString(frame).request_id.endswith(f"/{request_id}"):
            await until.wait()
        await write(frame)

    served._writer._write = slow_write


async def test_a_server_that_plans_ahead_gives_the_same_tokens() -> None:
    settings = {"engine.pipeline_depth": 1, "scheduler.max_running_requests": 3}
    async with (
        running_server(settings) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        assert app.backend.engine.pipeline_depth == 1
        for i in range(8):
            await session.start(f"r{i}", spec([1, 2, i], max_tokens=10 + i))
        await session.half_close()
        await session.to_the_end()
        for i in range(8):
            session.check(f"r{i}")
            assert session.tokens(f"r{i}") == expected_output([1, 2, i], 10 + i)


async def test_events_of_the_most_urgent_request_are_written_first() -> None:
    async with (
        running_server() as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        (served,) = app.backend.sessions
        blocked = asyncio.Event()
        _block_writes(served, blocked, "first")
        await session.start("first", spec([1], level=-100))
        for number, level in enumerate((10, 0, -10, 5, 0)):
            await session.start(f"{level} {number}", spec([1], level=level))
        await session.half_close()
        await settled(lambda: app.backend.registry.num_requests == 6)
        await settled(lambda: app.backend.engine.statistics().num_alive == 0)
        blocked.set()
        await session.to_the_end()
    order = [frame.request_id.split()[0] for frame in session.frames if frame.HasField("finished")]
    assert order == ["first", "-10", "0", "0", "5", "10"]


async def test_max_tokens_that_are_not_given_are_what_the_context_leaves() -> None:
    settings = {"scheduler.max_context_tokens": 64}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        answer = await stub(channel).Generate(gen.GenerateRequest(spec=spec([1] * 60, max_tokens=None)))
    assert list(answer.token_ids) == expected_output([1] * 60, 4)
    assert answer.finished.reason == types.FINISH_REASON_LENGTH


class FaultyRunner(ScriptedRunner):
    """Fails what a test tells it to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fail_steps = 0
        self.fail_prompts: Sequence[int] = ()
        self.lie = False

    async def execute(self, plan: Plan) -> StepResult:
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("secret of the kernel")
        result = await super().execute(plan)
        if self.lie:
            return StepResult({})
        bad = {g.request_id for g in plan.grants if g.start == 0 and g.token_ids[0] in self.fail_prompts}
        sampled = {key: value for key, value in result.sampled.items() if key not in bad}
        return StepResult(sampled, {key: InternalError("1234") for key in bad})


async def test_a_poisoned_request_fails_alone() -> None:
    runner = FaultyRunner(64, 16)
    runner.fail_prompts = [66]
    async with (
        running_server(runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        await session.start("good", spec([1], max_tokens=30))
        await session.start("bad", spec([66], max_tokens=30))
        await session.half_close()
        await session.to_the_end()
    for request_id in ("good", "bad"):
        session.check(request_id)
    assert session.tokens("good") == expected_output([1], 30)
    failed = session.of("bad")[-1].failed
    assert (failed.status.code, reason_in(failed.status)) == (13, "INTERNAL")


async def test_a_step_that_always_fails_ends_its_request_with_an_opaque_error() -> None:
    runner = FaultyRunner(64, 16)
    async with running_server(runner=runner) as app, grpc.aio.insecure_channel(app.address) as channel:
        runner.fail_steps = 2
        status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec())))
        assert reason_in(status) == "INTERNAL"
        assert "secret" not in str(status)
        runner.fail_steps = 1
        answer = await stub(channel).Generate(gen.GenerateRequest(spec=spec([1])))
        assert list(answer.token_ids) == expected_output([1], 8)


@pytest.mark.parametrize("kind", ["stream", "unary"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_call_that_is_given_up_is_cancelled_in_the_engine(kind: str, how: str) -> None:
    runner = HeldRunner(64, 16)
    async with running_server(runner=runner) as app, grpc.aio.insecure_channel(app.address) as channel:
        runner.hold()
        timeout_s = 0.05 if how == "deadline" else None
        if kind == "stream":
            request = gen.GenerateStreamRequest(spec=spec(max_tokens=500))
            call = stub(channel).GenerateStream(request, timeout=timeout_s)
        else:
            call = stub(channel).Generate(gen.GenerateRequest(spec=spec(max_tokens=500)), timeout=timeout_s)
        await runner.held.wait()
        if how == "cancel":
            call.cancel()
        await settled(lambda: app.statistics().num_calls == 0)
        runner.release()
        await settled(lambda: app.backend.engine.statistics().num_alive == 0)
        expected = grpc.StatusCode.DEADLINE_EXCEEDED if how == "deadline" else grpc.StatusCode.CANCELLED
        assert await call.code() is expected
        statistics = app.backend.engine.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks
        assert statistics.num_steps <= 1


async def test_initial_metadata_comes_with_acceptance_before_any_token() -> None:
    runner = HeldRunner(64, 16)
    async with running_server(runner=runner) as app, grpc.aio.insecure_channel(app.address) as channel:
        runner.hold()
        call = stub(channel).GenerateStream(gen.GenerateStreamRequest(spec=spec()))
        await call.initial_metadata()
        assert app.backend.engine.statistics().num_steps == 0
        runner.release()
        assert [event.WhichOneof("event") async for event in call][-1] == "finished"


async def test_a_message_over_the_limit_ends_the_stream_and_nothing_else() -> None:
    settings = {"server.max_frame_bytes": 4096}
    async with (
        running_server(settings) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
        open_session(channel) as other,
    ):
        await session.start("large", spec("x" * 5000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.to_the_end()
        await other.start("a")
        assert (await other.end_of("a")).HasField("finished")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_served_name_replaces_the_models_own() -> None:
    async with (
        running_server({"model.name": "mine"}) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        assert (await stub(channel).GetModel(gen.GetModelRequest())).name == "mine"
        message = spec()
        message.model = "scripted"
        status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=message)))
        message.model = "mine"
        await stub(channel).Generate(gen.GenerateRequest(spec=message))
    assert reason_in(status) == "UNKNOWN_MODEL"


async def test_bad_frames_end_a_session_and_free_what_it_held() -> None:
    runner = HeldRunner(64, 16)
    async with (
        running_server({"server.max_bad_frames": 2}, runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("a", spec(max_tokens=500))
        await session.event("started", "a")
        await session.send_raw(b"\xff")
        await session.send_raw(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.to_the_end()
        runner.release()
        await settled(lambda: app.backend.engine.statistics().num_alive == 0)
    assert reason_in(status_in(caught.value)) == "MALFORMED_FRAME"
