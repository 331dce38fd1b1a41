"""Commands and deadlines come first: rule 1 of docs/SCHEDULING.md.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

from engine.errors import EmptyPrompt
from engine.events import Failed, Finished, LevelChanged, Preempted
from engine.request import FinishReason, RequestId
from engine.scheduler.commands import Fail, Finish, SetLevel
from tests.support.drive import Driver, events, grants

# Commands


def test_cancelling_gives_all_blocks_back_whatever_the_state():
    driver = Driver(num_blocks=32, max_running_requests=2)
    driver.submit("prefill", 24)
    driver.submit("r1", 8)
    driver.submit("r11", 8)
    driver.step()
    for name in ("r1", "prefill", "r11"):
        driver.cancel(name)
        assert driver.cancel(name) == []  # SGLang 44
    assert driver.blocks.num_free_blocks == 32


def test_ids_are_matched_exactly():  # SGLang 41
    driver = Driver()
    driver.submit("batch_1")
    driver.submit("batch_10")
    driver.cancel("batch_1")
    driver.finish()
    assert driver.terminal("batch_10").reason is FinishReason.LENGTH


def test_a_cancel_in_flight_drops_what_the_step_computes():  # vLLM 63
    driver = Driver()
    driver.submit("a", 4, max_tokens=1)
    driver.step(between=(Finish(RequestId("a")),))
    assert driver.terminal("a").reason is FinishReason.CANCELLED
    assert driver.tokens("a") == []
    driver.finish()


def test_reprioritising_a_queued_request_lets_it_overtake():
    driver = Driver(max_running_requests=1)
    for name in "abc":
        driver.submit(name, max_tokens=20)
    driver.step()
    assert driver.set_level("c", -10) == [LevelChanged(RequestId("c"), -10)]
    plan = driver.step()
    assert [e.request_id for e in events(plan, Preempted)] == ["a"]
    assert driver.running() == ["c"]


def test_reprioritising_a_running_request_may_cost_it_its_seat():
    driver = Driver(max_running_requests=1)
    driver.submit("a", max_tokens=20)
    driver.submit("b", max_tokens=20)
    driver.step()
    driver.set_level("a", 10)
    driver.step()
    assert driver.running() == ["b"]
    driver.finish()


def test_commands_for_unknown_requests_do_nothing():
    driver = Driver()
    for command in (Finish(RequestId("x")), SetLevel(RequestId("x"), 1)):
        assert driver.scheduler.apply(command, 0.0) == []


def test_failing_a_request_frees_it():
    driver = Driver()
    driver.submit("a", 4)
    driver.step()
    driver.apply(Fail(RequestId("a"), EmptyPrompt()))
    assert isinstance(driver.terminal("a"), Failed)
    driver.finish()


# Deadlines


def test_a_queue_deadline_ends_only_what_never_started():
    driver = Driver(max_running_requests=1)
    driver.submit("runs", 4, max_tokens=20, queue_deadline=3.0)
    driver.submit("waits", 4, queue_deadline=3.0)
    for _ in range(2):
        driver.step()
    assert driver.terminal("waits") is None
    plan = driver.step()
    assert [e.request_id for e in events(plan, Finished)] == ["waits"]
    assert driver.terminal("waits").reason is FinishReason.TIME_LIMIT
    driver.finish()
    assert driver.terminal("runs").reason is FinishReason.LENGTH


def test_no_step_is_spent_on_an_expired_request():
    driver = Driver()
    driver.submit("a", 4, max_tokens=20, total_deadline=3.0)
    computed = [grants(driver.step()).get("a", 0) for _ in range(4)]
    assert computed == [4, 1, 0, 0]
    assert driver.terminal("a").reason is FinishReason.TIME_LIMIT
    assert len(driver.tokens("a")) == 2
    assert driver.blocks.num_free_blocks == driver.blocks.num_blocks
