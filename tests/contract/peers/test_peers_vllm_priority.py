"""What vLLM's tests of its priority scheduler pin down, held against this scheduler.

Every test names the behaviour's number in docs/PEERS.md, and says where ours differs on purpose.
"""

import random

import pytest

from engine.events import Finished, Preempted, Resumed, Started
from engine.request import FinishReason, PreemptReason, RequestId
from tests.support.drive import Driver
from tests.support.peers import grants, of


def started_in_order(driver):
    """Run to the end; who got its first seat when."""
    order = []
    while driver.scheduler.has_requests:
        order += of(driver.step().events, Started)
    return order


@pytest.mark.parametrize(
    ("seats", "levels", "running", "waiting"),
    [
        pytest.param(1, [3, 2, 0], [2], [1, 0], id="vLLM 29"),
        pytest.param(2, [3, 1, 2, 0], [3, 1], [2, 0], id="vLLM 30"),
        pytest.param(1, [5, 1, 8, 3, 2, 7, 4, 6], [1], [4, 3, 6, 0, 7, 5, 2], id="vLLM 31"),
    ],
)
def test_the_most_urgent_get_the_seats_and_the_others_wait_in_order(seats, levels, running, waiting):
    driver = Driver(max_running_requests=seats, num_blocks=64)
    for i, level in enumerate(levels):
        driver.submit(f"{i}", 4, level=level, max_tokens=2)
    driver.step()
    assert (driver.running(), driver.waiting()) == ([f"{i}" for i in running], [f"{i}" for i in waiting])
    assert started_in_order(driver) == [f"{i}" for i in waiting]


def test_of_equals_that_fill_the_pool_the_later_one_gives_way_and_keeps_its_token():
    """vLLM 6: ten blocks of sixteen, two prompts of eighty tokens.

    No token of the victim is in flight here: a step is planned when the one before is known.
    """
    driver = Driver(num_blocks=10, block_size=16, max_step_tokens=200, max_chunk_tokens=100)
    for name in ("r0", "r1"):
        driver.submit(name, 80, max_tokens=4)
    assert grants(driver.step()) == {"r0": 80, "r1": 80}
    assert driver.blocks.num_free_blocks == 0
    plan = driver.step()
    (event,) = (e for e in plan.events if isinstance(e, Preempted))
    assert (event.request_id, event.reason, event.beneficiary) == ("r1", PreemptReason.GROWTH, "r0")
    assert grants(plan) == {"r0": 1}
    assert len(driver.tokens("r1")) == 1
    driver.finish()
    assert len(driver.tokens("r1")) == 4
    assert driver.preemptions("r0") == 0


def test_a_less_urgent_request_gives_way_to_growth_and_resumes_with_all_it_had():
    """vLLM 34: the pool is full with both; the less urgent one goes, keeps its outputs and comes back."""
    driver = Driver(num_blocks=4, block_size=16, max_step_tokens=64, max_chunk_tokens=64)
    driver.submit("low", 30, level=1, max_tokens=8)
    driver.step()
    driver.submit("high", 32, level=0, max_tokens=8)
    driver.step()
    assert driver.running() == ["high", "low"]
    assert driver.blocks.num_free_blocks == 0
    plan = driver.step()
    (event,) = (e for e in plan.events if isinstance(e, Preempted))
    assert (event.request_id, event.reason, event.beneficiary) == ("low", PreemptReason.GROWTH, "high")
    assert grants(plan) == {"high": 1}
    low = driver.scheduler.find(RequestId("low"))
    assert (low.num_tokens, low.num_output_tokens) == (32, 2)
    driver.run_until_ended("high")
    plan = driver.step()
    assert of(plan.events, Resumed) == ["low"]
    (grant,) = plan.grants
    assert grant.start + len(grant.token_ids) == 32
    assert grant.token_ids[-1] == driver.tokens("low")[1]
    driver.finish()
    assert driver.preemptions("high") == 0


def test_who_is_granted_already_still_runs_in_the_step_that_evicts_another():
    """vLLM 35: there whole prompts need not fit, so a prompt of 200 could start on five blocks; here 46."""
    driver = Driver(num_blocks=5, block_size=16, max_step_tokens=200, max_chunk_tokens=15, prefix_cache=False)
    driver.submit("a", 46, level=9, max_tokens=4)
    assert grants(driver.step()) == {"a": 15}
    driver.submit("b", 15, level=0, max_tokens=10)
    assert grants(driver.step()) == {"b": 15, "a": 15}
    driver.submit("c", 1, level=1, max_tokens=10)
    assert grants(driver.step()) == {"b": 1, "c": 1, "a": 15}
    assert driver.blocks.num_free_blocks == 0
    plan = driver.step()
    assert of(plan.events, Preempted) == ["a"]
    assert grants(plan) == {"b": 1, "c": 1}
    assert driver.waiting() == ["a"]
    driver.finish()


def check_who_gave_way_to_growth(plan, seated):
    """The worst level of those with a seat, and among equals the last arrived; no block may be shared."""
    for event in plan.events:
        if isinstance(event, Preempted):
            victim = seated.pop(event.request_id, None)
            if event.reason is PreemptReason.GROWTH:
                winner = seated.get(event.beneficiary, victim)
                assert victim[0] == max(level for level, _ in (victim, *seated.values()))
                assert victim[0] > winner[0] or victim == max([victim, *seated.values()])


#: Limits of prompt and output, blocks of the pool, seats, and whether that means preemptions.
ROOMY = (50, 5, 300, 16, False)
TIGHT = (8, 40, 14, 8, True)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("profile", [ROOMY, TIGHT], ids=["long prompts, much room", "long outputs, no room"])
def test_random_traffic_keeps_plans_and_reports_consistent(profile, prefix_cache):
    """vLLM 36: fewer steps than there (the state machine in tests/property makes 20,000), more checks.

    The driver also checks who was overtaken, that nobody is evicted for a less urgent one, and that
    blocks are conserved.
    """
    max_prompt, max_output, num_blocks, seats, preempts = profile
    dice = random.Random(42)
    driver = Driver(
        num_blocks=num_blocks, max_running_requests=seats, max_step_tokens=40, max_chunk_tokens=20,
        prefix_cache=prefix_cache,
    )  # fmt: skip
    announced: list[str] = []
    for step in range(1000):
        if step < 80:
            for _ in range(dice.choice([0, 0, 1, 2])):
                level = 4 if step in (0, 1) else dice.randint(-3, 3)
                prompt = [dice.randrange(4) for _ in range(dice.randint(1, max_prompt))]
                driver.submit(
                    f"{len(driver.seen)}", prompt, level=level, max_tokens=dice.randint(1, max_output)
                )
        elif not driver.scheduler.has_requests:
            break
        seated = {r.request_id: (r.level, r.arrival_seq) for r in driver.scheduler.running()}
        plan = driver.step()
        if not prefix_cache:
            check_who_gave_way_to_growth(plan, seated)
        counts, preempted = grants(plan), of(plan.events, Preempted)
        assert sum(counts.values()) == plan.num_tokens
        assert not {*of(plan.events, Started)} & {*announced}, "announced twice"
        announced += of(plan.events, Started)
        assert {*counts, *preempted, *of(plan.events, Resumed)} <= {*announced}
        assert not {*preempted} & {*counts, *of(plan.events, Resumed)}, "preempted and served"
        assert {str(r) for r, seen in driver.seen.items() if seen.terminal} <= {*announced}
    driver.finish()
    assert sorted(announced) == sorted(driver.seen)
    assert {type(seen.terminal) for seen in driver.seen.values()} == {Finished}
    assert {seen.terminal.reason for seen in driver.seen.values()} == {FinishReason.LENGTH}
    num_preemptions = sum(driver.preemptions(name) for name in driver.seen)
    assert num_preemptions > 20 if preempts else num_preemptions == 0


def test_a_preemption_from_outside_is_reported_and_its_seat_goes_to_who_waits():
    """vLLM 37: the report is the event that the command returns, not a field of the next plan."""
    driver = Driver(max_running_requests=1, preempt_for_arrivals=False)
    driver.submit("a", 8, level=10, max_tokens=8)
    driver.step()
    driver.submit("b", 8, level=0, max_tokens=2)
    driver.step()
    assert driver.running() == ["a"]
    (event,) = driver.preempt("a")
    assert (event.request_id, event.reason, event.beneficiary) == ("a", PreemptReason.OPERATOR, None)
    plan = driver.step()
    assert of(plan.events, Started) == ["b"]
    assert driver.waiting() == ["a"]
    driver.finish()


def test_a_preemption_and_the_resume_right_after_it_are_both_reported():
    """vLLM 47: no single plan does both to one request here; a command and the next plan may."""
    driver = Driver(num_blocks=32)
    driver.submit("a", 8, max_tokens=8)
    driver.step()
    driver.preempt("a")
    plan = driver.step()
    assert of(plan.events, Resumed) == ["a"]
    assert "a" in grants(plan)
    driver.finish()
    moves = (Started, Preempted, Resumed)
    assert [type(e) for e in driver.seen[RequestId("a")].events if isinstance(e, moves)] == [*moves]
