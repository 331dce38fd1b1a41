"""Two schedulers through the same drawn calls, one step by step, one in bulk: alike after every piece.

Recordings (``test_sim_drawn``) show what requests got; this shows what is behind it, down to which block
is reused next, and brings what no workload holds: deadlines, and commands in the midst of a run.
"""

import dataclasses
import random

import pytest

from engine.errors import VorrangError
from engine.events import TokensSampled
from engine.request import RequestSpec
from engine.runner.simulated import OUTPUT
from engine.scheduler.bulk import BulkScheduler
from engine.scheduler.commands import Finish, Park, Preempt, SetLevel, Unpark
from engine.scheduler.scheduler import Scheduler
from engine.sim.requests import spec_of
from kv.block_manager import BlockManager
from tests.support.drawn import drawn, draws
from tests.support.walk import LEVELS

KINDS = (Finish, Preempt, Preempt, Park, Unpark, Unpark, SetLevel, SetLevel)


def drawn_calls(rng, workload):
    """(step before which it is done, what): requests, some with deadlines, and commands to them."""
    calls = []
    for request in workload.requests:
        at = int(request.arrival_s)
        deadlines = {
            name: float(at + rng.randint(0, 60))
            for name in ("queue_deadline", "total_deadline")
            if rng.random() < 0.1
        }
        spec = dataclasses.replace(spec_of(request), **deadlines)
        calls.append((at, spec))
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            kind = rng.choice(KINDS)
            more = (rng.choice(LEVELS),) if kind is SetLevel else ()
            calls.append((at + rng.randint(1, 60), kind(spec.request_id, *more)))
    return sorted(calls, key=lambda call: call[0])


class Pair:
    """Both schedulers; a step takes a second."""

    def __init__(self, draw):
        config, pool = draw.without_guesses(), draw.runner.pool
        pools = [
            BlockManager(pool.num_blocks, pool.block_size, enable_prefix_cache=draw.prefix_cache)
            for _ in "12"
        ]
        self.each = Scheduler(config, pools[0])
        self.bulk = BulkScheduler(config, pools[1], OUTPUT)
        self.both = (self.each, self.bulk)
        self.runner = draw.runner
        self.now = 0
        self.num_stretched = 0

    def do(self, what):
        """A request arrives, or a command is obeyed."""
        outcomes = []
        for scheduler in self.both:
            try:
                do = scheduler.submit if isinstance(what, RequestSpec) else scheduler.apply
                outcomes.append(list(map(shown, do(what, self.now))))
            except VorrangError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]

    def step(self):
        """One step each; returns whether anything was computed."""
        plan, step = self.each.plan(self.now), self.bulk.begin(self.now)
        assert list(map(shown, plan.events)) == list(map(shown, step.events))
        decodes, others = plan.grants[: len(step.decodes)], plan.grants[len(step.decodes) :]
        assert [grant.request_id for grant in decodes] == [request.request_id for request in step.decodes]
        assert list(map(granted, others)) == list(map(granted, step.grants))
        decoding = {request.request_id for request in step.decodes}
        found = self.each.commit(plan, self.runner.run(plan), self.now + 1)
        rest = [e for e in found if not (isinstance(e, TokensSampled) and e.request_id in decoding)]
        assert list(map(shown, rest)) == list(map(shown, self.bulk.end(step, self.now + 1)))
        self.now += 1
        return bool(plan.grants)

    def stretch(self, rng, until):
        """Steps at once, as many as there may be or fewer, planned before ``until``."""
        stretch = self.bulk.stretch()
        num_steps = stretch.num_steps
        while num_steps and not self.now + num_steps - 1 < min(until, stretch.until):
            num_steps -= 1
        if not num_steps:
            return
        num_steps = rng.choice([num_steps, rng.randint(1, num_steps)])
        found = []
        for i in range(num_steps):
            assert not found
            plan = self.each.plan(self.now + i)
            assert not plan.events
            found = self.each.commit(plan, self.runner.run(plan), self.now + i + 1)
            found = [shown(event) for event in found if not isinstance(event, TokensSampled)]
        self.now += num_steps
        self.num_stretched += num_steps
        assert found == list(map(shown, self.bulk.pass_stretch(num_steps, self.now - 1, self.now)))

    def check(self):
        """They stand alike."""
        one, other = map(standing, self.both)
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == other[name], name
        self.bulk.check_integrity()


def shown(event):
    return str(event)


def granted(grant):
    request, start, num_tokens, table, output_index = grant
    return request.request_id, start, num_tokens, list(table), output_index


def standing(scheduler):
    """All that decides what comes next."""
    state, blocks, policy = scheduler._state, scheduler.blocks, scheduler.policy
    requests = {
        name: (
            r.status, r.level, r.num_computed_tokens, r.token_ids, r.block_table, r.idle_since, r.is_starved,
            r.holds_all, r.in_reserve, r.num_bypassed, r.num_preemptions, r.num_recomputed_tokens,
            r.num_outputs_at_resume,
        )
        for name, r in state.requests.items()
    }  # fmt: skip
    ratio = getattr(scheduler._discipline, "ratio", None)
    return {
        "requests": requests,
        "running": [r.request_id for r in state.running],
        "waiting": [r.request_id for r in state.waiting],
        "growing": list(state.growing),
        "served": [policy.rank(r) for r in state.requests.values()],
        "free blocks": [list(part) for part in blocks._free],
        "findable blocks": blocks._index.hash_of,
        "ratio": ratio and ratio.value,
        "decoded last": getattr(scheduler._discipline, "_decoded_last", None),
    }


@pytest.mark.parametrize(("seed", "numbers"), draws(40, 500, 20))
def test_a_scheduler_in_bulk_stands_where_one_step_by_step_stands(seed, numbers, replay):
    num_stretched = 0
    for number in numbers:
        with replay(number):
            rng, draw = random.Random(f"lockstep {seed}/{number}"), drawn(seed, number)
            pair, calls = Pair(draw), drawn_calls(rng, draw.workload)
            while calls or pair.bulk.has_requests:
                while calls and calls[0][0] <= pair.now:
                    pair.do(calls.pop(0)[1])
                if not calls:
                    for request in pair.bulk.parked():
                        pair.do(Unpark(request.request_id))
                computes = pair.step()
                if computes and rng.random() < 0.9:
                    pair.stretch(rng, calls[0][0] if calls else 1e9)
                pair.check()
            num_stretched += pair.num_stretched
    assert num_stretched > 5 * len(numbers) or len(numbers) == 1
