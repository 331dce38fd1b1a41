"""The discipline ``static``: a batch is closed until all its members have ended."""

from engine.events import Preempted
from engine.request import FinishReason
from tests.support.drive import Driver


def static(**config):
    config = {
        "num_blocks": 64,
        "max_running_requests": 2,
        "max_step_tokens": 64,
        "max_chunk_tokens": 64,
    } | config
    return Driver(discipline="static", **config)


def grants(plan):
    return {str(g.request_id): len(g.token_ids) for g in plan.grants}


def test_the_seat_of_a_member_that_ended_stays_empty_until_the_batch_is_done():
    driver = static()
    driver.submit("short", 8, max_tokens=2)
    driver.submit("long", 8, max_tokens=6)
    driver.submit("next", 8)
    assert grants(driver.step()) == {"short": 8, "long": 8}
    assert grants(driver.step()) == {"short": 1, "long": 1}
    for _ in range(4):
        assert grants(driver.step()) == {"long": 1}  # padding for the other is not charged
        assert driver.waiting() == ["next"]
    assert grants(driver.step()) == {"next": 8}
    driver.finish()


def test_an_arrival_waits_for_the_batch_however_urgent_and_however_many_seats_are_free():
    driver = static(max_running_requests=8)
    driver.submit("batch", 8, level=10, max_tokens=6)
    driver.step()
    driver.submit("urgent", 8, level=-10)
    while driver.terminal("batch") is None:
        driver.step()
        assert driver.tokens("urgent") == []
    driver.finish()
    assert driver.preemptions("batch") == 0


def test_the_next_batch_is_made_in_policy_order():
    driver = static()
    driver.submit("runs", 8, max_tokens=2)
    driver.step()
    for name, level in (("batch", 10), ("standard", 0), ("urgent", -10)):
        driver.submit(name, 8, level=level)
    driver.step()
    driver.step()
    assert driver.running() == ["urgent", "standard"]
    driver.finish()


def test_all_members_prefill_before_any_decodes_and_the_step_budget_does_not_shrink_the_batch():
    driver = static(max_running_requests=3, max_step_tokens=16, max_chunk_tokens=16)
    for name in "abc":
        driver.submit(name, 12, max_tokens=3)
    assert grants(driver.step()) == {"a": 12, "b": 4}
    assert driver.running() == ["a", "b", "c"]
    assert grants(driver.step()) == {"b": 8, "c": 8}
    assert grants(driver.step()) == {"c": 4}
    assert grants(driver.step()) == {"a": 1, "b": 1, "c": 1}
    driver.finish()


def test_members_hold_blocks_for_their_longest_length():
    driver = static(num_blocks=10, block_size=4, max_running_requests=4)
    driver.submit("a", 8, max_tokens=16)  # 6 blocks
    driver.submit("b", 4, max_tokens=12)  # 4
    driver.submit("c", 4, max_tokens=1)
    driver.step()
    assert driver.running() == ["a", "b"]
    assert driver.blocks.num_free_blocks == 0
    driver.finish()
    assert all(not any(isinstance(e, Preempted) for e in seen.events) for seen in driver.seen.values())


def test_an_output_that_outgrows_the_pool_ends_and_makes_way():
    driver = static(num_blocks=4, block_size=4)
    driver.submit("grows", 10, max_tokens=100)
    driver.submit("other", 4, max_tokens=3)
    driver.finish()
    assert driver.terminal("grows").reason is FinishReason.CAPACITY
    assert len(driver.tokens("grows")) == 7
    assert driver.terminal("other").reason is FinishReason.LENGTH


def test_a_member_that_was_preempted_or_parked_joins_a_later_batch():
    driver = static(max_running_requests=3)
    for name in "abc":
        driver.submit(name, 8, max_tokens=6)
    driver.step()
    driver.preempt("a")
    driver.park("b")
    driver.step()
    driver.unpark("b")
    while driver.terminal("c") is None:
        assert driver.running() == ["c"]
        driver.step()
    driver.step()
    assert driver.running() == ["a", "b"]
    driver.finish()


def test_a_starved_request_is_in_the_next_batch():
    driver = static(max_running_requests=1, max_wait_s=5)
    driver.submit("batch", 4, level=10, max_tokens=2)
    for i in range(8):
        driver.submit(f"urgent{i}", 4, level=-10, max_tokens=4)
    while driver.terminal("batch") is None:
        driver.step()
    assert driver.now < 16
    driver.finish()
