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
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from engine.afterwards import Afterwards
from engine.clock import Clock, MonotonicClock
from engine.delivery import Delivery, incident
from engine.errors import (
    Draining,
    Unimplemented,
    UnknownModel,
    VorrangError,
)
from engine.grammar import GrammarsBusy, GrammarSpec
from engine.handle import RequestHandle
from engine.in_flight import StepsInFlight
from engine.look import ClassLook, RequestLook, class_looks, looks
from engine.losses import Losses
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
from engine.scheduler.commands import Allow, Command, Fail, Finish, MaskReady, SetLevel
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.decisions import DecisionSink, RecordingScheduler
from engine.scheduler.plan import Plan, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.statistics import EngineStatistics
from engine.text import OutputText, Tokenizer
from kv.block_manager import BlockManager

#: Seconds between looks at the deadlines while nothing is computed.
IDLE_POLL_S = 0.05


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
        self._afterwards = Afterwards()
        self._delivery = Delivery(
            self._clock, self._scheduler.apply, max_buffered_tokens, self._afterwards, observer
        )
        self._losses = Losses(self._clock, self._delivery)
        self._commands: deque[Command] = deque()
        self._wake = asyncio.Event()
        self._draining = False
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._last_step_s = 0.0
        self._step_ended = 0.0
        self._heartbeat = self._clock.now()
        self._idle = True
        self._in_flight = (
            StepsInFlight(runner) if pipeline_depth and isinstance(runner, PipelinedRunner) else None
        )
        self._mortal = runner if isinstance(runner, MortalRunner) else None
        if self._mortal is not None:
            self._mortal.watch(self._wake.set)
        self._constraining = runner if isinstance(runner, ConstrainingRunner) else None

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
        return self.submit_together([spec], on_ready)[0]

    def submit_together(
        self, specs: Sequence[RequestSpec], on_ready: Callable[[RequestHandle], None] | None = None
    ) -> list[RequestHandle]:
        """Queue the outputs of one prompt, all of them or none.

        Args:
            specs: what is asked for; at least one, alike but for their ids and sampling.
            on_ready: see ``submit``; called for each of them.

        Raises:
            VorrangError: see ``submit``; then nobody was displaced or told of anything.
        """
        if self._draining:
            raise Draining
        for spec in specs:
            if spec.adapter and spec.adapter not in self.info.adapters:
                known = ", ".join(map(repr, sorted(self.info.adapters)))
                there = f"only {known}" if known else "none at all"
                raise UnknownModel(f"adapter {spec.adapter[:80]!r} is not served, {there}")
            assert spec.request_id not in self._delivery
        texts = [self._text_of(spec) for spec in specs]
        if len(specs) > 1:
            self._scheduler.check_together(specs)
        now = self._clock.now()
        return [self._queue(spec, text, on_ready, now) for spec, text in zip(specs, texts, strict=True)]

    def _text_of(self, spec: RequestSpec) -> OutputText:
        return OutputText(
            self.tokenizer.stream_decoder(spec.prompt_token_ids),
            spec.sampling.stop_strings,
            include_stop_string=spec.sampling.include_stop_string,
        )

    def _queue(
        self,
        spec: RequestSpec,
        text: OutputText,
        on_ready: Callable[[RequestHandle], None] | None,
        now: float,
    ) -> RequestHandle:
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
        self._delivery.add(handle, text, now)
        self._delivery.hand_out(displaced)
        self._wake.set()
        return handle

    def check_levels(self, request_ids: Iterable[RequestId], level: int) -> None:
        """Refuse a new level unless all of these can have it now; changes nothing.

        Raises:
            InvalidRequest, QueueFull: see ``Scheduler.check_levels``.
        """
        self._scheduler.check_levels(request_ids, level)

    async def prepare(self, grammar: GrammarSpec, timeout_s: float, level: int = 0) -> None:
        """Have a grammar compiled before a request with it is submitted; steps go on meanwhile.

        Raises:
            GrammarRefused: it can't be compiled, or not within the time that it may compute.
            QueueFull: too many are being compiled, or its turn did not come within ``timeout_s`` seconds.
            Unimplemented, InternalError: see ``ConstrainingRunner.prepare``.
            Draining: nothing is computed any more.

        Cancellation: at once.
        """
        if self._constraining is None:
            raise Unimplemented("grammar")
        try:
            async with asyncio.timeout(timeout_s):
                await self._constraining.prepare(grammar, level)
        except TimeoutError:
            raise GrammarsBusy(timeout_s) from None
        except RunnerDead:
            raise Draining from None
        except VorrangError:
            raise
        except Exception as error:
            raise incident("grammar.failed", error) from error

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
            num_alive=len(self._delivery),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=self._scheduler.blocks.num_free_blocks,
            num_blocks=self.pool.num_blocks,
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
            num_preemptions=self._delivery.num_preemptions,
            idle=self._idle,
            heartbeat_age_s=self._clock.now() - self._heartbeat,
            num_runner_losses=self._losses.num_losses,
            last_resume_s=self._losses.last_resume_s,
            num_computed_tokens=self._num_computed_tokens,
            num_output_tokens=self._delivery.num_output_tokens,
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
        await self._delivery.nothing_alive.wait()

    def cancel_all(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End every request before the next step, with its output so far."""
        for request_id in self._delivery:
            self._send(Finish(request_id, reason))

    async def run(self) -> None:
        """Serve until cancelled. Run it in a task of its own, once.

        Raises:
            RunnerDead: nothing can be computed any more; every request that was alive has failed.

        Cancellation: waits for the step in flight as far as the runner does, fails
        every request that is alive, then returns.
        """
        if self._constraining is not None:
            self._constraining.watch_masks(self._masks_ready)
        try:
            while True:
                self._drain_inbox()
                if self._mortal is not None and (lost := self._mortal.take_loss()) is not None:
                    await self._recover(lost)
                    continue
                plan = self._scheduler.plan(self._clock.now())
                self._delivery.hand_out(plan.events)
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
                self._delivery.fail_all(Draining())
                self._afterwards.make()

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
            if self._in_flight is not None:
                await self._in_flight.give_up()
            self._losses.step_failed(plan, error)
            return
        now = self._clock.now()
        self._num_steps += 1
        self._last_step_s, self._step_ended = now - started, now
        self._num_computed_tokens += sum(grant.num_tokens for grant in plan.grants)
        self._delivery.hand_out_prompts(result.prompt_logprobs)
        self._delivery.hand_out(self._scheduler.commit(plan, result, now), result.logprobs)
        if self._observer is not None:
            self._afterwards(self._observer.step_made, plan, self._last_step_s)
        self._losses.step_made(now)
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
        self._losses.runner_lost(lost, plan)
        lost.recovery.add_done_callback(lambda _: self._wake.set())
        while not lost.recovery.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_POLL_S):
                    await self._wake.wait()
            now = self._clock.now()
            for request_id in self._scheduler.expired(now):
                command = Finish(request_id, FinishReason.TIME_LIMIT)
                self._delivery.obey(command, now)
            self._drain_inbox()
        lost.recovery.result()

    async def _sleep(self) -> None:
        """Wait for work. While requests are alive (parked ones), look at their deadlines now and then."""
        self._idle = True
        timeout_s = IDLE_POLL_S if self._scheduler.has_requests else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        self._idle = False

    def _masks_ready(self, ready: Sequence[tuple[RequestId, int]]) -> None:
        for request_id, output_index in ready:
            self._send(MaskReady(request_id, output_index))

    def _send(self, command: Command) -> None:
        """Have a command obeyed before the next plan.

        Raises:
            InvalidRequest, QueueFull: a new level can't be had. One that can be refused is obeyed at once,
                and with it what was said about the request's level before.
        """
        if isinstance(command, SetLevel) and self._scheduler.joins_another_class(command):
            now, earlier = self._clock.now(), [*self._commands]
            for other in earlier:
                if isinstance(other, SetLevel) and other.request_id == command.request_id:
                    self._commands.remove(other)
                    self._delivery.obey(other, now)
            self._delivery.obey(command, now)
        else:
            self._commands.append(command)
        self._wake.set()

    def _drain_inbox(self) -> None:
        """Commands are obeyed, ends before all others."""
        self._wake.clear()
        now = self._clock.now()
        commands = sorted(self._commands, key=lambda command: not isinstance(command, Finish | Fail))
        self._commands.clear()
        for command in commands:
            self._delivery.obey(command, now)
