"""A step planned while the one before it is computed: what is granted, kept, dropped and found."""

import pytest

from engine.events import Finished, Preempted, Resumed, TokensSampled
from engine.request import FinishReason, RequestId, RequestStatus
from engine.runner.scripted import expected_output
from engine.scheduler.commands import Fail, Finish, Park, Preempt, SetLevel
from engine.scheduler.draft import Gate
from tests.support.decisions import MemoryLog
from tests.support.drive import Driver, events, grants


def ahead(**config):
    return Driver(depth=1, **({"max_chunk_tokens": 16} | config))


def kinds(driver, name):
    return [type(event) for event in driver.seen[RequestId(name)].events]


def find(driver, name):
    return driver.scheduler.find(RequestId(name))


def test_a_decode_is_granted_before_its_token_is_known():
    driver = ahead()
    driver.submit("a", 6, max_tokens=5)
    assert grants(driver.step()) == {"a": 6}
    assert driver.tokens("a") == []  # nothing is committed yet
    (grant,) = driver.step().grants
    assert (grant.start, grant.num_tokens, grant.output_index) == (6, 1, 1)
    assert list(grant.token_ids) == driver.tokens("a")  # by now: its step was committed
    driver.finish()
    assert driver.noted["granted a token nobody knew"] == 4
    assert driver.noted["computed in vain"] == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_who_reaches_its_length_in_flight_is_granted_nothing_more(max_tokens):
    driver = ahead()
    driver.submit("a", 6, max_tokens=max_tokens)
    for num_tokens in [6, *[1] * (max_tokens - 1)]:
        assert grants(driver.step()) == {"a": num_tokens}
    request = find(driver, "a")
    plan = driver.step()
    assert plan.grants == ()
    assert request.status is RequestStatus.FINISHED
    assert driver.terminal("a").reason is FinishReason.LENGTH
    assert driver.noted["computed in vain"] == 0


def test_who_outgrows_the_pool_in_flight_is_granted_nothing_more():
    driver = ahead(num_blocks=2, block_size=4)
    driver.submit("a", 6, max_tokens=20)
    driver.run()
    assert driver.terminal("a").reason is FinishReason.CAPACITY
    assert len(driver.tokens("a")) == 3
    assert driver.noted["computed in vain"] == 0


def test_a_stop_token_makes_one_grant_vain_and_nothing_of_it_is_seen():
    driver = ahead()
    stop = expected_output(range(6), 4)[3]
    driver.submit("a", range(6), max_tokens=20, stop_token_ids=(stop,))
    driver.run()
    assert driver.terminal("a").reason is FinishReason.STOP_TOKEN
    assert driver.blocks.num_free_blocks == driver.blocks.num_blocks
    assert [flight.plan.grants[0].request_id for flight in driver.flights] == ["a"]
    driver.finish()
    assert driver.noted["computed in vain"] == 1


def test_what_is_in_flight_of_a_preempted_request_is_delivered_and_computed_again():
    driver = ahead(prefix_cache=False)
    driver.submit("a", 6, max_tokens=8)
    driver.step()
    driver.step(between=(Preempt(RequestId("a")),))
    assert len(driver.tokens("a")) == 1  # the first step was committed after the preemption
    assert find(driver, "a").status is RequestStatus.PREEMPTED
    (grant,) = driver.step().grants  # looks ahead to the second step, which samples the second token
    assert (grant.start, grant.num_tokens) == (0, 8)
    assert len(driver.tokens("a")) == 2
    assert kinds(driver, "a")[1:] == [Preempted, TokensSampled, Resumed, TokensSampled]
    driver.finish()


def test_one_preempted_for_an_arrival_keeps_the_token_in_flight():
    driver = ahead(max_running_requests=1, max_step_tokens=16)
    driver.submit("batch", 4, level=10, max_tokens=8)
    driver.step()
    driver.step()
    driver.submit("urgent", 4, level=-10, max_tokens=2)
    plan = driver.step()
    assert [e.request_id for e in events(plan, Preempted)] == ["batch"]
    assert grants(plan) == {"urgent": 4}
    assert len(driver.tokens("batch")) == 2
    driver.finish()


@pytest.mark.parametrize("command", [Preempt, Park])
def test_a_last_token_in_flight_ends_who_lost_its_seat_without_computing_it_again(command):
    driver = ahead()
    driver.submit("a", 6, max_tokens=2)
    driver.submit("b", 6, max_tokens=9)
    driver.step()
    driver.step(between=(command(RequestId("a")),))
    assert "a" not in grants(driver.step())
    assert driver.terminal("a").reason is FinishReason.LENGTH
    driver.finish()


def test_who_needs_nothing_more_gives_way_first():
    driver = ahead(max_running_requests=2)
    driver.submit("a", 9, level=10, max_tokens=2)
    driver.submit("b", 4, level=10, max_tokens=20)
    driver.step()
    driver.step()
    driver.submit("urgent", 4, level=-10, max_tokens=2)
    assert [e.request_id for e in events(driver.step(), Preempted)] == ["a"]
    assert driver.terminal("a").reason is FinishReason.LENGTH
    driver.finish()


def test_who_waits_for_its_last_token_is_no_candidate_for_a_seat():
    driver = ahead(max_running_requests=1)
    driver.submit("a", 6, max_tokens=2)
    driver.step()
    driver.step(between=(Preempt(RequestId("a")),))
    driver.submit("b", 6, max_tokens=2)
    plan = driver.step()
    assert plan.gate is Gate.IN_FLIGHT
    assert driver.terminal("a").reason is FinishReason.LENGTH
    assert grants(driver.step()) == {"b": 6}
    driver.finish()


def test_what_is_in_flight_of_a_cancelled_request_is_dropped_and_all_blocks_return():
    driver = ahead()
    driver.submit("a", 6, max_tokens=8)
    driver.step()
    driver.step()
    (finished,) = driver.cancel("a")
    assert finished.usage.output_tokens == len(driver.tokens("a")) == 1
    assert driver.blocks.num_free_blocks == driver.blocks.num_blocks
    driver.submit("b", 6, max_tokens=3)
    driver.finish()
    assert driver.noted["computed in vain"] == 1


def test_a_parked_request_keeps_what_was_computed_for_it():
    driver = ahead()
    driver.submit("a", 6, max_tokens=8)
    driver.step()
    driver.step(between=(Park(RequestId("a")),))
    driver.step()
    request = find(driver, "a")
    assert (len(driver.tokens("a")), request.num_computed_tokens, request.num_tokens) == (2, 7, 8)
    driver.unpark("a")
    assert grants(driver.step()) == {"a": 1}
    driver.finish()


# The cache


def test_a_block_is_found_only_once_the_step_that_fills_it_is_committed():
    driver = ahead(prefix_wait_tokens=256)
    driver.submit("a", range(8), max_tokens=8)
    driver.submit("b", [*range(8), 9], max_tokens=2)
    driver.step()
    assert driver.blocks.match(find(driver, "a")).num_tokens == 0  # computed or not, it is not committed
    driver.step()
    assert driver.blocks.match(find(driver, "a")).num_tokens == 8
    driver.finish()


@pytest.mark.parametrize("command", [Preempt, Finish])
def test_what_is_in_flight_is_not_published_when_its_blocks_are_lost(command):
    driver = Driver(max_chunk_tokens=16, max_running_requests=1)
    driver.submit("a", range(9), max_tokens=8)
    driver.submit("b", range(9), max_tokens=8)
    driver.scheduler.plan(1.0)
    driver.scheduler.plan(2.0)
    driver.scheduler.apply(command(RequestId("a")), 2.0)
    assert driver.blocks.match(find(driver, "b")).num_tokens == 0


def test_a_prefix_in_flight_is_waited_for_as_well():
    driver = ahead(prefix_wait_tokens=8)
    driver.submit("a", range(9), max_tokens=8)
    driver.step()  # its blocks are in flight
    driver.submit("b", [*range(8), 9, 10], max_tokens=2)
    plan = driver.step()
    assert (grants(plan), plan.gate) == ({"a": 1}, Gate.PREFIX)
    plan = driver.step()  # the prefix is committed by now
    assert grants(plan) == {"a": 1, "b": 2}
    driver.finish()


def test_a_failed_step_leaves_nothing_to_be_found():
    driver = ahead(prefix_wait_tokens=8)
    driver.submit("a", range(9), max_tokens=8)
    driver.step()
    driver.submit("b", [*range(8), 9, 10], max_tokens=2)
    driver.die("fails")
    assert driver.blocks.match(find(driver, "b")).num_tokens == 0
    driver.finish()
    assert driver.tokens("a") == driver.seen["a"].expected[:8]
    assert driver.tokens("b") == driver.seen["b"].expected[:2]


def test_the_prefix_of_one_that_ends_with_its_first_token_is_kept():
    driver = ahead()
    driver.submit("a", range(8), max_tokens=1)
    driver.finish()
    driver.submit("b", [*range(8), 9], max_tokens=1)
    driver.finish()
    assert driver.seen["b"].events[-1].usage.cached_tokens == 8


def test_blocks_freed_by_a_plan_may_be_in_the_same_plan():
    driver = ahead(num_blocks=4, block_size=4, prefix_cache=False)
    driver.submit("batch", 10, level=10, max_tokens=6)
    driver.step()
    driver.submit("urgent", 12, level=-10, max_tokens=3)
    plan = driver.step()  # while the runner has yet to write into batch's blocks
    assert [e.request_id for e in events(plan, Preempted)] == ["batch"]
    assert set(driver.blocks.table("urgent")) & {0, 1, 2}
    driver.finish()  # whoever read what the other one wrote would fail


# Order, losses, replay


def test_plans_are_committed_in_turn_and_made_one_ahead_at_most():
    driver = Driver()
    driver.submit("a", 6, max_tokens=8)
    scheduler = driver.scheduler
    first, second = scheduler.plan(1.0), scheduler.plan(2.0)
    results = [driver.runner.run(plan) for plan in (first, second)]
    with pytest.raises(AssertionError, match="an earlier plan comes first"):
        scheduler.commit(second, results[1], 2.0)
    with pytest.raises(AssertionError, match="more than one step is in flight"):
        scheduler.plan(3.0)
    scheduler.commit(first, results[0], 3.0)
    with pytest.raises(AssertionError, match="twice, or out of turn"):
        scheduler.commit(first, results[0], 3.0)


def test_a_count_of_what_is_in_flight_that_is_wrong_is_found():
    driver = Driver()
    driver.submit("a", 6, max_tokens=8)
    driver.scheduler.plan(1.0)
    driver.scheduler.plan(2.0)
    driver.scheduler.check_integrity()
    find(driver, "a").num_tokens_in_flight -= 1
    with pytest.raises(AssertionError):
        driver.scheduler.check_integrity()


def test_both_steps_are_lost_with_the_runner_and_computed_again():
    driver = ahead()
    driver.submit("a", 6, max_tokens=5)
    driver.submit("b", 6, max_tokens=2)
    driver.step()
    driver.step()
    driver.die("in_step")
    assert driver.noted["lost with two steps in flight"] == 1
    assert [len(driver.tokens(name)) for name in "ab"] == [1, 1]
    assert not any(r.num_outputs_in_flight for r in driver.alive())
    driver.finish()
    assert [driver.preemptions(name) for name in "ab"] == [1, 1]


def test_one_that_is_computed_alone_grows_while_it_is_watched():
    driver = ahead(num_blocks=16, block_size=2, prefix_cache=False)
    driver.submit("a", 8, max_tokens=21)
    driver.step()
    driver.die("in_step")
    assert driver.scheduler.is_quarantined(RequestId("a"))
    driver.step()
    assert grants(driver.step()) == {"a": 1}  # alone still, since its prefill is not committed
    assert len(driver.blocks.table("a")) == 5
    driver.finish()


def test_who_was_lent_an_urgency_grows_all_the_same():
    driver = ahead(
        num_blocks=8, max_running_requests=5, max_step_tokens=17, max_chunk_tokens=5,
        prefix_wait_tokens=4, max_bypass=3, max_preemptions=1, resume_quantum_tokens=2,
    )  # fmt: skip
    driver.submit("a", [(50 + i) % 256 for i in range(5)], level=-1, max_tokens=12)
    driver.submit("b", list(range(4)), level=1, max_tokens=20)
    for _ in range(12):
        driver.step()
    prompt = [100 + i for i in range(8)]
    driver.submit("c", prompt, level=-10, max_tokens=3)
    driver.submit("d", prompt, level=0, max_tokens=10)
    driver.step(between=(SetLevel(RequestId("c"), 10),))
    driver.finish()


@pytest.mark.parametrize("policy", ["priority", "fair"])
@pytest.mark.parametrize("discipline", ["unified", "prefill_first", "static"])
def test_a_run_with_plans_made_ahead_is_replayed_exactly(discipline, policy):
    log = MemoryLog()
    driver = ahead(decisions=log, discipline=discipline, policy=policy, num_blocks=8, max_running_requests=3)
    for i in range(6):
        driver.submit(f"r{i}", 5 + i, level=(10, 0, -10)[i % 3], max_tokens=6, tenant="ab"[i % 2])
        driver.step()
    driver.step(between=(Park(RequestId("r3")), Preempt(RequestId("r4"))))
    driver.step(between=(Fail(RequestId("r0"), RuntimeError("nan")),) if find(driver, "r0") else ())
    driver.die("in_step")
    driver.unpark("r3")
    driver.finish()
    log.replay(driver.num_steps)


def test_usage_and_end_agree_with_what_was_delivered():
    driver = ahead()
    driver.submit("a", 6, max_tokens=8, total_deadline=4.0)
    driver.run()
    finished = driver.terminal("a")
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.TIME_LIMIT
    assert finished.usage.output_tokens == len(driver.tokens("a"))
