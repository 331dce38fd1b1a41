"""Shutting down: who is told what, in which order, and what becomes of requests that stand still."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.runner.scripted import expected_output
from tests.support.server import HeldRunner, running_server
from tests.support.wire import WireSession, open_session, reason_in, refused, settled, spec, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio

ONE_SEAT = {"scheduler.max_running_requests": 1, "server.grace_s": 20.0}


async def test_11_health_turns_before_the_first_refusal() -> None:
    """However the tasks fall: a watcher that reads has its answer before anybody is refused."""
    order: list[str] = []
    async with (
        running_server({"server.grace_s": 20.0}) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        paused = spec([1], max_tokens=50)
        paused.credit_tokens = 1
        await session.start("keeps it alive", paused)
        await session.event("delta")
        write, submit = app.health.Watch, app.backend.submit

        class Watcher:
            async def write(self, response: Any) -> None:
                await asyncio.sleep(0.01)
                order.append(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

        watching = asyncio.ensure_future(write(health_pb2.HealthCheckRequest(), Watcher()))

        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                return submit(*args, **kwargs)
            except Exception:
                order.append("refused")
                raise

        app.backend.submit = noted  # type: ignore[method-assign]
        await settled(lambda: order == ["SERVING"])

        async def ask_until_refused() -> None:
            while True:
                try:
                    await stub(channel).Generate(gen.GenerateRequest(spec=spec([1], max_tokens=1)))
                except grpc.aio.AioRpcError:
                    return

        asking = [asyncio.ensure_future(ask_until_refused()) for _ in range(4)]
        await asyncio.sleep(0.02)
        app.stop()
        await asyncio.gather(*asking)
        watching.cancel()
        await session.cancel("keeps it alive")
        await session.end_of("keeps it alive")
    assert order[:2] == ["SERVING", "NOT_SERVING"]
    assert set(order[2:]) == {"refused"}


async def test_11_what_runs_ends_what_waits_fails_and_what_comes_is_refused() -> None:
    runner = HeldRunner(64, 16)
    async with (
        running_server(ONE_SEAT, runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
        open_session(channel) as idle,
    ):
        runner.hold()
        await session.start("runs", spec([1], max_tokens=20))
        await session.event("started", "runs")
        await session.start("waits", spec([2]))
        await session.event("accepted", "waits")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        app.stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        away = await session.event("go_away")
        await session.start("late", spec([3]))
        late = (await session.end_of("late")).failed
        status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec([3]))))
        runner.release()
        with pytest.raises(grpc.aio.AioRpcError):
            await session.to_the_end()
        with pytest.raises(grpc.aio.AioRpcError):
            await idle.to_the_end()
        watch.cancel()
    assert 0 < away.time_left.ToMilliseconds() <= 20_000
    assert [frame.WhichOneof("event") for frame in idle.frames] == ["opened", "go_away"]
    for request_id in ("runs", "waits", "late"):
        session.check(request_id)
    assert session.tokens("runs") == expected_output([1], 20)
    waited = session.of("waits")[-1].failed
    retry = error_details_pb2.RetryInfo()
    for refusal in (waited.status, late.status, status):
        assert (refusal.code, reason_in(refusal)) == (14, "DRAINING")
        assert any(detail.Unpack(retry) for detail in refusal.details)
    assert waited.retryable
    assert late.retryable


@pytest.mark.parametrize("how", ["grace", "second signal"])
async def test_11_what_stands_still_is_cut_with_its_output(how: str) -> None:
    """Without credit, paused, or of a session that is lost: nobody waits beyond the grace for them."""
    settings = {"server.grace_s": 0.2 if how == "grace" else 20.0}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        local = grpc.aio.insecure_channel(app.address, options=[("grpc.use_local_subchannel_pool", 1)])
        async with local, WireSession(local) as lost:
            await lost.open()
            message = spec([3], max_tokens=100)
            message.credit_tokens = 3
            await lost.start("lost", message)
            await lost.event("delta")
        async with open_session(channel) as session:
            for request_id in ("no credit", "paused"):
                message = spec([1], max_tokens=100)
                message.credit_tokens = 3
                await session.start(request_id, message)
                while len(session.tokens(request_id)) < 3:
                    await session.next()
            await session.pause("paused")
            app.stop()
            await session.event("go_away")
            if how == "second signal":
                app.stop()
            with pytest.raises(grpc.aio.AioRpcError):
                await session.to_the_end()
    for request_id in ("no credit", "paused"):
        session.check(request_id)
        assert session.of(request_id)[-1].finished.reason == types.FINISH_REASON_TIME_LIMIT
        assert session.tokens(request_id) == expected_output([1], 3)
