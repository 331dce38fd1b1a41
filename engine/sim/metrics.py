"""What a recording means: latencies by class, goodput, stalls, waste. Pure functions.

- TTFT: arrival to first token. TPOT: (last - first token) / (tokens - 1), of
  outputs of two tokens and more. E2E: arrival to last token. Seconds.
- Goodput: requests per second that were served whole and met all targets of their class.
- Recompute tax: tokens computed that had been computed before / all tokens computed.
- Stall: the time between two tokens of one request.
- Inversions: prefill grants to a request while a strictly more urgent one waited.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.priority import CLASSES, class_of
from engine.request import FinishReason
from engine.sim.recorder import Recording, RequestRecord


@dataclass(frozen=True, slots=True)
class Target:
    """What a class wants; infinity: anything will do.

    Attributes:
        ttft_s: longest time to the first token.
        tpot_s: longest time per output token after it.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf


#: For an 8B model: chat reads along and must start at once; standard may take its
#: time; batch merely wants its first token within ten minutes.
TARGETS: Mapping[str, Target] = {
    "interactive": Target(1.0, 0.05),
    "standard": Target(10.0, 0.1),
    "batch": Target(600.0),
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one quantity; all None when it was never seen."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class ClassReport:
    """How one class fared. Times in seconds.

    Attributes:
        name: of the class.
        num_requests: that arrived.
        num_served: of those, served whole.
        num_good: of those, within all targets.
        attainment: ``num_good / num_requests``.
        goodput_rps: ``num_good`` per second of the makespan.
        num_preemptions: of its requests.
        longest_stall_s: of its requests.
    """

    name: str
    num_requests: int
    num_served: int
    num_good: int
    attainment: float
    goodput_rps: float
    num_preemptions: int
    longest_stall_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution


@dataclass(frozen=True, slots=True)
class Report:
    """How one simulation went. Times in virtual seconds.

    Attributes:
        name: of the configuration.
        makespan_s: first arrival to the end of the last step.
        utilization: share of it in which steps ran.
        num_steps: steps made.
        num_requests: that arrived.
        num_served: of those, served whole.
        num_refused: of those, refused or failed.
        num_cut: of those, ended early because the pool could not hold them.
        num_output_tokens: that were made.
        output_tokens_per_s: over the makespan.
        requests_per_s: served whole, over the makespan.
        goodput_rps: served whole within all targets, over the makespan.
        num_preemptions: in all.
        preemptions: by reason.
        num_computed_tokens: prompt and output tokens that went through the model.
        num_recomputed_tokens: of those, not for the first time.
        recompute_tax: the latter by the former.
        num_cached_tokens: prompt tokens found in the prefix cache at first admissions.
        longest_stall_s: of all requests.
        num_inversions: see the module.
        inversion_s: time in which less urgent requests computed while a more urgent one waited.
        classes: most urgent first; only those that had requests.
    """

    name: str
    makespan_s: float
    utilization: float
    num_steps: int
    num_requests: int
    num_served: int
    num_refused: int
    num_cut: int
    num_output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput_rps: float
    num_preemptions: int
    preemptions: dict[str, int]
    num_computed_tokens: int
    num_recomputed_tokens: int
    recompute_tax: float
    num_cached_tokens: int
    longest_stall_s: float
    num_inversions: int
    inversion_s: float
    classes: tuple[ClassReport, ...]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Value below which ``share`` of the sorted values lie, linear between neighbours (numpy's default)."""
    assert ordered
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Iterable[float]) -> Distribution:
    """Mean, percentiles and maximum of values in any order."""
    ordered = sorted(values)
    if not ordered:
        return Distribution(0)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def ttft_s(record: RequestRecord) -> float | None:
    """Arrival to first token; None without one."""
    return None if record.first_token_s is None else record.first_token_s - record.request.arrival_s


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first; None with fewer than two."""
    if record.first_token_s is None or record.last_token_s is None or record.num_output_tokens < 2:
        return None
    return (record.last_token_s - record.first_token_s) / (record.num_output_tokens - 1)


def e2e_s(record: RequestRecord) -> float | None:
    """Arrival to last token; None unless it was served whole."""
    if record.last_token_s is None or not is_served(record):
        return None
    return record.last_token_s - record.request.arrival_s


def is_served(record: RequestRecord) -> bool:
    """Whether it got every token it asked for."""
    return record.num_output_tokens == record.request.num_output_tokens


def is_good(record: RequestRecord, target: Target) -> bool:
    """Whether it was served whole within the target."""
    first, each = ttft_s(record), tpot_s(record)
    in_time = first is not None and first <= target.ttft_s and (each is None or each <= target.tpot_s)
    return is_served(record) and in_time


def report(name: str, recording: Recording, targets: Mapping[str, Target] = TARGETS) -> Report:
    """Sum a recording up.

    Args:
        name: of the configuration.
        recording: a simulation that has ended.
        targets: by class name; a class that has none wants nothing.
    """
    records = list(recording.records.values())
    makespan_s = recording.end_s - min((r.request.arrival_s for r in records), default=0.0)
    of_class: dict[str, list[RequestRecord]] = {c.name: [] for c in CLASSES}
    for record in records:
        of_class[class_of(record.request.level).name].append(record)
    classes = tuple(
        _class_report(class_name, members, targets.get(class_name, Target()), makespan_s)
        for class_name, members in of_class.items()
        if members
    )
    num_served = sum(c.num_served for c in classes)
    num_output_tokens = sum(r.num_output_tokens for r in records)
    return Report(
        name=name,
        makespan_s=makespan_s,
        utilization=_per(recording.busy_s, makespan_s),
        num_steps=recording.num_steps,
        num_requests=len(records),
        num_served=num_served,
        num_refused=sum(r.refused is not None for r in records),
        num_cut=sum(r.ended is FinishReason.CAPACITY for r in records),
        num_output_tokens=num_output_tokens,
        output_tokens_per_s=_per(num_output_tokens, makespan_s),
        requests_per_s=_per(num_served, makespan_s),
        goodput_rps=_per(sum(c.num_good for c in classes), makespan_s),
        num_preemptions=recording.preemptions.total(),
        preemptions={
            reason.value: count
            for reason, count in sorted(recording.preemptions.items(), key=lambda item: item[0].value)
        },
        num_computed_tokens=recording.num_computed_tokens,
        num_recomputed_tokens=recording.num_recomputed_tokens,
        recompute_tax=_per(recording.num_recomputed_tokens, recording.num_computed_tokens),
        num_cached_tokens=recording.num_cached_tokens,
        longest_stall_s=max((r.longest_stall_s for r in records), default=0.0),
        num_inversions=recording.num_inversions,
        inversion_s=recording.inversion_s,
        classes=classes,
    )


def _class_report(
    name: str, records: Sequence[RequestRecord], target: Target, makespan_s: float
) -> ClassReport:
    num_good = sum(is_good(record, target) for record in records)
    return ClassReport(
        name=name,
        num_requests=len(records),
        num_served=sum(map(is_served, records)),
        num_good=num_good,
        attainment=_per(num_good, len(records)),
        goodput_rps=_per(num_good, makespan_s),
        num_preemptions=sum(record.num_preemptions for record in records),
        longest_stall_s=max(record.longest_stall_s for record in records),
        ttft_s=distribution(v for r in records if (v := ttft_s(r)) is not None),
        tpot_s=distribution(v for r in records if (v := tpot_s(r)) is not None),
        e2e_s=distribution(v for r in records if (v := e2e_s(r)) is not None),
    )


def parse_target(text: str) -> tuple[str, Target]:
    """Read ``CLASS=TTFT_S/TPOT_S``, such as ``interactive=1/0.05``; either may be empty.

    Raises:
        InvalidRequest: it is not of that form, or names no class.
    """
    name, _, values = text.partition("=")
    first, _, each = values.partition("/")
    if name not in {c.name for c in CLASSES}:
        raise InvalidRequest("target", f"must name one of {', '.join(c.name for c in CLASSES)}", text)
    try:
        return name, Target(float(first or math.inf), float(each or math.inf))
    except ValueError:
        raise InvalidRequest("target", "must be CLASS=TTFT_S/TPOT_S", text) from None


def _per(amount: float, total: float) -> float:
    return amount / total if total else 0.0
