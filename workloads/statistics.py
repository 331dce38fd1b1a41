"""What records mean: latencies by class, goodput, attainment. Pure functions.

- TTFT: intended start to first token. TPOT: (last - first token) / (tokens - 1), of
  outputs of two tokens and more. E2E: intended start to last token. Seconds.
- Goodput: requests per second that were served whole and met all targets of their class.
- Stall: the time between two tokens of one request.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workloads.classes import LEVELS, class_of
from workloads.errors import InvalidWorkload
from workloads.records import RequestRecord


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
    """Intended start to first token; None without one."""
    return None if record.first_token_s is None else record.first_token_s - record.request.arrival_s


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first; None with fewer than two."""
    if record.first_token_s is None or record.last_token_s is None or record.num_output_tokens < 2:
        return None
    return (record.last_token_s - record.first_token_s) / (record.num_output_tokens - 1)


def e2e_s(record: RequestRecord) -> float | None:
    """Intended start to last token; None unless it was served whole."""
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


def class_reports(
    records: Iterable[RequestRecord], targets: Mapping[str, Target], makespan_s: float
) -> tuple[ClassReport, ...]:
    """How each class fared, most urgent first; only those that had requests.

    Args:
        records: of one run.
        targets: by class name; a class that has none wants nothing.
        makespan_s: what goodput is a rate over.
    """
    of_class: dict[str, list[RequestRecord]] = {name: [] for name in LEVELS}
    for record in records:
        of_class[class_of(record.request.level)].append(record)
    return tuple(
        _class_report(name, members, targets.get(name, Target()), makespan_s)
        for name, members in of_class.items()
        if members
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
        attainment=per(num_good, len(records)),
        goodput_rps=per(num_good, makespan_s),
        num_preemptions=sum(record.num_preemptions for record in records),
        longest_stall_s=max(record.longest_stall_s for record in records),
        ttft_s=distribution(v for r in records if (v := ttft_s(r)) is not None),
        tpot_s=distribution(v for r in records if (v := tpot_s(r)) is not None),
        e2e_s=distribution(v for r in records if (v := e2e_s(r)) is not None),
    )


def parse_target(text: str) -> tuple[str, Target]:
    """Read ``CLASS=TTFT_S/TPOT_S``, such as ``interactive=1/0.05``; either may be empty.

    Raises:
        InvalidWorkload: it is not of that form, names no class, or is not above 0.
    """
    name, _, values = text.partition("=")
    first, _, each = values.partition("/")
    if name not in LEVELS:
        raise InvalidWorkload("target", f"must name one of {', '.join(LEVELS)}", text)
    try:
        target = Target(float(first or math.inf), float(each or math.inf))
    except ValueError:
        raise InvalidWorkload("target", "must be CLASS=TTFT_S/TPOT_S", text) from None
    if not all(seconds > 0 for seconds in (target.ttft_s, target.tpot_s)):
        raise InvalidWorkload("target", "must be of seconds greater than 0", text)
    return name, target


def per(amount: float, total: float) -> float:
    """``amount / total``; 0 when there is no total."""
    return amount / total if total else 0.0
