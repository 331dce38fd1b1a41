"""The runner dies: everything is computed again, and who kills it twice fails alone."""

import random

import pytest

from engine.errors import InternalError
from engine.events import Failed, Finished, Preempted, Resumed
from engine.request import PreemptReason
from tests.support.drive import Driver


def deaths_of(driver, *, poison=(), max_steps=500):
    """Run to the end; a step with a poisoned request in it kills the runner. The fatal plans."""
    fatal = []

    def dies(plan):
        ids = [str(grant.request_id) for grant in plan.grants]
        if not set(poison) & set(ids):
            return False
        fatal.append(ids)
        return True

    while driver.scheduler.has_requests:
        assert max_steps > 0
        max_steps -= 1
        driver.step(dies=dies)
    return fatal


def test_lost_kv_is_computed_again_and_nobody_sees_more_than_a_pause():
    driver = Driver(num_blocks=32)
    for name in "abc":
        driver.submit(name, 10)
    for _ in range(5):
        driver.step()
    events = driver.lose_kv()
    assert [type(e) for e in events] == [Preempted] * 3
    assert {e.reason for e in events} == {PreemptReason.RUNNER}
    assert driver.blocks.num_free_blocks == 32
    plan = driver.step()
    assert [type(e) for e in plan.events] == [Resumed] * 2  # as many as the step has tokens for
    assert all(event.num_recomputed_tokens > 0 for event in plan.events)
    driver.finish()  # the driver compares every token with those of an undisturbed run


def test_nothing_is_found_in_the_cache_after_the_pool_is_lost():
    driver = Driver(num_blocks=32)
    driver.submit("a", [1] * 12)
    driver.finish()
    driver.lose_kv()
    driver.submit("b", [1] * 12)
    plan = driver.step()
    assert plan.grants[0].start == 0
    driver.finish()


def test_who_holds_blocks_without_a_seat_loses_them_too_and_stays_parked():
    driver = Driver()
    driver.submit("a", 6)
    driver.step()
    driver.park("a")
    assert [e.request_id for e in driver.lose_kv()] == ["a"]
    driver.submit("b", 6)
    driver.run_until_ended("b")
    driver.unpark("a")
    driver.finish()


@pytest.mark.parametrize("max_preemptions", [1, 2])
def test_lost_kv_pins_nobody_down(max_preemptions):
    driver = Driver(max_preemptions=max_preemptions)
    driver.submit("a", 6, max_tokens=30)
    for _ in range(5):
        driver.step()
        driver.lose_kv()
    driver.step()
    (request,) = driver.scheduler.running()
    assert not request.holds_all
    assert (request.num_preemptions, request.num_kv_losses) == (0, 5)
    driver.finish()
    assert driver.terminal("a").usage.preemptions == 5


def test_a_death_from_outside_isolates_nobody():
    driver = Driver(num_blocks=32)
    for name in "abc":
        driver.submit(name, 4)
    plan = driver.step()
    driver.lose_kv([g.request_id for g in plan.grants], from_outside=True)
    assert len(driver.step().grants) == 3
    driver.finish()


def test_suspects_are_computed_alone_until_they_are_where_they_were():
    driver = Driver(num_blocks=32)
    driver.submit("short", 4)
    driver.submit("long", 20)
    for _ in range(4):
        driver.step()
    driver.step(dies=lambda plan: True)
    driver.submit("late", 4)
    plans = [driver.step() for _ in range(4)]
    # short: 4 known tokens and its output; long: 20 and its output, in chunks of 8
    assert [[g.request_id for g in plan.grants] for plan in plans] == [["short"]] + [["long"]] * 3
    assert len(driver.step().grants) == 3
    driver.finish()


@pytest.mark.parametrize("num_others", [0, 1, 3, 9])
def test_who_kills_the_runner_twice_fails_alone(num_others):
    driver = Driver(num_blocks=64, max_running_requests=5, max_step_tokens=32)
    for index in range(num_others):
        driver.submit(f"good{index}", 5 + index)
    driver.submit("bad", 9)
    fatal = deaths_of(driver, poison={"bad"})
    assert len(fatal) == 2
    assert fatal[1] == ["bad"]
    failed = driver.terminal("bad")
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InternalError)
    for index in range(num_others):
        assert isinstance(driver.terminal(f"good{index}"), Finished)
    driver.finish()


def test_two_poisoned_requests_fail_one_after_the_other():
    driver = Driver(num_blocks=64, max_running_requests=5, max_step_tokens=32)
    for name in ("bad1", "a", "bad2", "b"):
        driver.submit(name, 5)
    fatal = deaths_of(driver, poison={"bad1", "bad2"})
    assert fatal[1:] == [["bad1"], ["bad2"]]
    assert {n for n in driver.seen if isinstance(driver.terminal(n), Failed)} == {"bad1", "bad2"}


def test_killed_from_outside_it_takes_four_deaths_in_a_row_to_be_guilty():
    driver = Driver()
    driver.submit("a", 4)
    for death in range(4):
        driver.step()
        assert driver.terminal("a") is None
        if death == 2:  # it got past all it knew: it starts from nothing again
            driver.step()
        driver.lose_kv(["a"] if death != 2 else [], from_outside=True)
    driver.finish()
    assert isinstance(driver.terminal("a"), Finished)

    driver = Driver()
    driver.submit("a", 40)
    for _ in range(4):
        driver.step()
        driver.lose_kv(["a"], from_outside=True)
    assert isinstance(driver.terminal("a"), Failed)


def test_more_urgent_ones_do_not_wait_for_suspects_nor_run_beside_them():
    driver = Driver(num_blocks=32)
    for name in ("a", "b"):
        driver.submit(name, 12)
    for _ in range(4):
        driver.step()
    driver.step(dies=lambda plan: True)
    assert [g.request_id for g in driver.step().grants] == ["a"]
    for name in ("u", "v"):
        driver.submit(name, 8, level=-5, max_tokens=3)
    driver.submit("late", 4)
    plans = [driver.step() for _ in range(3)]
    assert [[g.request_id for g in plan.grants] for plan in plans] == [["u", "v"]] * 3
    assert all(driver.terminal(name) for name in ("u", "v"))
    assert [g.request_id for g in driver.step().grants] == ["a"]
    assert [g.request_id for g in driver.step().grants] == ["b"]
    driver.finish()


def test_a_more_urgent_one_grows_at_the_cost_of_the_suspect():
    driver = Driver(num_blocks=8)  # 32 tokens
    driver.submit("a", 20, max_tokens=4)
    for _ in range(3):
        driver.step()
    driver.step(dies=lambda plan: True)
    driver.step()
    assert driver.running() == ["a"]
    driver.submit("u", 4, level=-5, max_tokens=20)
    driver.run_until_ended("u")
    preempted = [e for e in driver.seen["a"].events if isinstance(e, Preempted)]
    assert [e.reason for e in preempted] == [PreemptReason.RUNNER] * 2
    driver.finish()
    assert isinstance(driver.terminal("a"), Finished)


def test_a_starved_suspect_is_overtaken_no_more():
    driver = Driver(num_blocks=32, max_wait_s=20.0)
    driver.submit("a", 6, level=5)
    driver.step()
    driver.step(dies=lambda plan: True)
    for index in range(40):
        driver.submit(f"u{index}", 4, level=-5, max_tokens=30)
    for _ in range(25):
        driver.step()
    assert len(driver.tokens("a")) > 1
    driver.finish()


def test_a_suspect_that_is_parked_holds_up_nobody():
    driver = Driver(num_blocks=32)
    driver.submit("a", 4)
    driver.submit("b", 4)
    driver.step()
    driver.step(dies=lambda plan: True)
    driver.park("a")
    assert [g.request_id for g in driver.step().grants] == ["b"]
    driver.submit("c", 4)
    assert len(driver.step().grants) == 2
    driver.unpark("a")
    assert [g.request_id for g in driver.step().grants] == ["a"]
    driver.finish()


def test_a_suspect_that_is_cancelled_holds_up_nobody():
    driver = Driver(num_blocks=32)
    for name in "ab":
        driver.submit(name, 4)
    driver.step()
    driver.step(dies=lambda plan: True)
    driver.cancel("a")
    assert [g.request_id for g in driver.step().grants] == ["b"]
    driver.finish()


def test_innocent_ones_give_way_to_a_suspect_that_does_not_fit_beside_them():
    driver = Driver(num_blocks=8)  # 32 tokens
    driver.submit("a", 12, max_tokens=4)
    driver.submit("b", 12, max_tokens=4)
    driver.step()
    driver.step()
    driver.step(dies=lambda plan: True)
    driver.park("a")
    driver.run_until_ended("b")
    driver.submit("c", 24, max_tokens=4)
    for _ in range(4):
        driver.step()
    driver.unpark("a")
    plan = driver.step()
    assert [g.request_id for g in plan.grants] == ["a"]
    assert [(e.request_id, e.reason) for e in plan.events if isinstance(e, Preempted)] == [
        ("c", PreemptReason.RUNNER)
    ]
    driver.finish()


@pytest.mark.parametrize("discipline", ["unified", "prefill_first", "static"])
@pytest.mark.parametrize("seed", range(5))
def test_random_deaths_and_poison_cost_nobody_else_a_token(discipline, seed):
    dice = random.Random(seed)
    driver = Driver(num_blocks=20, discipline=discipline)
    poison = {f"r{dice.randrange(12)}" for _ in range(2)}
    for index in range(12):
        driver.submit(f"r{index}", dice.randint(1, 30), level=dice.choice((-10, 0, 10)))
    steps = 0
    while driver.scheduler.has_requests:
        steps += 1
        assert steps < 2000
        driver.step(dies=lambda plan: bool(poison & {str(g.request_id) for g in plan.grants}))
        if steps < 100 and dice.random() < 0.2:
            driver.lose_kv(from_outside=True)
    assert {n for n in driver.seen if isinstance(driver.terminal(n), Failed)} == poison
