"""Health: several watchers, services, and the engine's heartbeat."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from engine.statistics import EngineStatistics
from server.health import LIVE, MAX_WATCHERS, Health, follow_engine

pytestmark = pytest.mark.asyncio

_Status = health_pb2.HealthCheckResponse
IDLE = EngineStatistics(0, 0, 0, 1, 1, 0, 0.0, 0, True, 0.0)


class Watcher:
    """A Watch call's context: keeps what is written."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[int] = asyncio.Queue()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise PermissionError(code, details)

    async def write(self, response: Any) -> None:
        self.written.put_nowait(response.status)


def watch(
    group: asyncio.TaskGroup, health: Health, service: str = ""
) -> tuple[Watcher, "asyncio.Task[None]"]:
    watcher = Watcher()
    task = group.create_task(health.Watch(health_pb2.HealthCheckRequest(service=service), watcher))
    return watcher, task


async def test_a_watcher_that_leaves_costs_the_others_nothing() -> None:
    health = Health()
    async with asyncio.TaskGroup() as group:
        first, leaving = watch(group, health)
        second, staying = watch(group, health, "vorrang.v1.GenerationService")
        assert await first.written.get() == await second.written.get() == _Status.NOT_SERVING
        leaving.cancel()
        await asyncio.wait([leaving])
        await health.set(serving=True)
        assert await second.written.get() == _Status.SERVING
        await health.set(serving=True)  # no change, no message
        await health.set(serving=False)
        assert await second.written.get() == _Status.NOT_SERVING
        assert first.written.empty()
        staying.cancel()


async def test_a_service_that_is_not_ours_is_unknown() -> None:
    health = Health()
    async with asyncio.TaskGroup() as group:
        watcher, task = watch(group, health, "nobody")
        assert await watcher.written.get() == _Status.SERVICE_UNKNOWN
        task.cancel()


async def test_a_server_that_is_busy_starting_is_alive_though_it_does_not_serve() -> None:
    health = Health()
    answers = [
        (await health.Check(health_pb2.HealthCheckRequest(service=name), Watcher())).status
        for name in ("", LIVE)
    ]
    assert answers == [_Status.NOT_SERVING, _Status.SERVING]


async def test_a_step_that_does_not_end_takes_the_server_out_until_it_does() -> None:
    health = Health()
    await health.set(serving=True)
    now = IDLE
    async with asyncio.TaskGroup() as group:
        watcher, watching = watch(group, health)
        following = group.create_task(follow_engine(health, lambda: now, stall_s=0.01))
        assert await watcher.written.get() == _Status.SERVING
        now = replace(IDLE, idle=False, heartbeat_age_s=0.02)
        assert await watcher.written.get() == _Status.NOT_SERVING
        now = replace(IDLE, idle=False, heartbeat_age_s=0.005)
        assert await watcher.written.get() == _Status.SERVING
        now = replace(IDLE, idle=True, heartbeat_age_s=99.0)  # idle for long is no stall
        await health.set(serving=False)
        assert await watcher.written.get() == _Status.NOT_SERVING
        assert await watcher.written.get() == _Status.SERVING
        following.cancel()
        watching.cancel()


async def test_watchers_are_bounded_and_their_places_come_back() -> None:
    health = Health()
    async with asyncio.TaskGroup() as group:
        watching = [watch(group, health) for _ in range(MAX_WATCHERS)]
        for watcher, _ in watching:
            await watcher.written.get()
        with pytest.raises(PermissionError) as caught:
            await health.Watch(health_pb2.HealthCheckRequest(), Watcher())
        assert caught.value.args[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        for _, task in watching:
            task.cancel()
        await asyncio.wait([task for _, task in watching])
        watcher, task = watch(group, health)
        assert await watcher.written.get() == _Status.NOT_SERVING
        task.cancel()
