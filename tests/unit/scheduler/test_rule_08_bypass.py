"""Bounded bypass: rule 8 of docs/SCHEDULING.md. The count itself is in tests/sim/test_scenarios.py."""

from engine.events import Started
from tests.support.drive import Driver, events, grants


def bypassed(max_bypass, num_small=10):
    driver = Driver(num_blocks=10, max_running_requests=8, max_step_tokens=64, max_bypass=max_bypass)
    driver.submit("holder", 20, max_tokens=30)
    driver.step()
    driver.submit("large", 28, max_tokens=2)
    for i in range(num_small):
        driver.submit(f"small{i}", 3, max_tokens=2)
    passed = 0
    for _ in range(12):
        passed += sum("small" in e.request_id for e in events(driver.step(), Started))
    return driver, passed


def test_without_bypass_the_queue_is_served_strictly_in_order():
    assert bypassed(max_bypass=0)[1] == 0


def test_with_much_bypass_all_small_ones_pass():
    assert bypassed(max_bypass=32)[1] == 10


def test_a_more_urgent_request_is_not_held_by_the_fence():
    driver, _ = bypassed(max_bypass=0)
    driver.submit("urgent", 4, level=-10)
    plan = driver.step()
    assert "urgent" in grants(plan)
    driver.finish()
