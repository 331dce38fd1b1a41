"""What every server promises of a request's life, seen from a channel alone.

The promises are numbered as in docs/PROTOCOL.md; those that are not here are in
``test_session`` (2, 5, 10) and ``test_calls`` (13), or need a server whose
settings are known: ``tests/e2e/test_server_sessions.py`` (6, 8, 9) and
``tests/e2e/test_server_drain.py`` (11).
"""

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from tests.support.wire import (
    WireSession,
    fields_in,
    open_session,
    reason_in,
    refused,
    rpc_error,
    spec,
    status_in,
    stub,
)
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio


def with_credit(prompt: Any = "hello", credit_tokens: int = 0, **sampling: Any) -> types.GenerationSpec:
    message = spec(prompt, **sampling)
    message.credit_tokens = credit_tokens
    return message


async def others_go_on(session: WireSession, request_id: str = "witness", num_tokens: int = 20) -> None:
    """Let another request run to its end: what could have happened meanwhile has."""
    await session.start(request_id, spec("somebody else", max_tokens=num_tokens))
    await session.end_of(request_id)


async def tokens_of(channel: Any, message: types.GenerationSpec) -> list[int]:
    """What a spec gives when nothing disturbs it."""
    plain = types.GenerationSpec()
    plain.CopyFrom(message)
    for field in ("credit_tokens", "total_timeout", "queue_timeout"):
        plain.ClearField(field)
    return list((await stub(channel).Generate(gen.GenerateRequest(spec=plain))).token_ids)


async def read_tokens(session: WireSession, request_id: str, num_tokens: int) -> None:
    """Read until a request has so many."""
    while len(session.tokens(request_id)) < num_tokens:
        await session.next()


# 1: one terminal event, and nothing after it.


async def test_1_nothing_follows_the_terminal_event(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("good", spec(max_tokens=5))
        await session.start("bad", spec(temperature=-1))
        await session.end_of("good")
        await session.credit("good", 5)
        await session.pause("good")
        await session.cancel("good")
        await others_go_on(session)
    session.check("good")
    session.check("bad")
    assert session.kinds("bad") == ["failed"]


# 3: the same id and the same spec mean the same request.


async def test_3_the_same_start_again_replays_an_ended_request(channel: Any) -> None:
    message = spec(max_tokens=12, temperature=1.0)  # its seed is drawn once
    async with open_session(channel) as session:
        await session.start("a", message)
        await session.end_of("a")
        async with WireSession(channel, scope=session.scope) as other:
            await other.open()
            await other.start("a", message)
            await other.end_of("a")
            await other.start("a", spec(max_tokens=11))
            rejected = await other.event("command_rejected")
    assert other.of("a") == session.of("a")
    assert reason_in(rejected.status) == "DUPLICATE_REQUEST_ID"
    assert rejected.status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]


async def test_3_the_same_start_again_takes_up_a_running_request(channel: Any) -> None:
    message = with_credit(credit_tokens=3, max_tokens=9)
    async with open_session(channel) as session:
        await session.start("a", message)
        await read_tokens(session, "a", 3)
        await session.start("a", message)  # it is here already: nothing happens
        await others_go_on(session)
        async with WireSession(channel, scope=session.scope) as other:
            await other.open()
            await other.start("a", message)
            await other.credit("a", 6)
            await other.end_of("a")
            await others_go_on(session, "second witness")
    other.check("a")
    assert other.tokens("a") == await tokens_of(channel, message)
    assert session.tokens("a") == other.tokens("a")[:3], "a stream that lost its request gets no more of it"
    assert not [f for f in session.frames if f.HasField("command_rejected")]


async def test_3_a_refused_start_leaves_its_id_free(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec(temperature=-1))
        await session.end_of("a")
        await session.start("a", spec())
        assert (await session.end_of("a")).HasField("finished")


# 4: cancelling.


async def test_4_cancel_is_idempotent_and_ends_a_request_once(channel: Any) -> None:
    message = with_credit(credit_tokens=3, max_tokens=500)
    async with open_session(channel) as session:
        await session.start("a", message)
        await read_tokens(session, "a", 3)
        for _ in range(3):
            await session.cancel("a")
        end = await session.end_of("a")
        await session.cancel("a")
        await others_go_on(session)
    session.check("a")
    assert end.finished.reason == types.FINISH_REASON_CANCELLED
    assert end.finished.usage.output_tokens == 3
    assert not [f for f in session.frames if f.HasField("command_rejected")]


# 6: changing the priority.


async def test_6_too_many_changes_of_priority_are_rejected_and_say_when_to_come_back(channel: Any) -> None:
    num_changes = 60
    async with open_session(channel) as session:
        await session.start("a", with_credit(credit_tokens=0, level=0))
        await session.event("accepted", "a")
        for number in range(num_changes):
            await session.reprioritize("a", number % 20)
        num_changed, rejected = 0, []
        while num_changed + len(rejected) < num_changes:
            frame = await session.next()
            num_changed += frame.HasField("priority_changed")
            if frame.HasField("command_rejected"):
                rejected.append(frame.command_rejected)
        await session.cancel("a")
        await session.end_of("a")
    session.check("a")
    assert num_changed >= 1
    assert rejected
    retry = error_details_pb2.RetryInfo()
    for rejection in rejected:
        assert (rejection.command, reason_in(rejection.status)) == ("reprioritize", "SESSION_LIMIT")
        assert any(detail.Unpack(retry) for detail in rejection.status.details)
        assert 0 < retry.retry_delay.ToMilliseconds() <= 60_000


# 7: time.


async def test_7_a_total_budget_ends_a_request_with_what_it_has(channel: Any) -> None:
    message = with_credit(credit_tokens=3, max_tokens=500)
    message.total_timeout.FromMilliseconds(150)
    async with open_session(channel) as session:
        await session.start("a", message)
        finished = (await session.end_of("a")).finished
    session.check("a")
    assert finished.reason == types.FINISH_REASON_TIME_LIMIT
    assert len(session.tokens("a")) == finished.usage.output_tokens == 3


async def test_7_a_queue_budget_ends_only_what_never_started(channel: Any) -> None:
    async with open_session(channel) as session:
        for request_id, credit_tokens in (("waits", 0), ("runs", 1)):
            message = with_credit(credit_tokens=credit_tokens, max_tokens=2)
            message.queue_timeout.FromMilliseconds(150)
            await session.start(request_id, message)
        finished = (await session.end_of("waits")).finished
        await session.credit("runs", 1)
        ran = (await session.end_of("runs")).finished
    assert finished.reason == types.FINISH_REASON_TIME_LIMIT
    assert session.kinds("waits") == ["accepted", "finished"]
    assert (ran.reason, ran.usage.output_tokens) == (types.FINISH_REASON_LENGTH, 2)


async def test_7_a_budget_of_a_call_gives_its_output_so_far_and_its_deadline_a_status(channel: Any) -> None:
    limits = (await stub(channel).GetModel(gen.GetModelRequest())).limits
    message = spec([1, 2], max_tokens=limits.max_output_tokens - 1)
    message.total_timeout.CopyFrom(Duration(nanos=1))
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=message))
    assert answer.finished.reason == types.FINISH_REASON_TIME_LIMIT
    message.ClearField("total_timeout")
    call = stub(channel).Generate(gen.GenerateRequest(spec=message), timeout=0.001)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# 8: credit and pauses.


async def test_8_credit_is_what_a_request_may_produce(channel: Any) -> None:
    message = with_credit(credit_tokens=3, max_tokens=10)
    async with open_session(channel) as session:
        await session.start("a", message)
        await read_tokens(session, "a", 3)
        await others_go_on(session)
        assert len(session.tokens("a")) == 3
        await session.credit("a", 4)
        await read_tokens(session, "a", 7)
        await others_go_on(session, "second witness")
        assert len(session.tokens("a")) == 7
        await session.credit("a", 100)
        finished = (await session.end_of("a")).finished
    session.check("a")
    assert session.tokens("a") == await tokens_of(channel, message)
    assert finished.usage.parked.ToNanoseconds() > 0


async def test_8_credit_comes_from_the_start_else_the_session_else_the_server(channel: Any) -> None:
    async with open_session(channel) as session:
        window = session.frames[0].opened.default_credit_tokens
    assert window > 0
    async with WireSession(channel) as session:
        opened = await session.open(default_credit_tokens=2)
        await session.start("default", spec(max_tokens=10))
        await session.start("own", with_credit(credit_tokens=5, max_tokens=10))
        await read_tokens(session, "default", 2)
        await read_tokens(session, "own", 5)
        await others_go_on(session, num_tokens=2)
        counts = [len(session.tokens(request_id)) for request_id in ("default", "own")]
    assert opened.default_credit_tokens == 2
    assert counts == [2, 5]


async def test_8_only_when_neither_pause_nor_credit_holds_it_a_request_goes_on(channel: Any) -> None:
    message = with_credit(credit_tokens=2, max_tokens=8)
    async with open_session(channel) as session:
        await session.start("a", message)
        await read_tokens(session, "a", 2)
        await session.pause("a")
        await session.pause("a")
        await session.credit("a", 2)
        await others_go_on(session)
        assert len(session.tokens("a")) == 2, "it has credit and is paused"
        await session.unpause("a")
        await read_tokens(session, "a", 4)
        await session.pause("a")
        await session.unpause("a")
        await others_go_on(session, "second witness")
        assert len(session.tokens("a")) == 4, "it is not paused and has no credit"
        await session.credit("a", 4)
        await session.end_of("a")
    session.check("a")
    assert session.tokens("a") == await tokens_of(channel, message)


async def test_8_a_paused_request_can_be_cancelled_and_runs_out_of_time(channel: Any) -> None:
    async with open_session(channel) as session:
        for request_id in ("cancelled", "late"):
            message = spec(max_tokens=500)
            if request_id == "late":
                message.total_timeout.FromMilliseconds(200)
            await session.start(request_id, message)
            await session.pause(request_id)
        await session.cancel("cancelled")
        reasons = {}
        while len(reasons) < 2:
            frame = await session.next()
            if frame.HasField("finished"):
                reasons[frame.request_id] = frame.finished.reason
    assert reasons == {
        "cancelled": types.FINISH_REASON_CANCELLED,
        "late": types.FINISH_REASON_TIME_LIMIT,
    }


async def test_8_half_close_lets_everything_run_to_its_end(channel: Any) -> None:
    """Nobody can grant or unpause any more, so credit and pauses count for nothing."""
    async with open_session(channel) as session:
        await session.start("no credit", with_credit(credit_tokens=1, max_tokens=9))
        await session.start("paused", spec(max_tokens=9))
        await session.pause("paused")
        await session.half_close()
        await session.to_the_end()
    for request_id in ("no credit", "paused"):
        session.check(request_id)
        assert len(session.tokens(request_id)) == 9


async def test_8_a_call_has_no_credit_to_grant(channel: Any) -> None:
    status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=with_credit(credit_tokens=4))))
    assert (reason_in(status), fields_in(status)) == ("INVALID_REQUEST", ["credit_tokens"])


@pytest.mark.parametrize("command", ["cancel", "credit", "pause", "unpause", "resume"])
async def test_8_commands_for_unknown_requests_are_rejected_by_name(channel: Any, command: str) -> None:
    async with open_session(channel) as session:
        await getattr(session, command)("nobody", **({"after": 0} if command == "resume" else {}))
        rejected = await session.event("command_rejected")
        await others_go_on(session)
    assert (rejected.command, reason_in(rejected.status)) == (command, "UNKNOWN_REQUEST")


# 9: lost streams.


async def test_9_a_lost_request_is_resumed_without_gap_or_repetition(channel: Any) -> None:
    message = with_credit(credit_tokens=5, max_tokens=20)
    async with open_session(channel) as session:
        token = session.frames[0].opened.session_token
        await session.start("a", message)
        await read_tokens(session, "a", 5)
    assert token
    num_seen = len(session.of("a")) - 2  # the last two events were lost on the way
    async with WireSession(channel, scope=session.scope) as again:
        opened = await again.open(resume_session_token=token)
        await again.resume("a", num_seen)
        await again.credit("a", 20)
        await again.end_of("a")
    assert opened.session_token == token
    seen = session.of("a")[:num_seen] + again.of("a")
    assert [frame.sequence for frame in seen] == list(range(1, len(seen) + 1))
    assert again.of("a")[:2] == session.of("a")[num_seen:], "what is sent again is what was sent"
    assert [i for frame in seen for i in frame.delta.token_ids] == await tokens_of(channel, message)
    assert seen[-1].HasField("finished")


async def test_9_credit_counts_from_where_a_request_is_resumed(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", with_credit(credit_tokens=4, max_tokens=20))
        await read_tokens(session, "a", 4)
        await session.credit("a", 4)
        await read_tokens(session, "a", 8)
    token = session.frames[0].opened.session_token
    async with WireSession(channel, scope=session.scope) as again:
        await again.open(resume_session_token=token)
        await again.resume("a", session.of("a")[-1].sequence)
        await read_tokens(again, "a", 4)
        await others_go_on(again)
        assert len(again.tokens("a")) == 4, "what its start had, and no more"
        await again.cancel("a")
        await again.end_of("a")


async def test_9_what_was_acknowledged_or_never_sent_can_not_be_had(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", with_credit(credit_tokens=5, max_tokens=20))
        await read_tokens(session, "a", 5)
        last = session.of("a")[-1].sequence
        await session.credit("a", 0, acknowledged=last)
        await session.credit("a", 0, acknowledged=last + 1)
        rejected = await session.event("command_rejected")
        token = session.frames[0].opened.session_token
    assert fields_in(rejected.status) == ["acknowledged_sequence"]
    async with WireSession(channel, scope=session.scope) as again:
        await again.open(resume_session_token=token)
        for after in (0, last - 1, last + 1, 2**64 - 1):
            await again.resume("a", after)
            status = (await again.event("command_rejected")).status
            assert status.code == grpc.StatusCode.OUT_OF_RANGE.value[0]
            assert reason_in(status) == "RESUME_OUT_OF_RANGE"
        await again.resume("a", last)
        await again.resume("a", last)
        twice = await again.event("command_rejected")
        await again.cancel("a")
        end = await again.end_of("a")
    assert reason_in(twice.status) == "SESSION_STATE"
    assert end.finished.reason == types.FINISH_REASON_CANCELLED


async def test_9_an_end_that_was_lost_is_resumed(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec(max_tokens=4))
        await session.end_of("a")
    token = session.frames[0].opened.session_token
    async with WireSession(channel, scope=session.scope) as again:
        await again.open(resume_session_token=token)
        last = session.of("a")[-1].sequence
        await again.resume("a", last - 1)
        end = await again.end_of("a")
        await again.resume("a", last)  # nothing is left to send
        await others_go_on(again)
    assert end == session.of("a")[-1]
    assert len(again.of("a")) == 1


async def test_9_the_newer_of_two_streams_has_the_session(channel: Any) -> None:
    message = with_credit(credit_tokens=3, max_tokens=9)
    async with open_session(channel) as session:
        await session.start("a", message)
        await read_tokens(session, "a", 3)
        token = session.frames[0].opened.session_token
        async with WireSession(channel, scope=session.scope) as again:
            await again.open(resume_session_token=token)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.to_the_end()
            await again.resume("a", 0)
            await again.credit("a", 9)
            await again.end_of("a")
    assert reason_in(status_in(caught.value)) == "SESSION_STATE"
    again.check("a")
    assert again.tokens("a") == await tokens_of(channel, message)


async def test_9_without_the_token_nothing_can_be_resumed(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", with_credit(credit_tokens=1, max_tokens=9))
        await read_tokens(session, "a", 1)
        token = session.frames[0].opened.session_token
        async with WireSession(channel, scope=session.scope) as stranger:
            await stranger.send(open=gen.OpenCommand(resume_session_token=token[:-1]))
            assert reason_in((await stranger.event("command_rejected")).status) == "RESUME_OUT_OF_RANGE"
            await stranger.open()
            for command in ("resume", "cancel", "pause"):
                await getattr(stranger, command)("a", **({"after": 0} if command == "resume" else {}))
                assert reason_in((await stranger.event("command_rejected")).status) == "UNKNOWN_REQUEST"
        await session.credit("a", 9)
        assert (await session.end_of("a")).HasField("finished")


async def test_9_tokens_can_not_be_guessed_from_one_another(channel: Any) -> None:
    tokens = []
    for _ in range(20):
        async with open_session(channel) as session:
            tokens.append(session.frames[0].opened.session_token)
    assert len({token[:16] for token in tokens}) == 20
    assert min(map(len, tokens)) >= 32


# 13: a stream is committed by its first event alone.


async def test_13_a_session_that_is_refused_has_no_initial_metadata(channel: Any) -> None:
    async with WireSession(channel, [("x-priority", "no such class")]) as session:
        assert await session.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not tuple(await session.call.initial_metadata() or ())
        assert reason_in(status_in(await rpc_error(session.call))) == "INVALID_METADATA"


# 12: a full queue.


async def test_12_a_full_queue_refuses_equals_and_lets_the_more_urgent_displace(channel: Any) -> None:
    """Requests without credit wait as long as one likes, so any server's queue can be filled."""
    num_sessions, num_each = 5, 210
    sessions = [WireSession(channel) for _ in range(num_sessions)]
    waiting = with_credit(credit_tokens=0, level=100)
    try:
        refusals = []
        for session in sessions:
            await session.open()
            for number in range(num_each):
                await session.start(f"r{number}", waiting)
            for _ in range(num_each):
                frame = await session.until(lambda f: f.HasField("accepted") or f.HasField("failed"))
                refusals += [frame.failed] if frame.HasField("failed") else []
        if not refusals:
            pytest.skip(f"this server's queue holds {num_sessions * num_each} requests and more")
        status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec(level=100))))
        answer = await stub(channel).Generate(gen.GenerateRequest(spec=spec(level=99)))
        displaced = []
        for session in sessions:
            for number in range(num_each):
                await session.cancel(f"r{number}")
            await session.half_close()
            await session.to_the_end()
            failures = [f.failed for f in session.frames if f.HasField("failed")]
            displaced += [f for f in failures if reason_in(f.status) == "DISPLACED"]
    finally:
        for session in sessions:
            session.call.cancel()
    for refusal in (*(failed.status for failed in refusals), status):
        assert (refusal.code, reason_in(refusal)) == (8, "QUEUE_FULL")
        details = [detail.TypeName().rpartition(".")[2] for detail in refusal.details]
        assert details == ["ErrorInfo", "RetryInfo", "QuotaFailure"]
    assert all(failed.retryable for failed in refusals)
    assert answer.finished.usage.output_tokens == 8
    assert [failed.retryable for failed in displaced] == [True]
