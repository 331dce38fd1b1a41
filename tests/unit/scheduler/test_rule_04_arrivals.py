"""Preempting for an arrival: rule 4 of docs/SCHEDULING.md; with numbers in tests/sim/test_scenarios.py.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

import pytest

from engine.events import Preempted
from tests.support.drive import Driver, events, grants


def test_equals_are_never_preempted_for_an_arrival():  # SGLang 3, SGLang 5
    driver = Driver(max_running_requests=1)
    driver.submit("a", level=0, max_tokens=6)
    driver.step()
    driver.submit("equal", level=0)
    driver.submit("less", level=5)
    driver.finish()
    assert driver.preemptions("a") == 0


@pytest.mark.parametrize(("gap", "preempts"), [(10, True), (11, False)])
def test_the_level_gap_decides(gap, preempts):  # SGLang 21
    driver = Driver(max_running_requests=1, preempt_level_gap=gap)
    driver.submit("a", level=10, max_tokens=20)
    driver.step()
    driver.submit("b", level=0)
    driver.step()
    assert driver.preemptions("a") == preempts


def test_nobody_is_evicted_when_evicting_all_would_not_help():  # SGLang 4, SGLang 24
    driver = Driver(num_blocks=10)
    driver.submit("equal", 16, level=-10, max_tokens=20)
    driver.submit("batch", 8, level=10, max_tokens=20)
    driver.step()
    driver.step()
    driver.submit("urgent", 28, level=-10)  # 7 blocks; without "equal" and "batch" 10, without "batch" 5
    for _ in range(3):
        assert not events(driver.step(), Preempted)
    assert driver.waiting() == ["urgent"]


def test_free_room_means_no_preemption():  # vLLM 32
    driver = Driver()
    for name, level in (("a", 3), ("b", 2), ("c", 1)):
        driver.submit(name, 4, level=level)
    driver.step()
    assert len(driver.running()) == 3
    driver.finish()
    assert sum(driver.preemptions(n) for n in "abc") == 0


def test_a_victim_gives_back_the_tokens_it_was_granted_in_the_same_step():
    driver = Driver(max_running_requests=2, max_step_tokens=2, max_chunk_tokens=2)
    driver.submit("a", 2, level=10, max_tokens=20)
    driver.submit("b", 2, level=10, max_tokens=20)
    while any(r.num_output_tokens == 0 for r in driver.scheduler.running()) or driver.waiting():
        driver.step()
    driver.submit("urgent", 4, level=-10)
    plan = driver.step()
    assert plan.num_tokens == 2
    assert grants(plan)["urgent"] == 1
    assert len(events(plan, Preempted)) == 1


def test_preempting_for_arrivals_can_be_switched_off():
    driver = Driver(max_running_requests=1, preempt_for_arrivals=False)
    driver.submit("batch", level=10, max_tokens=6)
    driver.step()
    driver.submit("urgent", level=-10)
    driver.finish()
    assert driver.preemptions("batch") == 0
