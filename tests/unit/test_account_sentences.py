"""Accounts as people read them."""

import io

import pytest
from rich.console import Console

from engine.lives.recorder import LifeRecorder
from engine.request import RequestId
from tests.support.drive import Driver
from timeline.account import GATES, Part
from timeline.sentences import because, duration, headline, sentences
from timeline.show import bar, print_account


def story(lives, driver, name):
    account = lives.account(name, driver.now)
    return headline(account), " ".join(sentences(account))


def kept(**config):
    lives = LifeRecorder(8)
    return lives, Driver(decisions=lives, **config)


def test_who_waits_says_where_it_is_and_what_it_stands_behind():
    lives, driver = kept(max_running_requests=1)
    for name in ("runs", "first", "second"):
        driver.submit(name, 4, max_tokens=6, tenant="acme")
        lives.named(RequestId(name), f"my-{name}", 0 if name != "second" else 1, driver.now)
    for _ in range(4):
        driver.step()
    head, told = story(lives, driver, "second")
    assert (
        head
        == "my-second (second), standard, level 0, tenant acme: waits for its first seat; alive for 4.00 s"
    )
    assert told.startswith("It came with 1 request before it in the queue, and found 1 seat taken by my-runs")
    assert "because it stood behind others and no seat was free" in told


@pytest.mark.parametrize("cause", ["operator", "runner"])
def test_a_loss_for_nobody_names_its_cause(cause):
    lives, driver = kept(prefix_cache=False)
    driver.submit("a", 8, max_tokens=6)
    driver.step()
    driver.step()
    if cause == "operator":
        driver.preempt("a")
    else:
        driver.lose_kv()
    _, told = story(lives, driver, "a")
    assert "and did not come back" in told
    driver.finish()
    head, told = story(lives, driver, "a")
    assert "ended (length)" in head
    assert {"operator": "an operator said so", "runner": "all KV was lost"}[cause] in told
    assert "computed 9 tokens again" in told or "computed 8 tokens again" in told


def test_what_the_cache_gave_back_was_not_computed_again():
    lives, driver = kept(max_running_requests=1, num_blocks=64, block_size=1)
    driver.submit("low", 8, level=10, max_tokens=6)
    driver.step()
    driver.step()
    driver.submit("high", 4, level=-10, max_tokens=2)
    driver.finish()
    _, told = story(lives, driver, "low")
    assert "and found them all in the prefix cache" in told
    assert "recompute" not in told


def test_a_pause_is_told_with_its_reason_and_the_way_back():
    lives, driver = kept(max_running_requests=1)
    driver.submit("a", 4, max_tokens=6)
    driver.step()
    driver.step()
    lives.parking(RequestId("a"), "paused")
    driver.park("a")
    driver.submit("b", 4, max_tokens=3)
    driver.step()
    assert "is not to be computed" in story(lives, driver, "a")[0]
    driver.unpark("a")
    driver.finish()
    _, told = story(lives, driver, "a")
    assert "It was parked for 1.00 s because its client had paused it." in told
    assert "Then it waited" in told


def test_guesses_are_told_while_a_request_is_alive_and_afterwards():
    lives, driver = kept(num_blocks=64, max_step_tokens=32, speculation_tokens=4)
    driver.submit("a", 6, max_tokens=64)
    for _ in range(20):
        driver.step()
    request = driver.scheduler.find(RequestId("a"))
    counts = request.num_drafted_tokens, request.num_accepted_tokens
    assert counts[0] > counts[1] > 0
    assert f"{counts[0]} tokens were guessed, {counts[1]} of them right." in story(lives, driver, "a")[1]
    driver.finish()
    usage = driver.terminal("a").usage
    counts = usage.drafted_tokens, usage.accepted_tokens
    assert f"{counts[0]} tokens were guessed, {counts[1]} of them right." in story(lives, driver, "a")[1]


def test_without_guesses_none_are_told():
    lives, driver = kept()
    driver.submit("a", 6, max_tokens=8)
    driver.finish()
    assert "guessed" not in story(lives, driver, "a")[1]


def test_every_gate_has_words_for_itself_and_for_who_stands_behind():
    for gate in GATES:
        assert because(Part("queued", gate, 1.0, 0.0)) == GATES[gate]
        behind = because(Part("queued", f"behind:{gate}", 1.0, 0.0))
        assert behind.startswith("it stood behind others and ")
        assert " it had" not in behind


def test_the_bar_is_as_long_as_the_life_and_times_are_short():
    lives, driver = kept(max_running_requests=1, prefix_cache=False)
    driver.submit("low", 8, level=10, max_tokens=12)
    for _ in range(6):
        driver.step()
    driver.submit("high", 4, level=-10, max_tokens=6)
    driver.finish()
    account = lives.account("low", driver.now)
    drawn = bar(account, 40).plain
    assert len(drawn) == 40
    assert drawn.index("D") < drawn.index("X") < drawn.index("R") < drawn.rindex("D")
    file = io.StringIO()
    print_account(Console(file=file, width=100), account)
    assert bar(account).plain in file.getvalue()
    assert "100.0%" in file.getvalue()
    assert [duration(s) for s in (0.0004, 0.0456, 1.234, 1234.5)] == ["0.4 ms", "46 ms", "1.23 s", "1,234 s"]
