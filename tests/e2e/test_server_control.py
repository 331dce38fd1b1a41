"""ControlService where the model's steps are held, so that who stands where is certain."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.runner.scripted import ScriptedTokenizer
from server.app import App, Loaded
from server.settings import load
from tests.support.server import HeldRunner, running_server
from tests.support.wire import open_session, reason_in, refused, settled, spec, stub
from vorrang.v1 import control_pb2 as pb
from vorrang.v1 import control_pb2_grpc
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio

ONE_SEAT: dict[str, object] = {"scheduler.max_running_requests": 1}


def control(channel: Any) -> Any:
    return control_pb2_grpc.ControlServiceStub(channel)


async def listed(channel: Any, **fields: Any) -> Any:
    return await control(channel).ListRequests(pb.ListRequestsRequest(**fields))


async def test_requests_are_listed_most_urgent_first_and_page_by_page() -> None:
    runner = HeldRunner(64, 16)
    async with (
        running_server(ONE_SEAT, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("runs", spec([1, 2, 3], level=10))
        await runner.held.wait()
        await session.start("urgent", level=-10)
        await session.start("plain", level=0)
        await settled(lambda: app.statistics().num_requests == 3)
        everybody = (await listed(channel)).requests
        assert [entry.request_id.removeprefix(session.scope) for entry in everybody] == [
            "urgent",
            "plain",
            "runs",
        ]
        assert [entry.level for entry in everybody] == [-10, 0, 10]
        waits, prefills = pb.REQUEST_STATE_WAITING, pb.REQUEST_STATE_PREFILL
        assert [entry.state for entry in everybody] == [waits, waits, prefills]
        assert [entry.num_blocks for entry in everybody] == [0, 0, 1]
        assert everybody[2].usage.prompt_tokens == 3
        assert [entry.num_known_tokens for entry in everybody[2:]] == [3]
        assert [entry.num_computed_tokens for entry in everybody] == [0, 0, 0]
        assert {entry.max_output_tokens for entry in everybody[:2]} == {spec().sampling.max_tokens}
        assert not any(entry.starved for entry in everybody)
        assert everybody[0].usage.queued.ToNanoseconds() == everybody[0].age.ToNanoseconds() > 0
        first = await listed(channel, page_size=2)
        second = await listed(channel, page_size=2, page_token=first.next_page_token)
        pages = [entry.server_request_id for entry in (*first.requests, *second.requests)]
        assert pages == [entry.server_request_id for entry in everybody]
        assert second.next_page_token == ""
        batch = (await listed(channel, class_name="batch")).requests
        assert [entry.request_id.removeprefix(session.scope) for entry in batch] == ["runs"]
        load_now = await control(channel).GetLoad(pb.GetLoadRequest())
        counts = {e.class_name: (e.num_waiting, e.num_running) for e in load_now.classes}
        assert counts == {"interactive": (1, 0), "standard": (1, 0), "batch": (0, 1)}
        assert load_now.num_free_seats == 0
        assert load_now.num_free_blocks == 63
        runner.release()
        for name in ("urgent", "plain", "runs"):
            await session.end_of(name)


async def test_an_operator_reprioritises_by_the_servers_id_and_not_what_has_ended() -> None:
    runner = HeldRunner(64, 16)
    async with (
        running_server(ONE_SEAT, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("a", level=10)
        await runner.held.wait()
        (entry,) = (await listed(channel)).requests
        by_id = {"server_request_id": entry.server_request_id}
        changing = pb.UpdateRequestPriorityRequest(**by_id, priority=types.Priority(level=-7))
        changed = await control(channel).UpdateRequestPriority(changing)
        runner.release()
        assert changed.level == (await session.event("priority_changed", "a")).level == -7
        await session.end_of("a")
        again = await control(channel).CancelRequest(pb.CancelRequestRequest(**by_id))
        assert not again.found
        assert reason_in(await refused(control(channel).UpdateRequestPriority(changing))) == "UNKNOWN_REQUEST"


async def test_a_queued_request_is_cancelled_at_once() -> None:
    runner = HeldRunner(64, 16)
    async with (
        running_server(ONE_SEAT, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("runs", level=0)
        await runner.held.wait()
        await session.start("queued", level=0)
        await settled(lambda: app.statistics().num_requests == 2)
        ids = {
            entry.request_id.removeprefix(session.scope): entry.server_request_id
            for entry in (await listed(channel)).requests
        }
        request = pb.CancelRequestRequest(server_request_id=ids["queued"])
        assert (await control(channel).CancelRequest(request)).found
        runner.release()
        finished = (await session.end_of("queued")).finished
        assert finished.reason == types.FINISH_REASON_CANCELLED
        assert finished.usage.output_tokens == 0


async def test_drain_ends_the_server_as_sigterm_does_but_with_a_grace_of_its_own() -> None:
    runner = HeldRunner(64, 16)
    settings = load(None, {"server.listen": "127.0.0.1:0", "server.grace_s": 3600.0}).settings
    app, ready, graces = App(settings, lambda: Loaded(runner, ScriptedTokenizer())), asyncio.Event(), []
    app.on_drain = graces.append
    async with asyncio.TaskGroup() as group:
        running = group.create_task(app.run(lambda _: ready.set()))
        await ready.wait()
        async with grpc.aio.insecure_channel(app.address) as channel, open_session(channel) as session:
            runner.hold()
            await session.start("a", spec([1], max_tokens=100))
            await runner.held.wait()
            watching = control(channel).WatchDecisions(pb.WatchDecisionsRequest())
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            drained = await control(channel).Drain(pb.DrainRequest(grace={"seconds": 0, "nanos": 50_000_000}))
            assert (drained.num_running, drained.num_waiting) == (1, 0)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            away = await session.event("go_away")
            assert away.time_left.ToMilliseconds() == 50
            assert (await control(channel).GetLoad(pb.GetLoadRequest())).draining
            status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec())))
            assert reason_in(status) == "DRAINING"
            await asyncio.sleep(0.06)  # longer than the grace, and the step is still held
            runner.release()
            end = await session.end_of("a")
            assert end.finished.reason == types.FINISH_REASON_TIME_LIMIT
            while await watching.read() is not grpc.aio.EOF:
                pass
            health.cancel()
        await running
    assert graces == [0.05]


async def test_a_watcher_that_does_not_read_loses_steps_visibly_and_slows_nobody() -> None:
    settings = {"control.max_watcher_steps": 4, "control.max_watchers": 1, "control.past_steps": 0}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        watcher = app.feed.watch(0)
        status = await refused(control(channel).WatchDecisions(pb.WatchDecisionsRequest()).read())
        assert reason_in(status) == "CALL_LIMIT"
        answer = await stub(channel).Generate(gen.GenerateRequest(spec=spec([1], max_tokens=20)))
        assert len(answer.token_ids) == 20
        app.feed.leave(watcher)
        first = await anext(watcher)
        assert first.num_lost == 16
        rest = [await anext(watcher) for _ in range(3)]
        assert [w.num_lost for w in rest] == [0, 0, 0]
        assert [w.decision.step - first.decision.step for w in rest] == [1, 2, 3]
        assert not app.feed.is_open  # nobody watches and nothing is kept: the engine pays nothing
        watching = control(channel).WatchDecisions(pb.WatchDecisionsRequest())
        await settled(lambda: app.feed.num_watchers == 1)
        watching.cancel()
        await settled(lambda: app.feed.num_watchers == 0)
