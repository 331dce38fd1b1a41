"""What a session does that needs known settings and steps that can be held: credit, queues, lost streams."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.decisions.file import DecisionLog
from engine.runner.scripted import expected_output
from engine.scheduler.commands import Finish, Park, SetLevel, Unpark
from engine.scheduler.decisions import Applied, Planned
from server.app import App
from tests.support.server import HeldRunner, running_server
from tests.support.wire import WireSession, let_pass, open_session, reason_in, settled, spec, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio

ONE_SEAT = {"scheduler.max_running_requests": 1}
#: No machine is so slow that it passes by itself.
AN_HOUR_S = 3600.0


def connected(app: App) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(app.address, options=[("grpc.use_local_subchannel_pool", 1)])


def with_credit(credit_tokens: int, prompt: Any = (1,), **sampling: Any) -> types.GenerationSpec:
    message = spec(list(prompt), **sampling)
    message.credit_tokens = credit_tokens
    return message


async def heard(session: WireSession) -> None:
    """All frames so far have been obeyed."""
    await session.cancel("nobody")
    await session.event("command_rejected")


async def read_tokens(session: WireSession, request_id: str, num_tokens: int) -> None:
    while len(session.tokens(request_id)) < num_tokens:
        await session.next()


def all_free(app: App) -> bool:
    statistics = app.backend.engine.statistics()
    return statistics.num_alive == 0 and statistics.num_free_blocks == statistics.num_blocks


# Within one step.


async def test_commands_take_effect_within_one_step(tmp_path: Path) -> None:
    path, runner = tmp_path / "decisions", HeldRunner(64, 16)
    settings = {"engine.record_decisions": path}
    commands = ("cancel", "reprioritize", "pause", "credit")
    async with (
        running_server(settings, runner) as app,
        connected(app) as channel,
        open_session(channel) as session,
    ):
        for name in commands:
            message = with_credit(3 if name == "credit" else 1000, max_tokens=300)
            await session.start(name, message)
            await session.event("started", name)
        await read_tokens(session, "credit", 3)
        runner.hold()
        await runner.held.wait()
        num_steps = app.backend.engine.statistics().num_steps
        await session.cancel("cancel")
        await session.reprioritize("reprioritize", -7)
        await session.pause("pause")
        await session.credit("credit", 5)
        await settled(lambda: len(app.backend.engine._commands) == 4)
        assert app.backend.engine.statistics().num_steps == num_steps
        runner.release()
        await read_tokens(session, "credit", 8)
        await session.unpause("pause")
        await session.half_close()
        await session.to_the_end()
    ids = dict(zip([f"r{number}" for number in range(1, 5)], commands, strict=True))
    in_flight = num_steps + 1  # the step that was held when the commands came
    step = 0
    obeyed: dict[tuple[str, type], int] = {}
    granted: dict[int, dict[str, int]] = {}
    with DecisionLog(path) as log:
        for line in log:
            if isinstance(line.call, Planned) and line.body["grants"]:
                step += 1
                granted[step] = {ids[grant[0]]: grant[4] for grant in line.body["grants"]}
            elif isinstance(line.call, Applied) and isinstance(
                line.call.command, Finish | SetLevel | Park | Unpark
            ):
                key = ids[line.call.command.request_id], type(line.call.command)
                obeyed.setdefault(key, step)
    assert obeyed["cancel", Finish] == in_flight
    assert obeyed["reprioritize", SetLevel] == in_flight
    assert obeyed["pause", Park] == in_flight
    assert obeyed["credit", Unpark] == in_flight
    after = granted[in_flight + 1]
    assert "cancel" in granted[in_flight]
    assert "cancel" not in after
    assert "pause" in granted[in_flight]
    assert "pause" not in after
    assert "credit" not in granted[in_flight]
    assert "credit" in after
    assert (granted[in_flight]["reprioritize"], after["reprioritize"]) == (0, -7)


async def test_no_step_is_made_for_a_request_whose_time_is_over(tmp_path: Path) -> None:
    path, runner = tmp_path / "decisions", HeldRunner(64, 16)
    async with (
        running_server({"engine.record_decisions": path}, runner) as app,
        connected(app) as channel,
        open_session(channel) as session,
    ):
        message = spec([1], max_tokens=1000)
        message.total_timeout.FromMilliseconds(100)
        runner.hold()
        await session.start("a", message)
        await runner.held.wait()
        await asyncio.sleep(0.12)
        runner.release()
        finished = (await session.end_of("a")).finished
        assert all_free(app)
    assert finished.reason == types.FINISH_REASON_TIME_LIMIT
    with DecisionLog(path) as log:
        plans = [(line.now, line.body["grants"]) for line in log if isinstance(line.call, Planned)]
    begun = next(now for now, grants in plans if grants)
    assert not [now for now, grants in plans if grants and now > begun + 0.11]


# Slow readers.


async def test_who_grants_no_credit_for_too_long_fails_and_gives_its_blocks_back() -> None:
    settings = {"session.slow_client_timeout_s": AN_HOUR_S}
    async with running_server(settings) as app, connected(app) as channel, open_session(channel) as session:
        for request_id in ("slow", "paused"):
            await session.start(request_id, with_credit(4, max_tokens=100))
            await read_tokens(session, request_id, 4)
        await session.pause("paused")  # who pauses says that it will take its time
        await heard(session)
        let_pass(AN_HOUR_S)
        failed = (await session.end_of("slow")).failed
        await session.unpause("paused")
        await heard(session)
        assert app.backend.engine.statistics().num_alive == 1
        let_pass(AN_HOUR_S)
        other = (await session.end_of("paused")).failed
        assert all_free(app)
    session.check("slow")
    for failure in (failed, other):
        assert reason_in(failure.status) == "SLOW_CONSUMER"
        assert failure.usage.output_tokens == 4
        assert failure.usage.parked.ToNanoseconds() > 0
    assert session.tokens("slow") == expected_output([1], 4)


async def test_credit_that_comes_in_time_stops_the_clock() -> None:
    settings = {"session.slow_client_timeout_s": AN_HOUR_S}
    async with running_server(settings) as app, connected(app) as channel, open_session(channel) as session:
        await session.start("a", with_credit(1, max_tokens=6))
        for num_tokens in range(1, 6):
            await read_tokens(session, "a", num_tokens)
            let_pass(AN_HOUR_S / 2)  # more in all than it may wait at once
            await session.credit("a", 1)
        await session.end_of("a")
    assert session.tokens("a") == expected_output([1], 6)


async def test_who_has_no_credit_gives_way_to_an_equal_that_needs_its_blocks() -> None:
    settings = {"kv.num_blocks": 8, "scheduler.max_context_tokens": 128}
    async with running_server(settings) as app, connected(app) as channel, open_session(channel) as session:
        await session.start("idle", with_credit(1, [1] * 60, max_tokens=20))
        await read_tokens(session, "idle", 1)
        await session.start("large", spec([2] * 100, max_tokens=10))
        await session.end_of("large")
        await session.credit("idle", 20)
        finished = (await session.end_of("idle")).finished
    assert "preempted" in session.kinds("idle")
    assert finished.usage.preemptions >= 1
    assert session.tokens("idle") == expected_output([1] * 60, 20)


async def test_a_call_that_does_not_read_is_parked_and_fails_in_the_end() -> None:
    settings = {"engine.max_buffered_tokens": 10, "session.slow_client_timeout_s": 0.1}
    async with running_server(settings) as app, connected(app) as channel:
        go = asyncio.Event()
        _hold_call_writes(app, go)
        call = stub(channel).GenerateStream(gen.GenerateStreamRequest(spec=spec([1], max_tokens=1000)))
        await settled(lambda: app.backend.engine.statistics().num_alive == 1)
        await settled(lambda: all_free(app))
        go.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def _hold_call_writes(app: App, go: asyncio.Event) -> None:
    import server.generation as generation

    write = generation._write

    async def held(context: Any, frame: Any) -> None:
        generation._write = write
        await go.wait()
        await write(context, frame)

    generation._write = held


async def test_a_stalled_stream_costs_other_sessions_nothing_and_holds_its_tokens_alone() -> None:
    settings = {"session.credit_tokens": 50, "session.slow_client_timeout_s": 60}
    async with running_server(settings) as app, connected(app) as channel:
        async with open_session(channel) as stalled, open_session(channel) as session:
            for number in range(10):
                await stalled.start(f"s{number}", spec([1], max_tokens=1000))
            await settled(lambda: app.backend.engine.statistics().num_alive == 10)
            for number in range(10):
                await session.start(f"r{number}", spec([2], max_tokens=50))
            for number in range(10):
                if session.kinds(f"r{number}")[-1:] != ["finished"]:
                    await session.end_of(f"r{number}")
            held = [request for request, _ in app.backend.registry._requests.values() if request.ticket]
            assert len(held) == 10
            assert {request.ticket.handle.num_output_tokens for request in held if request.ticket} == {50}
            statistics = app.backend.engine.statistics()
            assert (statistics.num_running, statistics.num_waiting) == (0, 0), "they hold no seat"
        await settled(lambda: app.statistics().num_sessions == 0)


# Places in the queue.


async def test_waiting_requests_are_told_their_place_now_and_then() -> None:
    runner = HeldRunner(64, 16)
    settings = ONE_SEAT | {"session.queue_update_s": 0.02}
    async with (
        running_server(settings, runner) as app,
        connected(app) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("runs", spec([1], level=-10))
        await session.event("started", "runs")
        await session.start("waits", spec([2]))
        accepted = await session.event("accepted", "waits")
        await session.start("urgent", spec([3], level=-5))
        await session.start("equal", spec([4]))
        await session.start("less", spec([5], level=5))
        update = await session.event("queue_update", "waits")
        await session.reprioritize("waits", -9)
        await asyncio.sleep(0.1)  # time for several updates, of which none is news
        runner.release()
        await session.half_close()
        await session.to_the_end()
    assert (accepted.queue_position, update.queue_position) == (0, 1)
    for request_id in ("waits", "urgent", "equal", "less"):
        session.check(request_id)
        kinds, frames = session.kinds(request_id), session.of(request_id)
        places = [f.queue_update.queue_position for f in frames if f.HasField("queue_update")]
        assert all(first != second for first, second in itertools.pairwise(places))
        assert len(places) <= 4
        if "queue_update" in kinds:
            assert max(i for i, kind in enumerate(kinds) if kind == "queue_update") < kinds.index("started")


# Lost streams.


@pytest.mark.parametrize("grace_s", [0.0, AN_HOUR_S])
async def test_requests_of_a_lost_session_are_cancelled_after_the_grace(grace_s: float) -> None:
    settings = {"session.resume_grace_s": grace_s}
    async with running_server(settings) as app, connected(app) as channel:
        async with open_session(channel) as session:
            token = session.frames[0].opened.session_token
            await session.start("a", with_credit(3, max_tokens=100))
            await read_tokens(session, "a", 3)
        await settled(lambda: app.statistics().num_sessions == 0)
        assert bool(token) == (grace_s > 0)
        if grace_s:
            let_pass(grace_s - 60)
            await asyncio.sleep(0.02)
            assert app.backend.engine.statistics().num_alive == app.backend.registry.num_sessions == 1
            let_pass(60)
        await settled(lambda: all_free(app))
        assert app.backend.registry.num_sessions == 0
        async with WireSession(channel, scope=session.scope) as late:
            await late.send(open=gen.OpenCommand(resume_session_token=token or "none"))
            assert (await late.event("command_rejected")).command == "open"


async def test_what_is_resumed_in_time_outlives_the_grace_and_the_rest_does_not() -> None:
    settings = {"session.resume_grace_s": AN_HOUR_S, "session.slow_client_timeout_s": 2 * AN_HOUR_S}
    async with running_server(settings) as app, connected(app) as channel:
        async with open_session(channel) as session:
            token = session.frames[0].opened.session_token
            for request_id in ("kept", "left"):
                await session.start(request_id, with_credit(3, max_tokens=9))
                await read_tokens(session, request_id, 3)
        async with WireSession(channel, scope=session.scope) as again:
            await again.open(resume_session_token=token)
            await again.resume("kept", 0)
            await read_tokens(again, "kept", 3)
            let_pass(AN_HOUR_S)
            await settled(lambda: app.backend.engine.statistics().num_alive == 1)
            await again.credit("kept", 9)
            assert (await again.end_of("kept")).HasField("finished")
            await again.resume("left", 0)
            left = await again.end_of("left")
    assert again.tokens("kept") == expected_output([1], 9)
    assert left.finished.reason == types.FINISH_REASON_CANCELLED
    again.check("left")


async def test_a_lost_session_runs_on_as_far_as_its_credit_goes_and_is_never_too_slow() -> None:
    runner = HeldRunner(64, 16)
    settings = {"session.slow_client_timeout_s": 60, "session.resume_grace_s": AN_HOUR_S}
    async with running_server(settings, runner) as app, connected(app) as channel:
        async with open_session(channel) as session:
            token = session.frames[0].opened.session_token
            await session.start("a", with_credit(30, max_tokens=100))
            await session.event("accepted", "a")
            runner.hold()
        await settled(lambda: app.statistics().num_sessions == 0)
        runner.release()
        (request,) = [request for request, _ in app.backend.registry._requests.values()]
        await settled(lambda: app.backend.engine.statistics().num_output_tokens == 30)
        let_pass(AN_HOUR_S / 2)
        await asyncio.sleep(0.02)
        assert request.ticket is not None
        assert request.ticket.handle.num_output_tokens == 30
        async with WireSession(channel, scope=session.scope) as again:
            await again.open(resume_session_token=token)
            await again.resume("a", 0)
            await again.credit("a", 100)
            assert (await again.end_of("a")).HasField("finished")
    again.check("a")
    assert again.tokens("a") == expected_output([1], 100)
    merged = max(len(frame.delta.token_ids) for frame in again.of("a"))
    assert merged > 5, "what nobody read was merged"


async def test_a_pause_outlives_the_stream_that_asked_for_it() -> None:
    async with running_server() as app, connected(app) as channel:
        async with open_session(channel) as session:
            token = session.frames[0].opened.session_token
            await session.start("a", with_credit(3, max_tokens=20))
            await read_tokens(session, "a", 3)
            await session.pause("a")
            await session.start("witness", spec([2], max_tokens=1))
            await session.end_of("witness")
        async with WireSession(channel, scope=session.scope) as again:
            await again.open(resume_session_token=token)
            await again.resume("a", 0)
            await again.credit("a", 20)
            await again.start("another", spec([3], max_tokens=20))
            await again.end_of("another")
            assert len(again.tokens("a")) == 3
            await again.unpause("a")
            await again.end_of("a")
    assert again.tokens("a") == expected_output([1], 20)


async def test_the_replay_buffer_lets_the_oldest_go_and_never_what_was_not_sent() -> None:
    settings = {"session.max_replay_bytes": 2000}
    async with running_server(settings) as app, connected(app) as channel:
        async with open_session(channel) as session:
            token = session.frames[0].opened.session_token
            await session.start("a", with_credit(1, max_tokens=400))
            for num_tokens in range(1, 200):  # one by one, or a slow reader's would be merged and all fit
                await read_tokens(session, "a", num_tokens)
                await session.credit("a", 1)
            await read_tokens(session, "a", 200)
            (request,) = [request for request, _ in app.backend.registry._requests.values()]
            assert request.num_kept_bytes <= 2000
        last = session.of("a")[-1].sequence
        async with WireSession(channel, scope=session.scope) as again:
            await again.open(resume_session_token=token)
            await again.resume("a", 0)
            assert reason_in((await again.event("command_rejected")).status) == "RESUME_OUT_OF_RANGE"
            await again.start("a", with_credit(1, max_tokens=400))  # its first events are not held either
            assert reason_in((await again.event("command_rejected")).status) == "RESUME_OUT_OF_RANGE"
            await again.resume("a", last - 2)
            await again.credit("a", 400)
            await again.end_of("a")
    assert again.of("a")[:2] == session.of("a")[-2:]
    tokens = session.tokens("a") + [i for f in again.of("a")[2:] for i in f.delta.token_ids]
    assert tokens == expected_output([1], 400)


async def test_ended_requests_are_let_go_when_their_time_is_over() -> None:
    settings = {"session.retention_s": AN_HOUR_S}
    async with running_server(settings) as app, connected(app) as channel:
        async with open_session(channel) as session:
            await session.start("a", spec([1]))
            await session.end_of("a")
            registry = app.backend.registry
            assert (registry.num_requests, registry.num_ended_bytes > 0) == (1, True)
            let_pass(AN_HOUR_S)
            await settled(lambda: registry.num_requests == 0)
            assert registry.num_ended_bytes == 0
            await session.start("a", spec([2]))
            await session.end_of("a")
        await settled(lambda: app.statistics().num_sessions == 0)
        for _ in range(2):  # the grace of the session, the retention
            let_pass(AN_HOUR_S)
        await settled(lambda: registry.num_requests == registry.num_sessions == 0)


async def test_memory_for_ended_requests_is_bounded() -> None:
    settings = {"session.max_retained_bytes": 5000}
    async with (
        running_server(settings) as app,
        connected(app) as channel,
        open_session(channel) as session,
    ):
        for number in range(20):
            await session.start(f"r{number}", spec([1]))
            await session.end_of(f"r{number}")
            app.backend.registry.check_integrity()
        registry = app.backend.registry
        assert 0 < registry.num_ended_bytes <= 5000
        assert 0 < registry.num_requests < 20


async def test_a_request_that_failed_so_that_it_may_be_tried_again_is_tried_again() -> None:
    runner = HeldRunner(64, 16)
    settings = ONE_SEAT | {"scheduler.max_waiting_requests": 1}
    async with (
        running_server(settings, runner) as app,
        connected(app) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("runs", spec([1]))
        await session.event("started", "runs")
        await session.start("a", spec([2], level=5))
        await session.event("accepted", "a")
        await session.start("urgent", spec([3], level=-5))  # takes the place of the one that waits
        failed = (await session.end_of("a")).failed
        runner.release()
        await session.end_of("urgent")
        num_frames = len(session.of("a"))
        await session.start("a", spec([2], level=5))
        await session.end_of("a")
    assert (reason_in(failed.status), failed.retryable) == ("DISPLACED", True)
    second = session.of("a")[num_frames:]
    assert [frame.sequence for frame in second] == list(range(1, len(second) + 1))
    assert second[-1].HasField("finished")
