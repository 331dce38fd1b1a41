"""Drives a scheduler by hand and checks the invariants after every call.

``Driver`` keeps a model of what must hold that shares no code with the
scheduler: what was emitted, who ended, who may be evicted. Numbers in comments
are those of the invariants in docs/SCHEDULING.md; ``tests.support.oracle`` holds
single rules, ``tests.support.queue_oracle`` who may wait, ``tests.support.plan_checks``
what holds of every plan.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import InternalError, PoolExceeded, VorrangError
from engine.events import (
    TERMINAL,
    Failed,
    Finished,
    LevelChanged,
    Preempted,
    Resumed,
    SchedulerEvent,
    Started,
    TokensSampled,
)
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestSpec, RequestStatus
from engine.sampling import SamplingParams
from engine.scheduler.commands import Command, Finish, LoseKv, MaskReady, Park, Preempt, SetLevel, Unpark
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.scheduler.decisions import RecordingScheduler
from engine.scheduler.plan import Plan, StepResult
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager
from tests.support import oracle, plan_checks, queue_oracle
from tests.support.readback import ReadBackRunner, Text, text_of
from tests.support.seen import Seen, Standing

#: Reasons that are nobody's claim on what a request holds.
FORCED = (PreemptReason.OPERATOR, PreemptReason.RUNNER)


def grants(plan: Plan) -> dict[str, int]:
    """Tokens granted, by request, in the order of the plan."""
    return {str(grant.request_id): grant.num_tokens for grant in plan.grants}


def events(plan: Plan, kind) -> list:
    """A plan's events of one kind."""
    return [event for event in plan.events if isinstance(event, kind)]


@dataclass(slots=True)
class Flight:
    """A plan that is not committed, its result once it was computed, and who sat out the one before."""

    plan: Plan
    result: StepResult | None = None
    void: set[RequestId] = field(default_factory=set)


class Driver:
    """A scheduler, a model and the checks.

    ``depth``: 1 = a step plans the next one and commits the one before, as the engine
    does at ``pipeline_depth`` 1. The older plan is computed as late as it may be, or
    both as early as they may be, by turns.

    ``check_every_call``: recount the scheduler's counters after every call, not only
    after every step. Long random runs leave that to some of their episodes.
    """

    def __init__(
        self,
        *,
        num_blocks=16,
        block_size=4,
        prefix_cache=True,
        decisions=None,
        check_every_call=True,
        depth=0,
        class_limits=None,
        **config,
    ):
        self.depth = depth
        self.flights: deque[Flight] = deque()
        self.noted: Counter[str] = Counter()
        config = {"max_running_requests": 4, "max_step_tokens": 16, "max_chunk_tokens": 8} | config
        config = {"max_context_tokens": 512} | config
        # Simple rules unless a test asks for others: no watermark, no bypass, nobody starves.
        config = {"max_bypass": 0, "resume_quantum_tokens": 0, "max_preemptions": 10**6} | config
        watermark, max_wait_s = config.pop("watermark", 0.0), config.pop("max_wait_s", 1e9)
        for name in ("interactive", "standard", "batch"):
            own = 0.0 if name == "interactive" else watermark
            config.setdefault(name, ClassConfig(max_wait_s, own, **(class_limits or {}).get(name, {})))
        self.config = SchedulerConfig(**config)
        self.texts: dict[RequestId, Text] = {}
        self.runner = ReadBackRunner(num_blocks, block_size, self.texts)
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_cache=prefix_cache)
        self.scheduler = (
            Scheduler(self.config, self.blocks)
            if decisions is None
            else RecordingScheduler(self.config, self.blocks, decisions)
        )
        self.check_every_call = check_every_call
        self.seen: dict[RequestId, Seen] = {}
        self.seen_alive: dict[RequestId, Seen] = {}  # in order of arrival
        self.now = 0.0
        self.num_steps = 0
        self.longest = 0
        self.num_forced: Counter[RequestId] = Counter()
        self.started_families: set[str] = set()  # of those alive
        self.max_wait_s = max(self.config.class_config(level).max_wait_s for level in (-10, 0, 10))
        self.sitting: dict[RequestId, bool] = {}  # whose next token is not sampled, and whether it then waits
        self.decoded_last = False  # the last step of prefill_first was one of decodes

    # What can be done

    def submit(self, name, prompt=8, *, level=0, max_tokens=8, **more) -> RequestId:
        """``prompt``: a number of tokens (different for every request) or the tokens themselves."""
        return self.submit_together([name], prompt, level=level, max_tokens=max_tokens, **more)[0]

    def submit_together(self, names, prompt=8, *, level=0, max_tokens=8, **more) -> list[RequestId]:
        """The outputs of one prompt, all of them or none."""
        if isinstance(prompt, int):
            prompt = [(len(self.seen) * 7 + i * i) % 256 for i in range(prompt)]
        salt, tenant = more.pop("cache_salt", ""), more.pop("tenant", "")
        queue_deadline, total_deadline = more.pop("queue_deadline", None), more.pop("total_deadline", None)
        eos, family = frozenset(more.pop("eos_token_ids", ())), more.pop("family", "")
        adapter = more.pop("adapter", "")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=float("seed" in more), **more)
        specs = [
            RequestSpec(
                RequestId(name),
                tuple(prompt),
                sampling,
                level,
                eos,
                salt,
                tenant,
                queue_deadline,
                total_deadline,
                family=family,
                adapter=adapter,
            )
            for name in names
        ]
        numbered = enumerate(specs, len(self.seen))
        newcomers = [queue_oracle.newcomer(self, spec, level, number) for number, spec in numbered]
        outcome, displaced = queue_oracle.expected(self, newcomers), []
        try:
            if len(specs) > 1:
                self.scheduler.check_together(specs)
            for spec in specs:
                displaced += self.queue(spec)
        except VorrangError as error:
            assert not displaced, "displaced for one that was refused"
            queue_oracle.check_refused(self, outcome, error, newcomers)
            raise
        queue_oracle.check_accepted(self, outcome, displaced)
        self.check()
        return [spec.request_id for spec in specs]

    def queue(self, spec: RequestSpec) -> list[SchedulerEvent]:
        """Submit it, and note what must come of it."""
        displaced = self.scheduler.submit(spec, self.now)
        prompt, sampling, request_id = list(spec.prompt_token_ids), spec.sampling, spec.request_id
        self.longest = max(self.longest, len(prompt) + sampling.max_tokens)
        repetitive = self.config.speculation_tokens > 0
        self.texts[request_id] = text = text_of(prompt, sampling, repetitive=repetitive)
        expected = text.token_ids[len(prompt) :]
        self.seen[request_id] = self.seen_alive[request_id] = Seen(
            spec,
            expected,
            oracle.natural_end(spec, expected, self.blocks.num_blocks * self.blocks.block_size),
            progress_at=self.now,
            idle_at=self.now,
            num_earlier=len(self.seen_alive),
        )
        self.book(displaced)
        assert not queue_oracle.broken(self.config, queue_oracle.queued(self))
        return displaced

    def try_submit(self, name, prompt=8, **more) -> VorrangError | None:
        """Like ``submit``; what refuses the request is returned."""
        return self.try_submit_together([name], prompt, **more)

    def try_submit_together(self, names, prompt=8, **more) -> VorrangError | None:
        """Like ``submit_together``; what refuses the requests is returned."""
        try:
            self.submit_together(names, prompt, **more)
        except VorrangError as error:
            refusal = error
        else:
            return None
        too_large = len(prompt) + 1 > self.blocks.num_blocks * self.blocks.block_size
        assert too_large == isinstance(refusal, PoolExceeded)
        self.check()
        return refusal

    def try_apply(self, command: Command) -> VorrangError | None:
        """Like ``apply``; what refuses a new level is returned."""
        try:
            self.apply(command)
        except VorrangError as error:
            assert isinstance(command, SetLevel)
            self.check()
            return error
        return None

    def apply_level(self, command: SetLevel) -> list[SchedulerEvent]:
        """A new level: who never had a seat arrives in its class, if it is another one."""
        name = command.request_id
        moving = [member for member in queue_oracle.queued(self) if member.request_id == name]
        newcomers = [member._replace(level=command.level) for member in moving]
        outcome = queue_oracle.expected(self, newcomers, frozenset({str(name)}))
        before = self.scheduler.find(name)
        try:
            events = self.scheduler.apply(command, self.now)
        except VorrangError as error:
            queue_oracle.check_refused(self, outcome, error, newcomers)
            self.noted["refused a level"] += 1
            raise
        if before is not None:
            *displaced, changed = events
            assert changed == LevelChanged(name, command.level)
            queue_oracle.check_accepted(self, outcome, displaced)
            self.noted["displaced for a level"] += bool(displaced)
        self.book(events)
        assert not queue_oracle.broken(self.config, queue_oracle.queued(self))
        self.check()
        return events

    def apply(self, command: Command) -> list[SchedulerEvent]:
        if isinstance(command, SetLevel):
            return self.apply_level(command)
        seen = self.seen_alive.get(command.request_id)
        if seen is not None and isinstance(command, Park | Unpark | Preempt):
            seen.disturbed = True  # whoever asks for it can't ask for a bound
            seen.idle_at = self.now
        events = self.scheduler.apply(command, self.now)
        assert seen is not None or not events, "a command to one that has ended did something"  # 7
        assert all(event.request_id == command.request_id for event in events)
        self.book(events)
        self.check()
        return events

    def cancel(self, name):
        before = self.scheduler.find(RequestId(name))
        events = self.apply(Finish(RequestId(name)))
        if before is not None:  # 7
            assert [type(e) for e in events] == [Finished]
            assert events[0].reason is FinishReason.CANCELLED
            assert self.scheduler.find(RequestId(name)) is None
        return events

    def preempt(self, name):
        return self.apply(Preempt(RequestId(name)))

    def set_level(self, name, level):
        return self.apply(SetLevel(RequestId(name), level))

    def park(self, name):
        return self.apply(Park(RequestId(name)))

    def unpark(self, name):
        return self.apply(Unpark(RequestId(name)))

    def sit_out(self, name, awaits):
        """The next time it is to sample it does not; ``awaits``: then it waits for ``mask_ready``."""
        if RequestId(name) in self.seen_alive:
            self.sitting[RequestId(name)] = awaits

    def mask_ready(self, name):
        """What its grammar lets come next is known, if anybody waits for that."""
        request = self.scheduler.find(RequestId(name))
        if request is not None:
            self.apply(MaskReady(request.request_id, request.num_output_tokens))
            assert not request.awaits_mask

    def masks_ready(self):
        """All that anybody waits for is known."""
        for request in self.alive():
            if request.awaits_mask:
                self.mask_ready(request.request_id)

    def lose_kv(self, suspects=(), *, from_outside=False) -> list[SchedulerEvent]:
        """The runner dies, and its memory with it."""
        self.runner = ReadBackRunner(self.blocks.num_blocks, self.blocks.block_size, self.texts)
        self.noted["lost with two steps in flight"] += len(self.flights) == 2
        self.flights.clear()
        self.disturb_all()
        holders = {r.request_id for r in self.alive() if self.blocks.holds(r.request_id)}
        command = LoseKv(tuple(suspects), from_outside, InternalError("incident"))
        events = self.scheduler.apply(command, self.now)
        failed = {e.request_id for e in events if isinstance(e, Failed)}
        assert len(failed) <= 1
        assert {e.request_id for e in events if isinstance(e, Preempted)} == holders - failed
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        self.book(events)
        self.check()
        assert all(not self.blocks.match(request).blocks for request in self.alive())
        return events

    def die(self, how):
        """The runner dies ``in_step`` by itself, or is killed ``between`` two; or a step ``fails``.

        At depth 1 a step is in flight ``between`` two, if anything runs.
        """
        if how == "in_step":
            self.step(dies=lambda plan: True)
        elif how == "fails":
            self.step(fails=True)
        else:
            plan = self.flights[0].plan if self.flights else Plan(0, ())
            self.lose_kv([grant.request_id for grant in plan.grants], from_outside=True)

    def disturb_all(self):
        """No bound holds for what a dying runner makes one wait."""
        for request_id, seen in self.seen_alive.items():
            seen.disturbed = True
            request = self.scheduler.find(request_id)
            seen.starved |= request is not None and request.is_starved

    def step(
        self,
        *,
        between: tuple[Command, ...] = (),
        failing: dict[str, VorrangError] | None = None,
        dies: Callable[[Plan], bool] | None = None,
        fails: bool = False,
    ) -> Plan:
        """Plan, compute, obey commands that come in between, commit; rows of ``failing`` fail.

        ``dies``: whether the runner dies of a plan. ``fails``: whether the step fails as a whole.
        """
        self.now += 1.0
        before = self.standing()
        held = [r for r in before.running + before.waiting if self.scheduler.is_quarantined(r.request_id)]
        plan = self.scheduler.plan(self.now)
        self.num_steps += bool(plan.grants)
        after = self.standing()
        if held:
            self.disturb_all()
        plan_checks.check_plan(self, plan, before, after, held)
        self.book(plan.events)
        self.check()
        oracle.check_deadlines(self, plan)
        if not held:
            oracle.check_bypass(self, before, after)
            oracle.check_ageing(self, plan, before, after)
        plan_checks.check_stalls(self, plan)
        if plan.grants or not self.depth:
            self.flights.append(Flight(plan))
        if not self.depth or self.num_steps * 7919 % 5 < 2:
            self.compute()
        for command in between:
            self.try_apply(command)
        if self.flights and (len(self.flights) > self.depth or not plan.grants):
            oldest = self.flights[0].plan
            if dies is not None and oldest.grants and dies(oldest):
                self.lose_kv([grant.request_id for grant in oldest.grants])
            elif fails and oldest.grants:
                self.fail_step()
            else:
                self.land(failing or {})
        self.check(step=True)
        return plan

    def compute(self, num_plans: int = 2):
        """The runner computes what it was handed in, in that order."""
        for flight in list(self.flights)[:num_plans]:
            if flight.result is None:
                self.noted["computed a token nobody knew"] += any(
                    g.has_unknown_token for g in flight.plan.grants
                )
                flight.result = self.runner.run(flight.plan)

    def land(self, failing: dict[str, VorrangError]):
        """The oldest step in flight is computed, if it was not yet, and committed."""
        self.compute(1)
        flight = self.flights.popleft()
        plan, result = flight.plan, flight.result
        assert result is not None
        ids = [grant.request_id for grant in plan.grants]
        if failing:
            failures = {RequestId(name): error for name, error in failing.items()}
            result = dataclasses.replace(result, failures=failures)
            self.runner.fail(i for i in ids if i in result.failures)
        result = self.without_those_that_sit(flight, result)
        alive = {i for i in ids if i in self.seen_alive}
        idle = {i for i in alive if self.scheduler.find(i).status is not RequestStatus.RUNNING}
        events = self.scheduler.commit(plan, result, self.now + 0.5)
        for event in events:
            if isinstance(event, TokensSampled):
                self.noted["more than one token in a step"] += len(event.token_ids) > 1
        delivered = {e.request_id for e in events if isinstance(e, TokensSampled)}
        sampling = {grant.request_id for grant in plan.grants if grant.output_index is not None}
        sampling -= result.sat_out
        for request in (self.scheduler.find(i) for i in result.awaiting & self.seen_alive.keys()):
            assert request.awaits_mask or request.mask_index == request.num_output_tokens
        assert delivered == (sampling & alive) - result.failures.keys(), (
            "delivered once, or its request ended"
        )
        self.noted["delivered to one without a seat"] += len(delivered & idle)
        self.noted["computed in vain"] += len(sampling - alive)
        self.book(events)
        assert all(isinstance(self.seen[i].terminal, Failed) for i in alive & result.failures.keys())

    def without_those_that_sit(self, flight: Flight, result: StepResult) -> StepResult:
        """Some of those that were to sample a token do not; what was granted ahead to them is void."""
        sampling = {g.request_id for g in flight.plan.grants if g.output_index is not None}
        sampling -= result.failures.keys()
        own = {i for i in self.sitting if i in sampling and i not in flight.void}
        if not own and not flight.void:
            return result
        self.disturb_all()
        self.noted["sat out"] += len(own)
        self.noted["void"] += len(flight.void)
        awaiting = frozenset(i for i in own if self.sitting.pop(i))
        for other in self.flights:
            other.void |= own & {grant.request_id for grant in other.plan.grants}
        sat_out = frozenset(own | (flight.void & sampling))
        sampled = {i: token for i, token in result.sampled.items() if i not in sat_out}
        after = {i: tokens for i, tokens in result.after_drafts.items() if i not in sat_out}
        return dataclasses.replace(
            result, sampled=sampled, after_drafts=after, sat_out=sat_out, awaiting=awaiting
        )

    def fail_step(self):
        """The oldest step in flight comes to nothing: all is computed again, as the engine has it."""
        self.noted["failed as a whole"] += 1
        self.lose_kv([grant.request_id for grant in self.flights[0].plan.grants])

    def standing(self) -> Standing:
        """Who stands where now."""
        running = self.scheduler.running()
        seated = {r.request_id for r in running}
        idle: set[RequestId] = set()
        if self.blocks.num_owners > len(seated):
            idle = {r for r in self.seen_alive if r not in seated and self.blocks.holds(r)}
        waiting, parked = self.scheduler.waiting(), self.scheduler.parked()
        return Standing(running, waiting, parked, len(self.seen_alive), seated, idle)

    def run(self, max_steps=10_000):
        while self.scheduler.has_requests:
            self.masks_ready()
            assert max_steps > 0, "it does not come to an end"
            max_steps -= 1
            self.step()

    def run_until_ended(self, name):
        for _ in range(1000):
            if self.terminal(name) is not None:
                return
            self.step()
        raise AssertionError(f"{name} does not come to an end")

    def finish(self):
        """Run to the end: everything has ended, everything is free (1)."""
        self.run()
        while self.flights:  # computed for nobody
            self.land({})
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        assert self.blocks.num_owners == 0
        for seen in self.seen.values():
            assert seen.terminal is not None

    # What is seen

    def running(self) -> list[str]:
        return [str(r.request_id) for r in self.scheduler.running()]

    def waiting(self) -> list[str]:
        return [str(r.request_id) for r in self.scheduler.waiting()]

    def tokens(self, name) -> list[int]:
        return self.seen[RequestId(name)].tokens

    def terminal(self, name) -> SchedulerEvent | None:
        return self.seen[RequestId(name)].terminal

    def preemptions(self, name) -> int:
        return self.seen[RequestId(name)].num_preemptions

    # What must hold

    def num_outputs_to_come(self, request_id: RequestId) -> int:
        """Output tokens of it that are in flight."""
        return sum(
            grant.request_id == request_id and grant.output_index is not None
            for flight in self.flights
            if request_id not in flight.void
            for grant in flight.plan.grants
        )

    def has_its_last(self, request: Request) -> bool:
        """Whether the token in flight is its last one, as far as one can know without its id."""
        if not self.depth or not (num_to_come := self.num_outputs_to_come(request.request_id)):
            return False
        seen, pool_tokens = (
            self.seen_alive[request.request_id],
            self.blocks.num_blocks * self.blocks.block_size,
        )
        longest = min(seen.spec.sampling.max_tokens, pool_tokens + 1 - len(seen.spec.prompt_token_ids))
        return len(seen.tokens) + num_to_come >= longest

    def book(self, events):
        for event in events:
            seen = self.seen[event.request_id]
            assert seen.terminal is None, "an event after the terminal one"  # 4
            seen.events.append(event)
            if isinstance(event, TokensSampled):
                assert event.first_index == len(seen.tokens)  # 3
                seen.tokens.extend(event.token_ids)
                assert list(event.token_ids) == seen.expected[event.first_index : len(seen.tokens)]
            elif isinstance(event, Started | Resumed):
                assert not seen.holds
                assert isinstance(event, Resumed) == seen.started
                if isinstance(event, Started) and event.num_cached_tokens:
                    oracle.check_cached(self, seen, event.num_cached_tokens)
                if isinstance(event, Resumed):
                    seen.num_tokens_at_resume = len(seen.tokens)
                seen.holds = seen.started = True
                if seen.spec.family:
                    self.started_families.add(seen.spec.family)
            elif isinstance(event, Preempted):
                assert seen.holds, "preempted again before it was admitted again"  # 5
                seen.holds = False
                seen.idle_at = self.now
                seen.num_preemptions += 1
                self.num_forced[event.request_id] += event.reason in FORCED
                assert event.count == seen.num_preemptions
            elif isinstance(event, TERMINAL):
                seen.terminal = event
                seen.holds = False
                del self.seen_alive[event.request_id]
                families = {other.spec.family for other in self.seen_alive.values()}
                self.started_families &= families
                if isinstance(event, Finished):
                    assert event.usage.output_tokens == len(seen.tokens)
                    oracle.check_end(self, seen, event)

    def check(self, *, step=False):
        if step or self.check_every_call:
            self.scheduler.check_integrity()  # 1
        find, holds = self.scheduler.find, self.blocks.holds
        num_alive = self.scheduler.num_running + self.scheduler.num_waiting + len(self.scheduler.parked())
        assert num_alive == len(self.seen_alive)
        last_arrival = -1
        for request_id, seen in self.seen_alive.items():
            request = find(request_id)
            assert request is not None
            assert seen.holds == holds(request_id)
            assert request.arrival_seq > last_arrival, "seniority was lost"
            last_arrival = request.arrival_seq

    def alive(self) -> list[Request]:
        return [*self.scheduler.running(), *self.scheduler.waiting(), *self.scheduler.parked()]
