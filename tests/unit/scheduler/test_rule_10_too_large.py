"""What can never fit is refused, what outgrows the pool ends: rule 10 of docs/SCHEDULING.md."""

import pytest

from engine.errors import ContextExceeded, EmptyPrompt, InvalidRequest, PoolExceeded
from engine.request import FinishReason, RequestId
from tests.support.drive import Driver


def test_requests_that_can_never_run_are_refused_with_the_numbers():
    driver = Driver(num_blocks=4, block_size=4, max_context_tokens=32)
    with pytest.raises(EmptyPrompt):
        driver.submit("empty", [])
    with pytest.raises(ContextExceeded, match=r"prompt must be shorter than the context of 32 .* got 32"):
        driver.submit("long", 32)
    with pytest.raises(ContextExceeded, match=r"max_tokens must be at most 26.* got 27"):
        driver.submit("much", 6, max_tokens=27)
    with pytest.raises(PoolExceeded, match=r"KV pool of 16 tokens, got 16"):
        driver.submit("large", 16, max_tokens=1)
    with pytest.raises(InvalidRequest, match=r"level must be between -100 and 100, got 101"):
        driver.submit("level", 4, level=101)
    driver.submit("fits", 15, max_tokens=1)
    driver.finish()


@pytest.mark.parametrize("discipline", ["unified", "prefill_first", "static"])
def test_an_output_that_outgrows_the_pool_ends_at_once_and_cannot_be_preempted_into_limbo(discipline):
    # The random machine should have caught this: preempted after its last token that fits, it
    # waited for more blocks than there are, and everybody behind it as well.
    driver = Driver(num_blocks=4, block_size=4, discipline=discipline)
    driver.submit("grows", 10, max_tokens=100)
    driver.submit("next", 4, max_tokens=2)
    while driver.scheduler.find(RequestId("grows")):
        driver.step()
        if len(driver.tokens("grows")) == 7:
            driver.preempt("grows")
    assert driver.terminal("grows").reason is FinishReason.CAPACITY
    driver.finish()
