"""Puts the server together and takes it through its life: listen, load, serve, drain, stop."""

import asyncio
import gc
import ipaddress
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.decisions.file import DecisionFile
from engine.loop import Engine
from engine.request import FinishReason
from engine.runner.base import Runner
from engine.text import Tokenizer
from server import control, generation
from server.backend import Backend, ServerStatistics
from server.generation import GenerationService
from server.health import Health, follow_engine
from server.settings import Settings, SettingsError

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
        after_ready: what need not be waited for; runs on a thread once requests are taken.
    """

    runner: Runner
    tokenizer: Tokenizer
    after_ready: Callable[[], None] | None = None


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

    def __str__(self) -> str:
        computed_by = f", {self.computed_by}" if self.computed_by else ""
        return (
            f"ready on {self.address}: model {self.model}, policy {self.policy}, "
            f"{self.max_running_requests} seats, {self.num_blocks} blocks of {self.block_size} tokens, "
            f"largest request {self.max_request_tokens} tokens{computed_by}, runner {self.runner}"
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
        self.backend = Backend(settings.server, settings.model.name, sessions=settings.session)
        self.health = Health()
        self.address = ""
        self._stop = asyncio.Event()
        self._grace: asyncio.Timeout | None = None
        self._stopped_twice = False
        self._decisions: DecisionFile | None = None
        self._server = grpc.aio.server(options=_options(settings))

    def stop(self) -> None:
        """Drain and end; the second time: at once. What SIGTERM and SIGINT call."""
        if not self._stop.is_set():
            self._stop.set()
            return
        self._stopped_twice = True
        if self._grace is not None and not self._grace.expired():
            self._grace.reschedule(asyncio.get_running_loop().time())

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
        await self._listen()
        try:
            self._decisions = self._decision_file()
            loaded = await self._loaded()
            if loaded is not None:
                try:
                    await self._serve(loaded, on_ready)
                finally:
                    await loaded.runner.close()
        finally:
            if self._decisions is not None:
                await asyncio.to_thread(self._decisions.close)
            await self.health.set(serving=False)
            await self._server.stop(STOP_GRACE_S)
            self.backend.registry.close()

    async def _listen(self) -> None:
        listen, is_open = self._settings.server.listen, self._settings.server.insecure_listen
        host, _, port = listen.rpartition(":")
        if not is_open and not _is_loopback(host.strip("[]")):
            rule = "is not loopback, and this server speaks plaintext; --insecure-listen allows it"
            raise SettingsError(f"server.listen: {host} {rule}")
        reflection.enable_server_reflection(
            (generation.SERVICE, control.SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME),
            self._server,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self._server.add_generic_rpc_handlers(
            (GenerationService(self.backend).rpc_handler(), control.rpc_handler())
        )
        if int(port) > 65535:
            raise SettingsError(f"server.listen: the port must be at most 65535, got {port}")
        try:
            bound = self._server.add_insecure_port(listen)
        except RuntimeError:
            raise SettingsError(f"server.listen: can't listen on {listen}; is it in use?") from None
        self.address = f"{host}:{bound}"
        await self._server.start()

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

    async def _serve(self, loaded: Loaded, on_ready: Callable[[Ready], None]) -> None:
        engine = Engine(
            loaded.runner,
            loaded.tokenizer,
            self._settings.scheduler_config,
            max_buffered_tokens=self._settings.engine.max_buffered_tokens,
            check_integrity=self._check_integrity,
            decisions=self._decisions,
        )
        self.backend.set_engine(engine)
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
                if loaded.after_ready is not None:  # nobody waits for it, the end of the process neither
                    threading.Thread(target=loaded.after_ready, name="after-ready", daemon=True).start()
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
            log.critical("engine.died", exc_info=error)
        await self.health.set(serving=False)
        raise EngineDied

    async def _drain(self, engine: Engine) -> None:
        """Let what runs end, refuse what is new, cut what lasts too long."""
        await self.health.set(serving=False)
        await self.health.wait_until_told(TELL_S_MAX)
        grace_s = self._settings.server.grace_s
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
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _options(settings: Settings) -> list[tuple[str, int]]:
    """Options of the transport; a misspelt one is silently ignored, so tests look at their effects."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", settings.server.max_concurrent_streams),
        ("grpc.max_receive_message_length", settings.server.max_frame_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.server_handshake_timeout_ms", 10_000),
    ]
