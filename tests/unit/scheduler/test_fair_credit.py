"""The policy fair: nobody saves up right of way. What a tenant did before makes it at most an equal.

Each scenario ends with a tenant ``a`` that asks for much at once, beside a tenant ``b`` that waits
for as much. Who gets the next 60 seats is counted.
"""

from collections import Counter

import pytest

from engine.errors import InternalError
from engine.scheduler.commands import LoseKv
from engine.scheduler.config import TenantConfig
from tests.support.drive import Driver
from tests.support.light_drive import LightDriver

MANY, COUNTED = 99, 60


def driver_for(**config) -> LightDriver:
    return LightDriver(**{"policy": "fair", "max_running_requests": 4, "max_step_tokens": 64} | config)


def ask(driver, tenant, number=MANY, *, name=None, **more):
    """Many requests of a tenant."""
    name = name or tenant
    for i in range(number):
        driver.submit(f"{name}-{i}", 8, tenant=tenant, **{"max_tokens": 4} | more)


def seats_by_tenant(driver, number=COUNTED) -> Counter[str]:
    """Who gets the next seats; stops when one of the two waits no more."""
    seats: Counter[str] = Counter()
    before = set(driver.running())
    while seats.total() < number:
        waiting = {r.spec.tenant for r in driver.scheduler.waiting()}
        assert {"a", "b"} <= waiting, "nobody waits against whom it could be measured"
        driver.step()
        seats.update(r.spec.tenant for r in driver.scheduler.running() if str(r.request_id) not in before)
        before = set(driver.running())
    return seats


def check_shares(driver, tenants="ab", weight=1.0):
    """None of these gets more than its part and a fifth of it; the part of ``a`` is of that weight."""
    seats = seats_by_tenant(driver)
    for tenant in tenants:
        part = (weight if tenant == "a" else 1.0) / (1.0 + weight)
        assert seats[tenant] / seats.total() <= 1.2 * part, seats


def serve(driver, tenant, number, *, name="served", max_tokens=40, **more):
    """A tenant is served without ever waiting: a request at a time."""
    for i in range(number):
        driver.submit(f"{name}-{i}", 8, tenant=tenant, max_tokens=max_tokens, **more)
        driver.run_until_ended(f"{name}-{i}")


FIRST = pytest.mark.parametrize("first", ["a", "b"])


def ask_both(driver, first, **more):
    """Either may be the first to ask."""
    for tenant in (first, "ab".replace(first, "")):
        ask(driver, tenant, **more)


@FIRST
def test_a_paused_request_saves_nothing_up(first):
    driver = driver_for()
    driver.submit("paused", 8, tenant="a", max_tokens=40)
    driver.steps(3)
    driver.park("paused")
    ask(driver, "b", 6, name="meanwhile", max_tokens=100)
    driver.steps(150)
    ask_both(driver, first)
    check_shares(driver)


@FIRST
def test_a_long_request_kept_alive_saves_nothing_up(first):
    driver = driver_for()
    driver.submit("long", 8, tenant="a", max_tokens=400)
    serve(driver, "b", 8)
    ask_both(driver, first)
    check_shares(driver, "a")  # who also pays for the long one meanwhile


@FIRST
def test_to_be_the_last_one_that_got_a_seat_saves_nothing_up(first):
    driver = driver_for()
    for i in range(3):
        driver.submit(f"served-{i}", 8, tenant="b", max_tokens=200)
    driver.step()
    driver.submit("last", 8, tenant="a", max_tokens=1)
    driver.steps(180)
    ask_both(driver, first)
    check_shares(driver)


@FIRST
def test_a_tenant_that_was_served_without_queueing_owes_nothing(first):
    driver = driver_for()
    serve(driver, "b", 10)
    ask_both(driver, first)
    check_shares(driver)


@FIRST
def test_a_tenant_that_leaves_and_returns_is_an_equal(first):
    driver = driver_for()
    serve(driver, "a", 1)
    serve(driver, "b", 10)
    ask(driver, "c", 3, max_tokens=80)
    driver.run()
    ask_both(driver, first)
    check_shares(driver)


def test_a_tenant_that_comes_while_another_waits_is_an_equal():
    driver = driver_for(max_running_requests=2)
    driver.submit("early", 8, tenant="a", max_tokens=1)
    driver.run()
    ask(driver, "b", 150)
    driver.steps(120)
    ask(driver, "a")
    check_shares(driver)


@FIRST
def test_to_come_back_by_preemption_saves_nothing_up(first):
    driver = driver_for()
    driver.submit("victim", 8, tenant="a", max_tokens=400)
    serve(driver, "b", 8)
    for i in range(4):
        driver.submit(f"urgent-{i}", 8, tenant="c", level=-50, max_tokens=10)
    driver.step()
    assert driver.waiting() == ["victim"]
    ask_both(driver, first)
    check_shares(driver, "a")  # who also pays for the long one meanwhile


def test_a_preempted_request_keeps_its_place_before_others_that_wait():
    driver = Driver(policy="fair", max_running_requests=1, num_blocks=64)
    for i in range(3):
        driver.submit(f"older-{i}", 8, tenant="b", max_tokens=20)
    driver.submit("victim", 8, tenant="a", max_tokens=40)
    driver.run_until_ended("older-0")
    driver.step()
    assert driver.running() == ["victim"], "it is its turn"
    driver.submit("urgent", 8, tenant="c", level=-50)
    driver.step()
    assert driver.running() == ["urgent"]
    driver.run_until_ended("urgent")
    driver.step()
    assert driver.running() == ["victim"], "it lost its seat, not its place"
    driver.finish()


def test_a_request_that_waits_at_another_level_saves_nothing_up():
    driver = driver_for(max_running_requests=2)
    ask(driver, "b", 200)
    driver.submit("never", 8, tenant="a", level=100)
    driver.steps(120)
    assert "never" in driver.waiting()
    ask(driver, "a")
    check_shares(driver)


def test_to_wait_below_others_is_no_claim_on_them_when_they_come_down():
    driver = driver_for(max_running_requests=2)
    ask(driver, "b", 60, level=0, name="above")
    ask(driver, "a", level=50)
    while any(name.startswith("above") for name in driver.waiting()):
        driver.step()
    ask(driver, "b", level=50)
    check_shares(driver)


@FIRST
def test_parked_requests_that_all_go_on_at_once_take_turns_with_those_that_wait(first):
    driver = driver_for(max_running_requests=64, max_step_tokens=1024)
    for i in range(MANY):
        driver.submit(f"parked-{i}", 8, tenant="a", max_tokens=12)
        driver.steps(3)
        driver.park(f"parked-{i}")
    ask(driver, "c", 64, max_tokens=20)
    driver.steps(10)
    assert len(driver.running()) == 64
    if first == "b":
        ask(driver, "b", max_tokens=12)
    for i in range(MANY):
        driver.unpark(f"parked-{i}")
    if first == "a":
        ask(driver, "b", max_tokens=12)
    check_shares(driver)


def test_a_pause_costs_nothing_in_the_end():
    driver = driver_for(num_blocks=40)
    policy = driver.scheduler.policy
    for tenant in "ab":
        driver.submit(tenant, 31, tenant=tenant, max_tokens=24)
    driver.steps(2)
    driver.submit("large", 130, tenant="c", max_tokens=4)  # waits for blocks, so nobody is lifted
    for cycle in range(4):
        driver.park("a")
        driver.steps(1)
        driver.unpark("a")
        driver.steps(2)
        assert cycle or policy.served("a") > policy.served("b"), "charged ahead"
    while driver.is_alive("a") or driver.is_alive("b"):
        driver.step()
    assert policy.served("a") == policy.served("b")
    assert not policy._advances


def test_siblings_are_no_more_than_as_many_requests():
    driver = driver_for()
    for n in range(13):
        for i in range(8):
            driver.submit(f"a{n}.{i}", 8, tenant="a", max_tokens=4, family=f"a{n}")
    ask(driver, "b")
    check_shares(driver)


def test_long_outputs_are_charged_as_they_come():
    driver = driver_for()
    ask(driver, "a", max_tokens=64)
    ask(driver, "b", max_tokens=8)
    service: Counter[str] = Counter()
    while len({request.spec.tenant for request in driver.scheduler.waiting()}) == 2:
        plan = driver.step()
        for grant in plan.grants:
            tenant = str(grant.request_id).partition("-")[0]
            service[tenant] += grant.num_tokens + 2 * (grant.output_index is not None)
    assert 0.8 <= service["a"] / service["b"] <= 1.25, service


@pytest.mark.parametrize("weight", [3.0, 0.5])
def test_weights_hold_after_a_pause_too(weight):
    driver = driver_for(tenants=(TenantConfig("a", weight=weight),))
    driver.submit("long", 8, tenant="a", max_tokens=300)
    serve(driver, "b", 6)
    ask(driver, "b", 150)
    ask(driver, "a", 150)
    check_shares(driver, weight=weight)


def test_a_tenant_that_waits_for_its_own_limit_saves_nothing_up():
    driver = driver_for(
        max_running_requests=16,
        max_step_tokens=256,
        max_context_tokens=1024,
        tenants=(TenantConfig("a", max_running_tokens=1000),),
    )
    driver.submit("long", 8, tenant="a", max_tokens=900)
    driver.submit("own", 8, tenant="a", max_tokens=200)
    for n in range(8):
        ask(driver, "b", 15, name=f"served-{n}", max_tokens=20)
        driver.steps(25)
    assert driver.waiting() == ["own"]
    driver.cancel("long")
    ask(driver, "b", 150)
    ask(driver, "a", 80)
    driver.cancel("own")
    check_shares(driver)


def test_a_seat_is_paid_for_at_the_level_at_which_it_was_had():
    driver = driver_for(max_running_requests=4, preempt_level_gap=5)
    ask(driver, "a", max_tokens=30)
    ask(driver, "b", max_tokens=30)
    seats: Counter[str] = Counter()
    before: set[str] = set()
    while seats.total() < COUNTED:
        driver.step()
        for request in driver.scheduler.running():
            if str(request.request_id) not in before:
                seats[request.spec.tenant] += 1
                if request.spec.tenant == "a":
                    driver.set_level(request.request_id, 4)
        before = set(driver.running())
    assert seats["a"] <= 0.6 * COUNTED


def test_what_is_computed_again_is_never_charged():
    driver = driver_for()
    policy = driver.scheduler.policy
    driver.submit("a", 8, tenant="a", max_tokens=40)
    driver.steps(6)
    served = policy.served("a")
    driver.apply(LoseKv((), True, InternalError("incident")))
    driver.steps(2)
    assert policy.served("a") == served + 4


def test_books_are_bounded_by_those_who_are_there():
    driver = driver_for()
    policy = driver.scheduler.policy
    ask(driver, "b", 40, max_tokens=200)
    for i in range(400):  # the queue is never empty
        driver.submit(f"passer-by-{i}", 1, tenant=f"tenant-{i}", max_tokens=1)
        driver.step()
        if driver.scheduler.find(f"passer-by-{i}"):
            driver.cancel(f"passer-by-{i}")
    (level,) = policy._levels.values()
    assert len(level.served) < 150
