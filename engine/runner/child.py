"""One process that computes, from its start to its end, as the event loop sees it.

Knows when it is dead or hangs; whether another one follows is not its business.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from engine.grammar import GrammarSpec
from engine.runner import process_life
from engine.runner.base import ModelInfo, PoolShape
from engine.runner.channel import (
    BEAT,
    LOAD,
    LOAD_FAILED,
    LOG,
    MASKS,
    PLAN,
    PREPARE,
    PREPARED,
    READY,
    WITHDRAW,
    FrameReader,
    Message,
    frame,
    unpack_error,
)
from engine.runner.delta import PlanEncoder
from engine.runner.process_life import Death, death_by
from engine.runner.sources import ModelSource
from engine.scheduler.plan import Plan

#: The watchdog looks so many times in the time without a sign of life that it allows.
NUM_TICKS = 5
#: Signs of life in that time.
NUM_BEATS = 10
#: Seconds a process that closed its socket, or was told to end, gets to exit by itself.
EXIT_S_MAX = 2.0

log = structlog.get_logger("vorrang.runner")


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """How long to wait for a process, and how often to start another one.

    Attributes:
        start_s_max: seconds that loading may take; restarts get no more than many times the first start.
        hang_s: seconds without a sign of life after which it counts as hanging.
        step_s_max: seconds that a step may take, whatever signs of life there are.
        max_restarts: restarts in a row, without a computed step between them, before it is given up.
        backoff_s: wait before the second restart in a row; it doubles from one to the next.
        backoff_s_max: longest such wait.
    """

    start_s_max: float = 600.0
    hang_s: float = 5.0
    step_s_max: float = 120.0
    max_restarts: int = 8
    backoff_s: float = 0.1
    backoff_s_max: float = 5.0


class ChildDied(Exception):
    """It ended, or hung, before its model was loaded; the message says how."""


class Child:
    """Starts, watches and ends one process. All methods are for the event loop's thread.

    Made by ``start``; ``end`` must follow.

    Attributes:
        info: what it serves.
        pool: size of its KV pool.
        lost: set when it is dead or hangs.
        ended: set when it has been ended and cleared up after.
    """

    info: ModelInfo
    pool: PoolShape

    def __init__(self, limits: RunnerLimits, on_message: Callable[[Message], None]) -> None:
        self.lost = asyncio.Event()
        self.ended = asyncio.Event()
        self._limits = limits
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._encoder = PlanEncoder()
        self._hang: Death | None = None
        self._ready: asyncio.Future[bool] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._num_silent_ticks = 0
        self._num_unanswered = 0
        self._busy_since = 0.0
        self._preparing: dict[int, asyncio.Future[None]] = {}
        self._num_prepared = 0
        self._process, self._connection = process_life.spawn_connected("engine.runner.worker")

    @classmethod
    async def start(
        cls,
        source: ModelSource,
        pool: PoolShape | None,
        limits: RunnerLimits,
        on_message: Callable[[Message], None],
    ) -> "Child":
        """A process that has loaded its model.

        Args:
            source: what to load.
            pool: what its KV pool must be; None = as ``source`` has it.
            limits: how long to wait.
            on_message: is told of what it sends from then on, but for signs of life and log lines.

        Raises:
            ChildDied: it ended, or took too long.
            OSError: it could not be started.
            Exception: what loading raised.

        Cancellation: the process is ended.
        """
        child = cls(limits, on_message)
        try:
            await child._load(source, pool)
        except BaseException:
            await child.end(kill=True)
            raise
        return child

    @property
    def pid(self) -> int:
        """Its process id; it names this process until ``end`` has returned."""
        return self._process.pid

    def send(self, plan: Plan) -> None:
        """Give it a step to compute. Nothing happens when it is dead."""
        assert self._transport is not None
        if not self._num_unanswered:
            self._busy_since = self._loop.time()
        self._num_unanswered += 1
        self._transport.write(frame((PLAN, self._encoder.encode(plan))))

    def prepare(self, grammar: GrammarSpec, level: int = 0) -> "asyncio.Future[None]":
        """Have it compile a grammar.

        Returns:
            Done when it has; holds what compiling raised, or ``ChildDied``.
        """
        assert self._transport is not None
        done: asyncio.Future[None] = self._loop.create_future()
        if self.lost.is_set():
            done.set_exception(ChildDied("it is dead"))
            return done
        self._num_prepared += 1
        self._preparing[self._num_prepared] = done
        number = self._num_prepared
        self._transport.write(frame((PREPARE, number, grammar, level)))
        done.add_done_callback(lambda _: self._withdraw(number, done))
        return done

    def _withdraw(self, number: int, done: "asyncio.Future[None]") -> None:
        """Nobody waits for a grammar any more."""
        if done.cancelled() and not self.lost.is_set() and self._transport is not None:
            self._preparing.pop(number, None)
            self._transport.write(frame((WITHDRAW, number)))

    async def end(self, *, kill: bool = False) -> Death:
        """End it, and clear up after it. May be called twice.

        Args:
            kill: by force at once, rather than after ``EXIT_S_MAX``.

        Cancellation: it is killed at once; nothing is left behind.
        """
        if self._tick is not None:
            self._tick.cancel()
        if not self._ready.done():
            self._ready.cancel()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._connection.close()
        try:
            if self._hang is None and not kill:
                await self._exited()
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
        self.lost.set()
        self.ended.set()
        preparing, self._preparing = self._preparing, {}
        death = self._hang or death_by(self._process.returncode)
        for done in preparing.values():
            if not done.done():
                done.set_exception(ChildDied(death.cause))
        return death

    async def _load(self, source: ModelSource, pool: PoolShape | None) -> None:
        transport, _ = await self._loop.create_connection(lambda: _Link(self), sock=self._connection)
        self._transport = transport
        transport.write(frame((LOAD, source, pool, self._limits.hang_s / NUM_BEATS)))
        try:
            async with asyncio.timeout(self._limits.start_s_max):
                is_there = await self._ready
        except TimeoutError:
            self._hang = Death(f"it did not load its model within {self._limits.start_s_max:g} s", False)
            raise ChildDied(self._hang.cause) from None
        if not is_there:
            await self._exited()
            code = self._process.poll()
            raise ChildDied("it closed its socket" if code is None else death_by(code).cause)
        if pool not in (None, self.pool):
            raise ChildDied(f"its KV pool is {self.pool} now, and was {pool}")
        self._watch()

    async def _exited(self) -> None:
        """Wait a little for it to exit by itself."""
        wait_s = 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S_MAX):
                while self._process.poll() is None:
                    await asyncio.sleep(wait_s)
                    wait_s = min(0.02, wait_s + 0.001)

    def _watch(self) -> None:
        """Look whether it gives signs of life.

        Looks are counted, not seconds: when this very process was stopped for a
        while, the first look afterwards must not blame the other one.
        """
        self._num_silent_ticks += 1
        limits = self._limits
        if self._num_silent_ticks > NUM_TICKS:
            self._hang = Death(f"no sign of life for {limits.hang_s:g} s", from_outside=True)
        elif self._num_unanswered and self._loop.time() - self._busy_since > limits.step_s_max:
            self._hang = Death(f"a step took more than {limits.step_s_max:g} s", from_outside=False)
        else:
            self._tick = self._loop.call_later(limits.hang_s / NUM_TICKS, self._watch)
            return
        self.lost.set()

    def received(self, messages: list[Message]) -> None:
        """For the link alone: what it sent."""
        self._num_silent_ticks = 0
        for message in messages:
            kind = message[0]
            if kind == BEAT:
                continue
            if kind == LOG:
                _, level, values = message
                getattr(log, level)(values.pop("event", ""), **values)
            elif kind == READY:
                _, self.info, self.pool = message
                if not self._ready.done():
                    self._ready.set_result(True)
            elif kind == LOAD_FAILED:
                if not self._ready.done():
                    self._ready.set_exception(unpack_error(message[1]))
            elif kind == PREPARED:
                self._prepared(message)
            elif kind == MASKS:
                self._on_message(message)
            else:
                self._num_unanswered -= 1
                self._busy_since = self._loop.time()
                self._on_message(message)

    def _prepared(self, message: Message) -> None:
        _, number, packed = message
        done = self._preparing.pop(number, None)
        if done is None or done.done():
            return  # whoever wanted it was cancelled
        if packed is None:
            done.set_result(None)
        else:
            done.set_exception(unpack_error(packed))

    def closed(self) -> None:
        """For the link alone: it closed its end, most likely because it died."""
        if not self._ready.done():
            self._ready.set_result(False)
        self.lost.set()


class _Link(asyncio.Protocol):
    """Bytes from the process, as messages."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._reader = FrameReader()

    def data_received(self, data: bytes) -> None:
        self._child.received(self._reader.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._child.closed()
