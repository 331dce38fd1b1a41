"""How requests end: stop tokens, lengths, rows that fail.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

import pytest

from engine.errors import EmptyPrompt
from engine.events import Failed
from engine.request import FinishReason, RequestId
from engine.runner.scripted import expected_output
from engine.scheduler.plan import StepResult
from tests.support.drive import Driver


def test_stop_tokens_end_the_output_and_belong_to_it():  # vLLM 7, vLLM 8
    prompt = [5, 6, 7]
    out = expected_output(prompt, 6)
    driver = Driver()
    driver.submit("stop", prompt, max_tokens=6, stop_token_ids=(out[2], 1000))
    driver.submit("eos", prompt, max_tokens=6, eos_token_ids=[out[1]])
    driver.submit("both", prompt, max_tokens=6)
    driver.finish()
    assert driver.tokens("stop") == out[:3]
    assert driver.terminal("stop").reason is FinishReason.STOP_TOKEN
    assert driver.terminal("stop").stop_token_id == out[2]
    assert driver.tokens("eos") == out[:2]
    assert driver.terminal("eos").reason is FinishReason.STOP
    assert driver.tokens("both") == out
    assert driver.terminal("both").reason is FinishReason.LENGTH  # vLLM 9


def test_min_tokens_bans_and_ignores_ends():  # vLLM 11
    prompt = [5, 6, 7]
    out = expected_output(prompt, 8)
    driver = Driver()
    driver.submit("a", prompt, max_tokens=8, min_tokens=5, eos_token_ids=[out[1]], stop_token_ids=(out[2],))
    banned = []
    while driver.scheduler.has_requests:
        banned.append(driver.step().grants[0].banned_token_ids)
    assert len(driver.tokens("a")) >= 5
    assert banned[:5] == [frozenset({out[1], out[2]})] * 5
    assert not any(banned[5:])


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_token_is_computed_in_vain(max_tokens):  # vLLM 38
    driver = Driver()
    driver.submit("a", 9, max_tokens=max_tokens)
    computed = 0
    while driver.scheduler.has_requests:
        computed += driver.step().num_tokens
    assert computed == 9 + max_tokens - 1


def test_the_context_ends_an_output():
    driver = Driver(max_context_tokens=12)
    driver.submit("a", 8, max_tokens=4)
    driver.finish()
    assert len(driver.tokens("a")) == 4


def test_a_row_that_fails_fails_alone():
    driver = Driver()
    driver.submit("bad", 4)
    driver.submit("good", 4)
    plan = driver.scheduler.plan(1.0)
    result = driver.runner.run(plan)
    error = EmptyPrompt()
    failing = StepResult(result.sampled, {RequestId("bad"): error})
    driver.book(plan.events)
    driver.book(driver.scheduler.commit(plan, failing, 1.5))
    assert driver.terminal("bad") == Failed(RequestId("bad"), error, driver.terminal("bad").usage)
    driver.finish()
    assert driver.terminal("good").reason is FinishReason.LENGTH
