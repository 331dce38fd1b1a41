"""A runner in a process of its own, which may die: then another one takes its place.

The KV in the dead process is lost, so whoever held any is computed again; see
``RunnerLost``. What the process does is in ``engine.runner.worker``.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import structlog

from engine.descriptors import is_shortage
from engine.errors import InternalError, VorrangError
from engine.events import PositionLogProbs, PromptLogProbs
from engine.failure import trace_of
from engine.grammar import GrammarSpec
from engine.request import RequestId
from engine.runner.base import MAX_STEPS_IN_FLIGHT, ModelInfo, PoolShape, RunnerDead, RunnerLost
from engine.runner.channel import MASKS, RESULT, Message, PackedError, unpack_error
from engine.runner.child import Child, ChildDied, RunnerLimits
from engine.runner.grammars.limits import GrammarLimits
from engine.runner.process_life import Death
from engine.runner.sources import ModelSource
from engine.scheduler.plan import Plan, StepResult

#: A restart may take so many times as long as the first start, and at least so many seconds.
PATIENCE, RESTART_S_MIN = 10, 30.0
_NOTHING: Mapping[RequestId, Any] = {}

log = structlog.get_logger("vorrang.runner")


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """How often the process died.

    Attributes:
        pid: the process that computes; None while there is none.
        num_restarts: processes that took the place of a dead one.
    """

    pid: int | None
    num_restarts: int


@dataclass(slots=True)
class _Step:
    """A step that the process has not answered."""

    plan: Plan
    result: asyncio.Future[StepResult]


class ProcessRunner:
    """Computes in a process of its own, and starts another one when that dies or hangs.

    A ``MortalRunner`` and a ``PipelinedRunner``: the next plan waits in the socket while one is computed.

    Made by ``start``, inside an event loop; ``close`` must follow. All methods are
    for that loop's thread, which must live as long as the runner.
    """

    _info: ModelInfo
    _pool: PoolShape

    def __init__(self, source: ModelSource, limits: RunnerLimits) -> None:
        self._source = source
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._steps: deque[_Step] = deque()  # unanswered, oldest first; some may be given up
        self._loss: RunnerLost | None = None
        self._recovery: asyncio.Future[None] = self._loop.create_future()
        self._recovery.set_result(None)
        self._last_death = Death("it was closed", from_outside=True)
        self._tell: Callable[[], None] = lambda: None
        self._masks_ready: Callable[[Sequence[tuple[RequestId, int]]], None] = lambda _: None
        self._num_in_a_row = 0
        self._num_restarts = 0
        self._prepared: OrderedDict[GrammarSpec, None] = OrderedDict()  # what another process must have

    @classmethod
    async def start(cls, source: ModelSource, limits: RunnerLimits | None = None) -> Self:
        """A runner that can compute.

        Raises:
            ChildDied: the process died, or took too long, while it loaded the model.
            Exception: what loading raised.

        Cancellation: the process is ended.
        """
        runner = cls(source, limits or RunnerLimits())
        began = time.monotonic()
        child = runner._child = await Child.start(source, None, runner._limits, runner._received)
        runner._info, runner._pool = child.info, child.pool
        start_s = time.monotonic() - began
        start_s_max = min(runner._limits.start_s_max, max(RESTART_S_MIN, PATIENCE * start_s))
        runner._limits = dataclasses.replace(runner._limits, start_s_max=start_s_max)
        runner._supervisor = asyncio.create_task(runner._supervise(), name="runner")
        log.info("runner.started", pid=child.pid, start_s=round(start_s, 3))
        return runner

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        return self._pool

    @property
    def pid(self) -> int | None:
        """The process that computes; None while there is none."""
        return self._child.pid if self._child is not None else None

    def statistics(self) -> RunnerStatistics:
        """How things stand."""
        return RunnerStatistics(self.pid, self._num_restarts)

    def take_loss(self) -> RunnerLost | None:
        """A loss that ``execute`` has not raised; it is given out once."""
        loss, self._loss = self._loss, None
        return loss

    def watch(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, on the event loop, whenever there is a loss to take."""
        self._tell = tell

    async def execute(self, plan: Plan) -> StepResult:
        """Have every grant of ``plan`` computed.

        Raises:
            RunnerLost: the process died or hung; the step counts as never made.
            Exception: whatever the model raised; the whole step failed.

        Cancellation: at once. The process computes the step nevertheless, before
        any later one; its result is lost.
        """
        return await self.submit(plan)

    def submit(self, plan: Plan) -> asyncio.Future[StepResult]:
        """Hand in a plan; see ``PipelinedRunner``. Cancellation of the future: as for ``execute``."""
        result: asyncio.Future[StepResult] = self._loop.create_future()
        loss = self.take_loss()
        if loss is None and self._child is None:
            loss = self._new_loss()
        if loss is not None:
            result.set_exception(loss)
            return result
        assert self._child is not None
        assert sum(not step.result.done() for step in self._steps) < MAX_STEPS_IN_FLIGHT
        self._steps.append(_Step(plan, result))
        self._child.send(plan)
        return result

    def watch_masks(self, ready: Callable[[Sequence[tuple[RequestId, int]]], None]) -> None:
        """See ``ConstrainingRunner``."""
        self._masks_ready = ready

    async def prepare(self, grammar: GrammarSpec, level: int = 0) -> None:
        """See ``ConstrainingRunner``. When the process was killed meanwhile, the next one is asked, once.

        Raises:
            RunnerDead: there is no next one.
        """
        for is_last in (False, True):
            await asyncio.shield(self._recovery)
            child = self._child
            if child is None:
                continue
            try:
                await child.prepare(grammar, level)
            except ChildDied as died:
                log.error("grammar.lost", cause=str(died), grammar=grammar.field)
                await child.ended.wait()  # by then it is known how, and that another one is to come
                if is_last or not self._last_death.from_outside:
                    break
                continue
            self._prepared[grammar] = None
            self._prepared.move_to_end(grammar)
            while len(self._prepared) > GrammarLimits().num_idle_max:
                self._prepared.popitem(last=False)
            return
        raise InternalError(secrets.token_hex(8))

    async def close(self) -> None:
        """End the process. May be called twice.

        Cancellation: the process is killed; nothing is left behind.
        """
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._child is not None:
            child, self._child = self._child, None
            await child.end()

    def _received(self, message: Message) -> None:
        kind, step_number = message[0], message[1]
        if kind == MASKS:
            self._masks_ready(step_number)
            return
        step = self._steps.popleft()
        assert step.plan.step == step_number, "plans are answered in their order"
        if step.result.done():
            return  # whoever wanted it was cancelled
        self._num_in_a_row = 0
        if kind == RESULT:
            step.result.set_result(_result(step.plan, *message[2:]))
        else:
            step.result.set_exception(unpack_error(message[2]))

    async def _supervise(self) -> None:
        """Put another process in the place of each that dies, until there is no hope."""
        child = self._child
        while child is not None:
            await child.lost.wait()
            began = time.monotonic()
            self._recovery = self._loop.create_future()
            self._recovery.add_done_callback(_seen)
            self._child = None
            pid = child.pid
            self._last_death = await child.end()
            log.error("runner.died", pid=pid, cause=self._last_death.cause, step_begun=bool(self._steps))
            self._tell_of_loss()
            try:
                child = self._child = await self._another()
            except RunnerDead as dead:
                log.critical("runner.given_up", cause=str(dead))
                self._recovery.set_exception(dead)
                self._loss = self._loss or self._new_loss()
                self._tell()
                return
            self._num_restarts += 1
            restart_s = time.monotonic() - began
            for grammar in self._prepared:  # before any plan, which waits for them at worst
                child.prepare(grammar).add_done_callback(_seen)
            log.info("runner.respawned", pid=child.pid, restart_s=round(restart_s, 3))
            self._recovery.set_result(None)

    async def _another(self) -> Child:
        """A process that can compute.

        Raises:
            RunnerDead: all attempts are spent.
        """
        limits = self._limits
        why = self._last_death.cause
        while True:
            self._num_in_a_row += 1
            num_before = self._num_in_a_row - 1
            if num_before >= limits.max_restarts:
                raise RunnerDead(f"{num_before} restarts in a row did not help; the last time: {why}")
            if num_before:
                await asyncio.sleep(min(limits.backoff_s_max, limits.backoff_s * 2 ** (num_before - 1)))
            try:
                return await self._started()
            except Exception as error:  # whatever the model or the machine has against it now
                why = str(error)
                trace = trace_of(error, with_text=True)
                log.error("runner.start_failed", attempt=self._num_in_a_row, exception=trace)

    async def _started(self) -> Child:
        """A process, as soon as there is what it takes to start one.

        A want of descriptors, memory or processes is no death of the runner, however long it lasts.

        Raises:
            Exception: whatever else ``Child.start`` does.
        """
        wait_s = self._limits.backoff_s
        while True:
            try:
                return await Child.start(self._source, self._pool, self._limits, self._received)
            except OSError as error:
                if not is_shortage(error):
                    raise
                log.warning("runner.start_delayed", cause=error.strerror or str(error), wait_s=wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(self._limits.backoff_s_max, 2 * wait_s)

    def _tell_of_loss(self) -> None:
        """Every plan that is still wanted is lost; the process died of the oldest one it had, if of any."""
        is_oldest, is_told = True, False
        while self._steps:
            step = self._steps.popleft()
            if not step.result.done():
                loss = self._new_loss()
                loss.step_begun = is_oldest
                step.result.set_exception(loss)
                is_told = True
            is_oldest = False
        if not is_told:
            self._loss = self._new_loss()
            self._tell()

    def _new_loss(self) -> RunnerLost:
        death = self._last_death
        return RunnerLost(death.cause, from_outside=death.from_outside, recovery=self._recovery)


def _result(
    plan: Plan,
    sampled: list[int | None],
    failures: dict[RequestId, PackedError],
    logprobs: Mapping[RequestId, PositionLogProbs] = _NOTHING,
    prompt_logprobs: Mapping[RequestId, PromptLogProbs] = _NOTHING,
    complete: frozenset[RequestId] = frozenset(),
    after_drafts: Mapping[RequestId, Sequence[int]] = _NOTHING,
    sat_out: frozenset[RequestId] = frozenset(),
    awaiting: frozenset[RequestId] = frozenset(),
) -> StepResult:
    ids = [grant.request_id for grant in plan.grants if grant.output_index is not None]
    tokens = {i: token_id for i, token_id in zip(ids, sampled, strict=True) if token_id is not None}
    failed = {request_id: _failure(packed) for request_id, packed in failures.items()}
    return StepResult(tokens, failed, logprobs, prompt_logprobs, complete, after_drafts, sat_out, awaiting)


def _failure(packed: PackedError) -> VorrangError:
    error = unpack_error(packed)
    return error if isinstance(error, VorrangError) else InternalError("unknown")


def _seen(recovery: "asyncio.Future[None]") -> None:
    """Nobody need look: a runner that nobody uses may be given up, too."""
    if not recovery.cancelled():
        recovery.exception()
