"""The decision log: what is recorded, how it is written, read and replayed."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import structlog.testing

from engine.decisions import file as decision_file
from engine.decisions.codec import End, end_line, origin_line, record_line
from engine.decisions.file import DamagedDecisionLog, DecisionFile, DecisionLog, DecisionLogUnavailable
from engine.decisions.replay import replay
from engine.errors import Displaced, InternalError, InvalidRequest, QueueFull
from engine.loop import Engine
from engine.request import PreemptReason, RequestId, RequestSpec
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.sampling import SamplingParams
from engine.scheduler.commands import Fail, Finish, SetLevel
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.decisions import (
    Applied,
    DecisionRing,
    GrantDecision,
    Origin,
    Record,
    RecordingScheduler,
    Submitted,
)
from engine.scheduler.draft import Gate
from engine.scheduler.plan import StepResult
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager
from tests.support.decisions import MemoryLog
from tests.support.drive import Driver

LOG = Path("some.log")


def read(text: bytes) -> DecisionLog:
    return DecisionLog(LOG, io.BytesIO(text))


def eventful() -> bytes:
    """A run with everything in it: refusals, preemptions, failures, commands, stop tokens, deadlines."""
    log = MemoryLog()
    driver = Driver(
        num_blocks=10, max_running_requests=2, max_waiting_requests=3, max_wait_s=9.0, decisions=log
    )
    driver.submit("a", 12, level=10, max_tokens=20, eos_token_ids=[33], cache_salt="s")
    driver.submit("b", 12, level=10, max_tokens=20, seed=7, tenant="t", total_deadline=30)
    driver.step()
    driver.step()
    driver.submit("c", 8, level=-10, max_tokens=4, stop_token_ids=(40, 41), min_tokens=2)
    driver.step(between=(SetLevel(RequestId("b"), 3),))
    driver.park("b")
    for name in "def":
        driver.submit(name, 4, level=0)
    with pytest.raises(QueueFull):
        driver.submit("g", 4, level=0)
    driver.submit("h", 4, level=-1)
    with pytest.raises(InvalidRequest):
        driver.scheduler.apply(SetLevel(RequestId("b"), 1000), driver.now)
    driver.apply(Fail(RequestId("d"), InternalError("abc")))
    driver.unpark("b")
    driver.step()
    plan = driver.scheduler.plan(driver.now)
    failed = plan.grants[0].request_id
    sampled = dict(driver.runner.run(plan).sampled)
    driver.scheduler.commit(plan, StepResult(sampled, {failed: InternalError("nan")}), driver.now)
    driver.scheduler.apply(Finish(RequestId("e")), driver.now)
    while driver.scheduler.has_requests:
        driver.now += 1
        plan = driver.scheduler.plan(driver.now)
        driver.scheduler.commit(plan, driver.runner.run(plan), driver.now)
    return log.text()


def tampered(text: bytes, line: int, change) -> bytes:
    """The log with the JSON object of a line (counted from 1) changed."""
    lines = text.splitlines()
    body = json.loads(lines[line - 1])
    change(body)
    lines[line - 1] = json.dumps(body).encode()
    return b"\n".join(lines) + b"\n"


def line_of(text: bytes, holds) -> int:
    return next(i for i, line in enumerate(text.splitlines(), start=1) if holds(json.loads(line)))


# What is recorded


def test_a_decision_says_who_was_granted_what_which_gate_bound_and_what_a_preemption_cost():
    ring = DecisionRing(8)
    driver = Driver(num_blocks=16, max_running_requests=1, decisions=ring)
    driver.submit("low", 12, level=10)
    driver.step()
    driver.submit("high", 4, level=-10)
    driver.submit("late", 4, level=10)
    driver.step()
    first, second = ring.last(2)
    assert first.grants == (GrantDecision(RequestId("low"), 0, 8, None, 10),)
    assert first.now == 1.0
    assert not first.preemptions
    assert second.grants == (GrantDecision(RequestId("high"), 0, 4, 0, -10),)
    assert second.gate is Gate.JUST_PREEMPTED
    (preempted,) = second.preemptions
    assert (preempted.request_id, preempted.beneficiary) == ("low", "high")
    assert preempted.reason is PreemptReason.SEATS
    assert (preempted.num_blocks, preempted.num_lost_tokens) == (3, 8)
    assert (second.num_running, second.num_waiting, second.num_free_blocks) == (1, 2, 15)


def test_the_ring_keeps_the_last_steps_alone():
    ring = DecisionRing(3)
    driver = Driver(decisions=ring)
    driver.submit("a", 4)
    for _ in range(6):
        driver.step()
    assert [decision.step for decision in ring.last(99)] == [4, 5, 6]
    assert [decision.step for decision in ring.last(2)] == [5, 6]
    assert ring.last(0) == ()


def test_nothing_is_recorded_when_nobody_listens():
    engine = Engine(ScriptedRunner(), ScriptedTokenizer(), SchedulerConfig())
    assert type(engine._scheduler) is Scheduler


def test_a_sink_that_closed_hears_nothing_more_and_changes_nothing():
    log, plain = MemoryLog(), Driver()
    driver = Driver(decisions=log)
    log.is_open = False
    for either in (driver, plain):
        either.submit("a", 8)
        either.finish()
    assert len(log.lines) == 1
    assert driver.tokens("a") == plain.tokens("a")


# Replay


def test_a_replay_makes_every_decision_again():
    log = read(eventful())
    done = replay(log)
    assert done.difference is None, str(done.difference)
    assert log.end == End("closed", done.num_calls)
    assert done.num_steps > 20


def test_the_eventful_run_holds_what_it_promises():
    text = eventful().decode()
    for what in ("QueueFull", "Displaced", "Preempted", "Resumed", "LevelChanged", '"InternalError"', "Park"):
        assert what in text


@pytest.mark.parametrize(
    ("holds", "change", "says"),
    [
        (
            lambda b: b.get("step") == 2 and b["call"] == "plan",
            lambda b: b["grants"][1].__setitem__(2, 7),
            "step 2 (line {}): plan grants[1].num_tokens: recorded 7, now ",
        ),
        (
            lambda b: b.get("step") == 3 and b["call"] == "plan",
            lambda b: b.update(gate="watermark"),
            'step 3 (line {}): plan gate: recorded "watermark", now ',
        ),
        (
            lambda b: b.get("call") == "plan" and "Preempted" in str(b),
            lambda b: b["events"].pop(0),
            "): plan events[0].type: recorded ",
        ),
        (
            lambda b: "QueueFull" in str(b),
            lambda b: b["error"].update(type="Other"),
            'submit error.type: recorded "Other", now "QueueFull"',
        ),
        (
            lambda b: b.get("call") == "commit" and b["sampled"],
            lambda b: b["sampled"].clear(),
            "commit error: recorded nothing, now ",
        ),
        (
            lambda b: b.get("call") == "apply" and b["command"]["type"] == "Finish",
            lambda b: b["command"].update(request_id="nobody"),
            "apply events: recorded ",
        ),
    ],
)
def test_the_first_difference_is_named(holds, change, says):
    text = eventful()
    line = line_of(text, holds)
    done = replay(read(tampered(text, line, change)))
    assert done.difference is not None
    assert done.difference.line == line
    assert done.num_calls == line - 2
    assert says.format(line) in str(done.difference)


def test_another_prompt_shows_in_a_later_step():
    text = eventful()
    line = line_of(text, lambda b: b.get("call") == "submit" and b["spec"]["request_id"] == "c")
    done = replay(read(tampered(text, line, lambda b: b["spec"]["prompt_token_ids"].append(1))))
    assert done.difference is not None
    assert done.difference.line > line


def test_a_log_of_a_killed_process_replays_as_far_as_it_goes():
    lines = eventful().splitlines(keepends=True)
    log = read(b"".join(lines[:30]) + lines[30][:20])
    done = replay(log)
    assert (done.difference, done.num_calls, log.end) == (None, 29, None)


# Damage


@pytest.mark.parametrize(
    ("line", "change", "rule"),
    [
        (1, lambda b: b.pop("vorrang_decision_log"), "must begin a decision log"),
        (1, lambda b: b.update(vorrang_decision_log=2), "must be 1, got 2"),
        (1, lambda b: b["config"].update(policy="nice"), "scheduler.policy must be"),
        (1, lambda b: b["config"].update(max_bypass="many"), "config.max_bypass must be an integer"),
        (1, lambda b: b["config"].update(max_chunk_tokens=0), "max_chunk_tokens must be at least 1"),
        (1, lambda b: b["config"].pop("policy"), "config.policy is missing"),
        (1, lambda b: b["config"].update(shiny=1), "config.shiny is unknown to this version"),
        (1, lambda b: b["config"]["batch"].pop("watermark"), "config.batch.watermark is missing"),
        (1, lambda b: b["pool"].update(num_blocks=10**12), "pool.num_blocks must be between"),
        (1, lambda b: b["pool"].update(prefix_cache=1), "pool.prefix_cache must be true or false"),
        (1, lambda b: b.pop("pool"), "pool must be a JSON object"),
        (2, lambda b: b.update(call="jump"), "call must be one of"),
        (2, lambda b: b.pop("now"), "now must be a number, got null"),
        (2, lambda b: b["spec"].update(prompt_token_ids=[1, "x"]), "spec.prompt_token_ids[1] must be"),
        (2, lambda b: b["spec"]["sampling"].update(top_p=9), "spec.sampling: sampling.top_p must be"),
        (5, lambda b: b.update(step=99), "step must be one of the last"),
        (5, lambda b: b.update(sampled=[]), "sampled must be a JSON object"),
        (-1, lambda b: b.update(num_records=1), "says that 1 calls came before it"),
    ],
)
def test_a_damaged_line_is_named_with_its_rule(line, change, rule):
    text = eventful()
    line = line if line > 0 else len(text.splitlines())
    with pytest.raises(DamagedDecisionLog) as caught:
        replay(read(tampered(text, line, change)))
    assert str(caught.value).startswith(f"some.log: line {line}: ")
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"hello\n", b"[1]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"{}\n"])
def test_a_foreign_file_is_refused_at_line_1(text):
    with pytest.raises(DamagedDecisionLog, match="line 1"):
        read(text)


@pytest.mark.parametrize("odd", [b"{}", b"x", b'{"end":"closed"}', b'{"call":"apply","now":1,"command":{}}'])
def test_an_odd_line_in_the_middle_is_refused(odd):
    lines = eventful().splitlines()
    lines.insert(7, odd)
    with pytest.raises(DamagedDecisionLog, match="line 8: "):
        replay(read(b"\n".join(lines) + b"\n"))


def test_a_missing_line_and_one_behind_the_end_are_noticed():
    lines = eventful().splitlines(keepends=True)
    with pytest.raises(DamagedDecisionLog, match="must not follow the last line"):
        replay(read(b"".join([*lines, lines[3]])))
    is_harmless = next(i for i, line in enumerate(lines) if b'"QueueFull"' in line)
    with pytest.raises(DamagedDecisionLog, match=f"line {len(lines) - 1}: says that"):
        replay(read(b"".join(lines[:is_harmless] + lines[is_harmless + 1 :])))


# What is written


def test_what_the_scheduler_never_looks_at_stays_out_of_the_log():
    sampling = SamplingParams(stop_strings=("secret-stop",), include_stop_string=True)
    spec = RequestSpec(RequestId("a"), (1, 2), sampling, label="secret-label")
    assert "secret" not in record_line(Record(Submitted(spec), 0.0))


@pytest.mark.parametrize("error", [Displaced(), InternalError("x"), QueueFull("queue", "tokens", 3)])
def test_errors_are_written_by_class_and_text(error):
    body = json.loads(record_line(Record(Applied(Fail(RequestId("a"), error)), 0.5)))
    assert body["command"]["error"] == {"type": type(error).__name__, "text": str(error)}


def test_the_log_covers_every_field_of_a_spec_and_of_the_configuration():
    # A new field is written and read without a change here, unless it is of a new type: then this fails.
    class_fields = {"max_wait_s": 1.5}
    config = dataclasses.replace(
        SchedulerConfig(), batch=dataclasses.replace(SchedulerConfig().batch, **class_fields)
    )
    log = read(f"{origin_line(Origin(config, 4, 2, False))}\n".encode())
    assert log.origin == Origin(config, 4, 2, False)
    spec = RequestSpec(
        RequestId("a"), (5, 6), SamplingParams(seed=2**64 - 1), -7, frozenset({9, 1}), "s", "t", 1.25, 1e9,
        adapter="x",
    )  # fmt: skip
    text = f"{origin_line(log.origin)}\n{record_line(Record(Submitted(spec), 0.1))}\n"
    (line,) = read(text.encode())
    assert line.call == Submitted(spec)
    assert line.now == 0.1


def write(path, **settings):
    return DecisionFile(path, **settings)


def run_through(sink, num_requests=3):
    scheduler = RecordingScheduler(SchedulerConfig(), BlockManager(64, 16), sink)
    runner = ScriptedRunner(64, 16)
    for number in range(num_requests):
        spec = RequestSpec(RequestId(f"r{number}"), (1, 2, 3), SamplingParams(temperature=0))
        scheduler.submit(spec, float(number))
    now = float(num_requests)
    while scheduler.has_requests:
        plan = scheduler.plan(now)
        now += 0.1
        scheduler.commit(plan, runner.run(plan), now)


def test_a_file_is_private_whole_and_replays(tmp_path):
    path = tmp_path / "decisions.log"
    path.write_text("what was here before")
    path.chmod(0o644)
    sink = write(path)
    run_through(sink)
    sink.close()
    sink.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not sink.is_open
    with DecisionLog(path) as log:
        done = replay(log)
    assert done.difference is None
    assert log.end == End("closed", 3 + 2 * done.num_steps)
    assert log.num_bytes_read == path.stat().st_size


def test_a_full_log_ends_with_one_warning_and_its_reason_and_replays(tmp_path):
    path = tmp_path / "decisions.log"
    with structlog.testing.capture_logs() as logs:
        sink = write(path, max_bytes=6000, wait=True)
        run_through(sink, num_requests=20)
        sink.close()
    assert [(entry["event"], entry["reason"]) for entry in logs] == [
        ("decisions.recording_stopped", "max_bytes")
    ]
    assert path.stat().st_size <= 6000
    with DecisionLog(path) as log:
        done = replay(log)
    assert done.difference is None
    assert log.end == End("max_bytes", done.num_calls)


def test_a_disk_that_is_too_slow_ends_the_log_and_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(decision_file, "MAX_BACKLOG", 4)
    path = tmp_path / "decisions.log"
    sink = write(path)
    put, real = sink._put, []
    started, go_on = decision_file.threading.Event(), decision_file.threading.Event()

    def slow():
        started.set()
        assert go_on.wait(10)
        return real.pop()

    def begin(origin):
        real.append(origin_line(origin))
        put(slow)
        assert started.wait(10)

    monkeypatch.setattr(sink, "begin", begin)
    with structlog.testing.capture_logs() as logs:
        run_through(sink)  # returns although nothing is written
        assert not sink.is_open
        go_on.set()
        sink.close()
    assert [entry["reason"] for entry in logs] == ["backlog"]
    with DecisionLog(path) as log:
        done = replay(log)
    assert (done.difference, done.num_calls, log.end) == (None, 4, End("backlog", 4))


def test_a_disk_that_fails_ends_the_log(tmp_path):
    with structlog.testing.capture_logs() as logs:
        sink = write(Path("/dev/full"))
        run_through(sink)
        sink.close()
    assert [entry["reason"] for entry in logs] == ["failed"]


def test_a_file_that_cannot_be_opened_is_a_typed_error(tmp_path):
    for make in (lambda: write(tmp_path / "no" / "where"), lambda: DecisionLog(tmp_path / "nothing")):
        with pytest.raises(DecisionLogUnavailable, match="No such file"):
            make()


def test_an_end_line_reads_as_it_was_written():
    log = read(
        f"{origin_line(Origin(SchedulerConfig(), 1, 1, True))}\n{end_line(End('closed', 0))}\n".encode()
    )
    assert list(log) == []
    assert log.end == End("closed", 0)
