"""Runs as timelines: what the tracks hold, as a trace and as a picture."""

import io
import itertools
import json
import sys

import pytest
from typer.testing import CliRunner

from clients.python.watch import WatchedRun
from engine.scheduler.decisions import Planned, RecordingScheduler
from server.cli import main
from server.control import _decision
from server.feed import Watched
from server.trace import LogDiffers, RunSink, trace
from tests.support import walk
from tests.support.decisions import MemoryLog
from tests.support.drive import Driver
from tests.support.trace_events import checked
from timeline.builder import Granted, RunBuilder
from timeline.chrome import QUEUE, SEATS, write
from timeline.picture import PictureUnavailable, draw


class Both(MemoryLog):
    """A log, and the run made as it is written."""

    def __init__(self):
        super().__init__()
        self.sink = RunSink()

    def begin(self, origin):
        super().begin(origin)
        self.sink.begin(origin)

    def record(self, record):
        super().record(record)
        self.sink.record(record)


def overtaken(log=None):
    """Two seats; an interactive request takes one from the batch requests that hold them."""
    log = log or Both()
    driver = Driver(max_running_requests=2, num_blocks=32, prefix_cache=False, decisions=log)
    for name in ("report", "essay", "later"):
        driver.submit(name, 12, level=10, max_tokens=8)
    for _ in range(5):
        driver.step()
    driver.submit("question", 4, level=-10, max_tokens=3)
    driver.finish()
    return log


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def text_of(run):
    file = io.StringIO()
    num_events = write(run, file)
    events = checked(file.getvalue())
    assert len(events) == num_events
    return events


def test_seats_hold_who_ran_in_pieces_and_the_victims_gap_lies_between_two_stays():
    run = overtaken().sink.finish()
    assert {stay.seat for stay in run.stays} == {0, 1}
    (cut,) = run.cuts
    assert (cut.beneficiary, cut.reason) == ("question", "seats")
    first, again = [stay for stay in run.stays if stay.request_id == cut.victim]
    assert (first.left, again.is_resume, again.left) == ("preempted", True, "length")
    assert first.pieces[0].kind == "prefill"
    assert "recompute" in {piece.kind for piece in again.pieces}
    (gap,) = [w for w in run.waits if w.request_id == cut.victim and w.kind == "preempted"]
    assert (first.end_s, again.begin_s) == (gap.begin_s, gap.end_s)
    assert first.end_s == cut.at_s
    tokens = sum(p.num_tokens for s in run.stays if s.request_id == "question" for p in s.pieces)
    assert tokens == 4 + 2  # the last output token is never computed
    for seat in (0, 1):
        stays = sorted((s for s in run.stays if s.seat == seat), key=lambda s: s.begin_s)
        assert all(one.end_s <= other.begin_s for one, other in itertools.pairwise(stays))
    assert run.samples[-1].waiting == {"interactive": 0, "standard": 0, "batch": 0}
    assert max(sample.waiting["batch"] for sample in run.samples) == 3
    assert max(sample.used_blocks for sample in run.samples) > 6


def test_the_trace_is_what_the_format_asks_for_and_arrows_lead_to_the_victim_and_back():
    run = overtaken().sink.finish()
    events = text_of(run)
    (cut,) = run.cuts
    arrows = [(e["name"], e["ph"], e["pid"]) for e in events if e["ph"] in "sf"]
    assert arrows == [
        ("gives way to", "s", QUEUE), ("gives way to", "f", SEATS),
        ("preempted", "s", SEATS), ("preempted", "f", QUEUE),
        ("resumes", "s", QUEUE), ("resumes", "f", SEATS),
    ]  # fmt: skip
    names = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == SEATS}
    assert {"interactive question", "batch report", f"batch {cut.victim} resumed"} <= names
    assert {"batch prefill", "batch decode", "batch recompute", "interactive prefill"} <= names
    assert {e["name"] for e in events if e["ph"] == "C"} == {
        "queue", "running", "step tokens", "KV blocks in use",
    }  # fmt: skip
    colors = {e["cat"]: e["cname"] for e in events if e["ph"] == "X"}
    assert colors["interactive"] != colors["batch"]


@pytest.mark.parametrize("depth", [0, 1])
def test_any_run_makes_a_sound_trace(monkeypatch, depth):
    made = []

    class Kept(RunSink):
        def __init__(self):
            super().__init__(every_step=depth == 0)
            made.append(self)

        def replay(self, num_steps):
            pass

    monkeypatch.setattr(walk, "REPLAY_EVERY", 1)
    monkeypatch.setattr(walk, "MemoryLog", Kept)
    for number in (0, 1, 4, 5):
        episode = walk.Episode(11, number, depth)
        episode.run()
        run = made[-1].finish()
        text_of(run)
        scheduled = sum(len(seen.tokens) for seen in episode.driver.seen.values())
        assert scheduled == 0 or run.stays
        assert all(stay.left for stay in run.stays)
        assert max((sum(s.waiting.values()) for s in run.samples), default=0) <= len(episode.driver.seen)
        assert min((min(s.waiting.values()) for s in run.samples), default=0) >= 0


def test_steps_that_were_never_made_are_not_drawn_and_late_ones_begin_when_the_one_before_is_over():
    builder = RunBuilder(("batch",), num_seats=1)
    builder.arrived("a", "batch", 10.0)
    for step, now in ((1, 11.0), (2, 11.5)):
        builder.planned(step, now, [(Granted("a", step - 1, 1, True), "batch")], num_free_blocks=0, gate="")
    builder.computed(1, 12.0)
    builder.computed(2, 13.0)
    builder.planned(3, 13.0, [(Granted("a", 2, 1, True), "batch")], num_free_blocks=0, gate="")
    builder.ended("a", "cancelled", 13.5)
    run = builder.finish()
    (stay,) = run.stays
    assert [(p.begin_s, p.end_s, p.num_steps) for p in stay.pieces] == [(1.0, 2.0, 1), (2.0, 3.0, 1)]
    assert (stay.begin_s, stay.end_s, stay.left) == (1.0, 3.5, "cancelled")


class Watching(RunSink):
    """What a watcher of the server is told, beside the run made of the decisions themselves."""

    def __init__(self):
        super().__init__()
        self.watched = WatchedRun(4, 64)
        self.between = []

    def record(self, record):
        super().record(record)
        if isinstance(record.call, Planned):
            step = Watched(record.call.decision, 0, tuple(self.between))
            self.watched.step(_decision(step, with_happenings=True))
            self.between = []
        else:
            self.between.append(record)


def test_guesses_are_told_in_the_decode_slices_of_a_log_and_of_who_watches():
    sink = Watching()
    driver = Driver(num_blocks=64, max_step_tokens=32, speculation_tokens=4, decisions=sink)
    driver.submit("a", 6, max_tokens=64)
    driver.submit("b", 4, max_tokens=2)  # too short to be guessed
    driver.finish()
    driver.step()  # so that the last commit is watched
    usage = driver.terminal("a").usage
    assert usage.accepted_tokens > 0
    for run in (sink.finish(), sink.watched.finish()):
        slices = [event for event in text_of(run) if "steps" in event["args"]]
        told = [event["args"] for event in slices if "guessed" in event["args"]]
        assert {args["request"] for args in told} == {"a"}
        assert sum(args["guessed"] for args in told) == usage.drafted_tokens
        assert sum(args["right"] for args in told) == usage.accepted_tokens


def test_a_window_cuts_what_reaches_out_of_it():
    run = overtaken().sink.finish().between(3.0, 6.0)
    assert min(stay.begin_s for stay in run.stays) >= 3.0
    assert max(stay.end_s for stay in run.stays) <= 6.0
    text_of(run)


def test_a_picture_is_drawn_in_every_format_and_says_what_is_missing(tmp_path, monkeypatch):
    run = overtaken().sink.finish()
    for ending, beginning in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        draw(run, tmp_path / f"run{ending}")
        assert (tmp_path / f"run{ending}").read_bytes().startswith(beginning)
    drawn = (tmp_path / "run.svg").read_text()
    for text in (
        "No seat is free when urgent question comes",
        "seat 2",
        "question",
        "interactive",
        "goes on",
    ):
        assert text in drawn
    with pytest.raises(PictureUnavailable, match="must end in"):
        draw(run, tmp_path / "run.gif")
    with pytest.raises(PictureUnavailable, match="nothing ran"):
        draw(RunBuilder(("batch",)).finish(), tmp_path / "run.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PictureUnavailable, match=r"vorrang\[report\]"):
        draw(run, tmp_path / "run.png")


def test_a_log_becomes_a_timeline_and_a_story_and_wrong_usage_is_one_line(tmp_path):
    log = tmp_path / "decisions.log"
    log.write_bytes(overtaken().text())
    output, image = tmp_path / "trace.json", tmp_path / "trace.png"
    told = trace(log, output, image)
    assert "ui.perfetto.dev" in told
    checked(output.read_text())
    assert image.exists()
    victim = next(e["args"]["victim"] for e in checked(output.read_text()) if e["ph"] == "s")
    story = run("explain", str(log), victim)
    assert story.exit_code == 0, story.stderr
    assert "gave way to question (level -10), which needed a seat" in " ".join(story.stdout.split())
    assert "Its last event" not in story.stdout  # a log does not know
    as_json = run("explain", str(log), "question", "--json")
    assert json.loads(as_json.stdout)["num_output_tokens"] == 3
    for arguments, rule in (
        (("trace", str(log)), "output must be given"),
        (("trace", str(log), "-o", str(output), "--window", "5:2"), "--window must be BEGIN:END"),
        (("explain", str(log), "nobody"), "no request 'nobody'"),
        (("trace", str(tmp_path / "none"), "-o", str(output)), "No such file"),
        (("trace", str(log), "-o", str(tmp_path / "no" / "t.json")), "can't be written: No such file"),
        (("trace", str(log), "--image", str(tmp_path / "t.bmp")), "must end in .png"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert rule in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_log_that_is_not_reproduced_is_refused(tmp_path, monkeypatch):
    log = tmp_path / "decisions.log"
    log.write_bytes(overtaken().text())
    idle = RecordingScheduler._decision
    monkeypatch.setattr(
        RecordingScheduler,
        "_decision",
        lambda self, plan, now: idle(self, plan, now) if plan.step != 4 else None,
    )
    with pytest.raises(LogDiffers, match="decides otherwise: step 4"):
        trace(log, tmp_path / "trace.json", None)
