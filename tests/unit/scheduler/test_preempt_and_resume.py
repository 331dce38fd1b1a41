"""What survives a preemption."""

import pytest

from engine.events import Resumed
from engine.runner.scripted import expected_output
from tests.support.drive import Driver, events


def test_a_preempted_request_keeps_output_and_seniority_and_hits_its_own_blocks():
    driver = Driver(max_running_requests=1, num_blocks=32)
    driver.submit("a", 8, level=10, max_tokens=12)
    driver.submit("later", 8, level=10, max_tokens=2)
    for _ in range(6):
        driver.step()
    before = list(driver.tokens("a"))
    driver.submit("urgent", 8, level=-10, max_tokens=2)
    driver.step()
    assert driver.waiting() == ["a", "later"]
    while not driver.running() or driver.running() == ["urgent"]:
        plan = driver.step()
    (resumed,) = events(plan, Resumed)
    assert resumed.request_id == "a"
    assert resumed.num_recomputed_tokens < 4  # only the unfinished block
    assert driver.tokens("a")[: len(before)] == before
    driver.finish()
    usage = driver.terminal("a").usage
    assert usage.preemptions == 1
    assert usage.recomputed_tokens == resumed.num_recomputed_tokens
    assert usage.preempted_s > 0


@pytest.mark.parametrize("every", range(1, 41))
@pytest.mark.parametrize("seed", [None, 7])
def test_a_preemption_after_every_kth_token_changes_nothing(every, seed):  # vLLM 68
    driver = Driver(max_running_requests=1, num_blocks=32, prefix_cache=every % 2 == 0)
    more = {} if seed is None else {"seed": seed}
    driver.submit("a", 9, max_tokens=41, **more)
    at = every
    while driver.scheduler.has_requests:
        driver.step()
        if len(driver.tokens("a")) == at and driver.scheduler.has_requests:
            driver.preempt("a")
            at += every
    assert driver.preemptions("a") == 40 // every
    prompt = driver.seen["a"].spec.prompt_token_ids
    assert driver.tokens("a") == expected_output(prompt, 41, seed or 0)
