"""What a tenant may have running and waiting, and its weight."""

import pytest

from engine.errors import InvalidRequest, TenantQuotaExceeded
from engine.scheduler.config import InvalidSetting, SchedulerConfig, TenantConfig
from engine.scheduler.draft import Gate
from tests.support.drive import Driver


def driver_for(*tenants: TenantConfig, **config) -> Driver:
    defaults = {"max_running_requests": 8, "max_step_tokens": 128, "max_chunk_tokens": 64, "num_blocks": 64}
    return Driver(**defaults | {"tenants": tenants} | config)


@pytest.mark.parametrize("discipline", ["unified", "prefill_first"])
def test_a_tenant_at_its_seats_waits_for_itself_and_holds_up_nobody(discipline):
    driver = driver_for(TenantConfig("a", max_running_requests=2), discipline=discipline)
    for i in range(40):  # more than the misfits that a step looks past
        driver.submit(f"a{i}", tenant="a", max_tokens=20)
    driver.submit("b", tenant="b", level=10)
    plan = driver.step()
    assert driver.running() == ["a0", "a1", "b"]
    assert plan.gate is Gate.TENANT
    for name in [f"a{i}" for i in range(2, 40)]:
        driver.cancel(name)
    driver.finish()


def test_an_urgent_request_overtakes_inside_its_own_tenant_alone():
    driver = driver_for(TenantConfig("a", max_running_requests=2))
    driver.submit("other", tenant="b", level=10, max_tokens=30)
    driver.submit("a0", tenant="a", level=10, max_tokens=30)
    driver.submit("a1", tenant="a", level=5, max_tokens=30)
    driver.step()
    driver.submit("urgent", tenant="a", level=-10)
    driver.step()
    assert driver.running() == ["urgent", "a1", "other"]
    assert driver.waiting() == ["a0"]
    driver.submit("equal", tenant="a", level=5)
    driver.step()
    assert "equal" in driver.waiting()
    driver.finish()


def test_running_tokens_count_at_their_longest_and_several_may_give_way():
    driver = driver_for(TenantConfig("a", max_running_tokens=64))
    driver.submit("a0", 8, tenant="a", level=10, max_tokens=24)
    driver.submit("a1", 8, tenant="a", level=10, max_tokens=24)
    driver.submit("a2", 8, tenant="a", level=10, max_tokens=1)
    driver.step()
    assert driver.running() == ["a0", "a1"]
    driver.submit("large", 30, tenant="a", level=-10, max_tokens=30)
    driver.step()
    assert driver.running() == ["large"]
    driver.finish()


def test_what_could_never_run_under_the_limit_is_refused():
    driver = driver_for(TenantConfig("a", max_running_tokens=20))
    with pytest.raises(InvalidRequest, match=r"sampling.max_tokens .* 20 tokens"):
        driver.submit("a0", 8, tenant="a", max_tokens=13)
    driver.submit("a1", 8, tenant="a", max_tokens=12)
    driver.submit("b", 8, tenant="b", max_tokens=13)
    driver.finish()


def test_the_starved_of_a_full_tenant_take_nothing_from_others():
    driver = driver_for(TenantConfig("a", max_running_requests=1), num_blocks=16)
    driver.submit("a0", tenant="a", max_tokens=60)
    driver.step()
    driver.submit("a1", tenant="a", max_tokens=20)
    driver.now += 1000
    driver.step()
    driver.submit("b", tenant="b", max_tokens=20)
    driver.step()
    assert driver.running() == ["a0", "b"]
    driver.finish()


def test_a_tenant_has_queue_limits_of_its_own():
    driver = driver_for(TenantConfig("a", max_waiting_requests=1), TenantConfig("b", max_waiting_tokens=10))
    driver.submit("a0", tenant="a")
    with pytest.raises(TenantQuotaExceeded, match="tenant 'a' holds as many waiting requests as it may, 1"):
        driver.submit("a1", tenant="a")
    driver.submit("b0", 8, tenant="b")
    with pytest.raises(TenantQuotaExceeded, match="waiting tokens as it may, 10"):
        driver.submit("b1", 3, tenant="b")
    driver.submit("c0", tenant="c")
    driver.finish()


def test_a_tenant_of_twice_the_weight_is_charged_half():
    driver = driver_for(TenantConfig("a", weight=2.0), policy="fair", max_running_requests=1)
    policy = driver.scheduler.policy
    driver.submit("a0", tenant="a", max_tokens=8)
    driver.submit("b0", tenant="b", max_tokens=8)
    driver.submit("a1", tenant="a", max_tokens=8)
    driver.submit("b1", tenant="b", max_tokens=8)
    driver.run_until_ended("b0")
    assert policy.served("a") == policy.served("b") / 2 > 0
    driver.finish()


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ((TenantConfig("a", weight=0.0),), "tenants.a.weight must be greater than 0"),
        ((TenantConfig("a", max_running_requests=0),), "tenants.a.max_running_requests must be at least 1"),
        ((TenantConfig("a"), TenantConfig("a")), "must have names of their own"),
    ],
)
def test_rules_of_tenants_are_checked(tenants, message):
    with pytest.raises(InvalidSetting, match=message):
        SchedulerConfig(tenants=tenants)
