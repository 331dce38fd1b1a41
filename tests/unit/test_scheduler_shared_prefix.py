"""Rule 12: whoever waits for a prefix that is being computed lends that prefill its urgency."""

import pytest

from engine.events import Preempted, Resumed, Started
from engine.scheduler.config import InvalidSetting, SchedulerConfig
from engine.scheduler.draft import Gate
from kv.block_manager import BlockManager
from tests.support.drive import Driver
from tests.unit.test_kv_blocks import Owner, admit

SHARED = [7 + i * i % 200 for i in range(40)]


def driver(**more):
    return Driver(**({"num_blocks": 64, "prefix_wait_tokens": 8, "max_bypass": 32} | more))


def granted(plan):
    return {str(g.request_id): g.num_tokens for g in plan.grants}


def started(drive, name):
    return next((e for e in drive.seen[name].events if isinstance(e, Started)), None)


def test_an_urgent_request_waits_for_its_prefix_and_lends_its_urgency():
    drive = driver(max_step_tokens=8)
    drive.submit("batch", [*SHARED, *range(100, 108)], level=10)
    drive.step()
    drive.submit("other", 40, level=0)
    drive.submit("urgent", [*SHARED, 2, 3], level=-10)
    plans = [drive.step() for _ in range(5)]
    # The batch prefill goes before the standard one until the shared 40 tokens are done, but not further.
    assert [granted(plan) for plan in plans[:4]] == [{"batch": 8}] * 4
    assert plans[0].gate is Gate.PREFIX
    assert granted(plans[4]) == {"urgent": 2, "other": 6}
    assert started(drive, "urgent").num_cached_tokens == 40
    drive.finish()


def test_urgency_is_inherited_for_the_shared_part_alone():
    drive = driver(max_step_tokens=12, max_chunk_tokens=12)
    drive.submit("batch", [*SHARED, *range(100, 140)], level=10)
    drive.step()
    drive.submit("other", 40, level=0)
    drive.submit("urgent", [*SHARED[:22], *range(50)], level=-10)
    assert granted(drive.step()) == {"batch": 8, "other": 4}
    assert granted(drive.step()) == {"urgent": 12}
    assert started(drive, "urgent").num_cached_tokens == 20
    drive.finish()


def test_a_prefill_that_is_waited_for_is_not_evicted_by_what_is_less_urgent_than_who_waits():
    drive = driver(num_blocks=24, max_step_tokens=12)
    drive.submit("batch", [*SHARED, 1], level=10)
    drive.step()
    drive.submit("urgent", [*SHARED, 2], level=-10)
    drive.submit("standard", 60, level=0)  # would fit, were the batch request gone
    for _ in range(3):
        plan = drive.step()
        assert not any(isinstance(e, Preempted) for e in plan.events)
        assert "batch" in granted(plan)
    drive.finish()


def test_growth_does_not_evict_a_prefill_that_is_waited_for():
    drive = driver(num_blocks=14, max_step_tokens=12, max_chunk_tokens=4)
    drive.submit("grows", 7, level=0, max_tokens=12)
    for _ in range(3):
        drive.step()
    drive.submit("batch", [*SHARED, 1], level=10)
    drive.step()
    drive.submit("urgent", [*SHARED, 2], level=-10)
    names = [e.request_id for _ in range(6) for e in drive.step().events if isinstance(e, Preempted)]
    assert "batch" not in names
    drive.finish()


def test_whoever_is_waited_for_may_leave():
    drive = driver(max_step_tokens=8)
    drive.submit("batch", [*SHARED, 1], level=10)
    drive.step()
    drive.submit("urgent", [*SHARED, 2], level=-10)
    assert granted(drive.step()) == {"batch": 8}
    drive.cancel("batch")
    assert granted(drive.step()) == {"urgent": 8}
    assert started(drive, "urgent").num_cached_tokens == 16
    drive.finish()


def test_a_parked_prefill_is_not_waited_for():
    drive = driver(max_step_tokens=8)
    drive.submit("batch", [*SHARED, 1], level=10)
    drive.step()
    drive.submit("urgent", [*SHARED, 2], level=-10)
    drive.park("batch")
    assert granted(drive.step()) == {"urgent": 8}
    drive.unpark("batch")
    drive.finish()


@pytest.mark.parametrize(
    ("num_shared", "salt", "waits"),
    [(16, "", True), (15, "", True), (11, "", False), (16, "another", False), (0, "", False)],
    ids=["two blocks left", "a block and a bit left", "too short", "another salt", "nothing shared"],
)
def test_only_what_is_worth_a_step_is_waited_for(num_shared, salt, waits):
    drive = driver(max_step_tokens=12, max_chunk_tokens=4, prefix_wait_tokens=8)
    drive.submit("first", SHARED, level=0)
    drive.step()
    drive.submit("second", [*SHARED[:num_shared], *range(210, 230)], cache_salt=salt)
    assert (granted(drive.step()).get("second") is None) == waits
    drive.finish()


def test_equals_compute_a_shared_prefix_once():
    drive = driver(max_running_requests=8, max_step_tokens=32, max_chunk_tokens=32, num_blocks=200)
    for index in range(6):
        drive.submit(f"r{index}", [*SHARED, index], max_tokens=1)
    num_tokens = 0
    while drive.scheduler.has_requests:
        num_tokens += drive.step().num_tokens
    assert num_tokens == 40 + 6  # each computes its own last prompt token; max_tokens=1 needs no decode
    drive.finish()


def test_others_go_on_meanwhile():
    drive = driver(max_step_tokens=12, max_chunk_tokens=8)
    drive.submit("first", [*SHARED, 1])
    drive.submit("second", [*SHARED, 2])
    drive.submit("third", 8)
    assert granted(drive.step()) == {"first": 8, "third": 4}
    drive.finish()


def test_whoever_waits_too_long_for_a_prefix_waits_no_more():
    drive = driver(max_step_tokens=4, max_chunk_tokens=4, max_running_requests=4, max_wait_s=3.0)
    drive.submit("first", [*SHARED, 1])
    drive.submit("second", [*SHARED, 2])
    while started(drive, "second") is None:
        drive.step()
    assert drive.num_steps <= 5
    assert started(drive, "second").num_cached_tokens < 40
    drive.finish()


def test_a_preempted_request_waits_for_its_prefix_too():
    drive = driver(max_step_tokens=8)
    drive.submit("first", [*SHARED, 1], max_tokens=4)
    for _ in range(7):
        drive.step()
    drive.submit("twin", [*SHARED[:20], 9, 9], level=0)
    drive.preempt("first")
    drive.step()
    drive.finish()
    assert any(isinstance(e, Resumed) for e in drive.seen["first"].events)


def test_static_batches_wait_for_nothing():
    drive = driver(discipline="static", max_step_tokens=16, max_chunk_tokens=8)
    drive.submit("first", [*SHARED, 1])
    drive.submit("second", [*SHARED, 2])
    assert set(granted(drive.step())) == {"first", "second"}
    drive.finish()


def test_the_setting_is_checked():
    with pytest.raises(InvalidSetting, match=r"scheduler\.prefix_wait_tokens must be at least 1, got 0"):
        SchedulerConfig(prefix_wait_tokens=0)


def test_the_manager_says_who_computes_the_next_blocks():
    manager = BlockManager(20, 4)
    first = admit(manager, "a", [*range(20), 1], computed=4)
    second = Owner("b", [*range(14), 99, 98, 97])
    hit = manager.match(second)
    assert len(hit.blocks) == 1
    assert manager.being_computed(second, hit) == (first, 2)  # blocks 1 and 2; block 3 differs
    manager.confirm(first, 12)
    assert manager.being_computed(second, manager.match(second)) is None
    manager.free(first)
    manager.check_integrity()
    assert manager.being_computed(second, manager.match(second)) is None


def test_two_that_compute_the_same_blocks_are_told_apart():
    manager = BlockManager(20, 4)
    first = admit(manager, "a", [*range(8), 1], computed=0)
    second = admit(manager, "b", [*range(8), 2], computed=0)
    third = Owner("c", [*range(8), 3])
    assert manager.being_computed(third, manager.match(third)) == (first, 2)
    manager.free(second)
    assert manager.being_computed(third, manager.match(third)) == (first, 2)
    manager.free(first)
    assert manager.being_computed(third, manager.match(third)) is None
    manager.check_integrity()
