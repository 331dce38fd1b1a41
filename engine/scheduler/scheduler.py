"""The scheduler: pure, synchronous, driven from outside.

Per step: ``apply`` what happened to requests, ``plan``, let a runner compute the
plan, ``commit`` its result; the next plan may be made before that
(``engine.scheduler.ahead``). It knows no torch, clock, I/O or randomness: the same
calls give the same plans.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from engine.errors import ContextExceeded, Displaced, EmptyPrompt, PoolExceeded
from engine.events import LevelChanged, SchedulerEvent, TokensSampled
from engine.priority import check_level, class_of
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestSpec, RequestStatus
from engine.scheduler.ahead import UncommittedPlans
from engine.scheduler.commands import (
    Allow,
    Command,
    Fail,
    Finish,
    LoseKv,
    MaskReady,
    Park,
    Preempt,
    SetLevel,
    Unpark,
)
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.disciplines import new_discipline
from engine.scheduler.draft import Gate, StepDraft
from engine.scheduler.grants import decode_grants, other_grants
from engine.scheduler.limits import Unit, place_for, place_of
from engine.scheduler.plan import Plan, StepResult
from engine.scheduler.policies import policy_named
from engine.scheduler.quarantine import Quarantine
from engine.scheduler.room import room_for_all
from engine.scheduler.speculation import Speculation, verified
from engine.scheduler.state import SchedulerState
from kv.block_manager import BlockManager

_new_tuple = tuple.__new__  # a named tuple's own constructor takes twice the time

#: A grant as its own members, which are read without a call.
Fields = tuple[Request, int, int, object, int | None]


@dataclass(slots=True)
class Booked:
    """What a commit has brought: events so far, who produced a token, whom its token may end."""

    events: list[SchedulerEvent]
    producers: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)


class Scheduler:
    """Decides, before every step, who computes how many tokens.

    Invariant (``check_integrity``): seats, queue, blocks and counters agree; all
    blocks are free when no request is alive.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.policy = policy_named(config.policy, {t.name: t.weight for t in config.tenants})
        self.blocks = blocks
        self._state = SchedulerState(config, self.policy, blocks)
        self._discipline = new_discipline(config)
        self._deadlines = Deadlines()
        self._quarantine = Quarantine()
        self._speculation = Speculation(config)
        self._uncommitted = UncommittedPlans()
        self._kept_out: dict[RequestId, Gate] = {}  # of the last plan, for who records decisions
        self._num_arrivals = 0
        self._step = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a seat."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, preempted ones included."""
        return len(self._state.waiting)

    @property
    def has_requests(self) -> bool:
        """Whether any request is alive."""
        return bool(self._state.requests)

    def running(self) -> tuple[Request, ...]:
        """Requests that hold a seat, in policy order."""
        return tuple(self._state.running)

    def parked(self) -> tuple[Request, ...]:
        """Requests that are not to be computed."""
        return tuple(self._state.parked.values())

    def waiting(self) -> tuple[Request, ...]:
        """Requests that wait, in policy order; sorts, so not for the hot path."""
        return tuple(self._state.waiting)

    def find(self, request_id: RequestId) -> Request | None:
        """A request that is alive; None when it is not."""
        return self._state.requests.get(request_id)

    def is_quarantined(self, request_id: RequestId) -> bool:
        """Whether it may have killed the runner and is computed alone."""
        return self._quarantine.holds(request_id)

    def check(self, spec: RequestSpec, num_outputs: int = 1) -> None:
        """Refuse what could never run, or wait. Changes nothing.

        Args:
            spec: what is asked for.
            num_outputs: so many times, at once.

        Raises:
            EmptyPrompt: no token.
            ContextExceeded: prompt + max_tokens is longer than the context.
            PoolExceeded: prompt + 1 token is larger than the whole pool.
            InvalidRequest: the level is out of range, its tenant may never run that many tokens, or not
                even an empty queue holds them.
        """
        num_prompt_tokens = len(spec.prompt_token_ids)
        context = self.config.max_context_tokens
        if num_prompt_tokens == 0:
            raise EmptyPrompt
        check_level(spec.level)
        if num_prompt_tokens >= context:
            rule = f"must be shorter than the context of {context} tokens"
            raise ContextExceeded("prompt", rule, num_prompt_tokens)
        if num_prompt_tokens + spec.sampling.max_tokens > context:
            rule = f"must be at most {context - num_prompt_tokens}: the context of {context} tokens"
            rule += f" less the prompt's {num_prompt_tokens}"
            raise ContextExceeded("sampling.max_tokens", rule, spec.sampling.max_tokens)
        num_blocks = self.blocks.blocks_for(num_prompt_tokens + 1)
        if num_blocks > self.blocks.num_blocks:
            pool_tokens = self.blocks.num_blocks * self.blocks.block_size
            rule = f"must leave room for an output token in the KV pool of {pool_tokens} tokens"
            raise PoolExceeded("prompt", rule, num_prompt_tokens)
        self._state.tenants.check(spec, self._num_tokens_max(spec))
        self._state.limits.check_ever(place_for(spec), num_outputs)

    def check_together(self, specs: Sequence[RequestSpec]) -> None:
        """Refuse the outputs of one prompt unless all of them can be queued now. Changes nothing.

        Raises:
            EmptyPrompt, ContextExceeded, PoolExceeded, InvalidRequest, QueueFull, TenantQuotaExceeded:
                as ``submit`` would for one of them.
        """
        for spec in specs:
            self.check(spec, len(specs))
        room_for_all(self._state, [place_for(spec) for spec in specs])

    def check_levels(self, request_ids: Iterable[RequestId], level: int) -> None:
        """Refuse a new level unless all of these can have it now; those that have ended can. Changes nothing.

        Raises:
            InvalidRequest: it is out of range, or not even an empty queue of its class holds them.
            QueueFull: they would break a limit of the queue of its class.
        """
        requests = [self._state.requests[i] for i in request_ids if i in self._state.requests]
        self._room_at(requests, check_level(level))

    def joins_another_class(self, command: SetLevel) -> bool:
        """Whether a new level is an arrival in another class, which can be refused.

        Raises:
            InvalidRequest: it is out of range.
        """
        to_class, request = class_of(command.level), self._state.requests.get(command.request_id)
        return request is not None and not request.has_started and class_of(request.level) is not to_class

    def _room_at(self, requests: Sequence[Request], level: int) -> list[Unit]:
        """Who must end so that these can have another level: who was never admitted waits in its class."""
        moving = [r for r in requests if not r.has_started and class_of(r.level) is not class_of(level)]
        if not moving:
            return []
        newcomers = [place_of(request)._replace(level=level) for request in moving]
        for place in newcomers:
            self._state.limits.check_ever(place, len(newcomers))
        return room_for_all(self._state, newcomers, moving)

    def _displace(self, units: Iterable[Unit], now: float) -> list[SchedulerEvent]:
        return [self._state.fail(request, Displaced(), now) for unit in units for request in unit]

    def _num_tokens_max(self, spec: RequestSpec) -> int:
        """Tokens at which a request ends whatever it says."""
        pool_tokens = self.blocks.num_blocks * self.blocks.block_size
        longest = len(spec.prompt_token_ids) + spec.sampling.max_tokens
        return min(longest, self.config.max_context_tokens, pool_tokens + 1)

    def submit(self, spec: RequestSpec, now: float) -> list[SchedulerEvent]:
        """Queue a request; in a full queue it takes the place of the least urgent one that is less urgent.

        Returns:
            The end of the request that was displaced, if one was; of all its outputs.

        Raises:
            EmptyPrompt, ContextExceeded, PoolExceeded, InvalidRequest: see ``check``.
            QueueFull, TenantQuotaExceeded: it would break a limit of the queue.
        """
        self.check(spec)
        assert spec.request_id not in self._state.requests
        events = self._displace(room_for_all(self._state, [place_for(spec)]), now)
        request = Request(spec, self._num_arrivals, now)
        request.num_tokens_max = self._num_tokens_max(spec)
        self._num_arrivals += 1
        self._state.enqueue(request)
        self._deadlines.add(request)
        return events

    def position(self, request_id: RequestId) -> int:
        """Requests that wait and would be served before this one, which waits."""
        return self._state.waiting.position(self._state.requests[request_id])

    def apply(self, command: Command, now: float) -> list[SchedulerEvent]:
        """Do something to a request, nothing at all when it is not alive; or lose what the pool holds.

        May be called at any time, between ``plan`` and ``commit`` too: what a step
        in flight samples for a request that ends now is dropped; of one that is
        preempted or parked it is kept.

        Raises:
            InvalidRequest, QueueFull: a level that the request can't have, see ``check_levels``.
        """
        if isinstance(command, LoseKv):
            return self._lose_kv(command, now)
        request = self._state.requests.get(command.request_id)
        if request is None:
            return []
        match command:
            case Finish(reason=reason, stop_string=stop_string, num_output_tokens=length):
                finished = self._state.finish(
                    request, reason, now, stop_string=stop_string, num_output_tokens=length
                )
                return [finished]
            case Fail(error=error):
                return [self._state.fail(request, error, now)]
            case SetLevel(level=level):
                events = self._displace(self._room_at([request], check_level(level)), now)
                self._state.set_level(request, level)
                return [*events, LevelChanged(request.request_id, level)]
            case Preempt():
                if request.status is not RequestStatus.RUNNING:
                    return []
                return [self._state.preempt(request, PreemptReason.OPERATOR, None, self._step, now)]
            case Park():
                if request.status is not RequestStatus.PARKED:
                    self._state.park(request, now)
                return []
            case Allow(num_output_tokens=num_output_tokens):
                request.num_outputs_allowed = num_output_tokens
                return []
            case MaskReady(output_index=output_index):
                request.mask_index = max(request.mask_index, output_index)
                if request.mask_index >= request.num_output_tokens:
                    self._state.release(request)
                return []
            case Unpark():
                if request.status is RequestStatus.PARKED:
                    self._state.unpark(request, now)
                return []

    def expired(self, now: float) -> list[RequestId]:
        """Requests whose time has run out, each named once, for who can't plan now but can end them."""
        return self._deadlines.expired(now, self._state.requests)

    def _lose_kv(self, command: LoseKv, now: float) -> list[SchedulerEvent]:
        state = self._state
        suspects = [state.requests[i] for i in command.suspects if i in state.requests]
        guilty = self._quarantine.blame(
            suspects, alone=len(command.suspects) == 1, from_outside=command.from_outside
        )
        failed = [] if guilty is None else [state.fail(guilty, command.error, now)]
        lost = state.lose_kv(self._step, now)
        for request in state.requests.values():
            request.mask_index = -1  # who makes masks from now on has made none
        self._uncommitted.lose()
        return [*failed, *lost]

    def plan(self, now: float) -> Plan:
        """Decide the next step. Never blocks, never raises for load; an empty plan is legal.

        The plan before need not be committed yet, the one before that must be.
        """
        self._uncommitted.look_ahead(self._state)
        draft = self._filled(now)
        plan = Plan(
            draft.step, (*decode_grants(draft), *other_grants(draft)), tuple(draft.events), draft.gate
        )
        self._uncommitted.planned(plan)
        return plan

    def _filled(self, now: float) -> StepDraft:
        """The next step, decided."""
        self._step += 1
        draft = StepDraft(self._step, now, self.config.max_step_tokens, self.config.max_scored_tokens)
        for request_id in self._deadlines.expired(now, self._state.requests):
            request = self._state.requests[request_id]
            draft.events.append(self._state.finish(request, FinishReason.TIME_LIMIT, now))
        if not (self._quarantine and self._quarantine.fill(self._state, draft)):
            self._discipline.fill(self._state, draft)
            self._speculation.fill(self._state, draft)
        self._kept_out = draft.kept_out
        return draft

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[SchedulerEvent]:
        """Book what a step has computed.

        Plans are committed in their order, each once. One is left out after ``LoseKv``,
        or when everybody it granted anything to was made to fail.

        Returns:
            Failures, then sampled tokens in the order of the plan's grants, then the ends those tokens cause.
        """
        is_late, void = self._uncommitted.land(plan)
        booked = Booked(self._fail_rows(plan, result, now))
        book = self._book_late if is_late else self._book
        grants = cast("Sequence[Fields]", plan.grants)
        if result.sat_out or result.complete or void:
            grants = self._without_tokens(grants, result, void, is_late=is_late)
        if result.after_drafts:
            grants = self._book_drafts(grants, result, booked)
        book(grants, result.sampled, now, booked)
        self.policy.produced(booked.producers)
        if self._quarantine:
            self._quarantine.release(plan, self._state)
        for request in booked.ended:
            booked.events.extend(self._end(request, now))
        if result.complete:
            booked.events.extend(self._end_complete(result, now))
        for request_id in result.awaiting:
            waiting = self._state.requests.get(request_id)
            if waiting is not None and waiting.mask_index < waiting.num_output_tokens:
                self._state.hold(waiting)
        return booked.events

    def _without_tokens(
        self, grants: Sequence[Fields], result: StepResult, void: Collection[Request], *, is_late: bool
    ) -> list[Fields]:
        """See to the grants that were to sample and did not: their last token counts as not computed.

        Args:
            grants: of the plan.
            result: what came of it.
            void: requests whose grants are for a token that never was.
            is_late: whether it was looked ahead to.

        Returns:
            What is left to be booked.
        """
        left: list[Fields] = []
        for grant in grants:
            request, start, num_tokens, table, output_index = grant
            request_id = request.request_id
            if request in void:
                continue
            if output_index is None or request_id in result.sampled or request_id in result.failures:
                left.append(grant)
                continue
            assert request_id in result.sat_out or request_id in result.complete, "it sampled nothing"
            if not is_late:
                if num_tokens > 1:
                    left.append((request, start, num_tokens - 1, table, None))
            elif request.status is not RequestStatus.FINISHED:
                if request.num_scored_tokens is not None:
                    _score(request, start + num_tokens - 1)
                self._state.look_back(request, start + num_tokens - 1, table)
                self._uncommitted.void(request)
        return left

    def _end_complete(self, result: StepResult, now: float) -> list[SchedulerEvent]:
        """The end of the requests whose grammar leaves nothing to be said, unless they have ended already."""
        sampled = [request_id for request_id in result.sampled if request_id in result.complete]
        ids = [*sampled, *sorted(result.complete - result.sampled.keys())]
        requests = [self._state.requests.get(request_id) for request_id in ids]
        return [
            self._state.finish(request, FinishReason.STOP, now) for request in requests if request is not None
        ]

    def _book(
        self, grants: Sequence[Fields], sampled: Mapping[RequestId, int], now: float, booked: Booked
    ) -> None:
        """What was granted by a plan that nobody looked ahead of."""
        state, block_size, running = self._state, self.blocks.block_size, RequestStatus.RUNNING
        events, charges = booked.events, not self.policy.is_fixed
        for grant in grants:
            request, start, num_tokens, _, output_index = grant
            if request.status is not running:  # it ended, was preempted or parked meanwhile
                state.look_ahead((grant,))
                self._book_late((grant,), sampled, now, booked)
                continue
            request.num_computed_tokens = num_computed = start + num_tokens
            if output_index is not None:
                request_id = request.request_id
                token_id = sampled[request_id]
                if not output_index:
                    request.spend(now)  # the first output token ends the prefill
                request.token_ids.append(token_id)
                if charges:
                    booked.producers.append(request)
                events.append(_new_tuple(TokensSampled, (request_id, output_index, (token_id,))))
                if num_computed + 1 >= request.num_tokens_max or token_id in request.ending_token_ids:
                    booked.ended.append(request)
            if num_tokens > 1 or not output_index:
                if request.num_scored_tokens is not None:
                    _score(request, num_computed)
                state.prefilled(request)
            elif not num_computed % block_size:
                state.filled_block(request)

    def _book_drafts(self, grants: Sequence[Fields], result: StepResult, booked: Booked) -> list[Fields]:
        """What was granted with drafts: the tokens that are the model's own.

        Returns:
            The grants that are not booked yet. Of who lost its seat meanwhile the drafts are forgotten.
        """
        others: list[Fields] = []
        for grant in grants:
            request, start, _, table, output_index = grant
            drafts, request.draft_token_ids = request.draft_token_ids, ()
            if not drafts or output_index is None:
                others.append(grant)
                continue
            if request.status is not RequestStatus.RUNNING:
                others.append((request, start, 1, table, output_index))
                continue
            request_id = request.request_id
            said = verified(drafts, result.sampled[request_id], result.after_drafts[request_id])
            request.num_drafted_tokens += len(drafts)
            request.num_accepted_tokens += len(said) - 1
            self._speculation.learned(request, len(drafts), len(said) - 1)
            for place, token_id in enumerate(said, start=1):
                if start + place + 1 >= request.num_tokens_max or token_id in request.ending_token_ids:
                    del said[place:]
                    booked.ended.append(request)
                    break
            request.num_computed_tokens = start + len(said)
            request.token_ids.extend(said)
            if not self.policy.is_fixed:
                booked.producers.extend([request] * len(said))
            booked.events.append(TokensSampled(request_id, output_index, tuple(said)))
            self._state.filled_block(request)
        return others

    def _book_late(
        self, grants: Sequence[Fields], sampled: Mapping[RequestId, int], now: float, booked: Booked
    ) -> None:
        """What was granted by a plan that was looked ahead of: where requests stand is known already."""
        finished, charges = RequestStatus.FINISHED, not self.policy.is_fixed
        for request, start, num_tokens, table, output_index in grants:
            if request.status is finished:
                continue  # computed in vain
            if request.num_scored_tokens is not None:
                _score(request, start + num_tokens)
            if request.num_tokens_in_flight and table is request.block_table:
                request.num_tokens_in_flight = 0
                if num_tokens > 1 or not output_index:
                    self.blocks.confirm(request, start + num_tokens)
            if output_index is None:
                continue
            request_id = request.request_id
            token_id = sampled[request_id]
            if not output_index:
                request.spend(now)
            request.num_outputs_in_flight = 0
            request.token_ids.append(token_id)
            if charges:
                booked.producers.append(request)
            booked.events.append(_new_tuple(TokensSampled, (request_id, output_index, (token_id,))))
            if start + num_tokens + 1 >= request.num_tokens_max or token_id in request.ending_token_ids:
                booked.ended.append(request)

    def _fail_rows(self, plan: Plan, result: StepResult, now: float) -> list[SchedulerEvent]:
        """End the requests whose own computation failed."""
        if not result.failures:
            return []
        requests = [self._state.requests.get(grant.request_id) for grant in plan.grants]
        return [
            self._state.fail(request, result.failures[request.request_id], now)
            for request in requests
            if request is not None and request.request_id in result.failures
        ]

    def check_integrity(self) -> None:
        """Recount everything; an ``AssertionError`` here is a bug of ours."""
        self._state.check_integrity()
        self._uncommitted.check_integrity(self._state)

    def _end(self, request: Request, now: float) -> list[SchedulerEvent]:
        """The end of a request, if its last output token or its length is one."""
        spec, token_id = request.spec, request.token_ids[-1]
        if request.num_output_tokens >= spec.sampling.min_tokens:
            if token_id in spec.eos_token_ids:
                return [self._state.finish(request, FinishReason.STOP, now)]
            if token_id in spec.sampling.stop_token_ids:
                reason = FinishReason.STOP_TOKEN
                return [self._state.finish(request, reason, now, stop_token_id=token_id)]
        longest = min(request.max_known_tokens, self.config.max_context_tokens)
        if request.num_tokens >= longest:
            return [self._state.finish(request, FinishReason.LENGTH, now)]
        if request.num_tokens >= request.num_tokens_max:
            return [self._state.finish(request, FinishReason.CAPACITY, now)]
        return []


def _score(request: Request, num_computed_tokens: int) -> None:
    """What was computed has told how likely the tokens after it were."""
    assert request.num_scored_tokens is not None
    num_scored = min(num_computed_tokens, request.num_prompt_tokens - 1)
    request.num_scored_tokens = max(request.num_scored_tokens, num_scored)
