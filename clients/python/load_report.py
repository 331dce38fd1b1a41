"""What a run of the load generator means: latencies by class, rates, errors. Pure.

Every latency is measured from the intended start of its request. A request that
never got what is measured counts with the time it had waited in vain when the run
ended, so that a server that answers nobody does not look quick; such figures are
lower bounds, and ``num_unfinished`` says how many went in.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from workloads.classes import LEVELS, class_of
from workloads.records import RequestRecord, Run
from workloads.statistics import (
    Distribution,
    Target,
    distribution,
    e2e_s,
    is_good,
    is_served,
    per,
    tpot_s,
    ttft_s,
)

#: Errors of the generator's own making: the request was waited for until then, in vain.
_GIVEN_UP = ("UNFINISHED",)
#: The generator was late itself, when it was by more than this for one request in a hundred.
LATE_S = 0.005


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """How one class fared. Times in seconds, from the intended start.

    Attributes:
        name: of the class; ``all`` for all of them.
        num_requests: that were due.
        num_served: of those, served whole.
        num_failed: of those, refused, failed or given up.
        num_unfinished: of those, given up before they had ended.
        num_good: of those, served whole within the targets of their class; None without targets.
        offered_rps: requests due in a second.
        achieved_rps: requests served whole in a second.
        output_tokens_per_s: output tokens in a second.
        num_preemptions: of its requests.
        num_recomputed_tokens: tokens computed again for them.
        ttft_s: intended start to first token.
        tpot_s: mean time per token after the first, for each request.
        gap_s: time between two arrivals of output of one request; tokens that come together are one.
        e2e_s: intended start to last token, of those served whole.
    """

    name: str
    num_requests: int
    num_served: int
    num_failed: int
    num_unfinished: int
    num_good: int | None
    offered_rps: float
    achieved_rps: float
    output_tokens_per_s: float
    num_preemptions: int
    num_recomputed_tokens: int
    ttft_s: Distribution
    tpot_s: Distribution
    gap_s: Distribution
    e2e_s: Distribution


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """What a run means.

    Attributes:
        workload: its name.
        server: what served.
        seed: of the workload.
        command: that made it.
        duration_s: over which requests were due.
        makespan_s: from the start to the last end.
        num_due: requests that were due.
        num_sent: of those, handed to the transport.
        classes: most urgent first; only those that had requests.
        total: all classes together.
        errors: requests that failed, by reason.
        messages: one message for each reason.
        lateness_s: the generator's own: ``send`` (intended start to transport) and ``loop`` (how late
            its event loop came round), each p50, p99 and max.
        late: it was late enough for its own lateness to matter.
        interrupted: it was stopped before its end.
    """

    workload: str
    server: str
    seed: int
    command: str
    duration_s: float
    makespan_s: float
    num_due: int
    num_sent: int
    classes: tuple[ClassSummary, ...]
    total: ClassSummary
    errors: dict[str, int]
    messages: dict[str, str]
    lateness_s: dict[str, dict[str, float]]
    late: bool
    interrupted: bool
    versions: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def summarise(
    run: Run, *, targets: Mapping[str, Target] | None = None, interrupted: bool = False
) -> LoadSummary:
    """What a run means.

    Args:
        run: as ``run_load`` returned it.
        targets: by class name; None = goodput is not asked for.
        interrupted: it was stopped before its end.
    """
    records = run.records
    duration_s = max((r.request.arrival_s for r in records), default=0.0)
    makespan_s = max((r.ended_s for r in records if r.ended_s is not None), default=0.0)
    of_class: dict[str, list[RequestRecord]] = {name: [] for name in LEVELS}
    for record in records:
        of_class[class_of(record.request.level)].append(record)

    def summary(name: str, members: list[RequestRecord]) -> ClassSummary:
        return _class_summary(name, members, targets, duration_s, makespan_s, run.end_s)

    errors = Counter(r.error for r in records if r.error is not None)
    lateness_s = {
        name: {key: run.figures.get(f"{figure}_{key}", 0.0) for key in ("p50", "p99", "max")}
        for name, figure in (("send", "send_lateness_s"), ("loop", "loop_lag_s"))
    }
    return LoadSummary(
        workload=run.workload,
        server=run.server,
        seed=run.seed,
        command=run.command,
        duration_s=duration_s,
        makespan_s=makespan_s,
        num_due=len(records),
        num_sent=sum(r.sent_s is not None for r in records),
        classes=tuple(summary(name, members) for name, members in of_class.items() if members),
        total=summary("all", records),
        errors=dict(errors.most_common()),
        messages={r.error: r.error_message for r in reversed(records) if r.error is not None},
        lateness_s=lateness_s,
        late=max(lateness_s["send"]["p99"], lateness_s["loop"]["p99"]) > LATE_S,
        interrupted=interrupted,
        versions=run.versions,
    )


def _class_summary(
    name: str,
    records: list[RequestRecord],
    targets: Mapping[str, Target] | None,
    duration_s: float,
    makespan_s: float,
    end_s: float,
) -> ClassSummary:
    num_served = sum(map(is_served, records))
    good = None
    if targets is not None:
        good = sum(is_good(r, targets.get(class_of(r.request.level), Target())) for r in records)
    return ClassSummary(
        name=name,
        num_requests=len(records),
        num_served=num_served,
        num_failed=sum(r.error is not None for r in records),
        num_unfinished=sum(r.error in _GIVEN_UP for r in records),
        num_good=good,
        offered_rps=per(len(records), duration_s),
        achieved_rps=per(num_served, makespan_s),
        output_tokens_per_s=per(sum(r.num_output_tokens for r in records), makespan_s),
        num_preemptions=sum(r.num_preemptions for r in records),
        num_recomputed_tokens=sum(r.num_recomputed_tokens for r in records),
        ttft_s=distribution(_with_waits(records, end_s, ttft_s)),
        tpot_s=distribution(v for r in records if (v := tpot_s(r)) is not None),
        gap_s=distribution(gap for r in records for gap in gaps_s(r, end_s)),
        e2e_s=distribution(_with_waits(records, end_s, e2e_s)),
    )


def _with_waits(records: Iterable[RequestRecord], end_s: float, value_of: Any) -> Iterable[float]:
    """Values, and for requests that were given up the time they had waited for one."""
    for record in records:
        value = value_of(record)
        if value is not None:
            yield value
        elif record.error in _GIVEN_UP:
            yield max(0.0, (record.ended_s or end_s) - record.request.arrival_s)


def gaps_s(record: RequestRecord, end_s: float) -> Iterable[float]:
    """Times between two arrivals of output; one that was given up waits for its next until then."""
    times_s = record.token_times_s
    for before_s, after_s in pairwise(times_s):
        if after_s > before_s:
            yield after_s - before_s
    if record.error in _GIVEN_UP and times_s:
        yield max(0.0, (record.ended_s or end_s) - times_s[-1])
