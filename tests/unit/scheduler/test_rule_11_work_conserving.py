"""While anybody is alive who is not parked, no step is empty: rule 11 of docs/SCHEDULING.md."""

import pytest

from tests.support.drive import Driver, grants

DISCIPLINES = pytest.mark.parametrize("discipline", ["unified", "prefill_first", "static"])


@DISCIPLINES
def test_no_step_is_empty_while_anybody_is_alive(discipline):
    """Misfits, fences, watermarks and starved requests included: the pool holds two of them at best."""
    driver = Driver(num_blocks=10, discipline=discipline, watermark=0.3, max_bypass=1, max_wait_s=6.0)
    for i in range(12):
        driver.submit(f"r{i}", 1 + 7 * i % 30, level=(-10, 0, 10)[i % 3], max_tokens=6)
    num_steps = 0
    while driver.scheduler.has_requests:
        assert grants(driver.step())
        num_steps += 1
    assert num_steps > 30
    driver.finish()


@DISCIPLINES
def test_a_step_may_be_empty_when_all_are_parked(discipline):
    driver = Driver(discipline=discipline)
    driver.submit("a", 8, max_tokens=3)
    driver.step()
    driver.park("a")
    assert grants(driver.step()) == {}
    driver.unpark("a")
    assert grants(driver.step()) == {"a": 1}
    driver.finish()


def test_a_request_that_leaves_no_watermark_runs_when_nothing_else_does():
    driver = Driver(num_blocks=10, watermark=0.5)
    driver.submit("a", 24, level=10, max_tokens=2)
    driver.submit("b", 24, level=10, max_tokens=2)
    assert grants(driver.step()) == {"a": 8}
    driver.run_until_ended("a")
    assert grants(driver.step()) == {"b": 8}
    driver.finish()
