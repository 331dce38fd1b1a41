"""What the demo's runs are worth: statistics by class, and the verdict. Pure functions."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

#: How many times sooner the first interactive token must come under `priority`.
SPEEDUP_MIN = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request of the workload ended.

    Attributes:
        name: the same in every run, such as "batch-3".
        class_name: "batch" or "interactive".
        token_ids: its output.
        text: its output.
        finish_reason: as the server gave it; empty when it did not finish.
        error: why it did not finish; empty when it did.
        ttft_s: time to the first token; None when there was none.
        tpot_s: mean time between tokens after the first, preempted time included.
        ended_at_s: when it ended, from the start of the run.
        preemptions: how often it was preempted.
        recomputed_tokens: tokens computed again.
    """

    name: str
    class_name: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    ended_at_s: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The workload under one policy."""

    policy: str
    outcomes: tuple[Outcome, ...]

    def of_class(self, class_name: str) -> list[Outcome]:
        """The outcomes of one class."""
        return [outcome for outcome in self.outcomes if outcome.class_name == class_name]


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class under one policy; times in seconds, None where nothing was measured."""

    policy: str
    class_name: str
    num_requests: int
    ttft_s_median: float | None
    ttft_s_max: float | None
    tpot_s_median: float | None
    preemptions: int
    recomputed_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """One thing the demo promises, and whether it held."""

    passed: bool
    text: str


def summarize(run: PolicyRun, class_name: str) -> ClassSummary:
    """Statistics of one class; its duration is the time until its last request ended."""
    outcomes = run.of_class(class_name)
    ttfts = _known(outcome.ttft_s for outcome in outcomes)
    tpots = _known(outcome.tpot_s for outcome in outcomes)
    return ClassSummary(
        policy=run.policy,
        class_name=class_name,
        num_requests=len(outcomes),
        ttft_s_median=median(ttfts) if ttfts else None,
        ttft_s_max=max(ttfts, default=None),
        tpot_s_median=median(tpots) if tpots else None,
        preemptions=sum(outcome.preemptions for outcome in outcomes),
        recomputed_tokens=sum(outcome.recomputed_tokens for outcome in outcomes),
        duration_s=max((outcome.ended_at_s for outcome in outcomes), default=0.0),
    )


def speedup(priority: PolicyRun, fcfs: PolicyRun) -> float | None:
    """Interactive median TTFT under fcfs by that under priority; None when one was not measured."""
    slow = summarize(fcfs, "interactive").ttft_s_median
    fast = summarize(priority, "interactive").ttft_s_median
    return slow / fast if slow is not None and fast else None


def differing(priority: PolicyRun, fcfs: PolicyRun) -> list[str]:
    """Names of requests whose token ids or text are not the same in both runs, or that one run lacks."""
    left = {o.name: (o.token_ids, o.text) for o in priority.outcomes}
    right = {o.name: (o.token_ids, o.text) for o in fcfs.outcomes}
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def verdict(priority: PolicyRun, fcfs: PolicyRun) -> list[Check]:
    """What the demo promises, checked against what happened."""
    unfinished = [o.name for run in (priority, fcfs) for o in run.outcomes if not o.finish_reason or o.error]
    num_streams = len(priority.outcomes) + len(fcfs.outcomes)
    preempted = [o for o in priority.outcomes if o.preemptions]
    times = sum(o.preemptions for o in preempted)
    changed = differing(priority, fcfs)
    ratio = speedup(priority, fcfs)
    return [
        Check(
            num_streams > 0 and not unfinished,
            f"{num_streams - len(unfinished)} of {num_streams} streams ended with `finished`"
            + _listed(unfinished),
        ),
        Check(times > 0, f"{len(preempted)} streams were preempted under priority, {times} times in all"),
        Check(
            not changed,
            f"{len(preempted)} preempted and {len(priority.outcomes) - len(preempted)} other outputs "
            "are token for token those of fcfs"
            if not changed
            else f"outputs differ between the policies{_listed(changed)}",
        ),
        Check(
            ratio is not None and ratio >= SPEEDUP_MIN,
            "the median interactive TTFT was not measured"
            if ratio is None
            else f"interactive requests saw their first token {ratio:.0f} times sooner (median TTFT, "
            f"at least {SPEEDUP_MIN:.0f} wanted)",
        ),
    ]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _listed(names: list[str]) -> str:
    return f": {', '.join(names)}" if names else ""
