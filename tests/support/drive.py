"""Drives a scheduler by hand and checks the invariants after every call.

``Driver`` keeps a model of what must hold that shares no code with the
scheduler: what was emitted, who ended, who may be evicted. Numbers in comments
are those of the invariants in docs/SCHEDULING.md; ``tests.support.oracle`` holds
single rules.
"""

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from engine.errors import InternalError, VorrangError
from engine.events import (
    TERMINAL,
    Failed,
    Finished,
    Preempted,
    Resumed,
    SchedulerEvent,
    Started,
    TokensSampled,
)
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestSpec, RequestStatus
from engine.sampling import SamplingParams
from engine.scheduler.commands import Command, Finish, LoseKv, Park, Preempt, SetLevel, Unpark
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.scheduler.decisions import RecordingScheduler
from engine.scheduler.plan import Plan, StepResult
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager
from tests.support import oracle
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
    """A plan that is not committed, and its result once it was computed."""

    plan: Plan
    result: StepResult | None = None


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
            config.setdefault(name, ClassConfig(max_wait_s, own))
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
        self.max_wait_s = max(self.config.class_config(level).max_wait_s for level in (-10, 0, 10))
        self.decoded_last = False  # the last step of prefill_first was one of decodes

    # What can be done

    def submit(self, name, prompt=8, *, level=0, max_tokens=8, **more) -> RequestId:
        """``prompt``: a number of tokens (different for every request) or the tokens themselves."""
        request_id = RequestId(name)
        if isinstance(prompt, int):
            prompt = [(len(self.seen) * 7 + i * i) % 256 for i in range(prompt)]
        salt, tenant = more.pop("cache_salt", ""), more.pop("tenant", "")
        queue_deadline, total_deadline = more.pop("queue_deadline", None), more.pop("total_deadline", None)
        eos, family = frozenset(more.pop("eos_token_ids", ())), more.pop("family", "")
        adapter = more.pop("adapter", "")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=float("seed" in more), **more)
        spec = RequestSpec(
            request_id,
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
        displaced = self.scheduler.submit(spec, self.now)
        oracle.check_displaced(self, spec, displaced)
        self.longest = max(self.longest, len(prompt) + max_tokens)
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
        oracle.check_limits(self, spec)
        self.check()
        return request_id

    def try_submit(self, name, prompt=8, **more) -> VorrangError | None:
        """Like ``submit``; what refuses the request is checked and returned."""
        try:
            self.submit(name, prompt, **more)
        except VorrangError as error:
            oracle.check_refusal(self, error, len(prompt), more.get("level", 0), more.get("tenant", ""))
            self.check()
            return error
        return None

    def apply(self, command: Command) -> list[SchedulerEvent]:
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
        self.check_plan(plan, before, after, held)
        self.book(plan.events)
        self.check()
        oracle.check_deadlines(self, plan)
        if not held:
            oracle.check_bypass(self, before, after)
            oracle.check_ageing(self, plan, before, after)
        self.check_stalls(plan)
        if plan.grants or not self.depth:
            self.flights.append(Flight(plan))
        if not self.depth or self.num_steps * 7919 % 5 < 2:
            self.compute()
        for command in between:
            self.apply(command)
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
        alive = {i for i in ids if i in self.seen_alive}
        idle = {i for i in alive if self.scheduler.find(i).status is not RequestStatus.RUNNING}
        events = self.scheduler.commit(plan, result, self.now + 0.5)
        for event in events:
            if isinstance(event, TokensSampled):
                self.noted["more than one token in a step"] += len(event.token_ids) > 1
        delivered = {e.request_id for e in events if isinstance(e, TokensSampled)}
        sampling = {grant.request_id for grant in plan.grants if grant.output_index is not None}
        assert delivered == (sampling & alive) - result.failures.keys(), (
            "delivered once, or its request ended"
        )
        self.noted["delivered to one without a seat"] += len(delivered & idle)
        self.noted["computed in vain"] += len(sampling - alive)
        self.book(events)
        assert all(isinstance(self.seen[i].terminal, Failed) for i in alive & result.failures.keys())

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

    def check_plan(self, plan: Plan, before: Standing, after: Standing, held: Sequence[Request]):
        config, running = self.config, after.running
        ids = {grant.request_id for grant in plan.grants}
        assert len(ids) == len(plan.grants)
        assert plan.num_tokens <= config.max_step_tokens
        assert len(ids) <= config.max_running_requests
        ended = {e.request_id for e in plan.events if isinstance(e, TERMINAL)}
        if before.num_alive > len(ended) + len(after.parked):
            assert plan.grants or self.flights, "something admissible waits, but the step is empty"
        for grant in plan.grants:
            request = self.scheduler.find(grant.request_id)
            assert request is not None
            n, num_to_come = grant.num_tokens, self.num_outputs_to_come(grant.request_id)
            n_known = n - grant.num_drafts
            assert 1 <= n_known <= config.max_chunk_tokens
            assert grant.num_drafts <= config.speculation_tokens
            self.noted["guessed"] += grant.num_drafts > 0
            assert grant.start == request.num_computed_tokens
            known = request.token_ids[grant.start : grant.start + n_known]
            assert list(grant.token_ids) == known + list(request.draft_token_ids)
            assert len(grant.token_ids) == n - grant.has_unknown_token
            assert grant.has_unknown_token <= num_to_come <= self.depth
            assert not self.has_its_last(request), "granted in vain, and one could know"
            num_outputs = len(self.seen_alive[grant.request_id].tokens) + num_to_come
            assert grant.output_index in (None, num_outputs)
            self.noted["granted a token nobody knew"] += grant.has_unknown_token
            assert (grant.output_index is None) == (grant.start + n < request.num_tokens)
            assert grant.banned_token_ids == oracle.banned(request.spec, grant.output_index)
        if held:
            self.num_forced.update(
                e.request_id for e in plan.events if isinstance(e, Preempted) and e.request_id in before.idle
            )
            self.check_preemptions(plan, before.idle, after.seated)
            self.check_quarantine(plan, held)
            return
        if config.discipline == "unified":
            for request in running:
                # A starved one may be given its seat and its blocks before its first token.
                is_due = request.num_missing_tokens == 1 and not self.has_its_last(request)
                if is_due and request.request_id in before.seated:
                    assert request.request_id in ids, "a decode was left out"
        if config.discipline == "static" and before.seated & after.seated:
            assert before.seated >= after.seated, "somebody joined a batch that was closed"
        self.num_forced.update(
            e.request_id for e in plan.events if isinstance(e, Preempted) and e.request_id in before.idle
        )
        self.check_preemptions(plan, before.idle, after.seated)
        oracle.check_watermark(self, before, after)
        oracle.check_growth(self, plan, before, after)
        oracle.check_victims(self, plan, before, after)
        oracle.check_tenants(self, after)
        self.check_overtaking(plan, before, after)
        oracle.check_order(self, plan, before, after)

    def check_quarantine(self, plan: Plan, held: Sequence[Request]):
        """Who may have killed the runner is computed alone, and only more urgent ones before it."""
        if any(self.scheduler.is_quarantined(grant.request_id) for grant in plan.grants):
            assert len(plan.grants) == 1
            return
        held = [r for r in held if self.scheduler.find(r.request_id)]  # some may have run out of time
        held = [r for r in held if not self.has_its_last(r)]
        if held:
            most_urgent = min(map(self.urgency, held))
            for grant in plan.grants:
                assert self.urgency(self.scheduler.find(grant.request_id)) < most_urgent

    def check_stalls(self, plan: Plan):
        """6: nobody goes without a token for longer than the stated bound (docs/SCHEDULING.md)."""
        granted = {grant.request_id for grant in plan.grants}
        max_wait_s, turn_s = self.stall_bound()
        for num_earlier, (request_id, seen) in enumerate(self.seen_alive.items()):
            if request_id in granted:
                seen.progress_at = seen.idle_at = self.now
                seen.num_earlier = num_earlier
            elif not seen.disturbed and not oracle.has_seat_limit(self.config, seen.spec.tenant):
                assert self.now - seen.progress_at <= max_wait_s + (seen.num_earlier + 1) * turn_s

    def stall_bound(self) -> tuple[float, float]:
        """Longest wait before the starved tier, and longest turn in it, in seconds; a step takes one."""
        config, longest = self.config, self.longest
        pool_tokens = self.blocks.num_blocks * self.blocks.block_size
        drain = pool_tokens / max(1, config.max_step_tokens - config.max_running_requests) + longest
        share = max(1, config.num_reserved_tokens(config.max_step_tokens - config.max_running_requests))
        serve = longest / share + longest
        if config.discipline == "prefill_first":
            drain, serve = 2 * drain, 2 * serve  # two kinds of steps take turns
        if self.depth:
            drain, serve = 2 * drain, 2 * serve  # every other plan may have to wait for a commit
        return self.max_wait_s, drain + serve

    def urgency(self, request: Request) -> int:
        return 0 if self.config.policy == "fcfs" else request.level

    def key(self, request: Request) -> tuple[int, int]:
        return self.urgency(request), request.arrival_seq

    def check_preemptions(self, plan: Plan, idle_before: set[RequestId], seated: set[RequestId]):
        """5: for an arrival only across a level gap; for growth only who comes later."""
        for_arrivals: list[RequestId] = []
        for event in plan.events:
            if isinstance(event, Preempted):
                assert event.request_id not in seated, "admitted in the step that preempted it"
            if isinstance(event, Preempted) and event.beneficiary is not None:
                victim = self.scheduler.find(event.request_id)
                winner = self.scheduler.find(event.beneficiary)
                assert victim is not None
                assert winner is not None
                idle = event.request_id in idle_before
                assert idle or self.key(winner) < self.key(victim)
                assert event.count <= self.config.max_preemptions + self.num_forced[event.request_id]
                if event.reason in (PreemptReason.SEATS, PreemptReason.BLOCKS):
                    gap = self.urgency(victim) - self.urgency(winner)
                    assert idle or gap >= self.config.preempt_level_gap
                    assert idle or oracle.had_its_quantum(self, event.request_id)
                    for_arrivals.append(event.beneficiary)
        if len(for_arrivals) > self.config.max_preemptions_per_step:
            assert len(set(for_arrivals)) == 1, "too many for arrivals in one step"  # but one may need more

    def check_overtaking(self, plan: Plan, before: Standing, after: Standing):
        """2: no less urgent prefill or admission while a more urgent admissible request waits.

        The starved tier is excepted, and ``static`` admits nobody to a batch under way. A
        decode step of ``prefill_first`` admits nobody either; it may only precede a step of
        prefills that could be formed when a bounded decode gap is set (never twice in a row:
        ``oracle.check_order``).
        """
        config = self.config
        if config.discipline == "static" or any(r.is_starved for r in after.alive):
            return
        preempted_now = {e.request_id for e in plan.events if isinstance(e, Preempted)}
        if len(preempted_now) >= config.max_preemptions_per_step:
            return
        first = self.must_be_next(after.waiting, preempted_now, plan)
        if not first:
            return
        running = {r.request_id: r for r in after.running}
        granted = [running[grant.request_id] for grant in plan.grants]
        num_tokens = plan.num_tokens - sum(grant.num_drafts for grant in plan.grants)
        is_full = num_tokens == config.max_step_tokens
        if config.discipline == "prefill_first":
            if oracle.may_be_decodes(granted, before) and any(map(oracle.is_decoding, granted)):
                if preempted_now:
                    return  # what a retraction frees comes after prefills were tried
                assert config.prefill_first_max_decode_gap_ms is not None, "somebody could prefill"
                assert not self.decoded_last, "two decode steps in a row while somebody could prefill"
                return
            is_full |= plan.num_tokens == config.prefill_first_max_input_tokens
            is_full |= plan.num_tokens == config.prefill_first_max_chunk_tokens
            is_full |= len(granted) == config.prefill_first_max_requests
        for waiting in first:
            assert is_full, f"{waiting.request_id} fits but was left out"
            for request in granted:
                if self.comes_after(request, waiting):
                    assert config.discipline == "unified"
                    assert request.num_missing_tokens == 1
                    assert request.request_id in before.seated

    def must_be_next(
        self, waiting: Sequence[Request], preempted_now: set[RequestId], plan: Plan
    ) -> list[Request]:
        """Waiting requests that nothing but the budget of the step may keep out."""
        found: list[Request] = []
        for _, group in groupby(waiting, self.turn):
            members = list(group)
            for request in members:
                if self.has_its_last(request):
                    return found
                if request.request_id in preempted_now or not self.is_admissible(request, len(preempted_now)):
                    return found  # whoever comes after it may be kept behind it
                if self.waits_for_prefix(request, plan):
                    return found
            found += members
        return found

    def turn(self, request: Request) -> tuple[int, ...]:
        """What certainly orders requests; under ``fair`` tenants of one level may change places."""
        return (self.urgency(request),) if self.config.policy == "fair" else self.key(request)

    def comes_after(self, request: Request, other: Request) -> bool:
        """Whether a request certainly stands behind another one in the order of service."""
        if self.turn(request) != self.turn(other):
            return self.turn(request) > self.turn(other)
        return request.spec.tenant == other.spec.tenant and request.arrival_seq > other.arrival_seq

    def waits_for_prefix(self, waiting: Request, plan: Plan) -> bool:
        """12: somebody who runs computes enough of its prompt right now."""
        if not self.blocks.enable_prefix_cache or self.blocks.holds(waiting.request_id):
            return False
        if not self.is_scored(waiting):
            return False  # what it may not take it need not wait for
        granted = {grant.request_id for grant in plan.grants}
        # Other disciplines have more budgets, and steps that hold no prefill.
        full = plan.num_tokens == self.config.max_step_tokens or self.config.discipline != "unified"
        for running in self.scheduler.running():
            if self.computes_prefix_of(running, waiting):
                full |= bool(running.num_tokens_in_flight)  # all of it may be in flight
                assert full or running.request_id in granted, "a prefill that is waited for stands still"
                return True
        return False

    def computes_prefix_of(self, running: Request, waiting: Request) -> bool:
        """12: whether enough of a prompt is being computed to wait for it."""
        num_alike = 0
        for mine, theirs in zip(waiting.token_ids[:-1], running.token_ids[:-1], strict=False):
            if mine != theirs or waiting.cache_salt != running.cache_salt:
                break
            num_alike += 1
        num_alike -= num_alike % self.blocks.block_size
        is_sibling = waiting.spec.family != "" and waiting.spec.family == running.spec.family
        least = 1 if is_sibling else self.config.prefix_wait_tokens
        return num_alike - running.num_committed_tokens >= least

    def is_scored(self, request: Request) -> bool:
        """Whether its prompt need not be scored, or all of it has been."""
        wanted = request.spec.sampling.prompt_logprobs is not None
        return not wanted or request.num_scored_tokens >= request.num_prompt_tokens - 1

    def is_admissible(self, waiting: Request, num_used: int) -> bool:
        """Whether it would fit if all that it may evict were gone, after ``num_used`` evictions."""
        running = self.scheduler.running()
        staying = [r for r in running if not self.is_evictable(r, waiting)]
        if len(staying) >= self.config.max_running_requests:
            return False
        if oracle.has_seat_limit(self.config, waiting.spec.tenant):
            return False  # its tenant may keep it out
        gone = {r.request_id for r in running} - {r.request_id for r in staying}
        if self.blocks.num_owners > len(running):
            gone |= {
                r.request_id
                for r in (*self.scheduler.waiting(), *self.scheduler.parked())
                if self.blocks.holds(r.request_id)
                and (not running or self.urgency(r) >= self.urgency(waiting))
            } - {waiting.request_id}
        if num_used and num_used + len(gone) > self.config.max_preemptions_per_step:
            return False
        held = {
            block
            for request_id, seen in self.seen_alive.items()
            if self.blocks.holds(request_id) and request_id not in gone
            for block in self.blocks.table(request_id)
        }
        pinned = waiting.num_preemptions >= self.config.max_preemptions
        pool_tokens = self.blocks.num_blocks * self.blocks.block_size
        size = min(waiting.max_known_tokens, pool_tokens) if pinned else waiting.num_tokens
        if self.blocks.holds(waiting.request_id):
            have = len(self.blocks.table(waiting.request_id))  # it kept them while it was parked
        else:
            most = None if self.is_scored(waiting) else waiting.num_scored_tokens
            have = sum(block in held for block in self.blocks.match(waiting, most).blocks)
        need = self.blocks.blocks_for(size) - have
        if need <= 0:
            return True
        spare = max(self.watermark(waiting, staying), self.most_reserved(waiting, size, staying))
        return len(held) + need + spare <= self.blocks.num_blocks

    def most_reserved(self, waiting: Request, size: int, staying: list[Request]) -> int:
        """The most that ``prefill_first`` may keep for outputs: as if all grew to their longest."""
        if self.config.discipline != "prefill_first" or not staying:
            return 0
        block_size = self.blocks.block_size
        num_tokens = max(0, waiting.max_known_tokens - size) + block_size
        num_tokens += sum(r.max_known_tokens - r.num_tokens + block_size for r in staying if not r.holds_all)
        return self.blocks.blocks_for(num_tokens)

    def watermark(self, waiting: Request, staying: list[Request]) -> int:
        if not staying:
            return 0
        rules = self.config.class_config(waiting.level)
        share = (rules if self.config.policy != "fcfs" else self.config.standard).watermark
        if waiting.has_started:
            share = max(share, self.config.standard.watermark)
        return math.ceil(share * self.blocks.num_blocks)

    def is_evictable(self, running: Request, waiting: Request) -> bool:
        if not self.config.preempt_for_arrivals or running.holds_all:
            return False
        if self.urgency(running) - self.urgency(waiting) < self.config.preempt_level_gap:
            return False
        at = running.num_outputs_at_resume
        return at is None or running.num_output_tokens - at >= self.config.resume_quantum_tokens
