"""The session of the Python client against a scripted server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from clients.python import (
    Accepted,
    CommandRejected,
    ConnectionLost,
    Delta,
    DuplicateRequestId,
    Finished,
    InvalidRequest,
    Overloaded,
    Preempted,
    PriorityChanged,
    QueueUpdate,
    Resumed,
    ResumeOutOfRange,
    Session,
    SessionClosed,
    Started,
    VorrangClient,
)
from clients.python import session as session_module
from tests.support.fake_server import FakeServer, FakeSession, SessionScript, abort, delta, finished, status
from vorrang.v1 import generation_pb2, types_pb2

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


@asynccontextmanager
async def connected(script: SessionScript, **options: Any) -> AsyncIterator[Session]:
    """A session with a server that plays ``script``."""
    async with (
        FakeServer(script) as server,
        VorrangClient(server.target) as client,
        client.session(**options) as session,
    ):
        yield session


REJECTED_UNKNOWN = generation_pb2.CommandRejectedEvent(
    status=status(grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST", "not alive"), command="reprioritize"
)


async def test_events_of_interleaved_requests_reach_their_own_streams_in_order():
    async def script(session: FakeSession) -> None:
        await session.open()
        a, b = await session.accept(level=-10), await session.accept(level=10)
        await session.send(b, started=generation_pb2.StartedEvent(prompt_tokens=3))
        await session.send(a, delta=delta(0, 1))
        await session.send(b, delta=delta(0, 100))
        await session.send(
            b,
            preempted=generation_pb2.PreemptedEvent(reason=types_pb2.PREEMPT_REASON_SEATS, count=1),
        )
        await session.send(a, delta=delta(1, 2))
        await session.send(a, finished=finished("STOP", output_tokens=2))
        await session.send(b, resumed=generation_pb2.ResumedEvent(recomputed_tokens=4))
        await session.send(b, delta=delta(1, 101))
        await session.send(b, finished=finished("LENGTH", output_tokens=2, preemptions=1))
        await session.receive_end()

    async with connected(script) as session:
        a = await session.start("a", priority="interactive", request_id="a")
        b = await session.start("b", priority=10, request_id="b")
        of_a = [event async for event in a]
        of_b = [event async for event in b]
        assert [e.token_ids for e in of_a if isinstance(e, Delta)] in ([(1,), (2,)], [(1, 2)])
        assert of_a[0] == Accepted(level=-10)
        assert isinstance(of_a[-1], Finished)
        assert of_a[-1].reason == "STOP"
        assert of_b[:2] == [Accepted(level=10), Started(3)]
        assert of_b[2:6] == [
            Delta("100 ", (100,), 0),
            Preempted("SEATS", 1),
            Resumed(4),
            Delta("101 ", (101,), 1),
        ]
        result = await b.result()
        assert (result.text, result.token_ids, result.usage.preemptions) == ("100 101 ", (100, 101), 1)
        assert result.accepted == Accepted(level=10)
        assert result.ttft_s is not None
        assert 0 <= result.ttft_s <= result.duration_s


async def test_what_the_caller_says_is_on_the_wire():
    seen: list[generation_pb2.StartCommand] = []

    async def script(session: FakeSession) -> None:
        command = await session.open(policy="priority", default_level=10, server_version="9")
        assert (command.client_name, command.revision) == ("tester", 1)
        assert command.default_priority.class_name == "batch"
        for _ in range(3):
            seen.append(await session.receive("start"))
            await session.send(seen[-1].request_id, finished=finished())

    async with connected(script, default_priority="batch", client_name="tester") as session:
        assert (session.info.policy, session.info.default_level) == ("priority", 10)
        await (await session.start("x", stop="END", temperature=0.0, seed=0, label="l")).result()
        await (await session.start(token_ids=[5, 6], priority="-3", queue_timeout_s=1.5)).result()
        turns = [{"role": "user", "content": "hi"}]
        await (await session.start(messages=turns, stop=["a", "b"], logit_bias={7: -1.0})).result()
    text, ids, chat = (s.spec for s in seen)
    assert text.prompt.text == "x"
    assert text.sampling.HasField("temperature")
    assert text.sampling.HasField("seed")
    assert not text.sampling.HasField("max_tokens")
    assert not text.HasField("priority")
    assert (list(text.sampling.stop_strings), text.label) == (["END"], "l")
    assert (list(ids.prompt.tokens.ids), ids.priority.level) == ([5, 6], -3)
    assert ids.queue_timeout.ToMilliseconds() == 1500
    assert chat.prompt.chat.messages[0].content == "hi"
    assert list(chat.sampling.stop_strings) == ["a", "b"]
    assert (chat.sampling.logit_bias[0].token_id, chat.sampling.logit_bias[0].bias) == (7, -1.0)
    assert len({s.request_id for s in seen}) == 3


async def test_cancel_sends_one_frame_and_ends_with_the_finish_the_server_gives():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.send(request_id, delta=delta(0, 1))
        assert (await session.receive("cancel")).request_id == request_id
        await session.send(request_id, finished=finished("CANCELLED", output_tokens=1))
        await session.receive_end()

    async with connected(script) as session:
        stream = await session.start("x")
        assert isinstance(await anext(stream), Accepted)
        await stream.cancel()
        result = await stream.result()
        assert (result.finish_reason, result.text) == ("CANCELLED", "1 ")
        await stream.cancel()  # Ended: nothing is sent, or `receive_end` would fail.


async def test_leaving_the_block_of_a_stream_early_cancels_the_request():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.receive("cancel")
        await session.send(request_id, finished=finished("CANCELLED"))
        await session.receive_end()

    async with connected(script) as session, await session.start("x") as stream:
        await anext(stream)


async def test_reprioritize_returns_the_acknowledgement():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept(level=10)
        command = await session.receive("reprioritize")
        assert (command.request_id, command.priority.class_name) == (request_id, "interactive")
        await session.send(
            request_id, priority_changed=generation_pb2.PriorityChangedEvent(level=-5, capped=True)
        )
        await session.send(request_id, finished=finished())

    async with connected(script) as session:
        stream = await session.start("x")
        assert await stream.reprioritize("interactive") == PriorityChanged(-5, capped=True)
        assert PriorityChanged(-5, capped=True) in [event async for event in stream]


async def test_reprioritize_of_an_unknown_id_raises_and_harms_nobody():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        command = await session.receive("reprioritize")
        await session.send(command.request_id, command_rejected=REJECTED_UNKNOWN)
        await session.send(request_id, finished=finished("STOP"))

    async with connected(script) as session:
        stream = await session.start("x")
        with pytest.raises(CommandRejected, match="not alive") as caught:
            await session.reprioritize("ghost", 0)
        assert (caught.value.reason, caught.value.code) == ("UNKNOWN_REQUEST", grpc.StatusCode.NOT_FOUND)
        assert (await stream.result()).finish_reason == "STOP"


async def test_reprioritize_after_the_end_is_answered_by_the_server():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.send(request_id, finished=finished())
        await session.receive("reprioritize")
        await session.send(request_id, command_rejected=REJECTED_UNKNOWN)

    async with connected(script) as session:
        stream = await session.start("x")
        await stream.result()
        with pytest.raises(CommandRejected):
            await stream.reprioritize(5)


@pytest.mark.parametrize("end", ["finished", "failed"])
async def test_a_reprioritize_that_the_end_overtook_is_not_waited_for(end: str):
    """The server takes the command, and the request ends in the step that was under way."""

    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.receive("reprioritize")
        if end == "finished":
            await session.send(request_id, finished=finished())
        else:
            refusal = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "DISPLACED")
            await session.send(request_id, failed=generation_pb2.FailedEvent(status=refusal))
        await session.receive_end()

    async with connected(script) as session:
        stream = await session.start("x")
        with pytest.raises(CommandRejected, match="has ended") as caught:
            await stream.reprioritize(5)
        assert caught.value.reason == "UNKNOWN_REQUEST"


async def test_reprioritize_gives_up_after_its_timeout_and_a_late_answer_is_not_taken_for_the_next():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.receive("reprioritize")
        await session.receive("reprioritize")
        for level in (1, 2):
            await session.send(request_id, priority_changed=generation_pb2.PriorityChangedEvent(level=level))
        await session.send(request_id, finished=finished())

    async with connected(script) as session:
        stream = await session.start("x")
        with pytest.raises(TimeoutError):
            await stream.reprioritize(1, timeout_s=0.01)
        assert (await stream.reprioritize(2)).level == 2


async def test_cancel_of_an_unknown_id_is_harmless():
    async def script(session: FakeSession) -> None:
        await session.open()
        command = await session.receive("cancel")
        rejected = generation_pb2.CommandRejectedEvent(
            status=status(grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST"), command="cancel"
        )
        await session.send(command.request_id, command_rejected=rejected)
        await session.send(await session.accept(), finished=finished("STOP"))

    async with connected(script) as session:
        await session.cancel("ghost")
        assert (await (await session.start("x")).result()).finish_reason == "STOP"


async def test_failed_raises_the_typed_error_with_usage_and_spares_the_others():
    async def script(session: FakeSession) -> None:
        await session.open()
        bad = (await session.receive("start")).request_id
        good = await session.accept()
        await session.send(
            bad,
            failed=generation_pb2.FailedEvent(
                status=status(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full"),
                retryable=True,
                usage=types_pb2.Usage(prompt_tokens=9),
            ),
        )
        await session.send(good, finished=finished("STOP"))

    async with connected(script) as session:
        bad = await session.start("x")
        good = await session.start("y")
        with pytest.raises(Overloaded, match="full") as caught:
            await bad.text()
        assert (caught.value.reason, caught.value.retryable) == ("QUEUE_FULL", True)
        assert caught.value.usage is not None
        assert caught.value.usage.prompt_tokens == 9
        with pytest.raises(Overloaded):  # Asked again, it says the same.
            await anext(bad)
        assert (await good.result()).finish_reason == "STOP"


@pytest.mark.parametrize("event", ["failed", "command_rejected"])
async def test_a_duplicate_id_refused_by_the_server_raises_from_the_iterator(event: str):
    refusal = status(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", "in use")

    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = (await session.receive("start")).request_id
        if event == "failed":
            await session.send(request_id, failed=generation_pb2.FailedEvent(status=refusal))
        else:
            rejected = generation_pb2.CommandRejectedEvent(status=refusal, command="start")
            await session.send(request_id, command_rejected=rejected)

    async with connected(script) as session:
        stream = await session.start("x", request_id="taken")
        with pytest.raises(DuplicateRequestId, match="in use"):
            await anext(stream)


async def test_an_id_alive_in_the_session_is_refused_without_asking_the_server():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.send(request_id, finished=finished("STOP"))
        await session.receive_end()

    async with connected(script) as session:
        stream = await session.start("x", request_id="one")
        with pytest.raises(DuplicateRequestId):
            await session.start("y", request_id="one")
        assert (await stream.result()).finish_reason == "STOP"


async def test_half_close_lets_running_requests_finish_and_refuses_commands():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.receive_end()
        await session.send(request_id, delta=delta(0, 1, 2))
        await session.send(request_id, finished=finished("LENGTH"))

    async with connected(script) as session:
        stream = await session.start("x")
        await session.close()
        with pytest.raises(SessionClosed):
            await session.start("y")
        with pytest.raises(SessionClosed):
            await stream.cancel()
        assert await stream.text() == "1 2 "


async def test_leaving_normally_waits_for_running_requests():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.receive_end()  # Only leaving half-closes here, so the rest happens while it waits.
        await session.send(request_id, delta=delta(0, 1))
        await session.send(request_id, finished=finished("LENGTH"))

    async with connected(script) as session:
        stream = await session.start("x")
    assert stream.ended
    assert await stream.text() == "1 "


async def test_leaving_normally_lets_the_server_end_the_stream():
    ended = asyncio.Event()

    async def script(session: FakeSession) -> None:
        await session.open()
        await session.receive_end()
        await session.send(go_away=generation_pb2.GoAwayEvent())
        await session.send(go_away=generation_pb2.GoAwayEvent())
        ended.set()

    async with connected(script):
        pass
    assert ended.is_set()


async def test_a_server_that_does_not_end_the_stream_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session_module, "_EOF_WAIT_S_MAX", 0.02)

    async def script(session: FakeSession) -> None:
        await session.open()
        await session.hold()

    async with FakeServer(script) as server, VorrangClient(server.target) as client:
        async with client.session():
            pass
        await server.cancelled.wait()


async def test_leaving_with_an_exception_cancels_the_call():
    async def script(session: FakeSession) -> None:
        await session.open()
        await session.accept()
        await session.hold()

    async with FakeServer(script) as server, VorrangClient(server.target) as client:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with client.session() as session:
                stream = await session.start("x")
                await anext(stream)
                raise ZeroDivisionError
        await server.cancelled.wait()
        with pytest.raises(ConnectionLost):
            await anext(stream)
        with pytest.raises(ConnectionLost):
            await session.start("y")


async def test_a_server_that_vanishes_leaves_nobody_waiting():
    async def script(session: FakeSession) -> None:
        await session.open()
        for _ in range(2):
            await session.send(await session.accept(), delta=delta(0, 1))
        await session.receive("reprioritize")
        await session.vanish()

    async with connected(script) as session:
        streams = [await session.start("x"), await session.start("y")]
        waiting = [asyncio.ensure_future(stream.result()) for stream in streams]
        acknowledgement = asyncio.ensure_future(streams[0].reprioritize(3))
        outcomes = await asyncio.gather(*waiting, acknowledgement, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 3
        assert len({id(outcome) for outcome in outcomes}) == 3
        with pytest.raises(ConnectionLost):
            await session.start("z")
        with pytest.raises(ConnectionLost):
            await session.cancel("z")


async def test_what_arrived_before_the_loss_can_still_be_read():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        await session.send(request_id, delta=delta(0, 1))
        await abort(session.context, grpc.StatusCode.UNAVAILABLE, "DRAINING", "shutting down")

    async with connected(script) as session:
        stream = await session.start("x")
        assert isinstance(await anext(stream), Accepted)
        assert await anext(stream) == Delta("1 ", (1,))
        with pytest.raises(ConnectionLost, match="shutting down") as caught:
            await anext(stream)
        assert caught.value.reason == "DRAINING"


async def test_a_server_that_ends_the_stream_politely_with_requests_alive_is_a_loss_too():
    async def script(session: FakeSession) -> None:
        await session.open()
        await session.accept()

    async with connected(script) as session:
        stream = await session.start("x")
        with pytest.raises(ConnectionLost, match="ended the session"):
            await stream.result()


async def test_a_refused_session_raises_what_the_server_said():
    async def script(session: FakeSession) -> None:
        await session.receive("open")
        await abort(session.context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_METADATA", "bad x-priority")

    async with FakeServer(script) as server, VorrangClient(server.target) as client:
        with pytest.raises(InvalidRequest, match="bad x-priority"):
            async with client.session():
                pytest.fail("the session must not open")


async def test_open_without_an_answer_gives_up_and_cancels_the_call():
    async def script(session: FakeSession) -> None:
        await session.receive("open")
        await session.hold()

    async with FakeServer(script) as server, VorrangClient(server.target) as client:
        with pytest.raises(ConnectionLost, match="no answer to open"):
            async with client.session(open_timeout_s=0.05):
                pytest.fail("the session must not open")
        await server.cancelled.wait()


async def test_no_server_is_a_connection_loss():
    async with FakeServer() as server:
        target = server.target
    async with VorrangClient(target) as client:
        with pytest.raises(ConnectionLost):
            async with client.session():
                pytest.fail("the session must not open")


async def test_unknown_events_and_events_of_unknown_requests_are_ignored():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept()
        # Field 99 stands for an event of a later version; the frame's oneof is then empty here.
        later = generation_pb2.SessionResponse.FromString(
            generation_pb2.SessionResponse(request_id=request_id).SerializeToString() + b"\x9a\x06\x00"
        )
        await session.context.write(later)
        await session.send("ghost", delta=delta(0, 1))
        await session.send("ghost", finished=finished())
        await session.send(go_away=generation_pb2.GoAwayEvent(time_left={"seconds": 3}))
        await session.send(request_id, finished=finished("STOP"))

    async with connected(script) as session:
        stream = await session.start("x")
        events = [event async for event in stream]
        assert [type(event) for event in events] == [Accepted, Finished]
        assert session.going_away_s == 3.0


async def test_a_slow_consumer_gets_deltas_in_one_piece_and_the_latest_queue_position():
    num_tokens = 2000

    async def script(session: FakeSession) -> None:
        await session.open()
        slow, fast = await session.accept(), await session.accept()
        for position in (9, 8, 7):
            await session.send(slow, queue_update=generation_pb2.QueueUpdateEvent(queue_position=position))
        for index in range(num_tokens):
            await session.send(slow, delta=delta(index, index))
        await session.send(slow, preempted=generation_pb2.PreemptedEvent(count=1))
        await session.send(slow, delta=delta(num_tokens, 7))
        await session.send(slow, finished=finished())
        await session.send(fast, finished=finished())

    async with connected(script) as session:
        slow, fast = await session.start("x"), await session.start("y")
        await fast.result()  # By then everything of `slow` has arrived and none of it was read.
        events = [event async for event in slow]
    assert [type(e) for e in events] == [Accepted, QueueUpdate, Delta, Preempted, Delta, Finished]
    assert events[1] == QueueUpdate(7)
    assert events[2] == Delta(
        "".join(f"{i} " for i in range(num_tokens)), tuple(range(num_tokens)), first_token_index=0
    )
    assert events[4] == Delta("7 ", (7,), first_token_index=num_tokens)


async def test_a_full_outbox_does_not_outlive_the_stream():
    async def script(session: FakeSession) -> None:
        await session.open()
        await asyncio.sleep(0)
        await session.vanish()

    async with connected(script) as session:
        big = "x" * 100_000
        starts = [session.start(big) for _ in range(300)]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        for outcome in outcomes:
            if not isinstance(outcome, ConnectionLost):
                assert not isinstance(outcome, BaseException)
                with pytest.raises(ConnectionLost):
                    await outcome.result()
        assert any(isinstance(outcome, ConnectionLost) for outcome in outcomes)
        assert session.alive == 0


async def test_credit_pause_and_resume_are_on_the_wire():
    async def script(session: FakeSession) -> None:
        command = await session.open(session_token="t", default_credit_tokens=4)
        assert (command.default_credit_tokens, command.resume_session_token) == (4, "t")
        resume = await session.receive("resume")
        assert (resume.request_id, resume.after_sequence) == ("r", 7)
        credit = await session.receive("credit")
        assert (credit.request_id, credit.tokens) == ("r", 4), "whatever its start had, it has the window now"
        assert not credit.HasField("acknowledged_sequence")
        await session.send("r", sequence=8, delta=delta(5, 1))
        await session.send("r", sequence=9, delta=delta(6, 2))
        credit = await session.receive("credit")
        assert (credit.tokens, credit.acknowledged_sequence) == (2, 9)
        assert (await session.receive("pause")).request_id == "r"
        assert (await session.receive("unpause")).request_id == "r"
        by_hand = await session.receive("credit")
        assert (by_hand.tokens, by_hand.HasField("acknowledged_sequence")) == (3, False)
        await session.send("r", sequence=10, finished=finished())
        await session.receive_end()

    async with connected(script, default_credit_tokens=4, resume_token="t") as session:
        stream = await session.resume("r", 7)
        num_tokens = 0
        while num_tokens < 2:
            num_tokens += len((await anext(stream)).token_ids)
        assert stream.last_sequence == 9
        await stream.pause()
        await stream.unpause()
        await session.credit("r", 3)
        result = await stream.result()
    assert result.token_ids == (1, 2)
    assert stream.last_sequence == 10


async def test_a_resume_that_is_rejected_fails_its_stream_alone():
    async def script(session: FakeSession) -> None:
        await session.open()
        resume = await session.receive("resume")
        rejection = generation_pb2.CommandRejectedEvent(
            status=status(grpc.StatusCode.OUT_OF_RANGE, "RESUME_OUT_OF_RANGE"), command="resume"
        )
        await session.send(resume.request_id, command_rejected=rejection)
        await session.send(await session.accept(), finished=finished())
        await session.receive_end()

    async with connected(script) as session:
        with pytest.raises(ResumeOutOfRange):
            await (await session.resume("r")).result()
        await (await session.start("x")).result()


async def test_nothing_is_granted_when_the_caller_keeps_credit_or_the_server_has_none():
    async def script(session: FakeSession) -> None:
        command = await session.open()
        assert not command.HasField("default_credit_tokens")
        request_id = (await session.receive("start")).request_id
        await session.send(request_id, delta=delta(0, *range(50)))
        await session.send(request_id, finished=finished())
        await session.receive_end()

    for options in ({}, {"keep_credit": False}):
        async with connected(script, **options) as session:
            await (await session.start("x")).result()
