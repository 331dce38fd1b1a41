"""A Hypothesis state machine over the scheduler: any calls, in any order, on small pools.

The random walk beside it makes many more steps; this one finds the shortest run that fails.
"""

import os

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.errors import PoolExceeded
from engine.request import RequestId
from engine.scheduler.commands import Finish, Park, Preempt, SetLevel, Unpark
from tests.support.decisions import MemoryLog
from tests.support.draws import DISCIPLINE_DRAWS, POLICY_DRAWS
from tests.support.drive import Driver

LEVELS = st.sampled_from([-10, -1, 0, 0, 1, 10, 10])
MIN_STEPS = int(os.environ.get("VORRANG_MACHINE_STEPS", "1500"))
SEED = int(os.environ.get("VORRANG_SEED", "20261129"))


class SchedulerMachine(RuleBasedStateMachine):
    num_steps = 0
    num_preemptions = 0

    @initialize(
        num_blocks=st.integers(2, 14),
        policy=st.sampled_from(POLICY_DRAWS),
        discipline=st.sampled_from(DISCIPLINE_DRAWS),
        seats=st.integers(1, 5),
        spare=st.integers(0, 12),
        chunk=st.integers(1, 9),
        gap=st.sampled_from([1, 1, 5]),
        watermark=st.sampled_from([0.0, 0.02, 0.3]),
        prefix_cache=st.booleans(),
        more=st.fixed_dictionaries(
            {
                "prefix_wait_tokens": st.sampled_from([256, 1, 4, 12]),
                "max_bypass": st.sampled_from([0, 0, 1, 3]),
                "max_wait_s": st.sampled_from([1e9, 1e9, 60.0, 8.0]),
                "resume_quantum_tokens": st.sampled_from([0, 2, 5]),
                "max_preemptions": st.sampled_from([1, 2, 8]),
                "max_preemptions_per_step": st.sampled_from([1, 2, 8]),
            }
        ),
    )
    def build(self, num_blocks, policy, discipline, seats, spare, chunk, gap, watermark, prefix_cache, more):
        self.log = MemoryLog()
        self.driver = Driver(
            num_blocks=num_blocks,
            policy=policy,
            discipline=discipline,
            max_running_requests=seats,
            max_step_tokens=seats + spare,
            max_chunk_tokens=chunk,
            preempt_level_gap=gap,
            watermark=watermark,
            prefix_cache=prefix_cache,
            decisions=self.log,
            **more,
        )

    @rule(
        size=st.integers(1, 40),
        family=st.integers(0, 2),
        level=LEVELS,
        max_tokens=st.integers(1, 24),
        more=st.fixed_dictionaries(
            {},
            optional={
                "seed": st.integers(0, 3),
                "cache_salt": st.just("b"),
                "adapter": st.sampled_from("xy"),
                "tenant": st.sampled_from("abc"),
                "queue_in": st.integers(0, 30),
                "total_in": st.integers(0, 40),
            },
        ),
    )
    def submit(self, size, family, level, max_tokens, more):
        # Few families: prompts share prefixes. Ids such as r1 and r11 must not be mixed up (7).
        prompt = [(family * 50 + i) % 256 for i in range(size)]
        name = f"r{len(self.driver.seen)}"
        more = dict(more)
        for what in ("queue", "total"):
            if f"{what}_in" in more:
                more[f"{what}_deadline"] = self.driver.now + more.pop(f"{what}_in")
        pool_tokens = self.driver.blocks.num_blocks * self.driver.blocks.block_size
        try:
            self.driver.submit(name, prompt, level=level, max_tokens=max_tokens, **more)
        except PoolExceeded:
            assert size + 1 > pool_tokens
        else:
            assert size + 1 <= pool_tokens

    @rule(
        sizes=st.lists(st.integers(1, 24), min_size=2, max_size=5),
        level=LEVELS,
        max_tokens=st.integers(4, 24),
        urgent=st.lists(st.integers(1, 12), max_size=2),
    )
    def submit_many(self, sizes, level, max_tokens, urgent):
        """A crowd, and more urgent ones that arrive while it computes."""
        for size in sizes:
            self.submit(size, size % 3, level, max_tokens, {})
        for size in urgent:
            self.driver.step()
            self.driver.step()
            self.submit(size, size % 3, level - 20, 4, {})

    @precondition(lambda self: self.driver.seen)
    @rule(num_steps=st.integers(1, 16))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: self.driver.seen)
    @rule(data=st.data())
    def step_with_commands_in_flight(self, data):
        names = st.sampled_from(sorted(self.driver.seen))
        ids = names.map(RequestId)
        command = st.one_of(
            st.builds(Finish, ids),
            st.builds(Preempt, ids),
            st.builds(SetLevel, ids, LEVELS),
            st.builds(Park, ids),
            st.builds(Unpark, ids),
        )
        between = data.draw(st.lists(command, min_size=1, max_size=3))
        self.driver.step(between=tuple(between))

    @precondition(lambda self: self.driver.seen)
    @rule(how=st.sampled_from(["in_step", "between"]), times=st.integers(1, 3))
    def die(self, how, times):
        """The runner dies; now and then again and again, so that there are suspects and guilty ones."""
        for _ in range(times):
            self.driver.die(how)

    @precondition(lambda self: self.driver.seen)
    @rule(data=st.data(), what=st.sampled_from(["cancel", "preempt", "park", "park", "unpark", "unpark"]))
    def command(self, data, what):
        getattr(self.driver, what)(data.draw(st.sampled_from(sorted(self.driver.seen))))

    @precondition(lambda self: self.driver.seen)
    @rule(data=st.data(), level=LEVELS)
    def reprioritise(self, data, level):
        self.driver.set_level(data.draw(st.sampled_from(sorted(self.driver.seen))), level)

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        for request in self.driver.scheduler.parked():
            self.driver.unpark(request.request_id)
        self.driver.finish()
        SchedulerMachine.num_steps += self.driver.num_steps
        SchedulerMachine.num_preemptions += sum(self.driver.preemptions(n) for n in self.driver.seen)
        self.log.replay(self.driver.num_steps)


@pytest.mark.timeout(600 if MIN_STEPS <= 100_000 else 0)
def test_any_calls_in_any_order_keep_every_invariant():  # vLLM 36
    SchedulerMachine.num_steps = SchedulerMachine.num_preemptions = 0
    rounds = 0
    while SchedulerMachine.num_steps < MIN_STEPS:
        machine = seed(SEED + rounds)(SchedulerMachine)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=14,
                stateful_step_count=40,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        rounds += 1
    print(f"{SchedulerMachine.num_steps} steps, {SchedulerMachine.num_preemptions} preemptions, seed {SEED}")
    assert SchedulerMachine.num_preemptions > MIN_STEPS // 500, (
        "the pools were not small enough to mean anything"
    )
