"""Queue limits, and who is displaced.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

import pytest

from engine.errors import Displaced, QueueFull, TenantQuotaExceeded
from engine.scheduler.config import ClassConfig
from tests.support.drive import Driver


def test_the_queue_is_bounded_and_preempted_requests_do_not_count():
    driver = Driver(max_running_requests=1, max_waiting_requests=2)
    driver.submit("a", level=10, max_tokens=20)
    driver.step()
    driver.submit("b", level=10)
    driver.submit("urgent", level=-10)
    driver.step()
    assert driver.waiting() == ["a", "b"]
    driver.submit("c", level=10)
    with pytest.raises(QueueFull, match="queue holds as many waiting requests as it may, 2"):
        driver.submit("d", level=10)
    driver.cancel("b")
    driver.submit("d", level=10)
    driver.finish()


def test_a_more_urgent_newcomer_displaces_the_least_urgent_queued_request():  # SGLang 19, SGLang 20
    driver = Driver(max_running_requests=1, max_waiting_requests=2)
    driver.submit("runs", level=-20)
    driver.step()
    driver.submit("batch", level=10)
    driver.submit("standard", level=0)
    driver.submit("urgent", level=-10)
    assert isinstance(driver.terminal("batch").error, Displaced)
    assert driver.terminal("batch").error.retryable
    with pytest.raises(QueueFull):
        driver.submit("another", level=0)
    driver.finish()


def test_preempted_requests_are_never_displaced():
    driver = Driver(max_running_requests=1, max_waiting_requests=1)
    driver.submit("batch", level=10, max_tokens=20)
    driver.step()
    driver.submit("urgent", level=-10, max_tokens=20)
    driver.step()
    assert driver.waiting() == ["batch"]
    driver.submit("standard", level=0)
    with pytest.raises(QueueFull):
        driver.submit("second", level=0)
    assert driver.terminal("batch") is None
    driver.finish()


def test_a_class_has_limits_of_its_own_in_requests_and_tokens():
    batch = ClassConfig(1e9, 0.0, max_waiting_requests=2, max_waiting_tokens=20)
    driver = Driver(max_running_requests=1, batch=batch)
    driver.submit("runs", level=0)
    driver.step()
    driver.submit("b1", 8, level=10)
    with pytest.raises(QueueFull, match="class batch holds as many waiting tokens as it may, 20"):
        driver.submit("b2", 13, level=10)
    driver.submit("b3", 12, level=20)
    with pytest.raises(QueueFull, match="class batch holds as many waiting requests"):
        driver.submit("b4", 1, level=20)
    driver.submit("b5", 8, level=15)  # displaces b3, which is less urgent
    assert isinstance(driver.terminal("b3").error, Displaced)
    driver.submit("standard", 8, level=0)
    driver.finish()


def test_a_tenant_has_limits_of_its_own():
    driver = Driver(max_running_requests=1, max_tenant_waiting_requests=2, max_tenant_waiting_tokens=30)
    driver.submit("runs")
    driver.step()
    driver.submit("a1", 8, tenant="a")
    driver.submit("a2", 8, tenant="a")
    with pytest.raises(TenantQuotaExceeded, match="tenant 'a' holds as many waiting requests as it may, 2"):
        driver.submit("a3", 8, tenant="a", level=-10)
    driver.submit("b1", 30, tenant="b")
    with pytest.raises(TenantQuotaExceeded, match="tokens"):
        driver.submit("b2", 1, tenant="b")
    driver.finish()


def test_who_is_parked_and_never_ran_can_be_displaced_like_any_other():
    driver = Driver(max_running_requests=1, max_waiting_requests=2)
    driver.submit("runs", level=0)
    driver.step()
    driver.submit("parked", level=10)
    driver.submit("waits", level=5)
    driver.park("parked")
    with pytest.raises(QueueFull):
        driver.submit("equal", level=10)
    driver.submit("urgent", level=0)
    assert isinstance(driver.terminal("parked").error, Displaced)
    driver.submit("another", level=-1)
    assert isinstance(driver.terminal("waits").error, Displaced)
    driver.finish()
