"""What ``vorrangctl load`` sends, and what it makes of what it saw; no server is needed."""

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clients.python.cli import main
from clients.python.events import Finished, Usage
from clients.python.load import LoadOptions, tenants_without_token
from clients.python.load_report import gaps_s, summarise
from clients.python.load_state import LoadState
from clients.python.load_workload import Wish, parse_classes, parse_length, workload_of
from workloads.arrivals import Arrival, Workload
from workloads.errors import InvalidWorkload
from workloads.records import RequestRecord, Run
from workloads.statistics import Target

# What is sent


def test_constant_arrivals_are_evenly_spaced() -> None:
    requests = workload_of(None, Wish(rate_rps=4.0, duration_s=2.0, arrivals="constant")).requests
    assert [r.arrival_s for r in requests] == [0.25 * n for n in range(8)]


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    requests = workload_of(None, Wish(rate_rps=50.0, duration_s=200.0)).requests
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
    mean = math.fsum(gaps) / len(gaps)
    deviation = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.05)


def test_classes_are_drawn_by_their_shares_and_the_seed_decides() -> None:
    wish = Wish(rate_rps=100.0, duration_s=50.0, classes={"interactive": 0.2, "batch": 0.8}, seed=3)
    first, again = workload_of(None, wish), workload_of(None, wish)
    assert first == again
    urgent = sum(r.level == -10 for r in first.requests) / len(first.requests)
    assert urgent == pytest.approx(0.2, abs=0.02)


def test_changing_lengths_leaves_the_arrivals_as_they_are() -> None:
    short = workload_of(None, Wish(rate_rps=10.0, output_tokens="5"))
    long = workload_of(None, Wish(rate_rps=10.0, output_tokens="10-900"))
    assert [r.arrival_s for r in short.requests] == [r.arrival_s for r in long.requests]


@pytest.mark.parametrize(
    ("text", "low", "high"), [("7", 7, 7), ("16-256", 16, 256), ("~200", 1, 10**6), ("~200/0", 200, 200)]
)
def test_lengths_are_drawn_as_written(text: str, low: int, high: int) -> None:
    draw, rng = parse_length(text, "prompt_tokens"), random.Random(1)
    lengths = [draw(rng) for _ in range(4000)]
    assert low <= min(lengths) <= max(lengths) <= high
    if text == "~200":
        assert sorted(lengths)[2000] == pytest.approx(200, rel=0.1)
        assert sorted(lengths)[3600] == pytest.approx(200 * math.exp(1.2816 * 0.8), rel=0.1)


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "~0", "~x", "~200/-1", "1-2-3", "~200/9", "2000000"])
def test_a_length_that_is_none_is_named(text: str) -> None:
    with pytest.raises(InvalidWorkload, match=r"output_tokens must be N, LOW-HIGH"):
        parse_length(text, "output_tokens")


def test_shares_are_brought_to_one() -> None:
    assert parse_classes("interactive=1, batch=3") == {"interactive": 0.25, "batch": 0.75}
    assert parse_classes("standard") == {"standard": 1.0}
    for wrong in ("urgent=1", "batch=x", "batch=-1,standard=2", "batch=0", ""):
        with pytest.raises(InvalidWorkload, match=r"^classes "):
            parse_classes(wrong)


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        (Wish(rate_rps=0.0), "rate"),
        (Wish(rate_rps=math.inf), "rate"),
        (Wish(duration_s=-1.0), "duration"),
        (Wish(num_requests=0), "requests"),
        (Wish(arrivals="bursty"), "arrivals"),
        (Wish(rate_rps=1e6, duration_s=1e6), "workload"),
    ],
)
def test_bad_wishes_are_named(wish: Wish, field: str) -> None:
    with pytest.raises(InvalidWorkload, match=rf"^{field} "):
        workload_of(None, wish)


def test_a_ready_workload_is_brought_to_rate_and_duration() -> None:
    workload = workload_of("interactive-and-batch", Wish(rate_rps=20.0, duration_s=30.0))
    assert len(workload.requests) == pytest.approx(600, rel=0.15)
    assert 25 < workload.requests[-1].arrival_s < 30
    assert {r.level for r in workload.requests} == {-10, 10}
    assert workload_of("steady", Wish()).requests[-1].arrival_s < 60
    few = workload_of("steady", Wish(num_requests=3, classes={"standard": 1.0}))
    assert [r.level for r in few.requests] == [0, 0, 0]


def test_a_trace_is_brought_to_a_rate_and_cut(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:00:{second:02}.0000000,10,{second + 1}" for second in range(0, 60, 2)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    assert len(workload_of(str(trace), Wish()).requests) == 30
    quick = workload_of(str(trace), Wish(rate_rps=5.0, duration_s=3.0))
    assert quick.requests[-1].arrival_s < 3
    assert len(quick.requests) == pytest.approx(15, abs=1)


def test_an_unknown_source_says_what_there_is() -> None:
    with pytest.raises(InvalidWorkload, match=r"workload must be a file or one of .*tenant-flood"):
        workload_of("no-such-thing", Wish())


# What is made of it


def record(
    arrival_s: float, *token_times_s: float, level: int = 0, num_output: int = 3, **more: object
) -> RequestRecord:
    made = RequestRecord(Arrival(0, arrival_s, 5, num_output, level), sent_s=arrival_s + 0.001)
    for time_s in token_times_s:
        made.got_tokens(1, time_s)
        made.token_times_s.append(time_s)
    made.ended_s = token_times_s[-1] if token_times_s else None
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_latencies_are_from_the_intended_start() -> None:
    late = record(1.0, 3.0, 3.1, 3.3, sent_s=2.9)
    summary = summarise(Run("r", end_s=4.0, records=[late])).total
    assert summary.ttft_s.p50 == pytest.approx(2.0)
    assert summary.tpot_s.p50 == pytest.approx(0.15)
    assert summary.e2e_s.p50 == pytest.approx(2.3)
    assert [summary.gap_s.count, summary.gap_s.max] == [2, pytest.approx(0.2)]


def test_tokens_that_came_together_make_one_gap() -> None:
    assert list(gaps_s(record(0.0, 1.0, 1.0, 1.5), 9.0)) == [0.5]


def test_a_request_that_was_given_up_counts_with_its_wait() -> None:
    silent = record(1.0, error="UNFINISHED", ended_s=11.0)
    halfway = record(1.0, 2.0, error="UNFINISHED", ended_s=11.0)
    refused = record(1.0, error="QUEUE_FULL", ended_s=1.1)
    summary = summarise(Run("r", end_s=11.0, records=[silent, halfway, refused]))
    assert [summary.total.ttft_s.count, summary.total.ttft_s.max] == [2, 10.0]
    assert summary.total.e2e_s.p50 == 10.0
    assert summary.total.gap_s.max == 9.0
    assert (summary.total.num_failed, summary.total.num_unfinished, summary.total.num_served) == (3, 2, 0)
    assert summary.errors == {"UNFINISHED": 2, "QUEUE_FULL": 1}


def test_classes_rates_and_goodput_add_up() -> None:
    records = [record(n, n + 0.5, n + 0.6, n + 0.7, level=-10) for n in range(10)]
    records += [record(n, n + 2.0, n + 2.1, n + 2.2, level=10) for n in range(10)]
    records += [record(9.0, level=10, error="QUEUE_FULL", ended_s=9.5)]
    summary = summarise(Run("r", end_s=12.0, records=records), targets={"batch": Target(ttft_s=1.0)})
    assert [c.name for c in summary.classes] == ["interactive", "batch"]
    assert [c.num_good for c in (*summary.classes, summary.total)] == [10, 0, 10]
    assert summary.total.offered_rps == pytest.approx(21 / 9)
    assert summary.total.achieved_rps == pytest.approx(20 / 11.2)
    assert summary.total.output_tokens_per_s == pytest.approx(60 / 11.2)
    assert summary.as_json()["classes"][0]["ttft_s"]["p50"] == pytest.approx(0.5)


@pytest.mark.parametrize(("late_s", "late"), [(0.001, False), (0.02, True)])
def test_it_says_when_it_was_late_itself(late_s: float, late: bool) -> None:
    state = LoadState()
    for n in range(100):
        state.records.append(record(float(n), n + 0.5, sent_s=n + late_s))
    run = Run("r", records=state.records, figures=state.own_lateness())
    assert summarise(run).late is late
    assert summarise(run).lateness_s["send"]["p50"] == pytest.approx(late_s)


def test_a_failure_counts_once_and_usage_is_kept() -> None:
    state = LoadState()
    one, other = (state.due(Arrival(n, 0.0, 5, 2)) for n in range(2))
    state.got(one, 1, 0.5)
    state.got(one, 1, 0.7)
    state.finished(one, Finished("LENGTH", Usage(preemptions=2, cached_tokens=3, queued_s=0.25)), 0.8)
    state.failed(one, "UNFINISHED", "too late to matter", 0.9)
    state.failed(other, "QUEUE_FULL", "full", 0.1)
    state.failed(other, "UNFINISHED", "again", 0.2)
    assert (one.reason, one.error, one.num_preemptions, one.num_cached_tokens) == ("length", None, 2, 3)
    assert (one.ended_s, one.queued_s, one.token_times_s) == (0.8, 0.25, [0.5, 0.7])
    assert state.errors == {"QUEUE_FULL": 1}
    assert (state.num_tokens, state.num_finished) == (2, 1)


# What is refused


@pytest.mark.parametrize("field", ["num_connections", "num_sessions", "max_in_flight", "drain_s", "sample_s"])
def test_options_out_of_range_are_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: must be between"):
        LoadOptions(**{field: -1})


def test_tenants_that_share_an_identity_are_known() -> None:
    workload = Workload("w", tuple(Arrival(n, 0.0, 1, 1, tenant=t) for n, t in enumerate(("a", "b", ""))))
    assert tenants_without_token(workload, {"a": "secret"}) == ["b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), "rate must be greater than 0, got 0.0"),
        (("nowhere.toml",), "workload must be a file or one of"),
        (("--classes", "urgent=1"), "classes must be one of interactive"),
        (("--output-tokens", "many"), "output_tokens must be N"),
        (("--connections", "0"), "num_connections: must be between 1 and 256"),
        (("--target-latency", "urgent=1"), "target must name one of"),
        (("--tenant-token", "a=NOT_SET_ANYWHERE"), "tenant-token must be TENANT=VARIABLE"),
        (("--json", "/no/such/folder/x.json"), "/no/such/folder/x.json can't be written"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["load", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("vorrangctl: ")
    assert message in result.stderr
