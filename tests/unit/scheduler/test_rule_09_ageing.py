"""Ageing, and the share of the starved: rule 9 of docs/SCHEDULING.md."""

from engine.events import Started
from engine.request import RequestId
from engine.scheduler.starvation import MAX_STALE
from tests.support.drive import Driver, events, grants


def test_a_starved_request_gets_the_next_seat_whatever_its_level():
    driver = Driver(max_running_requests=2, num_blocks=64, max_wait_s=10)
    driver.submit("batch", 4, level=10, max_tokens=4)
    for i in range(60):
        driver.submit(f"urgent{i}", 4, level=-10, max_tokens=6)
    started = None
    for step in range(60):
        if any(e.request_id == "batch" for e in events(driver.step(), Started)):
            started = step
            break
    assert started is not None
    assert 10 <= started <= 10 + 6
    driver.finish()


def test_a_starved_request_is_never_evicted_and_keeps_its_level():
    driver = Driver(max_running_requests=1, num_blocks=64, max_wait_s=5)
    driver.submit("urgent0", 4, level=-10, max_tokens=8)
    driver.submit("batch", 4, level=10, max_tokens=20)
    for i in range(1, 6):
        driver.submit(f"urgent{i}", 4, level=-10, max_tokens=8)
    while "batch" not in driver.running():
        driver.step()
    assert driver.scheduler.find(RequestId("batch")).level == 10
    driver.finish()
    assert driver.preemptions("batch") == 0


def test_blocks_are_kept_free_for_a_starved_request():
    driver = Driver(max_running_requests=8, num_blocks=10, max_step_tokens=64, max_wait_s=5, max_bypass=1000)
    driver.submit("large", 28, level=10, max_tokens=2)
    driver.submit("first", 12, level=-10, max_tokens=12)
    driver.step()
    for i in range(40):
        driver.submit(f"urgent{i}", 7, level=-10, max_tokens=4)
    for _ in range(40):
        driver.step()
        if driver.tokens("large"):
            break
    assert driver.tokens("large")
    driver.finish()


def test_a_prefill_without_tokens_gets_the_reserved_share():
    driver = Driver(
        max_running_requests=4, max_step_tokens=20, max_chunk_tokens=20, num_blocks=400, max_wait_s=3
    )
    driver.submit("batch", 100, level=10, max_tokens=1)
    driver.step()
    for i in range(30):
        driver.submit(f"urgent{i}", 60, level=-10, max_tokens=1)
    granted = [grants(driver.step()).get("batch", 0) for _ in range(12)]
    assert granted == [0, 0] + [2] * 10  # a tenth of the 20 tokens
    driver.finish()


def test_a_starved_request_gets_the_token_of_whoever_it_evicts():
    driver = Driver(max_running_requests=1, max_step_tokens=1, max_chunk_tokens=1, max_wait_s=3.0)
    driver.submit("first", 2, max_tokens=4)
    driver.submit("starves", 2, max_tokens=4)
    while "starves" not in driver.running():
        driver.step()
    driver.step()
    driver.step()
    driver.park("starves")
    driver.submit("next", 2, max_tokens=20)
    for _ in range(3):
        driver.step()
    driver.set_level("starves", -1)
    driver.unpark("starves")
    plan = driver.step()  # the whole budget was granted to a decode before
    assert [g.request_id for g in plan.grants] == ["starves"]
    assert driver.preemptions("next") == 1
    driver.finish()


def test_the_starved_hold_no_more_than_their_share_for_good():
    """Overload: everything of the lowest class starves, and the most urgent must overtake none the less."""
    driver = Driver(
        max_running_requests=20, num_blocks=40, max_step_tokens=64, max_wait_s=5, starved_share=0.1
    )
    for index in range(60):
        driver.submit(f"batch{index}", 12, level=10, max_tokens=8)
    for _ in range(30):
        driver.step()
    running = driver.scheduler.running()
    assert sum(r.is_starved for r in running) >= 6
    held_for_good = [r for r in running if r.holds_all]
    assert len(held_for_good) == 1  # 4 blocks are the share, and hold one of 5
    driver.submit("urgent", 60, level=-10, max_tokens=2)
    driver.step()
    assert "urgent" in driver.running()
    driver.finish()


def test_requests_that_have_ended_are_not_kept_until_they_would_have_starved():
    """100,000 cancelled streams kept 20 MiB of entries for the ten minutes of their class."""
    driver = Driver(max_wait_s=1e6, num_blocks=64)
    for number in range(1500):
        name = f"r{number}"
        driver.submit(name, level=10, total_deadline=1e6, queue_deadline=1e6)
        driver.cancel(name)
        if number % 100 == 0:
            driver.step()
    state = driver.scheduler._state
    assert state.starvation.num_entries <= MAX_STALE + 1
    driver.step()
    assert driver.scheduler._deadlines.num_entries <= 2 * (MAX_STALE + 100)
