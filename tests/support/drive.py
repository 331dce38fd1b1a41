"""Drives a scheduler by hand and checks the invariants after every call.

``Driver`` keeps a model of what must hold that shares no code with the
scheduler: what was emitted, who ended, who may be evicted. Numbers in comments
are those of the invariants in docs/SCHEDULING.md.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import InternalError
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
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestSpec
from engine.runner.scripted import ScriptedRunner, expected_output
from engine.sampling import SamplingParams
from engine.scheduler.commands import Command, Finish, LoseKv, Park, Preempt, SetLevel, Unpark
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.scheduler.decisions import RecordingScheduler
from engine.scheduler.plan import Plan
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager

#: Reasons that are nobody's claim on what a request holds.
FORCED = (PreemptReason.OPERATOR, PreemptReason.RUNNER)


@dataclass
class Seen:
    """What a client would have seen of one request."""

    spec: RequestSpec
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    events: list[SchedulerEvent] = field(default_factory=list)
    terminal: SchedulerEvent | None = None
    holds: bool = False
    progress_at: float = 0.0
    num_earlier: int = 0
    disturbed: bool = False


class Driver:
    def __init__(self, *, num_blocks=16, block_size=4, prefix_cache=True, decisions=None, **config):
        config = {"max_running_requests": 4, "max_step_tokens": 16, "max_chunk_tokens": 8} | config
        config = {"max_context_tokens": 512} | config
        # Simple rules unless a test asks for others: no watermark, no bypass, nobody starves.
        config = {"max_bypass": 0, "resume_quantum_tokens": 0, "max_preemptions": 10**6} | config
        watermark, max_wait_s = config.pop("watermark", 0.0), config.pop("max_wait_s", 1e9)
        for name in ("interactive", "standard", "batch"):
            own = 0.0 if name == "interactive" else watermark
            config.setdefault(name, ClassConfig(max_wait_s, own))
        self.config = SchedulerConfig(**config)
        self.runner = ScriptedRunner(num_blocks, block_size)
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_cache=prefix_cache)
        self.scheduler = (
            Scheduler(self.config, self.blocks)
            if decisions is None
            else RecordingScheduler(self.config, self.blocks, decisions)
        )
        self.seen: dict[RequestId, Seen] = {}
        self.now = 0.0
        self.num_steps = 0
        self.longest = 0
        self.num_forced: Counter[RequestId] = Counter()

    # What can be done

    def submit(self, name, prompt=8, *, level=0, max_tokens=8, **more) -> RequestId:
        """``prompt``: a number of tokens (different for every request) or the tokens themselves."""
        request_id = RequestId(name)
        if isinstance(prompt, int):
            prompt = [(len(self.seen) * 7 + i * i) % 256 for i in range(prompt)]
        salt, tenant = more.pop("cache_salt", ""), more.pop("tenant", "")
        queue_deadline, total_deadline = more.pop("queue_deadline", None), more.pop("total_deadline", None)
        eos = frozenset(more.pop("eos_token_ids", ()))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=float("seed" in more), **more)
        spec = RequestSpec(
            request_id, tuple(prompt), sampling, level, eos, salt, tenant, queue_deadline, total_deadline
        )
        displaced = self.scheduler.submit(spec, self.now)
        self.longest = max(self.longest, len(prompt) + max_tokens)
        seed = sampling.seed if sampling.temperature > 0 else 0
        self.seen[request_id] = Seen(
            spec,
            expected_output(prompt, max_tokens, seed),
            progress_at=self.now,
            num_earlier=sum(seen.terminal is None for seen in self.seen.values()),
        )
        self.book(displaced)
        self.check()
        return request_id

    def apply(self, command: Command) -> list[SchedulerEvent]:
        if isinstance(command, Park | Unpark | Preempt) and command.request_id in self.seen:
            self.seen[command.request_id].disturbed = True  # whoever asks for it can't ask for a bound
        events = self.scheduler.apply(command, self.now)
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
        self.runner = ScriptedRunner(self.blocks.num_blocks, self.blocks.block_size)
        for seen in self.seen.values():
            seen.disturbed = True  # no bound holds for what a dying runner makes one wait
        holders = {r.request_id for r in self.alive() if self.blocks.holds(r.request_id)}
        events = self.apply(LoseKv(tuple(suspects), from_outside, InternalError("incident")))
        failed = {e.request_id for e in events if isinstance(e, Failed)}
        assert len(failed) <= 1
        assert {e.request_id for e in events if isinstance(e, Preempted)} == holders - failed
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        assert all(not self.blocks.match(request).blocks for request in self.alive())
        return events

    def step(self, *, between: tuple[Command, ...] = (), dies: Callable[[Plan], bool] | None = None) -> Plan:
        """Plan, compute, obey commands that come in between, commit; ``dies``: whether the runner does."""
        self.now += 1.0
        alive = [r for r in self.seen if self.scheduler.find(r)]
        seated = {r.request_id for r in self.scheduler.running()}
        idle = {r for r in alive if self.blocks.holds(r) and r not in seated}
        plan = self.scheduler.plan(self.now)
        self.num_steps += bool(plan.grants)
        self.check_plan(plan, alive, idle)
        self.check_quarantine(plan)
        if (
            self.config.discipline == "static"
            and any(self.scheduler.find(r) for r in seated)
            and not any(self.scheduler.is_quarantined(r.request_id) for r in self.alive())
        ):
            admitted = {r.request_id for r in self.scheduler.running()} - seated
            assert not admitted, "somebody joined a batch that was closed"
        self.book(plan.events)
        self.check()
        self.check_stalls(plan)
        if dies is not None and plan.grants and dies(plan):
            for command in between:
                self.apply(command)
            self.lose_kv([grant.request_id for grant in plan.grants])
            return plan
        result = self.runner.run(plan)
        for command in between:
            self.apply(command)
        self.book(self.scheduler.commit(plan, result, self.now + 0.5))
        self.check()
        return plan

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
        return sum(isinstance(e, Preempted) for e in self.seen[RequestId(name)].events)

    # What must hold

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
                earlier = any(isinstance(e, Started) for e in seen.events[:-1])
                assert isinstance(event, Resumed) == earlier
                seen.holds = True
            elif isinstance(event, Preempted):
                assert seen.holds, "preempted again before it was admitted again"  # 5
                seen.holds = False
                self.num_forced[event.request_id] += event.reason in FORCED
                assert event.count == sum(isinstance(e, Preempted) for e in seen.events)
            elif isinstance(event, TERMINAL):
                seen.terminal = event
                seen.holds = False
                assert isinstance(event, Failed) or event.usage.output_tokens == len(seen.tokens)

    def check(self):
        self.scheduler.check_integrity()  # 1
        for request in self.alive():
            assert self.seen[request.request_id].holds == self.blocks.holds(request.request_id)
        alive = {r for r, seen in self.seen.items() if seen.terminal is None}
        assert alive == {r.request_id for r in self.alive()}

    def alive(self) -> list[Request]:
        return [*self.scheduler.running(), *self.scheduler.waiting(), *self.scheduler.parked()]

    def check_plan(self, plan: Plan, alive: list[RequestId], idle_before: set[RequestId]):
        config = self.config
        ids = [grant.request_id for grant in plan.grants]
        assert len(set(ids)) == len(ids)
        assert plan.num_tokens <= config.max_step_tokens
        assert len(ids) <= config.max_running_requests
        ended = {e.request_id for e in plan.events if isinstance(e, TERMINAL)}
        if set(alive) - ended - {r.request_id for r in self.scheduler.parked()}:
            assert plan.grants, "something admissible waits, but the step is empty"
        for grant in plan.grants:
            request = self.scheduler.find(grant.request_id)
            assert request is not None
            n = len(grant.token_ids)
            assert 1 <= n <= config.max_chunk_tokens
            assert grant.start == request.num_computed_tokens
            assert list(grant.token_ids) == request.token_ids[grant.start : grant.start + n]
            assert (grant.output_index is None) == (grant.start + n < request.num_tokens)
        if any(self.scheduler.is_quarantined(r.request_id) for r in self.alive()):
            return
        if config.discipline == "unified":
            for request in self.scheduler.running():
                if request.num_missing_tokens == 1:
                    assert request.request_id in ids, "a decode was left out"
        self.num_forced.update(
            e.request_id for e in plan.events if isinstance(e, Preempted) and e.request_id in idle_before
        )
        self.check_preemptions(plan, idle_before)
        self.check_overtaking(plan)

    def is_quarantine(self, plan: Plan) -> bool:
        return any(self.scheduler.is_quarantined(grant.request_id) for grant in plan.grants)

    def check_quarantine(self, plan: Plan):
        """Who may have killed the runner is computed alone, and only more urgent ones before it."""
        held = [r for r in self.scheduler.waiting() if self.scheduler.is_quarantined(r.request_id)]
        held += [r for r in self.scheduler.running() if self.scheduler.is_quarantined(r.request_id)]
        if self.is_quarantine(plan):
            assert len(plan.grants) == 1
        elif held:
            most_urgent = min(map(self.urgency, held))
            for grant in plan.grants:
                assert self.urgency(self.scheduler.find(grant.request_id)) < most_urgent

    def check_stalls(self, plan: Plan):
        """6: nobody goes without a token for longer than the stated bound (docs/SCHEDULING.md)."""
        granted = {grant.request_id for grant in plan.grants}
        alive = sorted(self.alive(), key=lambda r: r.arrival_seq)
        max_wait_s, turn_s = self.stall_bound()
        for num_earlier, request in enumerate(alive):
            seen = self.seen[request.request_id]
            if request.request_id in granted:
                seen.progress_at, seen.num_earlier = self.now, num_earlier
            elif not seen.disturbed:
                assert self.now - seen.progress_at <= max_wait_s + (seen.num_earlier + 1) * turn_s

    def stall_bound(self) -> tuple[float, float]:
        """Longest wait before the starved tier, and longest turn in it, in seconds; a step takes one."""
        config, longest = self.config, self.longest
        pool_tokens = self.blocks.num_blocks * self.blocks.block_size
        drain = pool_tokens / max(1, config.max_step_tokens - config.max_running_requests) + longest
        share = max(1, config.num_reserved_tokens(config.max_step_tokens - config.max_running_requests))
        serve = longest / share + longest
        max_wait_s = max(config.class_config(level).max_wait_s for level in (-10, 0, 10))
        if config.discipline == "prefill_first":
            drain, serve = 2 * drain, 2 * serve  # two kinds of steps take turns
        return max_wait_s, drain + serve

    def urgency(self, request: Request) -> int:
        return 0 if self.config.policy == "fcfs" else request.level

    def key(self, request: Request) -> tuple[int, int]:
        return self.urgency(request), request.arrival_seq

    def check_preemptions(self, plan: Plan, idle_before: set[RequestId]):
        """5: for an arrival only across a level gap; for growth only who comes later."""
        for event in plan.events:
            if isinstance(event, Preempted) and event.beneficiary is not None:
                victim = self.scheduler.find(event.request_id)
                winner = self.scheduler.find(event.beneficiary)
                assert victim is not None
                assert winner is not None
                if event.request_id not in idle_before:
                    assert self.key(winner) < self.key(victim)
                assert event.count <= self.config.max_preemptions + self.num_forced[event.request_id]
                if event.reason in (PreemptReason.SEATS, PreemptReason.BLOCKS):
                    gap = self.urgency(victim) - self.urgency(winner)
                    idle = event.request_id in idle_before
                    assert idle or gap >= self.config.preempt_level_gap

    def check_overtaking(self, plan: Plan):
        """2: no less urgent prefill or admission while a more urgent admissible request waits."""
        if self.config.discipline != "unified" or any(r.is_starved for r in self.alive()):
            return  # others ask for more than seats and blocks; the starved tier is excepted
        preempted_now = {e.request_id for e in plan.events if isinstance(e, Preempted)}
        admitted = {e.request_id for e in plan.events if isinstance(e, Started | Resumed)}
        if self.config.policy == "fair" or len(preempted_now) >= self.config.max_preemptions_per_step:
            return
        for waiting in self.scheduler.waiting():
            if waiting.request_id in preempted_now or not self.is_admissible(waiting):
                break  # whoever comes after it may be kept behind it
            assert plan.num_tokens == self.config.max_step_tokens, (
                f"{waiting.request_id} fits but was left out"
            )
            for grant in plan.grants:
                request = self.scheduler.find(grant.request_id)
                assert request is not None
                if self.key(request) > self.key(waiting):
                    assert len(grant.token_ids) == 1
                    assert grant.request_id not in admitted

    def is_admissible(self, waiting: Request) -> bool:
        """Whether it would fit if all that it may evict were gone."""
        running = self.scheduler.running()
        staying = [r for r in running if not self.is_evictable(r, waiting)]
        if len(staying) >= self.config.max_running_requests:
            return False
        gone = {r.request_id for r in running} - {r.request_id for r in staying}
        gone |= {
            r.request_id
            for r in (*self.scheduler.waiting(), *self.scheduler.parked())
            if not running or self.urgency(r) >= self.urgency(waiting)
        } - {waiting.request_id}
        held = {
            block
            for r in self.alive()
            if self.blocks.holds(r.request_id) and r.request_id not in gone
            for block in self.blocks.table(r.request_id)
        }
        pinned = waiting.num_preemptions >= self.config.max_preemptions
        pool_tokens = self.blocks.num_blocks * self.blocks.block_size
        size = min(waiting.max_known_tokens, pool_tokens) if pinned else waiting.num_tokens
        if self.blocks.holds(waiting.request_id):
            have = set(self.blocks.table(waiting.request_id))  # it kept them while it was parked
        else:
            have = set(self.blocks.match(waiting).blocks) & held
        need = self.blocks.blocks_for(size) - len(have)
        if need <= 0:
            return True
        return len(held) + need + self.watermark(waiting, staying) <= self.blocks.num_blocks

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
