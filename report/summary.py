"""A run boiled down to what a report shows: figures by class, curves, a few hundred samples."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from timeline.printable import printable
from workloads.classes import LEVELS, class_of
from workloads.records import RequestRecord, Run, Sample
from workloads.statistics import (
    TARGETS,
    ClassReport,
    Target,
    class_reports,
    e2e_s,
    per,
    percentile,
    tpot_s,
    ttft_s,
)

#: Points of a curve: the values at so many even shares from 0 to 1.
NUM_POINTS = 201
#: Samples that are kept of a run.
NUM_SAMPLES = 400
QUANTITIES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft": ttft_s,
    "tpot": tpot_s,
    "e2e": e2e_s,
}
#: Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run.

    Attributes:
        name: the configuration that was tried, such as a policy.
        offered_rps: mean arrivals a second.
        seed: of the workload.
        makespan_s: from the start of the run to the end of the last thing.
        num_requests: that arrived.
        num_served: of those, served whole.
        output_tokens_per_s: over the makespan.
        goodput_rps: requests served whole within all targets of their class, over the makespan.
        attainment: share of all requests that were.
        num_preemptions: in all.
        recompute_tax: tokens computed again by all computed; None: not known.
        errors: requests that failed, by the error's name.
        classes: most urgent first; only those that had requests.
        curves: class -> quantity (``ttft``, ``tpot``, ``e2e``) -> seconds at ``NUM_POINTS`` shares.
        samples: by time.
    """

    name: str
    offered_rps: float
    seed: int
    makespan_s: float
    num_requests: int
    num_served: int
    output_tokens_per_s: float
    goodput_rps: float
    attainment: float
    num_preemptions: int
    recompute_tax: float | None
    errors: Mapping[str, int]
    classes: tuple[ClassReport, ...]
    curves: Mapping[str, Mapping[str, tuple[float, ...]]] = field(repr=False)
    samples: tuple[Sample, ...] = field(default=(), repr=False)

    def of_class(self, name: str) -> ClassReport | None:
        """How one class fared; None when it had no requests."""
        return next((part for part in self.classes if part.name == name), None)


def summarise(run: Run, targets: Mapping[str, Target] = TARGETS) -> RunSummary:
    """Boil a run down.

    Args:
        run: with its records. ``figures["num_computed_tokens"]`` and ``["num_recomputed_tokens"]``
            make the recompute tax; without them it is made of the records' own counts.
        targets: by class name; a class that has none wants nothing.
    """
    records = run.records
    end_s = max([run.end_s, *(r.last_token_s for r in records if r.last_token_s is not None)])
    classes = class_reports(records, targets, end_s)
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    num_good = sum(part.num_good for part in classes)
    return RunSummary(
        name=printable(run.name),
        offered_rps=run.offered_rps
        or per(len(records), max((r.request.arrival_s for r in records), default=0)),
        seed=run.seed,
        makespan_s=end_s,
        num_requests=len(records),
        num_served=sum(part.num_served for part in classes),
        output_tokens_per_s=per(sum(r.num_output_tokens for r in records), end_s),
        goodput_rps=per(num_good, end_s),
        attainment=per(num_good, len(records)),
        num_preemptions=sum(r.num_preemptions for r in records),
        recompute_tax=_recompute_tax(run),
        errors=errors,
        classes=classes,
        curves=_curves(records),
        samples=tuple(_thinned(run.samples)),
    )


def _recompute_tax(run: Run) -> float | None:
    if "num_computed_tokens" in run.figures:
        return per(run.figures.get("num_recomputed_tokens", 0.0), run.figures["num_computed_tokens"])
    again = sum(r.num_recomputed_tokens for r in run.records)
    served = [r for r in run.records if r.num_output_tokens]
    # Every token but the last of an output goes through the model once, less what the cache had.
    once = sum(r.request.num_prompt_tokens - r.num_cached_tokens + r.num_output_tokens - 1 for r in served)
    return per(again, once + again) if served else None


def _curves(records: Iterable[RequestRecord]) -> dict[str, dict[str, tuple[float, ...]]]:
    values: dict[str, dict[str, list[float]]] = {name: {q: [] for q in QUANTITIES} for name in LEVELS}
    for record in records:
        of_class = values[class_of(record.request.level)]
        for quantity, measure in QUANTITIES.items():
            value = measure(record)
            if value is not None:
                of_class[quantity].append(value)
    return {
        name: {quantity: _curve(sorted(seen)) for quantity, seen in of_class.items() if seen}
        for name, of_class in values.items()
        if any(of_class.values())
    }


def _curve(ordered: Sequence[float]) -> tuple[float, ...]:
    return tuple(percentile(ordered, i / (NUM_POINTS - 1)) for i in range(NUM_POINTS))


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    every = -(-len(samples) // NUM_SAMPLES) or 1
    return samples[::every]


@dataclass(frozen=True, slots=True)
class Band:
    """A mean over runs that differ in their seed alone, and its 95 % confidence interval (Student's t).

    With a single run there is no interval: ``low`` and ``high`` are the value itself.
    """

    mean: float
    low: float
    high: float


def band(
    values: Sequence[float], *, least: float = 0.0, most: float = math.inf, in_logarithms: bool = False
) -> Band | None:
    """Mean and interval, cut to what is possible; None without values.

    Args:
        values: one for each seed.
        least: no value can be below.
        most: no value can be above.
        in_logarithms: of the logarithms, as suits what spans magnitudes; the mean is geometric.
    """
    if not values:
        return None
    if in_logarithms and min(values) > 0:
        found = band([math.log(value) for value in values], least=-math.inf)
        assert found is not None
        return Band(math.exp(found.mean), math.exp(found.low), math.exp(found.high))
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Band(mean, mean, mean)
    degrees = len(values) - 1
    quantile = _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.5 / degrees
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Band(mean, max(least, mean - half), min(most, mean + half))


def names_of(summaries: Iterable[RunSummary]) -> list[str]:
    """Configurations in the order in which they first appear."""
    return list(dict.fromkeys(summary.name for summary in summaries))


def rates_of(summaries: Iterable[RunSummary]) -> list[float]:
    """Offered rates, lowest first; those within 2 % of each other are one."""
    rates: list[float] = []
    for rate in sorted({summary.offered_rps for summary in summaries}):
        if not rates or rate > 1.02 * rates[-1]:
            rates.append(rate)
    return rates


def at(summaries: Iterable[RunSummary], name: str, rate: float) -> list[RunSummary]:
    """Runs of one configuration at one of ``rates_of``, one for each seed."""
    return [s for s in summaries if s.name == name and rate <= s.offered_rps <= 1.02 * rate]


def classes_of(summaries: Iterable[RunSummary]) -> list[str]:
    """Classes that any run had, most urgent first."""
    seen = {part.name for summary in summaries for part in summary.classes}
    return [name for name in LEVELS if name in seen]


def pooled_curve(summaries: Iterable[RunSummary], class_name: str, quantity: str) -> tuple[float, ...]:
    """The curve of all of these runs together; empty when none has one."""
    curves = [s.curves.get(class_name, {}).get(quantity, ()) for s in summaries]
    values = sorted(value for curve in curves for value in curve)
    return _curve(values) if values else ()
