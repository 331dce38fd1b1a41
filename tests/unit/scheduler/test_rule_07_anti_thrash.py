"""Anti-thrash: rule 7 of docs/SCHEDULING.md."""

from engine.events import Preempted
from tests.support.drive import Driver, events


def resumed_batch(**config):
    """One seat; a batch request that was preempted once and has just resumed."""
    driver = Driver(max_running_requests=1, num_blocks=64, **config)
    driver.submit("batch", 8, level=10, max_tokens=60)
    driver.step()
    driver.step()
    driver.submit("urgent1", 4, level=-10, max_tokens=1)
    driver.step()
    driver.step()
    assert driver.running() == ["batch"]
    return driver


def test_a_resumed_request_may_produce_its_quantum_before_an_arrival_evicts_it():
    driver = resumed_batch(resume_quantum_tokens=5)
    had = len(driver.tokens("batch"))
    driver.submit("urgent2", 4, level=-10, max_tokens=1)
    while driver.waiting() != ["batch"]:
        driver.step()
    assert len(driver.tokens("batch")) - had == 4  # and the one of the step in which it resumed
    driver.finish()


def test_without_a_quantum_it_is_evicted_at_once():
    driver = resumed_batch(resume_quantum_tokens=0)
    driver.submit("urgent2", 4, level=-10, max_tokens=1)
    driver.step()
    assert driver.waiting() == ["batch"]
    driver.finish()


def test_after_max_preemptions_a_request_holds_all_it_can_need_and_stays():
    driver = resumed_batch(max_preemptions=1, block_size=4)
    assert len(driver.blocks.table("batch")) == (8 + 60) // 4
    driver.submit("urgent2", 4, level=-10, max_tokens=1)
    for _ in range(10):
        driver.step()
    assert driver.running() == ["batch"]
    driver.finish()
    assert driver.preemptions("batch") == 1


def test_preemptions_for_arrivals_are_bounded_per_step():
    driver = Driver(max_running_requests=4, num_blocks=64, max_preemptions_per_step=2)
    for i in range(4):
        driver.submit(f"batch{i}", 4, level=10, max_tokens=20)
    driver.step()
    for i in range(4):
        driver.submit(f"urgent{i}", 4, level=-10)
    assert len(events(driver.step(), Preempted)) == 2
    assert len(events(driver.step(), Preempted)) == 2
    driver.finish()


def test_one_arrival_may_need_more_victims_than_a_step_has():
    driver = Driver(num_blocks=12, max_step_tokens=48, max_chunk_tokens=16, max_preemptions_per_step=1)
    for name in "abc":
        driver.submit(name, 15, level=10, max_tokens=2)
    driver.step()
    driver.submit("urgent", 40, level=-10)
    assert len(events(driver.step(), Preempted)) == 3
    driver.finish()


def test_a_preempted_request_comes_back_only_with_the_watermark_left():
    driver = Driver(num_blocks=10, watermark=0.2, max_step_tokens=64, max_chunk_tokens=64)
    driver.submit("urgent", 16, level=-10, max_tokens=30)
    driver.step()
    driver.submit("interactive too", 19, level=-5, max_tokens=30)
    driver.step()
    driver.preempt("interactive too")
    driver.step()  # 5 blocks needed and 5 free, but the watermark is 2
    assert driver.waiting() == ["interactive too"]
    driver.finish()
