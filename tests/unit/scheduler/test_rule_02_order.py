"""Decodes first, then prefill chunks, each in policy order: rule 2 of docs/SCHEDULING.md.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

import pytest

from engine.events import Started
from engine.scheduler.config import ClassConfig
from tests.support.drive import Driver, events, grants


def test_all_fit_and_run_in_order_of_arrival():  # vLLM 1
    driver = Driver(max_running_requests=10, max_step_tokens=100, num_blocks=40)
    names = [driver.submit(f"r{i}", 10) for i in range(10)]
    assert list(grants(driver.step())) == names
    assert driver.running() == names


def test_decodes_come_before_a_more_urgent_prefill():
    driver = Driver(max_running_requests=3, max_step_tokens=6)
    driver.submit("decode", 4, level=10)
    driver.step()
    driver.submit("urgent", 12, level=-10)
    assert grants(driver.step()) == {"decode": 1, "urgent": 5}


def test_a_more_urgent_arrival_takes_the_token_budget_from_a_prefill_under_way():
    driver = Driver(max_running_requests=3, max_step_tokens=8, max_chunk_tokens=8)
    driver.submit("batch", 24, level=10)
    assert grants(driver.step()) == {"batch": 8}
    driver.submit("urgent", 12, level=-10)
    assert grants(driver.step()) == {"urgent": 8}
    assert grants(driver.step()) == {"urgent": 4, "batch": 4}


@pytest.mark.parametrize(
    ("levels", "order"),
    [([2, 0, 1], "bca"), ([0, 0, 0], "abc"), ([2, 1, 1, 0], "dbca")],
)  # vLLM 26, vLLM 27, vLLM 28
def test_priority_then_arrival(levels, order):
    driver = Driver(max_running_requests=8, num_blocks=64, max_step_tokens=64)
    for name, level in zip("abcd", levels, strict=False):
        driver.submit(name, level=level)
    driver.step()
    assert "".join(driver.running()) == order


def test_fcfs_ignores_levels():
    driver = Driver(policy="fcfs", max_running_requests=1)
    driver.submit("batch", level=10)
    driver.submit("urgent", level=-10)
    driver.step()
    assert driver.running() == ["batch"]
    driver.finish()
    assert driver.preemptions("batch") == 0


def test_under_fcfs_no_rule_looks_at_the_class():
    """Neither the interactive class's shorter wait nor its freedom from the watermark counts."""
    impatient = ClassConfig(max_wait_s=2.0, watermark=0.0)
    driver = Driver(policy="fcfs", max_running_requests=1, interactive=impatient)
    driver.submit("first", level=10, max_tokens=10)
    driver.submit("second", level=10)
    driver.submit("third", level=-10)
    order = []
    while driver.scheduler.has_requests:
        order += [str(e.request_id) for e in events(driver.step(), Started)]
    assert order == ["first", "second", "third"]
