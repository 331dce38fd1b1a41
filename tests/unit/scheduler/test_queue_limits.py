"""Queue limits, and who is displaced.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

import pytest

from engine.errors import Displaced, InvalidRequest, QueueFull, TenantQuotaExceeded
from engine.request import RequestId, RequestSpec
from engine.scheduler.config import ClassConfig, TenantConfig
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


def driver_with_a_busy_seat(**config) -> Driver:
    driver = Driver(max_running_requests=1, **config)
    driver.submit("runs", level=-50, max_tokens=40)
    driver.step()
    return driver


def rules(**limits) -> ClassConfig:
    return ClassConfig(1e9, 0.0, **limits)


@pytest.mark.parametrize("num_batch", [2, 3])
def test_every_limit_holds_not_only_the_first_that_is_broken(num_batch):
    driver = driver_with_a_busy_seat(max_waiting_requests=4, interactive=rules(max_waiting_requests=1))
    driver.submit("interactive", level=-10)
    for i in range(num_batch):
        driver.submit(f"batch-{i}", level=10)
    with pytest.raises(QueueFull, match=r"queue of class interactive holds as many waiting requests"):
        driver.submit("another", level=-10)
    assert all(driver.terminal(f"batch-{i}") is None for i in range(num_batch)), "displaced in vain"
    driver.finish()


def test_nobody_is_displaced_for_one_that_breaks_a_limit_in_tokens_as_well():
    driver = driver_with_a_busy_seat(max_waiting_requests=2, interactive=rules(max_waiting_tokens=20))
    driver.submit("interactive", 16, level=-10)
    driver.submit("batch", level=10)
    with pytest.raises(QueueFull, match=r"queue of class interactive holds as many waiting tokens"):
        driver.submit("another", 8, level=-10)
    driver.submit("fits", 4, level=-10)
    assert isinstance(driver.terminal("batch").error, Displaced)
    driver.finish()


def test_the_one_whose_end_is_enough_gives_way_and_no_other():
    driver = driver_with_a_busy_seat(max_waiting_requests=4, batch=rules(max_waiting_tokens=30))
    driver.submit("long", 20, level=20)
    driver.submit("short", 4, level=30)
    driver.submit("standard", 8, level=0)
    driver.submit("newcomer", 10, level=10)  # the end of "short" would leave 30 tokens in the class
    assert isinstance(driver.terminal("short").error, Displaced)
    driver.submit("large", 14, level=15)
    assert isinstance(driver.terminal("long").error, Displaced)
    assert driver.terminal("standard") is driver.terminal("newcomer") is None
    driver.finish()


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (
            {"batch": rules(max_waiting_tokens=20)},
            {"prompt": 21},
            r"prompt must be at most 20 tokens .* got 21",
        ),
        ({"max_tenant_waiting_tokens": 20}, {"prompt": 21}, r"20 tokens .* for this tenant .* got 21"),
        ({"max_waiting_requests": 2}, {"n": 3}, r"num_outputs must be at most 2, as many .* got 3"),
        ({"batch": rules(max_waiting_requests=2)}, {"n": 3}, r"at most 2, .* in class batch, got 3"),
        ({"max_tenant_waiting_requests": 2}, {"n": 3}, r"at most 2, .* for this tenant, got 3"),
        (
            {"batch": rules(max_waiting_tokens=20)},
            {"prompt": 7, "n": 3},
            "at most 6 tokens .* 3 outputs .* got 7",
        ),
        ({"tenants": (TenantConfig("t", max_waiting_requests=1),)}, {"n": 2}, r"at most 1, .* got 2"),
        (
            {"tenants": (TenantConfig("t", max_waiting_tokens=9),)},
            {"prompt": 10},
            "at most 9 tokens .* got 10",
        ),
    ],
)
def test_what_not_even_an_empty_queue_holds_is_invalid(config, more, message):
    driver = Driver(**config)
    specs = [
        RequestSpec(RequestId(f"a.{i}"), (1,) * more.get("prompt", 4), level=10, tenant="t", family="a")
        for i in range(more.get("n", 1))
    ]
    with pytest.raises(InvalidRequest, match=message):
        driver.scheduler.check_together(specs)
    with pytest.raises(InvalidRequest, match=message):
        driver.scheduler.check(specs[0], len(specs))


def test_outputs_of_one_prompt_are_displaced_together_while_none_of_them_had_a_seat():
    driver = driver_with_a_busy_seat(max_waiting_requests=4)
    for i in range(3):
        driver.submit(f"batch.{i}", level=10, family="batch")
    driver.submit("standard", level=0)
    driver.submit("newcomer", level=0)
    assert all(isinstance(driver.terminal(f"batch.{i}").error, Displaced) for i in range(3))
    assert driver.terminal("standard") is None
    driver.finish()


def test_outputs_of_one_prompt_are_not_displaced_once_one_of_them_had_a_seat():
    driver = Driver(max_running_requests=1, max_waiting_requests=3)
    for i in range(3):
        driver.submit(f"batch.{i}", level=10, family="batch", max_tokens=20)
    driver.step()
    driver.submit("standard", level=0)
    with pytest.raises(QueueFull):
        driver.submit("newcomer", level=0)
    driver.cancel("batch.0")  # it has ended, but it was admitted
    with pytest.raises(QueueFull):
        driver.submit("newcomer", level=0)
    driver.finish()


def test_a_new_level_is_refused_where_an_arrival_would_be():
    driver = driver_with_a_busy_seat(interactive=rules(max_waiting_requests=2, max_waiting_tokens=40))
    for i in range(4):
        driver.submit(f"batch-{i}", level=10)
    driver.set_level("batch-0", -10)
    driver.set_level("batch-1", -10)
    for i in (2, 3):
        with pytest.raises(QueueFull, match="queue of class interactive"):
            driver.set_level(f"batch-{i}", -10)
        assert driver.scheduler.find(f"batch-{i}").level == 10
    driver.set_level("batch-0", -20)  # inside its class nobody is one more
    driver.set_level("batch-2", 0)
    driver.submit("large", 41, level=10)
    with pytest.raises(InvalidRequest, match=r"at most 40 tokens .* in class interactive"):
        driver.set_level("large", -10)
    driver.set_level("runs", 20)  # it was admitted, so it counts nowhere
    driver.finish()


def test_a_new_level_displaces_as_an_arrival_does():
    driver = driver_with_a_busy_seat(interactive=rules(max_waiting_requests=1))
    driver.submit("less urgent", level=-5)
    driver.submit("batch", level=10)
    driver.set_level("batch", -10)
    assert isinstance(driver.terminal("less urgent").error, Displaced)
    assert driver.waiting() == ["batch"]
    driver.finish()
