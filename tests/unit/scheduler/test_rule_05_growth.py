"""Preempting for growth: rule 5 of docs/SCHEDULING.md.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

from engine.events import Preempted
from engine.request import PreemptReason
from tests.support.drive import Driver, events


def test_growth_evicts_the_less_urgent_first():  # vLLM 33
    driver = Driver(num_blocks=5, block_size=4)
    driver.submit("low", 8, level=5)
    driver.step()
    driver.submit("high", 8, level=0)
    driver.step()
    assert driver.running() == ["high", "low"]
    plans = [driver.step() for _ in range(2)]
    preempted = [e for plan in plans for e in events(plan, Preempted)]
    assert [(e.request_id, e.reason) for e in preempted] == [("low", PreemptReason.GROWTH)]
    driver.finish()


def test_growth_among_equals_evicts_the_last_arrived():  # vLLM 6
    driver = Driver(num_blocks=6, block_size=4, max_step_tokens=24)
    for name in "abc":
        driver.submit(name, 8, max_tokens=12)
    driver.step()
    preempted = [e for _ in range(2) for e in events(driver.step(), Preempted)]
    assert [e.request_id for e in preempted] == ["c"]
    assert preempted[0].beneficiary == "a"
    driver.finish()


def test_the_last_arrived_gives_itself_up():
    driver = Driver(num_blocks=5, block_size=4)
    driver.submit("first", 9, level=-10, max_tokens=6)
    driver.submit("second", 8, max_tokens=9)
    driver.step()
    plan = driver.step()
    (event,) = events(plan, Preempted)
    assert event.request_id == "second"
    assert event.beneficiary is None
    driver.finish()


def test_the_most_urgent_earliest_request_always_advances():
    driver = Driver(num_blocks=8, block_size=2, max_running_requests=8, max_step_tokens=16)
    for i in range(8):
        driver.submit(f"r{i}", 3, max_tokens=10)
    while driver.scheduler.has_requests:
        first = min((*driver.scheduler.running(), *driver.scheduler.waiting()), key=lambda r: r.arrival_seq)
        before = first.num_output_tokens
        driver.step()
        assert first.num_output_tokens > before or first.num_missing_tokens > 1
    driver.finish()


def test_growth_never_takes_from_a_request_that_holds_all_it_needs():
    driver = Driver(num_blocks=8, max_running_requests=2, max_preemptions=1, max_step_tokens=32)
    driver.submit("grows", 3, max_tokens=20)
    driver.submit("pinned", 4, max_tokens=20)
    driver.step()
    driver.preempt("pinned")
    driver.step()
    assert driver.running() == ["grows", "pinned"]
    driver.finish()
    assert driver.preemptions("pinned") == 1  # by hand
    assert driver.preemptions("grows") == 1  # "pinned" comes later, but "grows" gave itself up
