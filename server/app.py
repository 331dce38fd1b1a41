"""Puts the server together and takes it through its life: listen, load, serve, drain, stop."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from engine.decisions.file import DecisionFile
from engine.failure import trace_of
from engine.lives.recorder import LifeRecorder
from engine.loop import Engine
from engine.observer import EngineObserver, all_of
from engine.request import FinishReason
from engine.runner.base import Runner
from engine.scheduler.decisions import DecisionSink
from engine.text import Tokenizer
from server.backend import Backend, ServerStatistics
from server.control import ControlService
from server.door import Door
from server.feed import DecisionFeed, Sinks
from server.generation import GenerationService
from server.guard import Guard
from server.health import Health, follow_engine
from server.identity import Authenticator
from server.isolation import TextWork
from server.metrics import Metrics, Standing
from server.metrics_port import MetricsPort, standing
from server.ports import Ports, check_plaintext
from server.settings import Settings
from server.tls import TlsFiles
from server.token_rates import TokenRates
from server.tracing import RequestSpans

#: Seconds that cut requests get to end, and that their last events get to be written.
END_S_MAX = 5.0
#: Seconds that watchers of the health get to be told before the first request is refused.
TELL_S_MAX = 0.2
#: Seconds the transport gets to send the last statuses.
STOP_GRACE_S = 0.5

log = structlog.get_logger("vorrang.server")


class EngineDied(Exception):
    """The engine's task ended by itself; the process can't go on."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What serves a model.

    Attributes:
        runner: computes steps.
        tokenizer: the model's.
        text: works on callers' texts; None = threads of this process do. Closed with the server.
    """

    runner: Runner
    tokenizer: Tokenizer
    text: TextWork | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """What the server says of itself once it is ready."""

    address: str
    model: str
    policy: str
    max_running_requests: int
    num_blocks: int
    block_size: int
    max_request_tokens: int
    computed_by: str
    runner: str
    event_loop: str = "asyncio"
    transport: str = "plaintext"
    control_address: str = ""
    metrics_address: str = ""
    health_address: str = ""

    def __str__(self) -> str:
        computed_by = f", {self.computed_by}" if self.computed_by else ""
        control = f", control on {self.control_address}" if self.control_address else ""
        metrics = f", metrics on {self.metrics_address}" if self.metrics_address else ""
        health = f", health on {self.health_address}" if self.health_address else ""
        return (
            f"ready on {self.address}: model {self.model}, policy {self.policy}, "
            f"{self.max_running_requests} seats, {self.num_blocks} blocks of {self.block_size} tokens, "
            f"largest request {self.max_request_tokens} tokens{computed_by}, runner {self.runner}, "
            f"{self.event_loop}, {self.transport}{control}{metrics}{health}"
        )


class App:
    """One server. Make it and ``run`` it inside one event loop, once.

    Args:
        settings: all of them.
        load: loads the model: a function, which runs on a thread and may be slow, or a
            coroutine function, which is cancelled when the server is stopped meanwhile.
        check_integrity: recount the engine's books after every step (tests).
    """

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Loaded | Awaitable[Loaded]],
        *,
        check_integrity: bool = False,
    ) -> None:
        self._settings = settings
        self._load = load
        self._check_integrity = check_integrity
        self.metrics = Metrics()
        self._rates = TokenRates(settings.tenants, time.monotonic)
        self.lives = LifeRecorder(settings.control.past_requests) if settings.control.enabled else None
        self.backend = Backend(
            settings.server,
            settings.model.name,
            sessions=settings.session,
            rates=self._rates,
            metrics=self.metrics,
            lives=self.lives,
            grammar_wait_s_max=settings.engine.grammar_wait_s_max,
        )
        self.health = Health()
        self.address = ""
        self.control_address = ""
        self.metrics_address = ""
        #: Called once, when the server begins to drain, with the seconds it gives running requests.
        self.on_drain: Callable[[float], None] = lambda grace_s: None
        self._grace_s = settings.server.grace_s
        self._ports = Ports(settings)
        self.feed = DecisionFeed(
            past_steps=settings.control.past_steps,
            max_watchers=settings.control.max_watchers,
            max_watcher_steps=settings.control.max_watcher_steps,
        )
        self._metrics_port: MetricsPort | None = None
        self._spans: RequestSpans | None = None
        self._engine: Engine | None = None
        self._stop = asyncio.Event()
        self._grace: asyncio.Timeout | None = None
        self._stopped_twice = False
        self._decisions: DecisionFile | None = None

    def stop(self, grace_s: float | None = None) -> None:
        """Drain and end; the second time: at once. What SIGTERM, SIGINT and the ``Drain`` call call.

        Args:
            grace_s: seconds running requests are given; None = the settings'.
        """
        if not self._stop.is_set():
            if grace_s is not None:
                self._grace_s = grace_s
            self._stop.set()
            self.on_drain(self._grace_s)
            return
        self._stopped_twice = True
        if self._grace is not None and not self._grace.expired():
            self._grace.reschedule(asyncio.get_running_loop().time())

    @property
    def health_address(self) -> str:
        """Of the port for probes; empty without one."""
        return self._ports.health_address

    @property
    def tls(self) -> TlsFiles | None:
        """Certificates in use; None without TLS."""
        return self._ports.tls

    def statistics(self) -> ServerStatistics:
        """Live sessions, calls and requests."""
        return self.backend.statistics()

    async def run(self, on_ready: Callable[[Ready], None] = lambda ready: None) -> None:
        """Serve until ``stop``.

        Args:
            on_ready: called once requests are taken.

        Raises:
            SettingsError: the address can't be used.
            DecisionLogUnavailable: the decision log can't be written.
            EngineDied: the engine ended by itself; every caller has been told.
            Exception: whatever ``load`` raises.

        Cancellation: every call is cut; nothing is left behind.
        """
        try:
            await self._listen()
            self._decisions = self._decision_file()
            loaded = await self._loaded()
            if loaded is not None:
                try:
                    await self._serve(loaded, on_ready)
                finally:
                    await self.backend.close()
                    await loaded.runner.close()
        finally:
            if self._decisions is not None:
                await asyncio.to_thread(self._decisions.close)
            await self.health.set(serving=False)
            if self._metrics_port is not None:
                await self._metrics_port.close()
            await self._ports.close(STOP_GRACE_S)
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)
            self.backend.registry.close()

    async def _listen(self) -> None:
        settings = self._settings
        if settings.tracing.otlp_endpoint is not None:
            self._spans = RequestSpans(settings.tracing)
        door = Door(settings.admission, time.monotonic)
        guard = Guard(self.backend, Authenticator(settings.tenants), door, self.metrics.refused)
        service = GenerationService(self.backend).rpc_handler(guard)
        operators = ControlService(self.backend, self.feed, self.stop).rpc_handler(guard)
        addresses = await self._ports.open(self.health, service, operators)
        self.address, self.control_address = addresses
        if settings.metrics.listen is not None:
            check_plaintext("metrics.listen", settings.metrics.listen, allowed=settings.server.insecure)
            self._metrics_port = MetricsPort(settings.metrics.listen, self.metrics, self._standing)
            self.metrics_address = self._metrics_port.address

    def _standing(self) -> Standing:
        return standing(self.backend, self.health, self.metrics, self._engine)

    def _decision_file(self) -> DecisionFile | None:
        settings = self._settings.engine
        if settings.record_decisions is None:
            return None
        return DecisionFile(settings.record_decisions, max_bytes=settings.record_decisions_max_bytes)

    async def _loaded(self) -> Loaded | None:
        """The model; None when ``stop`` came first (a thread then ends by itself)."""
        loading = asyncio.ensure_future(self._load_anyhow())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
            return await loading if loading.done() else None
        finally:
            loading.cancel()
            stopping.cancel()
            await asyncio.wait([loading])  # a process that loads it is ended

    async def _load_anyhow(self) -> Loaded:
        loaded = await asyncio.to_thread(self._load)
        return loaded if isinstance(loaded, Loaded) else await loaded

    def _sink(self) -> DecisionSink | None:
        """Who is told of decisions: the log's file, who keeps lives, and those who watch."""
        sinks: list[DecisionSink] = [] if self._decisions is None else [self._decisions]
        if self.lives is not None:
            sinks += [self.lives, self.feed]
        return Sinks(sinks) if sinks else None

    def _observer(self) -> EngineObserver | None:
        """Who is told of requests: only whoever does something with it."""
        observers: list[EngineObserver] = []
        if self._metrics_port is not None:
            observers.append(self.metrics)
        if self._rates:
            observers.append(self._rates)
        if self._spans is not None:
            observers.append(self._spans)
        return all_of(observers)

    async def _serve(self, loaded: Loaded, on_ready: Callable[[Ready], None]) -> None:
        engine = self._engine = Engine(
            loaded.runner,
            loaded.tokenizer,
            self._settings.scheduler_config,
            max_buffered_tokens=self._settings.engine.max_buffered_tokens,
            check_integrity=self._check_integrity,
            pipeline_depth=self._settings.engine.pipeline_depth,
            decisions=self._sink(),
            observer=self._observer(),
        )
        self.backend.set_engine(engine, loaded.text)
        gc.collect()
        gc.freeze()  # a model's modules stay for good; without them a collection takes no longer than a step
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(self._run_engine(engine), name="engine")
                following = group.create_task(
                    follow_engine(self.health, engine.statistics, self._settings.server.stall_s),
                    name="health",
                )
                await self.health.set(serving=True)
                on_ready(self._describe(engine))
                self.backend.text.warm_up()
                await self._stop.wait()
                following.cancel()
                await self._drain(engine)
                running.cancel()
        except* EngineDied as died:
            await self._end_calls()
            raise died.exceptions[0] from None

    async def _run_engine(self, engine: Engine) -> None:
        try:
            await engine.run()
        except Exception as error:
            log.critical("engine.died", exception=trace_of(error, with_text=True))
        await self.health.set(serving=False)
        raise EngineDied

    async def _drain(self, engine: Engine) -> None:
        """Let what runs end, refuse what is new, cut what lasts too long."""
        await self.health.set(serving=False)
        await self.health.wait_until_told(TELL_S_MAX)
        grace_s = self._grace_s
        log.info("server.draining", grace_s=grace_s, num_alive=engine.statistics().num_alive)
        engine.drain()
        for session in list(self.backend.sessions):
            session.go_away(grace_s)
        self.backend.fail_queued()
        try:
            async with asyncio.timeout(0 if self._stopped_twice else grace_s) as self._grace:
                await engine.wait_until_idle()
        except TimeoutError:
            if num_alive := engine.statistics().num_alive:
                log.warning("server.cutting", num_alive=num_alive)
            engine.cancel_all(FinishReason.TIME_LIMIT)
        finally:
            self._grace = None
        try:
            async with asyncio.timeout(END_S_MAX):
                await engine.wait_until_idle()
        except TimeoutError:
            log.error("engine.stuck", num_alive=engine.statistics().num_alive)
        await self._end_calls()

    async def _end_calls(self) -> None:
        """Let sessions write their last events and end."""
        self.feed.close()
        for session in list(self.backend.sessions):
            session.end()
        try:
            async with asyncio.timeout(END_S_MAX):
                await self.backend.wait_until_no_calls()
        except TimeoutError:
            log.warning("server.calls_cut", num_calls=self.statistics().num_calls)

    def _describe(self, engine: Engine) -> Ready:
        return Ready(
            address=self.address,
            model=self.backend.info.name,
            policy=engine.config.policy,
            max_running_requests=engine.config.max_running_requests,
            num_blocks=engine.pool.num_blocks,
            block_size=engine.pool.block_size,
            max_request_tokens=engine.max_request_tokens,
            computed_by=engine.info.computed_by,
            runner="inline" if engine.runner_pid is None else f"process {engine.runner_pid}",
            event_loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
            transport=self._ports.transport,
            control_address=self.control_address if self.control_address != self.address else "",
            metrics_address=self.metrics_address,
            health_address=self._ports.health_address,
        )
