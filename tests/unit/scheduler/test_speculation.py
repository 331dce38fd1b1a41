"""Guessed tokens: what is guessed, who gets room for it, and that no output shows it."""

import pytest

from engine.events import Finished, TokensSampled
from engine.request import FinishReason, RequestId
from engine.scheduler.commands import Allow, Preempt
from engine.scheduler.config import InvalidSetting, SchedulerConfig
from engine.scheduler.speculation import MISSES_MAX, REST_TOKENS, NgramIndex, verified
from tests.support.drive import Driver, grants


def guessing(**config):
    """Texts repeat themselves then, with another token from time to time; see ``text_of``."""
    return Driver(**({"speculation_tokens": 4, "num_blocks": 64, "max_step_tokens": 32} | config))


def guessed_in(plan):
    """Requests that were granted guesses; of a plan that is committed, what they were is forgotten."""
    return [grant.request_id for grant in plan.grants if grant.num_tokens > 1 and grant.output_index]


def sizes(driver, name):
    """Tokens that each step brought."""
    events = driver.seen[RequestId(name)].events
    return [len(event.token_ids) for event in events if isinstance(event, TokensSampled)]


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "guess"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
        ([5, 5, 5], 4, [5, 5, 5, 5]),  # a cycle goes on at any length
        ([1, 2, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
        ([7, 1, 2, 3, 4, 8, 0, 2, 3, 9, 1, 2, 3, 4], 1, [8]),  # the longer end counts, though 3, 4 was first
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, [8, 1]),  # of equal ones the last
        ([1, 2, 3, 4], 4, []),
        ([1], 4, []),
    ],
)
def test_what_followed_the_last_tokens_before_is_guessed(tokens, num_tokens, guess):
    assert NgramIndex(tokens).continuation(num_tokens) == guess


def test_the_index_goes_on_where_it_stopped():
    tokens = [1, 2, 3]
    index = NgramIndex(tokens)
    assert index.continuation(2) == []
    tokens += [4, 1, 2]
    assert index.continuation(2) == [3, 4]
    tokens += [3, 4]
    assert index.continuation(3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("drafts", "first", "following", "said"),
    [
        ([1, 2], 1, [2, 3], [1, 2, 3]),
        ([1, 2], 1, [9, 3], [1, 9]),
        ([1, 2], 9, [2, 3], [9]),
    ],
)
def test_all_up_to_the_first_wrong_guess_is_said(drafts, first, following, said):
    assert verified(drafts, first, following) == said


def test_a_repetitive_output_takes_fewer_steps_and_is_the_same():
    plain, guessed = Driver(num_blocks=64), guessing()
    for driver in (plain, guessed):
        driver.submit("a", 6, max_tokens=64)
        driver.finish()
    assert len(guessed.tokens("a")) == 64  # the driver compares every token with the text
    assert guessed.num_steps * 1.5 < plain.num_steps
    usage = guessed.terminal("a").usage
    assert usage.output_tokens == 64
    assert 0 < usage.accepted_tokens <= usage.drafted_tokens
    assert sum(sizes(guessed, "a")) == 64
    assert max(sizes(guessed, "a")) == 5


def test_an_end_token_among_guesses_ends_the_output_there():
    driver = guessing()
    driver.submit("a", 7, max_tokens=64)
    driver.finish()
    text = driver.tokens("a")
    ending = text[40]
    first = text.index(ending)
    driver.submit("b", 7, max_tokens=64, eos_token_ids=[ending], min_tokens=first + 2)
    driver.finish()
    end = next(i for i, token_id in enumerate(text) if token_id == ending and i + 1 >= first + 2)
    assert driver.tokens("b") == text[: end + 1]
    assert driver.terminal("b").reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_guess_goes_beyond_the_longest_output(max_tokens):
    driver = guessing()
    driver.submit("a", [40, 40, 40, 40], max_tokens=max_tokens)
    driver.finish()  # the runner asserts that nothing is guessed beyond the text
    assert len(driver.tokens("a")) == max_tokens


def test_who_is_preempted_with_guesses_in_flight_keeps_its_first_token_alone():
    driver = guessing()
    driver.submit("a", 6, max_tokens=40)
    while not guessed_in(driver.step()):
        pass
    before = len(driver.tokens("a"))
    plan = driver.step(between=(Preempt(RequestId("a")),))
    assert guessed_in(plan)
    assert len(driver.tokens("a")) == before + 1
    driver.finish()


def test_drafts_take_no_token_of_the_budget_that_a_prefill_could_have():  # vLLM 23: guesses, no draft model
    driver = guessing(max_step_tokens=10, max_chunk_tokens=9)
    driver.submit("a", 6, max_tokens=60)
    for _ in range(8):
        driver.step()
    driver.submit("b", 30, max_tokens=2)
    assert grants(driver.step()) == {"a": 1, "b": 9}
    driver.finish()


def test_drafts_take_no_block_that_somebody_waits_for():  # vLLM 25: no slot is kept
    driver = guessing(num_blocks=8, block_size=4, max_running_requests=1)
    driver.submit("a", 6, max_tokens=20)
    driver.submit("b", 6, max_tokens=20)
    request = driver.scheduler.find(RequestId("a"))
    while driver.terminal("a") is None:
        driver.step()
        assert len(request.block_table) <= driver.blocks.blocks_for(request.num_tokens)
    driver.finish()


def test_nothing_is_guessed_for_a_large_batch():
    driver = guessing(speculation_max_running=1)
    driver.submit("a", 6, max_tokens=30)
    driver.submit("b", 6, max_tokens=30)
    driver.step()
    while driver.scheduler.num_running == 2:
        assert not guessed_in(driver.step())
    driver.finish()


def test_no_step_brings_more_than_a_client_is_ready_for():
    driver = guessing()
    driver.submit("a", 6, max_tokens=60)
    while len(driver.tokens("a")) < 30:
        driver.step()
    allowed = len(driver.tokens("a")) + 2
    driver.apply(Allow(RequestId("a"), allowed))
    driver.step()
    assert len(driver.tokens("a")) <= allowed
    driver.apply(Allow(RequestId("a"), None))
    driver.finish()


def test_whose_guesses_bring_nothing_rests_longer_each_time():
    driver = guessing()
    driver.submit("a", 6, max_tokens=400)
    request = driver.scheduler.find(RequestId("a"))
    driver.step()
    speculation = driver.scheduler._speculation
    drafter = speculation._drafter(request)
    rests = []
    for _ in range(3):
        for _ in range(MISSES_MAX):
            speculation.learned(request, 2, 0)
        rests.append(drafter.rests_until - request.num_output_tokens)
    assert rests == [REST_TOKENS, 2 * REST_TOKENS, 4 * REST_TOKENS]
    before = len(driver.tokens("a"))
    while len(driver.tokens("a")) < before + rests[-1] - 1:
        assert not guessed_in(driver.step())
    speculation.learned(request, 2, 1)
    assert drafter.rest_tokens == 0
    driver.finish()


def test_an_output_may_be_cut_where_a_stop_string_ended_it():
    from engine.scheduler.commands import Finish

    driver = guessing()
    driver.submit("a", 6, max_tokens=60)
    while len(driver.tokens("a")) < 20:
        driver.step()
    request = driver.scheduler.find(RequestId("a"))
    (event,) = driver.scheduler.apply(
        Finish(request.request_id, FinishReason.STOP_STRING, num_output_tokens=18), driver.now
    )
    assert isinstance(event, Finished)
    assert event.usage.output_tokens == 18


def test_a_negative_number_of_guesses_is_refused():
    with pytest.raises(InvalidSetting, match="speculation_tokens must be at least 0"):
        SchedulerConfig(speculation_tokens=-1)
