"""Parked requests keep their blocks, and give them up first."""

from engine.events import Preempted, Resumed
from tests.support.drive import Driver, events, grants


def test_parking_gives_back_the_seat_and_keeps_the_blocks():  # vLLM 46: there a pause keeps the seat
    driver = Driver(max_running_requests=1, num_blocks=32)
    driver.submit("a", 8, max_tokens=6)
    driver.submit("b", 8, max_tokens=2)
    driver.step()
    driver.park("a")
    plan = driver.step()
    assert "a" not in grants(plan)
    assert driver.running() == ["b"]
    assert driver.blocks.holds("a")
    driver.unpark("a")
    driver.run()
    assert not any(isinstance(e, Resumed) for e in driver.seen["a"].events)  # nothing was computed again
    driver.finish()
    assert driver.terminal("a").usage.parked_s > 0


def test_a_parked_request_is_the_first_victim_even_for_an_equal():
    driver = Driver(num_blocks=8, max_running_requests=4, max_step_tokens=64, max_chunk_tokens=32)
    driver.submit("parked", 15, max_tokens=4)
    driver.submit("runs", 7, max_tokens=4)
    driver.step()
    driver.park("parked")
    driver.submit("equal", 12, max_tokens=2)
    plan = driver.step()
    assert [e.request_id for e in events(plan, Preempted)] == ["parked"]
    assert "equal" in grants(plan)
    driver.unpark("parked")
    driver.finish()
    assert driver.terminal("parked").usage.preemptions == 1


def test_parking_a_queued_request_lets_others_pass():
    driver = Driver(max_running_requests=1)
    driver.submit("a", 4)
    driver.park("a")
    driver.submit("b", 4)
    driver.step()
    assert driver.running() == ["b"]
    driver.unpark("a")
    assert driver.waiting() == ["a"]
    driver.finish()


def test_parked_blocks_never_stop_the_last_one_that_could_run():
    driver = Driver(num_blocks=4, max_running_requests=2)
    driver.submit("urgent", 14, level=-10, max_tokens=2)
    driver.step()
    driver.park("urgent")
    driver.submit("batch", 12, level=10, max_tokens=2)
    driver.run_until_ended("batch")
    driver.unpark("urgent")
    driver.finish()


def test_cancelling_a_parked_request_frees_it():
    driver = Driver()
    driver.submit("a", 8)
    driver.step()
    driver.park("a")
    driver.cancel("a")
    driver.finish()
