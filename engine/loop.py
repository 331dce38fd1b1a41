"""The engine loop: before every forward pass, decide the batch anew.

One task owns the scheduler. Everybody else talks to it through an inbox that is
drained before each plan, ends first. The model computes off the event loop; no
other await lies between two plans, so a command takes effect in the next plan: within
one step, or one step later when plans are made while the step before is computed
(``pipeline_depth`` 1, see ``engine.scheduler.ahead``).
"""

import asyncio
import contextlib
import dataclasses
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from engine.clock import Clock, MonotonicClock
from engine.errors import (
    Draining,
    InternalError,
    SlowConsumer,
    Unimplemented,
    UnknownModel,
    VorrangError,
)
from engine.events import (
    Delta,
    Failed,
    Finished,
    PositionLogProbs,
    Preempted,
    PromptLogProbs,
    SchedulerEvent,
    TokensSampled,
)
from engine.grammar import GrammarRefused, GrammarSpec
from engine.handle import RequestHandle
from engine.in_flight import StepsInFlight
from engine.look import ClassLook, RequestLook, class_looks, looks
from engine.observer import EngineObserver
from engine.request import FinishReason, RequestId, RequestSpec, RequestStatus
from engine.runner.base import (
    ConstrainingRunner,
    ModelInfo,
    MortalRunner,
    PipelinedRunner,
    PoolShape,
    Runner,
    RunnerDead,
    RunnerLost,
)
from engine.scheduler.commands import Allow, Command, Fail, Finish, LoseKv
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.decisions import DecisionSink, RecordingScheduler
from engine.scheduler.plan import Plan, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.text import OutputText, Tokenizer
from kv.block_manager import BlockManager

#: Seconds between looks at the deadlines while nothing is computed.
IDLE_POLL_S = 0.05

_NO_LOGPROBS: Mapping[RequestId, PositionLogProbs] = {}

log = structlog.get_logger("vorrang.engine")


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A look at the engine between two steps.

    Attributes:
        num_alive: requests alive, in the scheduler or in the inbox.
        num_running: requests holding a seat.
        num_waiting: requests waiting, preempted ones included.
        num_free_blocks: KV blocks nobody holds.
        num_blocks: KV blocks in the pool.
        num_steps: steps made.
        last_step_s: duration of the last step, in seconds.
        num_preemptions: preemptions so far.
        idle: whether the loop waits for work.
        heartbeat_age_s: seconds since the loop last came round; meaningless while idle.
        num_runner_losses: times the runner died and all KV with it.
        last_resume_s: seconds from the last of them to the end of the next step; 0 = none yet.
        num_computed_tokens: tokens computed so far, those of prompts and those computed again included.
        num_output_tokens: output tokens produced so far.
    """

    num_alive: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    last_step_s: float
    num_preemptions: int
    idle: bool
    heartbeat_age_s: float
    num_runner_losses: int = 0
    last_resume_s: float = 0.0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0


class _Live:
    """A request the engine knows: its handle, its text so far, its times."""

    __slots__ = (
        "arrived", "first_token_at", "handle", "last_token_at", "next_scored", "stop_string", "text",
    )  # fmt: skip

    def __init__(self, handle: RequestHandle, text: OutputText, now: float) -> None:
        self.handle = handle
        self.text = text
        self.stop_string: str | None = None
        self.next_scored = 1  # nothing is before the first token of a prompt that could predict it
        self.arrived = now
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None


@dataclass(slots=True)
class _Resuming:
    """From the death of a runner to the end of the next step.

    Attributes:
        since: when it died.
        cause: of what, the last time.
        num_recomputed: requests that lost their KV.
    """

    since: float
    cause: str = ""
    num_recomputed: int = 0


class Engine:
    """Owns the scheduler and drives the runner. All methods are for the event loop's thread.

    Args:
        runner: computes plans.
        tokenizer: makes text of tokens.
        config: limits and policy; ``max_context_tokens`` is lowered to the model's context.
        clock: where time comes from.
        max_buffered_tokens: output tokens that may wait for a reader before its request fails.
        check_integrity: recount everything after every step (tests).
        decisions: is told of every call that drives the scheduler; None = nobody is.
        pipeline_depth: 1 = plan the next step, and deliver the last one's tokens, while a step is
            computed; a runner that is no ``PipelinedRunner`` gets one plan at a time all the same.
        observer: is told of what happens to requests and of every step; None = nobody is.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        config: SchedulerConfig,
        *,
        clock: Clock | None = None,
        max_buffered_tokens: int = 8192,
        check_integrity: bool = False,
        decisions: DecisionSink | None = None,
        pipeline_depth: int = 0,
        observer: EngineObserver | None = None,
    ) -> None:
        assert pipeline_depth in (0, 1)
        assert not (pipeline_depth and config.speculation_tokens), "how far drafts get is not known ahead"
        context = min(config.max_context_tokens, runner.info.context_tokens)
        self.config = dataclasses.replace(config, max_context_tokens=context)
        self.tokenizer = tokenizer
        self.max_buffered_tokens = max_buffered_tokens
        self._runner = runner
        self._clock = clock or MonotonicClock()
        blocks = BlockManager(runner.pool.num_blocks, runner.pool.block_size)
        self._scheduler = (
            Scheduler(self.config, blocks)
            if decisions is None
            else RecordingScheduler(self.config, blocks, decisions)
        )
        self._check_integrity = check_integrity
        self._observer = observer
        self._live: dict[RequestId, _Live] = {}
        self._commands: deque[Command] = deque()
        self._wake = asyncio.Event()
        self._nothing_alive = asyncio.Event()
        self._nothing_alive.set()
        self._draining = False
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_computed_tokens = 0
        self._num_output_tokens = 0
        self._last_step_s = 0.0
        self._step_ended = 0.0
        self._heartbeat = self._clock.now()
        self._idle = True
        self._num_losses = 0
        self._last_resume_s = 0.0
        self._resuming: _Resuming | None = None
        self._in_flight = (
            StepsInFlight(runner) if pipeline_depth and isinstance(runner, PipelinedRunner) else None
        )
        self._mortal = runner if isinstance(runner, MortalRunner) else None
        if self._mortal is not None:
            self._mortal.watch(self._wake.set)

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._runner.info

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        return self._runner.pool

    @property
    def pipeline_depth(self) -> int:
        """Steps that are planned ahead of the one that is computed; 0 where the runner can't take them."""
        return int(self._in_flight is not None)

    @property
    def runner_pid(self) -> int | None:
        """The process that computes; None when it is this one, or while there is none."""
        return self._mortal.pid if self._mortal is not None else None

    @property
    def uses_level(self) -> bool:
        """Whether the policy in force looks at levels."""
        return self._scheduler.policy.uses_level

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt + output that can be served: the smaller of context and pool."""
        return min(self.config.max_context_tokens, self.pool.num_blocks * self.pool.block_size)

    def submit(
        self, spec: RequestSpec, on_ready: Callable[[RequestHandle], None] | None = None
    ) -> RequestHandle:
        """Queue a request; it is considered before the next step.

        Args:
            spec: what is asked for; its ``request_id`` must be new.
            on_ready: called on the event loop whenever the handle's buffer gets an
                event; must not block or raise.

        Raises:
            Draining: no new requests are taken.
            UnknownModel: the model has no adapter of that name.
            EmptyPrompt, ContextExceeded, PoolExceeded, QueueFull, TenantQuotaExceeded, InvalidRequest:
                see ``Scheduler.submit``.
        """
        if self._draining:
            raise Draining
        if spec.adapter and spec.adapter not in self.info.adapters:
            known = ", ".join(map(repr, sorted(self.info.adapters)))
            there = f"only {known}" if known else "none at all"
            raise UnknownModel(f"adapter {spec.adapter[:80]!r} is not served, {there}")
        assert spec.request_id not in self._live
        now = self._clock.now()
        displaced = self._scheduler.submit(spec, now)
        sampling, guesses = spec.sampling, self.config.speculation_tokens > 0
        handle = RequestHandle(
            spec,
            self._scheduler.position(spec.request_id),
            self._send,
            on_ready,
            allows=guesses and sampling.may_be_guessed,
        )
        if guesses and not sampling.may_be_guessed:
            self._send(Allow(spec.request_id, 0))
        text = OutputText(
            self.tokenizer.stream_decoder(spec.prompt_token_ids),
            sampling.stop_strings,
            include_stop_string=sampling.include_stop_string,
        )
        self._live[spec.request_id] = _Live(handle, text, now)
        self._nothing_alive.clear()
        if self._observer is not None:
            self._observer.submitted(spec)
        self._dispatch(displaced)
        self._wake.set()
        return handle

    async def prepare(self, grammar: GrammarSpec, timeout_s: float) -> None:
        """Have a grammar compiled before a request with it is submitted; steps go on meanwhile.

        Raises:
            GrammarRefused: it can't be compiled, or not within ``timeout_s`` seconds.
            Unimplemented, QueueFull, InternalError: see ``ConstrainingRunner.prepare``.
            Draining: nothing is computed any more.

        Cancellation: at once.
        """
        if not isinstance(self._runner, ConstrainingRunner):
            raise Unimplemented("grammar")
        try:
            async with asyncio.timeout(timeout_s):
                await self._runner.prepare(grammar)
        except TimeoutError:
            rule = "must compile in time, in seconds"
            raise GrammarRefused(grammar, rule, f"more than {timeout_s:g}") from None
        except RunnerDead:
            raise Draining from None
        except VorrangError:
            raise
        except Exception as error:
            raise self._incident("grammar.failed", error) from error

    def now(self) -> float:
        """Time on the engine's clock, in seconds; deadlines are on it."""
        return self._clock.now()

    def queue_position(self, request_id: RequestId) -> int | None:
        """Requests that wait and would be served before this one; None when it does not wait itself."""
        request = self._scheduler.find(request_id)
        if request is None or request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return None
        return self._scheduler.position(request_id)

    def statistics(self) -> EngineStatistics:
        """How things stand."""
        return EngineStatistics(
            num_alive=len(self._live),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=self._scheduler.blocks.num_free_blocks,
            num_blocks=self.pool.num_blocks,
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
            num_preemptions=self._num_preemptions,
            idle=self._idle,
            heartbeat_age_s=self._clock.now() - self._heartbeat,
            num_runner_losses=self._num_losses,
            last_resume_s=self._last_resume_s,
            num_computed_tokens=self._num_computed_tokens,
            num_output_tokens=self._num_output_tokens,
        )

    def look(self) -> list[RequestLook]:
        """Every request alive, most urgent first. For operators: takes time that follows their number."""
        return looks(self._scheduler, self._clock.now())

    def class_looks(self) -> dict[tuple[str, str], ClassLook]:
        """How many requests are where, by class and tenant. Takes time that follows their number."""
        return class_looks(self._scheduler)

    @property
    def is_draining(self) -> bool:
        """Whether no new requests are taken."""
        return self._draining

    def drain(self) -> None:
        """Take no new requests from now on; those that were accepted run to their end."""
        self._draining = True

    async def wait_until_idle(self) -> None:
        """Return when no request is alive."""
        await self._nothing_alive.wait()

    def cancel_all(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End every request before the next step, with its output so far."""
        for request_id in self._live:
            self._send(Finish(request_id, reason))

    async def run(self) -> None:
        """Serve until cancelled. Run it in a task of its own, once.

        Raises:
            RunnerDead: nothing can be computed any more; every request that was alive has failed.

        Cancellation: waits for the step in flight as far as the runner does, fails
        every request that is alive, then returns.
        """
        try:
            while True:
                self._drain_inbox()
                if self._mortal is not None and (lost := self._mortal.take_loss()) is not None:
                    await self._recover(lost)
                    continue
                plan = self._scheduler.plan(self._clock.now())
                self._dispatch(plan.events)
                if self._in_flight is not None and (plan.grants or self._in_flight):
                    await self._overlap(plan, self._in_flight)
                elif plan.grants:
                    await self._step(plan, self._runner.execute(plan), self._clock.now())
                elif not self._commands:
                    await self._sleep()
                self._heartbeat = self._clock.now()
        finally:
            self._draining = True
            try:
                if self._in_flight is not None:
                    await self._in_flight.give_up()
            finally:
                self._fail_all(Draining())

    async def _overlap(self, plan: Plan, in_flight: StepsInFlight) -> None:
        """Hand in a plan, then book the step before it, which was computed while this one was planned.

        Nothing is awaited after the first plan of all, and after a plan that grants
        nothing there is nothing to be overlapped with.
        """
        if plan.grants:
            in_flight.hand_in(plan, self._clock.now())
        if len(in_flight) > 1 or not plan.grants:
            step = in_flight.take_oldest()
            await self._step(step.plan, step.result, max(step.since, self._step_ended))

    async def _step(self, plan: Plan, computed: Awaitable[StepResult], started: float) -> None:
        """Await what comes of a plan, and book it."""
        try:
            result = await computed
        except RunnerLost as lost:
            await self._recover(lost, plan)
            return
        except Exception as error:  # the step is lost, the engine is not
            await self._lose_step(plan, error)
            return
        now = self._clock.now()
        self._num_steps += 1
        self._last_step_s, self._step_ended = now - started, now
        self._num_computed_tokens += sum(grant.num_tokens for grant in plan.grants)
        self._deliver_prompts(result.prompt_logprobs)
        self._dispatch(self._scheduler.commit(plan, result, now), result.logprobs)
        if self._observer is not None:
            self._observer.step_made(plan, self._last_step_s)
        if self._resuming is not None:
            self._resumed(self._resuming, now)
        if self._check_integrity:
            self._scheduler.check_integrity()

    async def _recover(self, lost: RunnerLost, plan: Plan | None = None) -> None:
        """All KV is gone, and every step in flight with it: have it computed again once somebody can.

        Commands are obeyed and deadlines kept meanwhile.

        Args:
            lost: how the runner died.
            plan: the step it was given, if it was given one.

        Raises:
            RunnerDead: nobody ever can.

        Cancellation: at once.
        """
        if self._in_flight is not None:
            await self._in_flight.give_up()
        now = self._clock.now()
        self._num_losses += 1
        suspects = tuple(grant.request_id for grant in plan.grants) if plan and lost.step_begun else ()
        error = InternalError(secrets.token_hex(8))
        events = self._scheduler.apply(LoseKv(suspects, lost.from_outside, error), now)
        for event in events:
            if isinstance(event, Failed):
                log.error(
                    "request.killed_runner",
                    incident_id=error.incident_id,
                    request_id=event.request_id,
                    cause=lost.cause,
                )
        num_recomputed = sum(isinstance(event, Preempted) for event in events)
        if self._resuming is None:
            self._resuming = _Resuming(now)
        self._resuming.cause = lost.cause
        self._resuming.num_recomputed += num_recomputed
        self._dispatch(events)
        lost.recovery.add_done_callback(lambda _: self._wake.set())
        while not lost.recovery.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_POLL_S):
                    await self._wake.wait()
            now = self._clock.now()
            for request_id in self._scheduler.expired(now):
                command = Finish(request_id, FinishReason.TIME_LIMIT)
                self._dispatch(self._scheduler.apply(command, now))
            self._drain_inbox()
        lost.recovery.result()

    async def _lose_step(self, plan: Plan, error: Exception) -> None:
        """The model raised, and nobody knows what it has written: all is computed again, as after a death.

        A request that makes it raise again, alone, fails.
        """
        if self._in_flight is not None:
            await self._in_flight.give_up()
        suspects = tuple(grant.request_id for grant in plan.grants)
        command = LoseKv(suspects, from_outside=False, error=self._incident("step.failed", error))
        self._dispatch(self._scheduler.apply(command, self._clock.now()))

    def _resumed(self, resuming: "_Resuming", now: float) -> None:
        self._resuming = None
        self._last_resume_s = now - resuming.since
        log.info(
            "runner.resumed",
            cause=resuming.cause,
            resume_s=round(self._last_resume_s, 3),
            num_recomputed=resuming.num_recomputed,
        )

    async def _sleep(self) -> None:
        """Wait for work. While requests are alive (parked ones), look at their deadlines now and then."""
        self._idle = True
        timeout_s = IDLE_POLL_S if self._scheduler.has_requests else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        self._idle = False

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self._wake.set()

    def _drain_inbox(self) -> None:
        """Commands are obeyed, ends before all others."""
        self._wake.clear()
        now = self._clock.now()
        commands = sorted(self._commands, key=lambda command: not isinstance(command, Finish | Fail))
        self._commands.clear()
        for command in commands:
            self._dispatch(self._scheduler.apply(command, now))

    def _deliver_prompts(self, found: Mapping[RequestId, PromptLogProbs]) -> None:
        """Hand out log probabilities of prompts; what was computed again after a preemption is known."""
        for request_id, scored in found.items():
            live = self._live.get(request_id)
            if live is None:
                continue
            first = live.next_scored
            assert scored.first_index <= first, "log probabilities of a prompt have a gap"
            if new := scored.positions[first - scored.first_index :]:
                live.next_scored += len(new)
                live.handle.put(PromptLogProbs(request_id, first, new))

    def _dispatch(
        self,
        events: Iterable[SchedulerEvent],
        logprobs: Mapping[RequestId, PositionLogProbs] = _NO_LOGPROBS,
    ) -> None:
        """Hand scheduler events to their requests, tokens with their text and ``logprobs``."""
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue  # a stop string in its last token has ended it already
            if isinstance(event, TokensSampled):
                self._deliver(live, event, logprobs.get(event.request_id))
            elif isinstance(event, Finished | Failed):
                self._end(live, event)
            else:
                if isinstance(event, Preempted):
                    self._num_preemptions += 1
                    log.info("request.preempted", **_preemption(event))
                if self._observer is not None:
                    self._observer.happened(live.handle.spec, event)
                live.handle.put(event)

    def _deliver(self, live: _Live, event: TokensSampled, logprobs: PositionLogProbs | None) -> None:
        """Turn tokens into a delta; end the request when they hold a stop string or nobody reads."""
        now = self._clock.now()
        self._num_output_tokens += len(event.token_ids)
        if live.first_token_at is None:
            live.first_token_at = now
        if self._observer is not None:
            gap_s = None if live.last_token_at is None else now - live.last_token_at
            self._observer.produced(live.handle.spec, len(event.token_ids), gap_s)
            live.last_token_at = now
        try:
            text, num_tokens = self._text_of(live, event)
        except Exception as error:  # one poisoned request fails alone
            command: Command = Fail(event.request_id, self._incident("request.text_failed", error))
            self._dispatch(self._scheduler.apply(command, now))
            return
        found = () if logprobs is None else (logprobs,)
        delta = Delta(event.request_id, event.first_index, event.token_ids[:num_tokens], text, found)
        live.handle.put(delta)
        if live.stop_string is not None:
            is_last = num_tokens == len(event.token_ids)
            length = None if is_last else event.first_index + num_tokens
            command = Finish(event.request_id, FinishReason.STOP_STRING, num_output_tokens=length)
            self._dispatch(self._scheduler.apply(command, now))
        elif live.handle.num_buffered_tokens > self.max_buffered_tokens:
            rule = f"{live.handle.num_buffered_tokens} output tokens wait to be read,"
            command = Fail(event.request_id, SlowConsumer(f"{rule} more than {self.max_buffered_tokens}"))
            self._dispatch(self._scheduler.apply(command, now))

    def _text_of(self, live: _Live, event: TokensSampled) -> tuple[str, int]:
        """The tokens' text, and how many of them count: none after a stop string."""
        spec = live.handle.spec
        text = ""
        for index, token_id in enumerate(event.token_ids, start=event.first_index):
            may_stop = index + 1 >= spec.sampling.min_tokens
            if may_stop and (token_id in spec.eos_token_ids or token_id in spec.sampling.stop_token_ids):
                continue  # it ends the output and has no text
            piece = live.text.push(token_id, may_stop=may_stop)
            text += piece.text
            if piece.stop_string is not None:
                live.stop_string = piece.stop_string
                return text, index - event.first_index + 1
        return text, len(event.token_ids)

    def _end(self, live: _Live, event: Finished | Failed) -> None:
        handle = live.handle
        if isinstance(event, Finished):
            if live.stop_string is not None:
                reason = FinishReason.STOP_STRING
                event = dataclasses.replace(event, reason=reason, stop_string=live.stop_string)
            elif rest := live.text.flush().text:
                handle.put(Delta(event.request_id, event.usage.output_tokens, (), rest))
        del self._live[event.request_id]
        if not self._live:
            self._nothing_alive.set()
        now = self._clock.now()
        log.info("request.ended", **_summary(live, event, now))
        if self._observer is not None:
            ttft_s = None if live.first_token_at is None else live.first_token_at - live.arrived
            self._observer.ended(handle.spec, event, ttft_s, now - live.arrived)
        handle.put(event)

    def _fail_all(self, error: VorrangError) -> None:
        now = self._clock.now()
        for request_id in list(self._live):
            self._dispatch(self._scheduler.apply(Fail(request_id, error), now))

    def _incident(self, what: str, error: Exception) -> InternalError:
        incident_id = secrets.token_hex(8)
        log.error(what, incident_id=incident_id, exc_info=error)
        return InternalError(incident_id)


def _preemption(event: Preempted) -> dict[str, object]:
    return {
        "request_id": event.request_id,
        "reason": event.reason.value,
        "count": event.count,
        "beneficiary": event.beneficiary,
        "num_blocks": event.num_blocks,
        "num_lost_tokens": event.num_lost_tokens,
    }


def _summary(live: _Live, event: Finished | Failed, now: float) -> dict[str, object]:
    """The one canonical line of a request."""
    handle = live.handle
    how = (
        {"reason": event.reason.value}
        if isinstance(event, Finished)
        else {"reason": "failed", "error": type(event.error).__name__, "message": str(event.error)}
    )
    ttft_s = None if live.first_token_at is None else round(live.first_token_at - live.arrived, 4)
    usage = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(event.usage).items()
    }
    return {
        "request_id": handle.request_id,
        "label": handle.spec.label,
        "level": handle.level,
        **how,
        "ttft_s": ttft_s,
        "total_s": round(now - live.arrived, 4),
        **usage,
    }
