"""What vLLM's scheduler tests pin down about steps, ends and commands, held against this scheduler.

Every test names the behaviour's number in docs/PEERS.md, and says where ours differs on purpose.
"""

from itertools import permutations

import pytest

from engine.events import Finished, Preempted, Resumed, Started, TokensSampled
from engine.request import FinishReason, RequestId
from engine.scheduler.commands import Finish
from tests.support.drive import Driver
from tests.support.peers import grants, of

TEN = [f"r{i}" for i in range(10)]


def ten(**config):
    """Ten requests of eight tokens that all fit into one step."""
    driver = Driver(**{"max_running_requests": 10, "max_step_tokens": 100, "num_blocks": 100} | config)
    for name in TEN:
        driver.submit(name, 8, max_tokens=24)
    return driver


def test_each_of_ten_waiting_requests_can_be_aborted_in_turn():
    """vLLM 2: it is gone from the register, and the queue shrinks by one."""
    driver = ten()
    for i, name in enumerate(TEN):
        assert driver.scheduler.find(RequestId(name)) is not None
        driver.cancel(name)
        assert driver.scheduler.find(RequestId(name)) is None
        assert len(driver.waiting()) == 9 - i
    assert not driver.scheduler.has_requests


def test_a_prompt_is_cut_to_what_the_budget_leaves_and_short_ones_behind_it_wait():
    """vLLM 3: the half in which prompts may be cut; one that waits for blocks is a test of rule 3."""
    driver = Driver(
        max_running_requests=3, max_step_tokens=1024, max_chunk_tokens=1024, num_blocks=200,
        block_size=16, max_context_tokens=2048,
    )  # fmt: skip
    for name, size in zip("abcd", (800, 800, 10, 10), strict=True):
        driver.submit(name, size, max_tokens=2)
    assert grants(driver.step()) == {"a": 800, "b": 224}
    assert driver.waiting() == ["c", "d"]
    driver.finish()


def test_a_prefill_joins_a_decode_in_the_step_after_it_arrives():
    """vLLM 5: there two steps may be in flight; here a step is planned when the one before is known."""
    driver = Driver(
        max_running_requests=2, max_step_tokens=1024, max_chunk_tokens=1024, num_blocks=100,
        block_size=16, max_context_tokens=2048,
    )  # fmt: skip
    driver.submit("r0", 512)
    assert grants(driver.step()) == {"r0": 512}
    driver.submit("r1", 512)
    assert grants(driver.step()) == {"r0": 1, "r1": 512}
    assert grants(driver.step()) == {"r0": 1, "r1": 1}
    driver.finish()


@pytest.mark.parametrize("order", [TEN, TEN[::-1], TEN[::2] + TEN[1::2]], ids=["first", "last", "mixed"])
def test_requests_that_are_all_preempted_wait_in_their_original_order(order):
    """vLLM 12: the half that sends everybody back; nothing empties the prefix cache here."""
    driver = ten()
    driver.step()
    driver.step()
    for name in order:
        assert of(driver.preempt(name), Preempted) == [name]
    assert driver.running() == []
    assert driver.waiting() == TEN
    assert of(driver.step().events, Resumed) == TEN
    driver.finish()


@pytest.mark.parametrize(("prefix_cache", "num_cached_tokens"), [(True, 32), (False, 0)], ids=["on", "off"])
def test_cached_tokens_are_counted_once_however_often_admission_is_tried(prefix_cache, num_cached_tokens):
    """vLLM 13: a refused admission and a resume count nothing more; with the cache off it is 0."""
    driver = Driver(num_blocks=5, block_size=16, max_step_tokens=64, max_chunk_tokens=64,
                    prefix_cache=prefix_cache)  # fmt: skip
    driver.submit("before", range(33), max_tokens=1)
    driver.finish()
    driver.submit("holder", 46, level=-10, max_tokens=3)
    driver.step()
    driver.submit("late", [*range(32), *range(90, 106)], max_tokens=6)
    assert driver.step().gate is not None  # three blocks are needed and two are free
    assert driver.waiting() == ["late"]
    driver.run_until_ended("holder")
    while not driver.tokens("late"):
        driver.step()
    driver.preempt("late")
    driver.finish()
    started = [e for e in driver.seen[RequestId("late")].events if isinstance(e, Started)]
    assert [e.num_cached_tokens for e in started] == [num_cached_tokens]
    assert driver.terminal("late").usage.cached_tokens == num_cached_tokens
    assert driver.preemptions("late") == 1


def test_blocked_requests_are_passed_and_counted_apart():
    """vLLM 14: what blocks a request there is a grammar or a transfer; here it is parking."""
    driver = Driver(max_step_tokens=100, max_chunk_tokens=100, num_blocks=100, max_running_requests=8)
    for name in ("b0", "b1"):
        driver.submit(name, 50)
        driver.park(name)
    for name in ("r0", "r1", "r2"):
        driver.submit(name, 50)
    driver.step()
    parked = [str(r.request_id) for r in driver.scheduler.parked()]
    assert (driver.running(), driver.waiting(), parked) == (["r0", "r1"], ["r2"], ["b0", "b1"])
    for name in parked:
        driver.unpark(name)
    driver.finish()


def test_after_everything_ended_nothing_is_left():
    """vLLM 15: no request, no table, every block free."""
    driver = ten(num_blocks=30)  # too few for all at once: some are preempted on the way
    for _ in range(5):
        driver.step()
    driver.cancel("r3")
    driver.park("r4")
    driver.cancel("r4")
    driver.run()
    assert sum(map(driver.preemptions, TEN)) > 0
    assert (driver.running(), driver.waiting(), driver.scheduler.parked()) == ([], [], ())
    assert driver.scheduler.num_running == driver.scheduler.num_waiting == driver.blocks.num_owners == 0
    assert driver.blocks.num_free_blocks == 30
    assert not any(driver.scheduler.find(RequestId(name)) for name in TEN)
    assert not driver.step().grants


@pytest.mark.parametrize("order", [*permutations("bcd")], ids="".join)
def test_blocked_requests_come_back_to_the_place_they_had(order):
    """vLLM 19: however long they were blocked, and in whatever order that ended; what blocks is parking."""
    driver = Driver(max_running_requests=1)
    for name in "abcde":
        driver.submit(name, 4, max_tokens=8)
    for name in "bcd":
        driver.park(name)
    driver.step()
    assert (driver.running(), driver.waiting()) == (["a"], ["e"])
    for name in order:
        driver.unpark(name)
        driver.step()
    assert driver.waiting() == ["b", "c", "d", "e"]
    driver.finish()


def test_a_long_request_and_one_that_shares_its_beginning_do_not_wedge_a_small_pool():
    """vLLM 21: nine blocks, eight and five of them asked for, four shared; here nothing is loaded from afar.

    The second one waits until the shared blocks are computed, and then needs one block alone.
    """
    driver = Driver(num_blocks=9, block_size=4)
    driver.submit("a", range(31), max_tokens=1)
    driver.submit("b", [*range(16), 90, 91, 92], max_tokens=1)
    assert of(driver.step().events, Started) == ["a"]
    assert driver.waiting() == ["b"]
    driver.step()
    assert grants(driver.step()) == {"a": 8, "b": 3}
    driver.finish()
    assert driver.preemptions("a") == driver.preemptions("b") == 0
    assert driver.terminal("b").usage.cached_tokens == 16


def test_one_abort_a_step_leaves_each_with_what_it_had():
    """vLLM 39: ten run and one is aborted while each step computes; the n-th keeps n tokens."""
    driver = ten()
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    for i in order:
        driver.step(between=(Finish(RequestId(f"r{i}")),))
    assert [len(driver.tokens(f"r{i}")) for i in order] == list(range(10))
    assert {driver.terminal(name).reason for name in TEN} == {FinishReason.CANCELLED}
    assert not driver.scheduler.has_requests


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("steps", [{6, 14}, {6, 7, 18, 19}], ids=["6, 14", "6, 7, 18, 19"])
def test_preempting_all_again_and_again_repeats_no_token_and_loses_none(steps, prefix_cache):
    """vLLM 43: there an ordered subset of the outputs comes through, here all of them."""
    driver = ten(prefix_cache=prefix_cache)
    for step in range(1, 20):
        driver.step()  # compares every token with the undisturbed output
        for name in driver.running() if step in steps else []:
            driver.preempt(name)
    driver.finish()
    for name in TEN:
        assert driver.tokens(name) == driver.seen[RequestId(name)].expected
        assert driver.preemptions(name) == len(steps)


@pytest.mark.parametrize("num_steps", [0, 1, 4], ids=["first chunk", "later chunk", "decode"])
def test_blocks_of_a_request_aborted_in_flight_are_free_at_once(num_steps):
    """vLLM 45: there they are kept until the steps in flight are known.

    Here one step is in flight and nobody is given blocks before it is committed, so they need not be.
    """
    driver = Driver(num_blocks=32)
    driver.submit("a", 16, max_tokens=8)
    driver.submit("b", 4, max_tokens=8)
    for _ in range(num_steps):
        driver.step()
    plan = driver.scheduler.plan(driver.now + 1.0)
    driver.book(plan.events)
    result = driver.runner.run(plan)
    assert "a" in grants(plan)
    assert len(driver.blocks.table("a")) >= 4
    assert of(driver.cancel("a"), Finished) == ["a"]
    assert driver.blocks.num_free_blocks == 32 - len(driver.blocks.table("b"))
    events = driver.scheduler.commit(plan, result, driver.now + 1.5)
    assert of(events, TokensSampled) == ["b"]
    assert of(events, Finished) == []
    driver.book(events)
    driver.finish()
