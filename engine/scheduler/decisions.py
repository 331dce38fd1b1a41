"""What the scheduler was asked and what it decided, kept for whoever listens.

``RecordingScheduler`` is a scheduler that tells a sink of every call that drives
it. The plain ``Scheduler`` knows nothing of it, so nobody pays when nobody
listens. A sink that keeps everything can replay a run; ``DecisionRing`` keeps the
last steps alone. How records become text is in ``engine.decisions``; this module
does no I/O.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.events import Preempted, SchedulerEvent, TokensSampled
from engine.request import RequestId, RequestSpec
from engine.scheduler.commands import Command
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import Gate
from engine.scheduler.plan import Plan, StepResult
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager


class GrantDecision(NamedTuple):
    """Tokens granted to a request; a tuple, since a step makes hundreds of them.

    Attributes:
        request_id: whose.
        start: tokens computed before.
        num_tokens: known tokens granted; guesses behind them are told at the commit (``Record.guesses``).
        output_index: output token sampled after them; None mid-prefill.
        level: in force.
    """

    request_id: RequestId
    start: int
    num_tokens: int
    output_index: int | None
    level: int


@dataclass(frozen=True, slots=True)
class Decision:
    """One step as it was planned.

    Attributes:
        step: its number, from 1.
        now: when it was planned, in seconds of the caller's clock.
        grants: in the order of the plan.
        gate: what kept the first request out that could not be admitted; None when nothing waits.
        events: what else was decided, in order.
        num_running: requests holding a seat afterwards.
        num_waiting: requests waiting afterwards.
        num_free_blocks: KV blocks nobody holds afterwards.
        kept_out: what kept each waiting request out that was looked at. Not in logs.
        idle: who has a seat, and something to compute, and is granted nothing. Not in logs.
        masked: who of them awaits a mask. Not in logs: commits and commands tell.
    """

    step: int
    now: float
    grants: tuple[GrantDecision, ...]
    gate: Gate | None
    events: tuple[SchedulerEvent, ...]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    kept_out: Mapping[RequestId, Gate] = field(default_factory=dict)
    idle: tuple[RequestId, ...] = ()
    masked: frozenset[RequestId] = frozenset()

    @property
    def preemptions(self) -> tuple[Preempted, ...]:
        """Who was preempted, for whom, and what it cost."""
        return tuple(event for event in self.events if isinstance(event, Preempted))


@dataclass(frozen=True, slots=True)
class Submitted:
    """``submit`` was called."""

    spec: RequestSpec


@dataclass(frozen=True, slots=True)
class Applied:
    """``apply`` was called."""

    command: Command


@dataclass(frozen=True, slots=True)
class Planned:
    """``plan`` was called.

    Attributes:
        decision: what came of it; None when it raised.
    """

    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """``commit`` was called for the plan of a step."""

    step: int
    result: StepResult


Call = Submitted | Applied | Planned | Committed


class Guesses(NamedTuple):
    """Tokens of a request that a step guessed and judged.

    Attributes:
        request_id: whose.
        num_drafted: guessed.
        num_accepted: of these right, and part of the output.
    """

    request_id: RequestId
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Record:
    """One call that drove the scheduler, and what came of it.

    Attributes:
        call: which, with its arguments.
        now: the time it was given.
        events: what it returned; those of a plan are in order of the decision.
        error: what it raised; None when it returned.
    """

    call: Call
    now: float
    events: tuple[SchedulerEvent, ...] = ()
    error: Exception | None = None

    @property
    def guesses(self) -> tuple[Guesses, ...]:
        """Of a commit, the guesses of who is given tokens by it."""
        if not isinstance(self.call, Committed) or not self.call.result.after_drafts:
            return ()
        judged = self.call.result.after_drafts
        return tuple(
            Guesses(event.request_id, len(judged[event.request_id]), len(event.token_ids) - 1)
            for event in self.events
            if type(event) is TokensSampled and event.request_id in judged
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """What a scheduler was made of; with the calls that followed, all there is to know."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    prefix_cache: bool


class DecisionSink(Protocol):
    """Who listens."""

    @property
    def is_open(self) -> bool:
        """Whether it still listens; while it does not, nothing is made for it."""
        ...

    def begin(self, origin: Origin) -> None:
        """A scheduler was made; called once, first."""
        ...

    def record(self, record: Record) -> None:
        """A call was made. Must be quick and must not raise."""
        ...


class DecisionRing:
    """A sink that keeps the decisions of the last steps.

    Args:
        max_steps: how many.
    """

    is_open = True

    def __init__(self, max_steps: int) -> None:
        assert max_steps >= 1
        self._decisions: deque[Decision] = deque(maxlen=max_steps)

    def begin(self, origin: Origin) -> None:
        """Nothing to do."""

    def record(self, record: Record) -> None:
        """Keep a plan; other calls are passed over."""
        if isinstance(record.call, Planned) and record.call.decision is not None:
            self._decisions.append(record.call.decision)

    def last(self, num_steps: int) -> tuple[Decision, ...]:
        """Decisions of the last ``num_steps`` steps, oldest first; fewer when there are fewer."""
        return tuple(self._decisions)[max(0, len(self._decisions) - num_steps) :]


class RecordingScheduler(Scheduler):
    """A scheduler that decides as ``Scheduler`` does, and tells a sink of every call.

    A call that raises is told of, too: the last line before a crash is what one wants to see.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, sink: DecisionSink) -> None:
        super().__init__(config, blocks)
        self._sink = sink
        sink.begin(Origin(config, blocks.num_blocks, blocks.block_size, blocks.enable_prefix_cache))

    def submit(self, spec: RequestSpec, now: float) -> list[SchedulerEvent]:
        """As in ``Scheduler``."""
        return self._told(Submitted(spec), now, lambda: super(RecordingScheduler, self).submit(spec, now))

    def apply(self, command: Command, now: float) -> list[SchedulerEvent]:
        """As in ``Scheduler``."""
        return self._told(Applied(command), now, lambda: super(RecordingScheduler, self).apply(command, now))

    def plan(self, now: float) -> Plan:
        """As in ``Scheduler``."""
        if not self._sink.is_open:
            return super().plan(now)
        try:
            plan = super().plan(now)
        except Exception as error:
            self._sink.record(Record(Planned(), now, error=error))
            raise
        self._sink.record(Record(Planned(self._decision(plan, now)), now, plan.events))
        return plan

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[SchedulerEvent]:
        """As in ``Scheduler``."""
        call = Committed(plan.step, result)
        return self._told(call, now, lambda: super(RecordingScheduler, self).commit(plan, result, now))

    def _told(self, call: Call, now: float, make: Callable[[], list[SchedulerEvent]]) -> list[SchedulerEvent]:
        if not self._sink.is_open:
            return make()
        try:
            events = make()
        except Exception as error:
            self._sink.record(Record(call, now, error=error))
            raise
        self._sink.record(Record(call, now, tuple(events)))
        return events

    def _decision(self, plan: Plan, now: float) -> Decision:
        grants = tuple(
            tuple.__new__(
                GrantDecision,
                (
                    request.request_id,
                    start,
                    num_tokens if num_tokens == 1 else num_tokens - len(request.draft_token_ids),
                    output_index,
                    request.level,
                ),
            )
            for request, start, num_tokens, _, output_index in plan.grants
        )
        return Decision(
            plan.step,
            now,
            grants,
            plan.gate,
            plan.events,
            self.num_running,
            self.num_waiting,
            self.blocks.num_free_blocks,
            self._kept_out,
            self._idle(plan),
            frozenset(self._state.held),
        )

    def _idle(self, plan: Plan) -> tuple[RequestId, ...]:
        state = self._state
        if len(plan.grants) == len(state.running) - len(state.ending):
            return ()
        granted = {grant.request_id for grant in plan.grants}
        return tuple(r.request_id for r in state.running if not (r.request_id in granted or r.is_ending))
