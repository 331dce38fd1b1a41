"""The demo's statistics and verdict, its view, and the server it starts."""

import asyncio
import dataclasses
import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from clients.python import Accepted, Delta, Finished, Preempted, Resumed, Started, Usage, VorrangClient
from clients.python.demo import DemoOptions, _Pace, play
from clients.python.demo_report import Outcome, PolicyRun, differing, speedup, summarize, verdict
from clients.python.demo_server import ServerDied, serving
from clients.python.demo_view import DemoView, print_summary, tail_of
from clients.python.errors import ConnectionLost
from clients.python.progress import Progress, State
from tests.support.fake_server import FakeServer, FakeSession, delta, finished


def outcome(name: str, ttft_s: float | None, **changes: object) -> Outcome:
    class_name = name.partition("-")[0]
    usual = Outcome(
        name, class_name, (1, 2), "ab", "LENGTH", ttft_s=ttft_s, tpot_s=0.5, ended_at_s=3.0, preemptions=0
    )
    return dataclasses.replace(usual, **changes)


def run(policy: str, *outcomes: Outcome) -> PolicyRun:
    return PolicyRun(policy, outcomes)


PRIORITY = run(
    "priority",
    outcome("batch-1", 1.0, preemptions=2, recomputed_tokens=7, ended_at_s=9.0),
    outcome("batch-2", 3.0),
    outcome("interactive-1", 0.1),
    outcome("interactive-2", 0.2),
    outcome("interactive-3", 0.9),
)
FCFS = run(
    "fcfs",
    outcome("batch-1", 1.0),
    outcome("batch-2", 2.0),
    outcome("interactive-1", 1.0),
    outcome("interactive-2", 2.0),
    outcome("interactive-3", 9.0),
)


def changed(original: PolicyRun, name: str, **changes: object) -> PolicyRun:
    """The run with one outcome changed."""
    return PolicyRun(
        original.policy,
        tuple(dataclasses.replace(o, **changes) if o.name == name else o for o in original.outcomes),
    )


def passed(priority: PolicyRun, fcfs: PolicyRun) -> list[bool]:
    return [check.passed for check in verdict(priority, fcfs)]


def test_summary_of_a_class():
    batch = summarize(PRIORITY, "batch")
    assert (batch.num_requests, batch.ttft_s_median, batch.ttft_s_max) == (2, 2.0, 3.0)
    assert (batch.tpot_s_median, batch.preemptions, batch.recomputed_tokens) == (0.5, 2, 7)
    assert batch.duration_s == 9.0
    assert summarize(PRIORITY, "interactive").ttft_s_median == 0.2


def test_summary_of_nothing_measured_has_no_numbers():
    empty = summarize(run("x", outcome("batch-1", None, tpot_s=None)), "batch")
    assert (empty.ttft_s_median, empty.ttft_s_max, empty.tpot_s_median) == (None, None, None)
    assert summarize(run("x"), "batch").num_requests == 0


def test_speedup_is_the_ratio_of_medians():
    assert speedup(PRIORITY, FCFS) == pytest.approx(10.0)
    assert speedup(run("priority"), FCFS) is None


def test_verdict_holds_when_everything_does():
    assert passed(PRIORITY, FCFS) == [True, True, True, True]


@pytest.mark.parametrize("name", ["batch-1", "batch-2", "interactive-3"])
@pytest.mark.parametrize("changes", [{"token_ids": (1, 3)}, {"text": "ax"}])
def test_verdict_fails_when_an_output_differs(name: str, changes: dict[str, object]):
    other = changed(PRIORITY, name, **changes)
    assert differing(other, FCFS) == [name]
    assert passed(other, FCFS) == [True, True, False, True]
    assert name in verdict(other, FCFS)[2].text


def test_verdict_fails_when_a_request_is_missing_from_one_run():
    assert passed(PRIORITY, run("fcfs", *FCFS.outcomes[1:]))[2] is False


@pytest.mark.parametrize("changes", [{"finish_reason": ""}, {"error": "lost"}])
def test_verdict_fails_when_a_stream_did_not_finish(changes: dict[str, object]):
    assert passed(changed(PRIORITY, "batch-2", **changes), FCFS)[0] is False
    assert passed(PRIORITY, changed(FCFS, "batch-2", **changes))[0] is False


def test_verdict_fails_without_a_preemption():
    assert passed(changed(PRIORITY, "batch-1", preemptions=0), FCFS) == [True, False, True, True]


def test_verdict_fails_when_interactive_is_less_than_ten_times_sooner():
    assert passed(changed(PRIORITY, "interactive-2", ttft_s=0.201), FCFS) == [True, True, True, False]


def test_verdict_of_empty_runs_fails():
    assert passed(run("priority"), run("fcfs")) == [False, False, True, False]


def test_progress_follows_the_events_and_says_when_the_state_changes():
    progress = Progress()
    changes = [
        progress.apply(event)
        for event in (
            Accepted(level=10, queue_position=3),
            Started(5),
            Delta("a\nb", (1,)),
            Preempted("SEATS", 1),
            Resumed(4),
            Delta("c", (2,)),
            Finished("LENGTH", Usage()),
        )
    ]
    assert changes == [True, True, False, True, True, False, True]
    assert (progress.state, progress.num_tokens, progress.preemptions) == (State.DONE, 2, 1)
    assert (tail_of(progress), tail_of(progress, 2)) == ("a bc", "bc")
    assert progress.describe() == "done | LENGTH | 2 tokens | preempted 1x"


def test_progress_of_a_failed_request_says_why():
    progress = Progress()
    progress.fail(ConnectionLost("gone"))
    assert (progress.state, tail_of(progress)) == (State.FAILED, "gone (UNAVAILABLE)")


def test_the_table_fits_a_hundred_columns_and_names_every_request():
    console = Console(file=io.StringIO(), width=200)
    view = DemoView(console, "policy priority", lambda: 1.0)
    for name, text in (("batch-1", "long " * 100), ("interactive-1", "")):
        progress = Progress()
        progress.apply(Accepted(level=10))
        progress.apply(Delta(text, (1,)))
        view.add(name, name.partition("-")[0], progress)
    progress.apply(Preempted("SEATS", 1))
    console.print(view.table())
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert any("interactive-1" in line and "PREEMPTED" in line for line in lines)


def test_plain_lines_are_not_wrapped_or_read_as_markup():
    console = Console(file=io.StringIO(), width=20)
    with DemoView(console, "policy [red]fcfs[/red]", lambda: 1.0) as view:
        progress = Progress()
        view.add("batch-1", "batch", progress)
        progress.fail(ConnectionLost("[bold] " + "x" * 100))
        view.changed("batch-1")
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "policy [red]fcfs[/red]"
    assert "[bold] " + "x" * 100 in lines[1]
    assert len(lines) == 2


def test_the_summary_is_not_cut_at_a_hundred_columns():
    console = Console(file=io.StringIO(), width=100)
    print_summary(console, [summarize(PRIORITY, "interactive"), summarize(FCFS, "batch")])
    assert "…" not in console.file.getvalue()
    assert "interactive" in console.file.getvalue()


@pytest.mark.parametrize(
    "changes",
    [{"num_batch": 3}, {"num_interactive": 0}, {"num_seats": 0}, {"batch_tokens": 0}, {"gap_tokens": -1}],
)
def test_options_that_could_not_show_anything_are_refused(changes: dict[str, int]):
    with pytest.raises(ValueError, match="at least"):
        DemoOptions(**changes)


def test_server_arguments_leave_unsaid_choices_to_the_server():
    assert "--threads" not in DemoOptions().server_arguments("fcfs")
    assert DemoOptions(num_threads=2).server_arguments("fcfs")[-2:] == ["--threads", "2"]


@pytest.mark.asyncio
async def test_a_workload_whose_server_vanishes_ends_and_its_verdict_fails():
    async def script(session: FakeSession) -> None:
        if (await session.open()).default_priority.class_name != "batch":
            await session.hold()
        for _ in range(2):
            request_id = await session.accept()
            await session.send(request_id, started={})
            await session.send(request_id, delta=delta(0, 1))
        await session.send(request_id, finished=finished())
        await session.vanish()

    options = DemoOptions(num_batch=2, num_interactive=1, num_seats=2, gap_tokens=0)
    view = DemoView(Console(file=io.StringIO()), "", lambda: 1.0)
    async with FakeServer(script) as server, VorrangClient(server.target) as client:
        outcomes = await play(client, options, view, lambda: 1.0)
    by_name = {o.name: o for o in outcomes}
    assert by_name.keys() == {"batch-1", "batch-2", "interactive-1"}
    assert by_name["batch-1"].error
    assert by_name["batch-2"].finish_reason == "LENGTH"
    assert by_name["interactive-1"].error
    assert not verdict(PolicyRun("priority", tuple(outcomes)), FCFS)[0].passed


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code]


SLEEPER = "import time; print('up', flush=True); time.sleep(60)"


@pytest.mark.asyncio
async def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path):
    command = program("import sys; print('no model here'); sys.exit(3)")
    with pytest.raises(ServerDied, match=r"(?s)code 3.*no model here"):
        async with serving(command, tmp_path / "log", ready_timeout_s=30):
            pytest.fail("it must not be ready")


@pytest.mark.asyncio
async def test_a_server_that_never_becomes_ready_is_given_up_and_ended(tmp_path: Path):
    with pytest.raises(ServerDied, match="not ready after"):
        async with serving(program(SLEEPER), tmp_path / "log", ready_timeout_s=0.1):
            pytest.fail("it must not be ready")


@pytest.mark.asyncio
async def test_a_server_is_ended_when_the_demo_is_cancelled_while_it_waits(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        "import os, signal\n"
        f"pipe = os.open({str(pipe)!r}, os.O_WRONLY)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(pipe, b'ended'), os._exit(0)))\n"
        "os.write(pipe, b'up\\n')\n"
        f"{SLEEPER}"
    )

    async def use() -> None:
        async with serving(program(code), tmp_path / "log", ready_timeout_s=30):
            pytest.fail("it must not be ready")

    using = asyncio.ensure_future(use())
    reading = await asyncio.to_thread(pipe.open)
    assert await asyncio.to_thread(reading.readline) == "up\n"
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    with reading:
        assert reading.read() == "ended"


@pytest.mark.asyncio
async def test_the_pace_of_the_demo_is_that_of_the_batch_work() -> None:
    pace = _Pace(num_seats=1, num_batch=2)
    seated, later, never = (
        asyncio.create_task(waiting)
        for waiting in (pace.wait_for_seats(), pace.wait_for_tokens(3), pace.wait_for_tokens(100))
    )
    await pace.advance(tokens=2)
    await asyncio.sleep(0)
    assert not seated.done()
    await pace.advance(seats=1)
    await seated
    assert not later.done()
    await pace.advance(tokens=1, ends=1)
    await later
    assert not never.done()
    await pace.advance(ends=1)
    await never
