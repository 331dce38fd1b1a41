"""Metrics for Prometheus: one table of names, and plain numbers behind it.

What happens often is counted in plain lists and dictionaries on the event loop's
thread; Prometheus' own objects are made when somebody scrapes. What merely stands
(queues, seats, blocks) is looked at then, too. Labels are the class at arrival and
the tenant, which comes from the settings alone, so their number is bounded.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from engine.events import Failed, Finished, LevelChanged, Preempted, Resumed, Started
from engine.priority import CLASSES, LEVEL_MAX, LEVEL_MIN, class_of
from engine.request import RequestSpec
from engine.scheduler.plan import Plan
from server.errors import row_of

#: Tenants with a label of their own; all further ones share ``OTHER_TENANTS``.
MAX_TENANT_LABELS = 100
OTHER_TENANTS = "other"

_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 30.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
_BY_TENANT = ("class", "tenant")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without the ``_total`` that Prometheus adds to counters.
        kind: ``counter``, ``gauge`` or ``histogram``.
        text: what it is.
        labels: names of its labels.
        bounds: of a histogram's buckets, rising.
    """

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels)


def _histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", text, labels, bounds)


#: Every metric of this server.
TABLE: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        _gauge("vorrang_requests", "Requests alive, by where they are.", *_BY_TENANT, "state"),
        _gauge("vorrang_seats", "Seats of the running batch."),
        _gauge("vorrang_seats_free", "Seats nobody holds."),
        _gauge("vorrang_kv_blocks", "Blocks of the KV pool."),
        _gauge("vorrang_kv_blocks_free", "KV blocks free, or held by the prefix cache alone."),
        _gauge("vorrang_sessions", "Sessions open."),
        _gauge("vorrang_calls", "Calls open, sessions included."),
        _gauge("vorrang_tasks", "Tasks of the event loop."),
        _gauge("vorrang_serving", "1 while health says SERVING."),
        _gauge("vorrang_draining", "1 while no new requests are taken."),
        _counter("vorrang_requests_accepted", "Requests that were let into the queue.", *_BY_TENANT),
        _counter("vorrang_requests_ended", "Requests that have ended, by reason.", *_BY_TENANT, "reason"),
        _counter("vorrang_refusals", "What was refused, by reason.", "tenant", "reason"),
        _counter("vorrang_prompt_tokens", "Prompt tokens of requests that started.", *_BY_TENANT),
        _counter("vorrang_cached_tokens", "Those of them that were found in the prefix cache.", *_BY_TENANT),
        _counter("vorrang_output_tokens", "Output tokens.", *_BY_TENANT),
        _counter("vorrang_recomputed_tokens", "Tokens computed again after preemptions.", *_BY_TENANT),
        _counter("vorrang_drafted_tokens", "Tokens that were guessed and verified.", *_BY_TENANT),
        _counter("vorrang_accepted_tokens", "Those of them that were right.", *_BY_TENANT),
        _counter("vorrang_preemptions", "Preemptions, by reason.", *_BY_TENANT, "reason"),
        _counter("vorrang_credit_stalls", "Times a request was parked for want of credit.", *_BY_TENANT),
        _counter("vorrang_runner_restarts", "Times the runner was lost and started again."),
        _histogram("vorrang_queue_seconds", "From arrival to the first seat.", _WAITS_S, *_BY_TENANT),
        _histogram("vorrang_ttft_seconds", "From arrival to the first output token.", _WAITS_S, *_BY_TENANT),
        _histogram("vorrang_tpot_seconds", "Time per output token after the first.", _TOKENS_S, *_BY_TENANT),
        _histogram("vorrang_token_gap_seconds", "Between two outputs of a request.", _TOKENS_S, *_BY_TENANT),
        _histogram("vorrang_request_seconds", "From arrival to the end.", _WAITS_S, *_BY_TENANT),
        _histogram("vorrang_step_seconds", "Duration of a step.", _TOKENS_S),
        _histogram(
            "vorrang_step_requests", "Requests computed in a step: prefill or decode.", _SIZES, "kind"
        ),
        _histogram("vorrang_step_tokens", "Tokens computed in a step: prefill or decode.", _SIZES, "kind"),
    )
}

#: Counters that every class and tenant has from its first request on: a rate needs a 0 to start from.
_COUNTERS = [
    name for name, metric in TABLE.items() if metric.kind == "counter" and metric.labels == _BY_TENANT
]

#: Gauges, and counters kept elsewhere, at one moment: by name, then by values of the labels.
Standing = Mapping[str, Mapping[tuple[str, ...], float]]


class Buckets:
    """A histogram: counts by bucket, and a sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Counts of values up to each bound, as Prometheus writes them."""
        counts, result, num = list(self.counts), [], 0
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            num += count
            result.append(("+Inf" if bound == float("inf") else repr(bound), float(num)))
        return result


class _Series:
    """The numbers of one class and tenant."""

    __slots__ = ("counters", "gap", "histograms", "num_output_tokens", "preemptions", "reasons")

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.reasons: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.num_output_tokens = 0
        self.gap = Buckets(_TOKENS_S)
        names = ("vorrang_queue_seconds", "vorrang_ttft_seconds", "vorrang_tpot_seconds")
        self.histograms = {name: Buckets(TABLE[name].bounds) for name in (*names, "vorrang_request_seconds")}
        self.histograms["vorrang_token_gap_seconds"] = self.gap


_CLASS_NAMES = {level: class_of(level).name for level in range(LEVEL_MIN, LEVEL_MAX + 1)}


class Metrics:
    """Counts what the engine and the calls tell; an ``EngineObserver``."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}
        self._by_level: dict[tuple[int, str], _Series] = {}
        self._tenants: set[str] = set()
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._step_s = Buckets(TABLE["vorrang_step_seconds"].bounds)
        self._step = {
            (name, kind): Buckets(TABLE[name].bounds)
            for name in ("vorrang_step_requests", "vorrang_step_tokens")
            for kind in ("prefill", "decode")
        }

    # What is told

    def refused(self, tenant: str, reason: str) -> None:
        """A call, request or command was refused; ``reason`` is one of the error table's."""
        self._refusals[self._label(tenant), reason] += 1

    def credit_stalled(self, spec: RequestSpec) -> None:
        """A request was parked for want of credit."""
        self._of(spec).counters["vorrang_credit_stalls"] += 1

    def submitted(self, spec: RequestSpec) -> None:
        """Count an arrival."""
        self._of(spec).counters["vorrang_requests_accepted"] += 1

    def step_made(self, plan: Plan, duration_s: float) -> None:
        """Count a step, and what it was made of."""
        self._step_s.add(duration_s)
        num_decodes = num_tokens = 0
        for _, _, num_granted, _, output_index in plan.grants:
            num_tokens += num_granted
            if output_index:
                num_decodes += num_granted == 1
        step = self._step
        num_prefills = len(plan.grants) - num_decodes
        step["vorrang_step_requests", "decode"].add(num_decodes)
        step["vorrang_step_requests", "prefill"].add(num_prefills)
        step["vorrang_step_tokens", "decode"].add(num_decodes)
        step["vorrang_step_tokens", "prefill"].add(num_tokens - num_decodes)

    def produced(self, spec: RequestSpec, num_tokens: int, gap_s: float | None) -> None:
        """Count output tokens."""
        series = self._of(spec)
        series.num_output_tokens += num_tokens
        if gap_s is not None:
            series.gap.add(gap_s)

    def happened(self, spec: RequestSpec, event: Started | Preempted | Resumed | LevelChanged) -> None:
        """Count starts, preemptions, resumes."""
        series = self._of(spec)
        match event:
            case Started():
                if not spec.shares_prompt:
                    series.counters["vorrang_prompt_tokens"] += event.num_prompt_tokens
                series.counters["vorrang_cached_tokens"] += event.num_cached_tokens
            case Preempted():
                series.preemptions[event.reason.value] += 1
            case Resumed():
                series.counters["vorrang_recomputed_tokens"] += event.num_recomputed_tokens

    def ended(
        self, spec: RequestSpec, event: Finished | Failed, ttft_s: float | None, total_s: float
    ) -> None:
        """Count an end, and the times of the request."""
        series, usage = self._of(spec), event.usage
        how = event.reason.value if isinstance(event, Finished) else f"failed:{row_of(event.error).reason}"
        series.reasons[how] += 1
        series.histograms["vorrang_request_seconds"].add(total_s)
        series.histograms["vorrang_queue_seconds"].add(usage.queued_s)
        if usage.drafted_tokens:
            series.counters["vorrang_drafted_tokens"] += usage.drafted_tokens
            series.counters["vorrang_accepted_tokens"] += usage.accepted_tokens
        if ttft_s is not None:
            series.histograms["vorrang_ttft_seconds"].add(ttft_s)
            if usage.output_tokens > 1:
                per_token_s = (total_s - ttft_s) / (usage.output_tokens - 1)
                series.histograms["vorrang_tpot_seconds"].add(per_token_s)

    # What is read

    def families(self, standing: Standing) -> Iterator[Family]:
        """All metrics as Prometheus' own; may be called from another thread.

        Args:
            standing: gauges, and counters that are kept elsewhere.
        """
        simple, histograms = self._simple(), self._histograms()
        for name, metric in TABLE.items():
            if metric.kind == "histogram":
                family = HistogramMetricFamily(name, metric.text, labels=metric.labels)
                for labels, buckets in histograms.get(name, ()):
                    family.add_metric(labels, buckets.cumulative(), buckets.total)
                yield family
                continue
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            plain = make(name, metric.text, labels=metric.labels)
            for labels, value in (*standing.get(name, {}).items(), *simple.get(name, {}).items()):
                plain.add_metric(labels, value)
            yield plain

    def refusals(self) -> Counter[tuple[str, str]]:
        """Refusals so far, by tenant and reason."""
        return self._refusals.copy()

    def labels(self) -> set[tuple[str, str]]:
        """Classes and tenants that have had a request, and every class without a tenant."""
        return {*self._series, *((entry.name, "") for entry in CLASSES)}

    def label(self, tenant: str) -> str:
        """The label of a tenant."""
        return self._label(tenant)

    def _simple(self) -> dict[str, dict[tuple[str, ...], float]]:
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for labels, series in tuple(self._series.items()):
            for name, value in tuple(series.counters.items()):
                found.setdefault(name, {})[labels] = value
            found.setdefault("vorrang_output_tokens", {})[labels] = series.num_output_tokens
            for name, counts in (
                ("vorrang_requests_ended", series.reasons),
                ("vorrang_preemptions", series.preemptions),
            ):
                for reason, value in tuple(counts.items()):
                    found.setdefault(name, {})[*labels, reason] = value
        found["vorrang_refusals"] = dict(tuple(self._refusals.items()))
        return found

    def _histograms(self) -> dict[str, list[tuple[tuple[str, ...], Buckets]]]:
        found: dict[str, list[tuple[tuple[str, ...], Buckets]]] = {}
        for labels, series in tuple(self._series.items()):
            for name, buckets in series.histograms.items():
                found.setdefault(name, []).append((labels, buckets))
        found["vorrang_step_seconds"] = [((), self._step_s)]
        for (name, kind), buckets in self._step.items():
            found.setdefault(name, []).append(((kind,), buckets))
        return found

    def _of(self, spec: RequestSpec) -> _Series:
        series = self._by_level.get((spec.level, spec.tenant))
        if series is None:
            labels = (_CLASS_NAMES[spec.level], self._label(spec.tenant))
            series = self._series.setdefault(labels, _Series())
            if spec.tenant in self._tenants:
                self._by_level[spec.level, spec.tenant] = series
        return series

    def _label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANT_LABELS:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant


def by_labels(entries: Iterable[tuple[tuple[str, ...], float]]) -> dict[tuple[str, ...], float]:
    """Values by labels, those of the same labels added up."""
    total: dict[tuple[str, ...], float] = {}
    for labels, value in entries:
        total[labels] = total.get(labels, 0.0) + value
    return total
