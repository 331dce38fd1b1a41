"""The port that Prometheus scrapes: plain HTTP on threads of its own.

A scrape asks the event loop for what stands there and waits ``LOOK_S_MAX`` at
most, so that a blocked loop still answers with all that was counted.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator

import prometheus_client
import structlog
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from engine.loop import Engine
from server.backend import Backend
from server.health import Health
from server.metrics import Metrics, Standing, by_labels
from server.metrics_http import BoundedServer
from server.settings import SettingsError

#: Seconds a scrape waits for the event loop.
LOOK_S_MAX = 1.0
#: Where a request that is alive can be.
STATES = ("waiting", "running", "preempted", "parked")

log = structlog.get_logger("vorrang.server")


class MetricsPort:
    """Serves metrics from its making to ``close``. Make it inside the running event loop.

    Args:
        listen: ``host:port``; port 0 = any free one.
        metrics: what was counted.
        look: what stands, looked at on the event loop's thread.

    Raises:
        SettingsError: the address can't be used.

    Attributes:
        address: with the port that was chosen.
    """

    def __init__(self, listen: str, metrics: Metrics, look: Callable[[], Standing]) -> None:
        host, _, port = listen.rpartition(":")
        registry = prometheus_client.CollectorRegistry()
        registry.register(_Collector(metrics, look, asyncio.get_running_loop()))
        prometheus_client.ProcessCollector(registry=registry)
        try:
            server = BoundedServer(host.strip("[]"), int(port), prometheus_client.make_wsgi_app(registry))
        except (OSError, OverflowError):
            raise SettingsError(f"metrics.listen: can't listen on {listen}; is it in use?") from None
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{host}:{server.server_port}"

    async def close(self) -> None:
        """Answer no more scrapes."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector(Collector):
    def __init__(
        self, metrics: Metrics, look: Callable[[], Standing], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._metrics = metrics
        self._look = look
        self._loop = loop

    def describe(self) -> list[Family]:
        """Names alone, so that nothing is looked at when it is registered."""
        return list(self._metrics.families({}))

    def collect(self) -> Iterator[Family]:
        return self._metrics.families(self._standing())

    def _standing(self) -> Standing:
        async def look() -> Standing:
            return self._look()

        coroutine = look()
        try:
            looking = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            return {}
        try:
            return looking.result(LOOK_S_MAX)
        except concurrent.futures.TimeoutError:
            looking.cancel()
            log.warning("metrics.loop_blocked", waited_s=LOOK_S_MAX)
            return {}
        except concurrent.futures.CancelledError:
            return {}


def standing(backend: Backend, health: Health, metrics: Metrics, engine: Engine | None) -> Standing:
    """Everything that is looked at rather than counted."""
    calls = backend.statistics()
    found: dict[str, dict[tuple[str, ...], float]] = {
        "vorrang_sessions": {(): calls.num_sessions},
        "vorrang_calls": {(): calls.num_calls},
        "vorrang_tasks": {(): float(len(asyncio.all_tasks()))},
        "vorrang_serving": {(): float(health.serving)},
    }
    if engine is None:
        return found
    now = engine.statistics()
    found |= {
        "vorrang_requests": _requests(engine, metrics),
        "vorrang_seats": {(): engine.config.max_running_requests},
        "vorrang_seats_free": {(): engine.config.max_running_requests - now.num_running},
        "vorrang_kv_blocks": {(): now.num_blocks},
        "vorrang_kv_blocks_free": {(): now.num_free_blocks},
        "vorrang_draining": {(): float(engine.is_draining)},
        "vorrang_runner_restarts": {(): now.num_runner_losses},
    }
    return found


def _requests(engine: Engine, metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Requests alive; a series that was there once stays, at 0, for whoever scales or alerts by it."""
    looks = engine.class_looks().items()
    return by_labels(
        [
            *(((*labels, state), 0.0) for labels in metrics.labels() for state in STATES),
            *(
                ((class_name, metrics.label(tenant), state), float(getattr(look, f"num_{state}")))
                for (class_name, tenant), look in looks
                for state in STATES
            ),
        ]
    )
