"""Admission asks for a seat, then whether the whole known prompt fits: rule 3 of docs/SCHEDULING.md.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

from engine.events import Started
from tests.support.drive import Driver, events, grants


def test_the_whole_prompt_must_fit_before_its_first_chunk_runs():
    driver = Driver(num_blocks=6)
    driver.submit("a", 12)
    driver.step()
    driver.submit("b", 16)  # 4 blocks, 3 free; its first chunk alone would fit
    driver.step()
    assert driver.waiting() == ["b"]


def test_nobody_of_equal_urgency_passes_a_request_that_does_not_fit():  # vLLM 3, unchunked half
    driver = Driver(num_blocks=6)
    driver.submit("a", 12, max_tokens=2)
    driver.step()
    driver.submit("large", 16)
    driver.submit("small", 4)
    driver.step()
    assert driver.waiting() == ["large", "small"]


def test_ordinary_requests_leave_the_watermark_and_urgent_ones_do_not():
    for level, waits in ((0, True), (-10, False)):
        driver = Driver(num_blocks=10, watermark=0.2)
        driver.submit("a", 16, level=level)
        driver.step()
        driver.submit("b", 17, level=level)  # 5 of 6 free blocks; the watermark is 2
        driver.step()
        assert bool(driver.waiting()) is waits


def test_without_anything_running_there_is_no_watermark():
    driver = Driver(num_blocks=4, watermark=0.5)
    driver.submit("a", 15, level=10, max_tokens=1)
    driver.step()
    assert driver.terminal("a") is None
    assert driver.running() == ["a"]


def test_nobody_is_admitted_without_a_token_to_compute():
    driver = Driver(max_running_requests=3, max_step_tokens=8, max_chunk_tokens=8)
    driver.submit("urgent", 24, level=-10)
    driver.step()
    driver.submit("waits", 4)
    assert grants(driver.step()) == {"urgent": 8}
    assert driver.waiting() == ["waits"]


def test_a_head_that_does_not_fit_does_not_stop_prefills_under_way():
    driver = Driver(num_blocks=10, max_step_tokens=8, max_chunk_tokens=4)
    driver.submit("equal", 18, level=0, max_tokens=3)
    driver.submit("under way", 12, level=10, max_tokens=3)
    driver.step()
    driver.submit("head", 28, level=0, max_tokens=1)
    assert grants(driver.step()) == {"equal": 4, "under way": 4}
    assert driver.waiting() == ["head"]
    driver.finish()


def test_the_first_admission_tells_what_the_cache_gave():  # vLLM 40
    driver = Driver(max_step_tokens=120, max_chunk_tokens=120, num_blocks=64, block_size=16)
    prompt = list(range(100))
    driver.submit("a", prompt, max_tokens=4)
    driver.step()
    driver.submit("b", prompt)
    plan = driver.step()
    assert events(plan, Started)[0].num_cached_tokens == 96
    assert grants(plan) == {"a": 1, "b": 4}
