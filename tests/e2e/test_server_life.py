"""From listening to stopped, in this process: loading, faults of the engine, addresses."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import server.app
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.scheduler.plan import Plan, StepResult
from server.app import App, EngineDied, Loaded
from server.load import ModelUnavailable
from server.settings import SettingsError, load
from tests.support.server import HeldRunner, running_server
from tests.support.wire import open_session, reason_in, refused, settled, spec, stub
from vorrang.v1 import generation_pb2 as gen

pytestmark = pytest.mark.asyncio


def scripted() -> Loaded:
    return Loaded(ScriptedRunner(64, 16), ScriptedTokenizer())


def make_app(loader: Callable[[], Loaded] = scripted, **settings: object) -> App:
    values = {"server.listen": "127.0.0.1:0"} | {f"server.{name}": value for name, value in settings.items()}
    return App(load(None, values).settings, loader)


async def health_of(channel: Any) -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status


async def test_while_the_model_loads_the_server_listens_and_says_that_it_is_not_ready() -> None:
    loading, go = threading.Event(), threading.Event()

    def slow_load() -> Loaded:
        loading.set()
        assert go.wait(30)
        return scripted()

    app, ready = make_app(slow_load), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(app.run(lambda _: ready.set()))
        await settled(loading.is_set)
        async with grpc.aio.insecure_channel(app.address) as channel:
            assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
            status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec())))
            assert (status.code, reason_in(status)) == (14, "ENGINE_RESTARTING")
            assert not ready.is_set()
            go.set()
            await ready.wait()
            assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
            await stub(channel).Generate(gen.GenerateRequest(spec=spec()))
        app.stop()
        await running


async def test_a_stop_while_the_model_loads_ends_the_server_without_it() -> None:
    loading, go = threading.Event(), threading.Event()

    def slow_load() -> Loaded:
        loading.set()
        assert go.wait(30)
        return scripted()

    app = make_app(slow_load)
    async with asyncio.TaskGroup() as group:
        group.create_task(app.run(lambda _: pytest.fail("it is ready")))
        await settled(loading.is_set)
        app.stop()
    go.set()


async def test_a_model_that_can_not_be_loaded_ends_the_server() -> None:
    def fail() -> Loaded:
        raise ModelUnavailable("no such model")

    with pytest.raises(ModelUnavailable, match="no such model"):
        await make_app(fail).run()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
async def test_plaintext_is_for_loopback_alone(listen: str) -> None:
    with pytest.raises(SettingsError, match="not loopback"):
        await make_app(listen=listen).run()


async def test_plaintext_elsewhere_takes_a_flag() -> None:
    app = make_app(listen="0.0.0.0:0", insecure=True)
    await app.run(lambda _: app.stop())
    assert app.address.startswith("0.0.0.0:")


async def test_a_port_that_does_not_exist_is_a_setting_error() -> None:
    with pytest.raises(SettingsError, match="65535"):
        await make_app(listen="127.0.0.1:65536").run()


async def test_a_second_server_can_not_take_the_same_port() -> None:
    """``grpc.so_reuseport`` is on by default and silently shares the port."""
    async with running_server() as app:
        with pytest.raises(SettingsError, match="is it in use"):
            await make_app(listen=app.address).run()


class LyingRunner(ScriptedRunner):
    """Leaves out the tokens it was asked for, which the engine does not survive."""

    async def execute(self, plan: Plan) -> StepResult:
        await super().execute(plan)
        return StepResult({})


async def test_when_the_engine_dies_everybody_is_told_and_the_server_ends() -> None:
    app = make_app(lambda: Loaded(LyingRunner(64, 16), ScriptedTokenizer()))
    ready = asyncio.Event()

    async def run() -> None:
        with pytest.raises(EngineDied):
            await app.run(lambda _: ready.set())

    async with asyncio.TaskGroup() as group:
        running = group.create_task(run())
        await ready.wait()
        async with grpc.aio.insecure_channel(app.address) as channel, open_session(channel) as session:
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await health.read()
            await session.start("a", spec([1]))
            failed = (await session.end_of("a")).failed
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError):
                await session.to_the_end()
            health.cancel()
        await running
    assert failed.retryable
    session.check("a")
    assert app.statistics().num_calls == 0


async def test_a_step_that_never_ends_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app, "END_S_MAX", 0.05)
    runner = HeldRunner(64, 16)
    async with (
        running_server(runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("a", spec([1]))
        await runner.held.wait()
        app.stop()
        failed = (await session.end_of("a")).failed
    assert reason_in(failed.status) == "DRAINING"


async def test_a_served_call_is_cut_when_the_servers_task_is_cancelled() -> None:
    runner, ready = HeldRunner(64, 16), asyncio.Event()
    app = make_app(lambda: Loaded(runner, ScriptedTokenizer()))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(app.run(lambda _: ready.set()))
        await ready.wait()
        async with grpc.aio.insecure_channel(app.address) as channel, open_session(channel) as session:
            runner.hold()
            await session.start("a", spec([1]))
            await runner.held.wait()
            running.cancel()
            await session.end_of("a")
            with pytest.raises(grpc.aio.AioRpcError):
                await session.to_the_end()
        await asyncio.wait([running])
    assert running.cancelled()
    statistics = app.statistics()
    assert (statistics.num_calls, statistics.num_sessions, statistics.num_requests) == (0, 0, 0)
