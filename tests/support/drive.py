"""Drives a scheduler by hand and checks the invariants after every call.

``Driver`` keeps a model of what must hold that shares no code with the
scheduler: what was emitted, who ended, who may be evicted. Numbers in comments
are those of the invariants in docs/SCHEDULING.md.
"""

from dataclasses import dataclass, field

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
from engine.scheduler.commands import Command, Finish, Preempt, SetLevel
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Plan
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager


@dataclass
class Seen:
    """What a client would have seen of one request."""

    spec: RequestSpec
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    events: list[SchedulerEvent] = field(default_factory=list)
    terminal: SchedulerEvent | None = None
    running: bool = False


class Driver:
    def __init__(self, *, num_blocks=16, block_size=4, prefix_cache=True, **config):
        config = {"max_running_requests": 4, "max_step_tokens": 16, "max_chunk_tokens": 8} | config
        config = {"watermark": 0.0, "max_context_tokens": 512} | config
        self.config = SchedulerConfig(**config)
        self.runner = ScriptedRunner(num_blocks, block_size)
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_cache=prefix_cache)
        self.scheduler = Scheduler(self.config, self.blocks)
        self.seen: dict[RequestId, Seen] = {}
        self.now = 0.0
        self.num_steps = 0

    # What can be done

    def submit(self, name, prompt=8, *, level=0, max_tokens=8, **more) -> RequestId:
        """``prompt``: a number of tokens (different for every request) or the tokens themselves."""
        request_id = RequestId(name)
        if isinstance(prompt, int):
            prompt = [(len(self.seen) * 7 + i * i) % 256 for i in range(prompt)]
        salt = more.pop("cache_salt", "")
        eos = frozenset(more.pop("eos_token_ids", ()))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=float("seed" in more), **more)
        spec = RequestSpec(request_id, tuple(prompt), sampling, level, eos, salt)
        self.scheduler.submit(spec, self.now)
        seed = sampling.seed if sampling.temperature > 0 else 0
        self.seen[request_id] = Seen(spec, expected_output(prompt, max_tokens, seed))
        self.check()
        return request_id

    def apply(self, command: Command) -> list[SchedulerEvent]:
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

    def step(self, *, between: tuple[Command, ...] = ()) -> Plan:
        """Plan, compute, obey commands that come in between, commit."""
        self.now += 1.0
        alive = [r for r in self.seen if self.scheduler.find(r)]
        plan = self.scheduler.plan(self.now)
        self.num_steps += bool(plan.grants)
        self.check_plan(plan, alive)
        self.book(plan.events)
        self.check()
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
                assert not seen.running
                earlier = any(isinstance(e, Started) for e in seen.events[:-1])
                assert isinstance(event, Resumed) == earlier
                seen.running = True
            elif isinstance(event, Preempted):
                assert seen.running, "preempted again before it ran"  # 5
                seen.running = False
                assert event.count == sum(isinstance(e, Preempted) for e in seen.events)
            elif isinstance(event, TERMINAL):
                seen.terminal = event
                seen.running = False
                assert isinstance(event, Failed) or event.usage.output_tokens == len(seen.tokens)

    def check(self):
        self.scheduler.check_integrity()  # 1
        for request in self.scheduler.running():
            assert self.seen[request.request_id].running
        alive = {r for r, seen in self.seen.items() if seen.terminal is None}
        assert alive == {r.request_id for r in (*self.scheduler.running(), *self.scheduler.waiting())}

    def check_plan(self, plan: Plan, alive: list[RequestId]):
        config = self.config
        ids = [grant.request_id for grant in plan.grants]
        assert len(set(ids)) == len(ids)
        assert plan.num_tokens <= config.max_step_tokens
        assert len(ids) <= config.max_running_requests
        ended = {e.request_id for e in plan.events if isinstance(e, TERMINAL)}
        if set(alive) - ended:
            assert plan.grants, "something admissible waits, but the step is empty"
        for grant in plan.grants:
            request = self.scheduler.find(grant.request_id)
            assert request is not None
            n = len(grant.token_ids)
            assert 1 <= n <= config.max_chunk_tokens
            assert grant.start == request.num_computed_tokens
            assert list(grant.token_ids) == request.token_ids[grant.start : grant.start + n]
            assert (grant.output_index is None) == (grant.start + n < request.num_tokens)
        for request in self.scheduler.running():
            if request.num_missing_tokens == 1:
                assert request.request_id in ids, "a decode was left out"
        self.check_preemptions(plan)
        self.check_overtaking(plan)

    def urgency(self, request: Request) -> int:
        return request.level if self.config.policy == "priority" else 0

    def key(self, request: Request) -> tuple[int, int]:
        return self.urgency(request), request.arrival_seq

    def check_preemptions(self, plan: Plan):
        """5: for an arrival only across a level gap; for growth only who comes later."""
        for event in plan.events:
            if isinstance(event, Preempted) and event.beneficiary is not None:
                victim = self.scheduler.find(event.request_id)
                winner = self.scheduler.find(event.beneficiary)
                assert victim is not None
                assert winner is not None
                assert self.key(winner) < self.key(victim)
                if event.reason in (PreemptReason.SEATS, PreemptReason.BLOCKS):
                    gap = self.urgency(victim) - self.urgency(winner)
                    assert gap >= self.config.preempt_level_gap

    def check_overtaking(self, plan: Plan):
        """2: no less urgent prefill or admission while a more urgent admissible request waits."""
        preempted_now = {e.request_id for e in plan.events if isinstance(e, Preempted)}
        head = next((r for r in self.scheduler.waiting()), None)
        if head is None or head.request_id in preempted_now or not self.is_admissible(head):
            return
        assert plan.num_tokens == self.config.max_step_tokens, "the head of the queue fits but was left out"
        admitted = {e.request_id for e in plan.events if isinstance(e, Started | Resumed)}
        for grant in plan.grants:
            request = self.scheduler.find(grant.request_id)
            assert request is not None
            if self.key(request) > self.key(head):
                assert len(grant.token_ids) == 1
                assert grant.request_id not in admitted

    def is_admissible(self, waiting: Request) -> bool:
        """Whether it would fit if all that it may evict were gone."""
        gap = self.config.preempt_level_gap
        staying = [r for r in self.scheduler.running() if self.urgency(r) - self.urgency(waiting) < gap]
        if len(staying) >= self.config.max_running_requests:
            return False
        held = {b for r in staying for b in self.blocks.table(r.request_id)}
        hit = set(self.blocks.match(waiting).blocks)
        need = self.blocks.blocks_for(waiting.num_tokens) - len(hit & held)
        exempt = self.config.policy == "priority" and waiting.level <= self.config.watermark_exempt_level
        watermark = 0 if exempt or not staying else self.config.watermark_blocks(self.blocks.num_blocks)
        return len(held) + need + watermark <= self.blocks.num_blocks
