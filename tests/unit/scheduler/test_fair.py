"""The policy fair. Service under a flood is measured in tests/sim/test_scenarios.py."""

from engine.events import Started
from tests.support.drive import Driver, events


def test_a_flood_of_one_tenant_does_not_delay_the_others():
    driver = Driver(policy="fair", max_running_requests=2, num_blocks=64)
    for i in range(20):
        driver.submit(f"flood{i}", 8, tenant="flood")
    for i in range(3):
        driver.submit(f"quiet{i}", 8, tenant="quiet")
    order = []
    while driver.scheduler.has_requests:
        order += [str(e.request_id)[:5] for e in events(driver.step(), Started)]
    assert order[:6].count("quiet") == 3


def test_fair_keeps_levels_above_tenants():
    driver = Driver(policy="fair", max_running_requests=1, num_blocks=64)
    driver.submit("a1", tenant="a", level=10)
    driver.submit("a2", tenant="a", level=-10)
    driver.submit("b1", tenant="b", level=10)
    driver.step()
    assert driver.running() == ["a2"]
    driver.finish()


def test_cached_tokens_are_free_and_outputs_cost_double():
    driver = Driver(policy="fair", num_blocks=64, block_size=4)
    policy = driver.scheduler.policy
    prompt = list(range(12))
    driver.submit("keeps alive", 4, tenant="z", max_tokens=30)
    driver.submit("a1", prompt, tenant="a", max_tokens=3)
    before = policy.served("a")
    driver.run_until_ended("a1")
    driver.submit("a2", prompt, tenant="a", max_tokens=1)
    lifted = policy.served("a")
    assert before == 0
    driver.run_until_ended("a2")
    driver.submit("a3", prompt, tenant="a", max_tokens=1)
    assert policy.served("a") >= lifted
    driver.finish()


def test_idleness_earns_no_credit():
    driver = Driver(policy="fair", num_blocks=64)
    policy = driver.scheduler.policy
    driver.submit("a1", 8, tenant="a", max_tokens=20)
    driver.step()
    for _ in range(10):
        driver.step()
    driver.submit("late", 8, tenant="late", max_tokens=20)
    assert policy.served("late") == policy.served("a") > 8
    driver.finish()
