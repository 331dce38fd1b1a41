"""How a session of the Python client finds a lost connection again, against a scripted server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from clients.python import (
    Accepted,
    AccessDenied,
    CommandRejected,
    ConnectionLost,
    Delta,
    Finished,
    Overloaded,
    PriorityChanged,
    RequestFailed,
    ResumeOutOfRange,
    ServerUnavailable,
    Session,
    SessionClosed,
    VorrangClient,
)
from tests.support.fake_server import FakeServer, FakeSession, SessionScript, abort, delta, finished, status
from tests.support.wire import settled
from vorrang.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


@asynccontextmanager
async def connected(*scripts: SessionScript, **options: Any) -> AsyncIterator[Session]:
    """A session with a server that plays one script after the other, one a stream."""
    waiting = list(scripts)

    async def script(session: FakeSession) -> None:
        assert waiting, "one stream too many"
        await waiting.pop(0)(session)

    async with (
        FakeServer(script) as server,
        VorrangClient(server.target) as client,
        client.session(**options) as session,
    ):
        yield session
    assert not waiting, "one stream too few"


async def break_off(session: FakeSession, reason: str = "") -> None:
    """End the stream as a broken connection does; with a reason, as the server does."""
    await abort(session.context, grpc.StatusCode.UNAVAILABLE, reason, "broken")


async def opened(session: FakeSession, token: str = "t", **fields: Any) -> None:
    """Answer ``open``, which must name the session of the token."""
    command = await session.open(session_token="t", default_credit_tokens=8, **fields)
    assert command.resume_session_token == token


async def first_stream(session: FakeSession) -> None:
    """One request "r", of which two events arrive."""
    await opened(session, "")
    start = await session.receive("start")
    await session.send(start.request_id, sequence=1, accepted=pb.AcceptedEvent(level=10))
    await session.send(start.request_id, sequence=2, delta=delta(0, 1, 2, 3))


async def test_requests_go_on_after_what_arrived_and_unanswered_starts_are_said_again():
    starts: list[pb.StartCommand] = []

    async def first(session: FakeSession) -> None:
        await first_stream(session)
        starts.append(await session.receive("start"))
        await break_off(session)

    async def second(session: FakeSession) -> None:
        await opened(session)
        resume = await session.receive("resume")
        assert (resume.request_id, resume.after_sequence) == ("r", 2)
        starts.append(await session.receive("start"))
        # What had arrived comes again from a careless server, and is passed over.
        await session.send("r", sequence=2, delta=delta(0, 1, 2, 3))
        await session.send("r", sequence=3, delta=delta(3, 4))
        await session.send("r", sequence=4, finished=finished())
        await session.send("new", sequence=1, accepted=pb.AcceptedEvent())
        await session.send("new", sequence=2, finished=finished("STOP"))
        await session.receive_end()

    async with connected(first, second) as session:
        one = await session.start("x", request_id="r")
        two = await session.start("y", request_id="new", seed=5)
        assert (await one.result()).token_ids == (1, 2, 3, 4)
        assert (await two.result()).finish_reason == "STOP"
        assert session.connected
    assert starts[0] == starts[1]
    assert one.last_sequence == 4


async def test_a_stream_is_lost_as_often_as_it_likes_and_half_closed_again():
    async def another(session: FakeSession) -> None:
        await opened(session)
        assert (await session.receive("resume")).after_sequence == 2
        await session.receive_end()
        await break_off(session)

    async def last(session: FakeSession) -> None:
        await opened(session)
        await session.receive("resume")
        await session.receive_end()
        await session.send("r", sequence=3, finished=finished())

    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await session.receive_end()
        await break_off(session)

    async with connected(first, another, another, last) as session:
        stream = await session.start("x", request_id="r")
        await session.close()
        assert (await stream.result()).token_ids == (1, 2, 3)
        with pytest.raises(SessionClosed):
            await session.start("y")


async def test_credit_counts_anew_from_what_arrived_and_what_waits_is_paid_back_first():
    async def first(session: FakeSession) -> None:
        await opened(session, "")
        await session.receive("start")
        await session.send("r", sequence=1, delta=delta(0, *range(6)))
        await break_off(session)

    async def second(session: FakeSession) -> None:
        await opened(session)
        await session.receive("resume")  # the server grants 8 by itself, and 6 wait to be read
        await session.send("r", sequence=2, preempted=pb.PreemptedEvent(count=1))
        await session.send("r", sequence=3, delta=delta(6, *range(8)))
        credit = await session.receive("credit")
        assert (credit.tokens, credit.acknowledged_sequence) == (8, 3)
        await session.send("r", sequence=4, finished=finished())
        await session.receive_end()

    async with connected(first, second) as session:
        stream = await session.start("x", request_id="r")
        await settled(lambda: len(stream._buffer) == 3)  # nothing is read before the resumption
        assert len((await stream.result()).token_ids) == 14


async def test_credit_by_hand_is_not_lost():
    async def first(session: FakeSession) -> None:
        await opened(session, "")
        await session.receive("start")
        assert (await session.receive("credit")).tokens == 10
        await session.send("r", sequence=1, delta=delta(0, *range(5)))
        await break_off(session)

    async def second(session: FakeSession) -> None:
        await opened(session)
        await session.receive("resume")
        # 4 at the start and 10 by hand make 14; 5 have arrived and 4 come by themselves.
        assert (await session.receive("credit")).tokens == 5
        await session.send("r", sequence=2, finished=finished())
        await session.receive_end()

    async with connected(first, second, keep_credit=False) as session:
        stream = await session.start("x", request_id="r", credit_tokens=4)
        await session.credit("r", 10)
        await stream.result()


async def test_what_was_ordered_in_the_gap_is_said_on_the_next_stream():
    gap = asyncio.Event()

    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await session.receive("start")
        await break_off(session)

    async def second(session: FakeSession) -> None:
        await gap.wait()
        await opened(session)
        for request_id in ("r", "s"):
            begin = await session.receive("resume" if request_id == "r" else "start")
            assert begin.request_id == request_id
            if request_id == "r":
                assert (await session.receive("pause")).request_id == "r"
            assert (await session.receive("cancel")).request_id == request_id
            sequence = 3 if request_id == "r" else 1
            await session.send(request_id, sequence=sequence, finished=finished("CANCELLED"))
        assert (await session.receive("cancel")).request_id == "elsewhere"
        assert (await session.receive("start")).request_id == "late"
        await session.send("late", sequence=1, finished=finished("STOP"))
        await session.receive_end()

    async with connected(first, second) as session:
        one = await session.start("x", request_id="r")
        two = await session.start("y", request_id="s")
        assert isinstance(await anext(one), Accepted)
        await settled(lambda: not session.connected)
        await one.pause()
        await one.cancel()
        await two.cancel()
        elsewhere = asyncio.ensure_future(session.cancel("elsewhere"))
        late = asyncio.ensure_future(session.start("z", request_id="late"))
        given_up = asyncio.ensure_future(session.start("z", request_id="given up"))
        await asyncio.sleep(0)
        given_up.cancel()
        gap.set()
        assert (await one.result()).finish_reason == "CANCELLED"
        assert (await two.result()).finish_reason == "CANCELLED"
        assert (await (await late).result()).finish_reason == "STOP"
        await elsewhere


async def test_a_change_of_priority_outlives_the_loss_and_takes_no_answer_that_is_another_ones():
    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await session.receive("reprioritize")
        await break_off(session)  # after it was obeyed

    async def second(session: FakeSession) -> None:
        await opened(session)
        await session.receive("resume")
        await session.send("r", sequence=3, priority_changed=pb.PriorityChangedEvent(level=-10))
        assert (await session.receive("reprioritize")).priority.class_name == "interactive"
        assert (await session.receive("reprioritize")).priority.level == 7
        await session.send("r", sequence=4, priority_changed=pb.PriorityChangedEvent(level=-10))
        await session.send("r", sequence=5, priority_changed=pb.PriorityChangedEvent(level=7))
        await session.send("r", sequence=6, finished=finished())
        await session.receive_end()

    async with connected(first, second) as session:
        stream = await session.start("x", request_id="r")
        assert await stream.reprioritize("interactive") == PriorityChanged(-10)
        assert await stream.reprioritize(7) == PriorityChanged(7)
        assert [e.level for e in [e async for e in stream] if isinstance(e, PriorityChanged)] == [-10, -10, 7]


@pytest.mark.parametrize("was_obeyed", [True, False])
async def test_a_repeated_change_that_comes_too_late_is_answered_by_what_became_of_the_first(
    was_obeyed: bool,
):
    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await session.receive("reprioritize")
        await break_off(session)

    async def second(session: FakeSession) -> None:
        await opened(session)
        await session.receive("resume")
        await session.receive("reprioritize")
        rejection = pb.CommandRejectedEvent(
            status=status(grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST"), command="reprioritize"
        )
        # The session's own events go before those of its requests.
        await session.send("r", command_rejected=rejection)
        if was_obeyed:
            await session.send("r", sequence=3, priority_changed=pb.PriorityChangedEvent(level=5))
        await session.send("r", sequence=3 + was_obeyed, finished=finished())
        await session.receive_end()

    async with connected(first, second) as session:
        stream = await session.start("x", request_id="r")
        if was_obeyed:
            assert await stream.reprioritize(5) == PriorityChanged(5)
        else:
            with pytest.raises(CommandRejected):
                await stream.reprioritize(5)
        await stream.result()


async def test_a_server_that_was_started_anew_fails_what_had_begun_and_gets_what_had_not():
    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await session.receive("start")
        await break_off(session)

    async def second(session: FakeSession) -> None:
        command = await session.receive("open")
        assert command.resume_session_token == "t"
        refusal = status(grpc.StatusCode.OUT_OF_RANGE, "RESUME_OUT_OF_RANGE", "names no session")
        await session.send(command_rejected=pb.CommandRejectedEvent(status=refusal, command="open"))
        await opened(session, "")
        start = await session.receive("start")
        assert start.request_id == "new"
        await session.send("new", sequence=1, finished=finished("STOP"))
        await session.receive_end()

    async with connected(first, second) as session:
        one = await session.start("x", request_id="r")
        two = await session.start("y", request_id="new")
        assert (await two.result()).finish_reason == "STOP"
        assert isinstance(await anext(one), Accepted)
        assert isinstance(await anext(one), Delta)
        with pytest.raises(ResumeOutOfRange, match="started anew") as caught:
            await anext(one)
        assert caught.value.reason == "RESUME_OUT_OF_RANGE"


async def test_everybody_is_told_when_patience_is_at_its_end():
    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await session.receive("reprioritize")
        await session.vanish()

    async with connected(first, reconnect_s=0.3) as session:
        stream = await session.start("x", request_id="r")
        change = asyncio.ensure_future(stream.reprioritize(3))
        await settled(lambda: not session.connected)
        lost_at_s = asyncio.get_running_loop().time()
        outcomes = await asyncio.gather(
            stream.result(), change, session.start("y"), session.cancel("z"), return_exceptions=True
        )
        assert 0.1 < asyncio.get_running_loop().time() - lost_at_s < 5
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 4
        assert len({id(outcome) for outcome in outcomes}) == 4
        assert "not found again within 0.3 s" in str(outcomes[0])
        assert not session.connected
        with pytest.raises(ConnectionLost):
            await session.start("z")


@pytest.mark.parametrize("reason", ["DRAINING", "SESSION_STATE"])
async def test_a_stream_that_the_server_ended_itself_is_not_looked_for(reason: str):
    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await break_off(session, reason)

    async with connected(first) as session:
        stream = await session.start("x", request_id="r")
        with pytest.raises(ConnectionLost) as caught:
            await stream.result()
        assert caught.value.reason == reason


async def test_who_may_not_come_back_is_told_at_once():
    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await break_off(session)

    async def second(session: FakeSession) -> None:
        await session.receive("open")
        await abort(session.context, grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "token expired")

    async with connected(first, second, reconnect_s=60.0) as session:
        stream = await session.start("x", request_id="r")
        with pytest.raises(ConnectionLost, match="token expired") as caught:
            await stream.result()
        assert caught.value.reason == "UNAUTHENTICATED"
        assert not isinstance(caught.value, AccessDenied)


async def test_leaving_with_an_exception_in_the_gap_still_cancels_on_the_server():
    cancelled = asyncio.Event()

    async def first(session: FakeSession) -> None:
        await first_stream(session)
        await break_off(session)

    async def second(session: FakeSession) -> None:
        await opened(session)
        await session.receive("resume")
        assert (await session.receive("cancel")).request_id == "r"
        cancelled.set()
        await session.receive_end()

    async def leave() -> None:
        async with connected(first, second) as session:
            stream = await session.start("x", request_id="r")
            await anext(stream)
            await settled(lambda: not session.connected)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await leave()
    assert cancelled.is_set()


async def test_an_idle_session_finds_its_server_again():
    async def first(session: FakeSession) -> None:
        await opened(session, "")
        await break_off(session)

    async def second(session: FakeSession) -> None:
        await opened(session)
        await session.receive("start")
        await session.send("r", sequence=1, finished=finished("STOP"))
        await session.receive_end()

    async with connected(first, second) as session:
        await settled(lambda: not session.connected)
        assert (await (await session.start("x", request_id="r")).result()).finish_reason == "STOP"


async def test_events_that_are_missing_fail_their_request_alone():
    async def script(session: FakeSession) -> None:
        await first_stream(session)
        await session.send("r", sequence=4, delta=delta(9, 9))
        await session.receive("start")
        await session.send("s", sequence=1, finished=finished("STOP"))
        await session.receive_end()

    async with connected(script) as session:
        stream = await session.start("x", request_id="r")
        with pytest.raises(RequestFailed, match="events 3 to 3") as caught:
            await stream.result()
        assert caught.value.code is grpc.StatusCode.DATA_LOSS
        assert isinstance([e async for e in await session.start("y", request_id="s")][-1], Finished)


async def test_a_session_without_patience_is_lost_at_once():
    async def script(session: FakeSession) -> None:
        await first_stream(session)
        await break_off(session)

    async with connected(script, reconnect_s=0) as session:
        stream = await session.start("x", request_id="r")
        with pytest.raises(ConnectionLost, match="broken"):
            await stream.result()
    async with VorrangClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="reconnect_s must not be negative"):
            client.session(reconnect_s=-1.0)


async def test_a_first_stream_is_tried_again_while_the_server_is_not_there_for_a_moment():
    num_opens = 0

    async def refusing(session: FakeSession) -> None:
        nonlocal num_opens
        num_opens += 1
        await break_off(session, "DRAINING")

    async def third(session: FakeSession) -> None:
        await first_stream(session)
        await session.send("r", sequence=3, finished=finished())
        await session.receive_end()

    async with connected(refusing, refusing, third) as session:
        assert (await (await session.start("x", request_id="r")).result()).token_ids == (1, 2, 3)
    assert num_opens == 2


async def test_a_first_stream_is_tried_once_without_reconnection_or_where_trying_does_not_help():
    async def refusing(session: FakeSession) -> None:
        await break_off(session, "DRAINING")

    async def strict(session: FakeSession) -> None:
        await abort(session.context, grpc.StatusCode.RESOURCE_EXHAUSTED, "SESSION_LIMIT", "too many")

    with pytest.raises(ServerUnavailable):
        async with connected(refusing, reconnect_s=0):
            pass
    with pytest.raises(Overloaded):
        async with connected(strict):
            pass
