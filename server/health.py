"""grpc.health.v1, driven by the engine's heartbeat rather than by the event loop alone.

The servicer that comes with grpcio-health-checking loses its watchers when one of
several leaves (1.76); this one does not.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.statistics import EngineStatistics

SERVICES = ("", "vorrang.v1.GenerationService", "vorrang.v1.ControlService")
#: SERVING for as long as the event loop answers at all, also while a model is loaded or a runner started
#: again: what a liveness probe asks, so that nobody kills a server for being busy with that.
LIVE = "vorrang.live"
#: Calls of ``Watch`` open at once.
MAX_WATCHERS = 256
_Status = health_pb2.HealthCheckResponse

log = structlog.get_logger("vorrang.server")


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers whether this server takes requests: the same for all its services."""

    def __init__(self) -> None:
        self._serving = False
        self._num_watchers = 0
        self._changed = asyncio.Condition()
        self._watchers: dict[object, bool] = {}  # whether each was told of the last change

    @property
    def serving(self) -> bool:
        """What is answered now."""
        return self._serving

    async def set(self, serving: bool) -> None:
        """Change the answer, and tell every watcher."""
        async with self._changed:
            if serving is not self._serving:
                self._watchers = dict.fromkeys(self._watchers, False)
            self._serving = serving
            self._changed.notify_all()

    async def wait_until_told(self, timeout_s: float) -> None:
        """Return when every watcher was written the answer, or after ``timeout_s``: one may not read."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: all(self._watchers.values()))

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The answer now; NOT_FOUND for a service that is not ours."""
        if request.service not in (*SERVICES, LIVE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        """The answer now and whenever it changes, until the client leaves.

        Nobody has to say who it is for this, so there are ``MAX_WATCHERS`` at most; the others may poll.
        """
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch; call Check instead")
        self._num_watchers += 1
        try:
            await self._tell(request.service, context)
        finally:
            self._num_watchers -= 1

    async def _tell(self, service: str, context: Any) -> None:
        last: int | None = None
        me = object()
        self._watchers[me] = False
        try:
            while True:
                async with self._changed:
                    while self._status(service) == last:
                        if not self._watchers[me]:
                            self._watchers[me] = True
                            self._changed.notify_all()
                        await self._changed.wait()
                    last = self._status(service)
                await context.write(_Status(status=last))
        finally:
            del self._watchers[me]

    def _status(self, service: str) -> int:
        if service == LIVE:
            return int(_Status.SERVING)
        if service not in SERVICES:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.SERVING if self._serving else _Status.NOT_SERVING)


async def follow_engine(health: Health, statistics: Callable[[], EngineStatistics], stall_s: float) -> None:
    """Keep ``health`` in step with the engine's heartbeat, until cancelled.

    Args:
        health: what is set.
        statistics: a look at the engine.
        stall_s: seconds after which a step that does not end counts as a stall.
    """
    now = statistics()
    while True:
        # In time to see a step that goes on become a stall, not a quarter later.
        left_s = stall_s if now.idle else max(0.0, stall_s - now.heartbeat_age_s)
        await asyncio.sleep(min(left_s or stall_s, stall_s / 4) + 0.001)
        now = statistics()
        alive = now.idle or now.heartbeat_age_s < stall_s
        if alive != health.serving:
            log.warning(
                "engine.recovered" if alive else "engine.stalled", age_s=round(now.heartbeat_age_s, 1)
            )
            await health.set(alive)
