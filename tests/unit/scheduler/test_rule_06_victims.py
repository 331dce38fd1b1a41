"""Which victims: rule 6 of docs/SCHEDULING.md; against a brute force in tests/sim/test_scenarios.py.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

from engine.events import Preempted
from tests.support.drive import Driver, events


def test_the_worst_level_goes_first_even_when_it_is_dearer():  # SGLang 2
    driver = Driver(max_running_requests=2, num_blocks=32)
    driver.submit("dear", 24, level=20, max_tokens=40)
    driver.submit("cheap", 4, level=10, max_tokens=40)
    for _ in range(5):
        driver.step()
    driver.submit("urgent", 4)
    (event,) = events(driver.step(), Preempted)
    assert event.request_id == "dear"


def test_within_a_level_the_cheapest_to_recompute_goes():
    driver = Driver(max_running_requests=2, num_blocks=32)
    driver.submit("dear", 24, level=10, max_tokens=40)
    driver.submit("cheap", 4, level=10, max_tokens=40)
    for _ in range(5):
        driver.step()
    driver.submit("urgent", 4)
    (event,) = events(driver.step(), Preempted)
    assert event.request_id == "cheap"


def test_one_victim_when_one_is_enough():  # SGLang 7
    driver = Driver(num_blocks=12, max_step_tokens=48, max_chunk_tokens=16)
    driver.submit("half", 14, level=10, max_tokens=2)
    driver.submit("whole", 30, level=10, max_tokens=2)
    driver.step()
    driver.submit("urgent", 30, level=-10)  # 8 blocks
    (event,) = events(driver.step(), Preempted)
    assert event.request_id == "whole"


def test_two_victims_when_two_are_needed():  # SGLang 8
    driver = Driver(num_blocks=12, max_step_tokens=48, max_chunk_tokens=16)
    for name in "abc":
        driver.submit(name, 15, level=10, max_tokens=2)
    driver.step()
    driver.submit("urgent", 30, level=-10)
    assert len(events(driver.step(), Preempted)) == 2
    assert "urgent" in driver.running()


def test_a_victim_that_would_free_nothing_is_spared():
    driver = Driver(num_blocks=7, block_size=4, max_running_requests=4, max_step_tokens=40)
    shared = list(range(12))
    driver.submit("keeper", [*shared, 99], level=-10, max_tokens=3)
    driver.step()
    driver.step()
    driver.submit("sharer", [*shared, 98], level=20, max_tokens=3)
    driver.submit("loner", 7, level=10, max_tokens=3)
    driver.step()
    assert driver.blocks.num_free_blocks == 0
    # The sharer owns one block; the loner's two are needed as well as the worst level's one.
    driver.submit("urgent", 7, level=-5)
    victims = {str(e.request_id) for e in events(driver.step(), Preempted)}
    assert victims == {"loner"}
    driver.finish()


def test_victims_that_share_with_each_other_free_what_they_share():
    driver = Driver(num_blocks=8, block_size=4, max_step_tokens=40, max_chunk_tokens=32)
    shared = list(range(24))
    driver.submit("a", [*shared, 1], level=10, max_tokens=3)
    driver.step()
    driver.submit("b", [*shared, 2], level=10, max_tokens=3)
    driver.step()
    assert driver.blocks.num_free_blocks == 0
    driver.submit("urgent", 24, level=-10)
    assert len(events(driver.step(), Preempted)) == 2
    assert driver.running() == ["urgent"]
    driver.finish()
