"""What a recording means: the figures of ``workloads.statistics`` and what only a simulation knows.

- Recompute tax: tokens computed that had been computed before / all tokens computed.
- Inversions: prefill grants to a request while a strictly more urgent one waited.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.request import FinishReason
from engine.sim.recorder import Recording
from workloads.statistics import TARGETS, ClassReport, Target, class_reports, per


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


def report(name: str, recording: Recording, targets: Mapping[str, Target] = TARGETS) -> Report:
    """Sum a recording up.

    Args:
        name: of the configuration.
        recording: a simulation that has ended.
        targets: by class name; a class that has none wants nothing.
    """
    records = list(recording.records.values())
    first_s = min((r.request.arrival_s for r in records), default=0.0)
    makespan_s = max(0.0, recording.end_s - first_s)  # no step is made when all are refused
    classes = class_reports(records, targets, makespan_s)
    num_served = sum(c.num_served for c in classes)
    num_output_tokens = sum(r.num_output_tokens for r in records)
    return Report(
        name=name,
        makespan_s=makespan_s,
        utilization=per(recording.busy_s, makespan_s),
        num_steps=recording.num_steps,
        num_requests=len(records),
        num_served=num_served,
        num_refused=sum(r.error is not None for r in records),
        num_cut=sum(r.reason == FinishReason.CAPACITY.value for r in records),
        num_output_tokens=num_output_tokens,
        output_tokens_per_s=per(num_output_tokens, makespan_s),
        requests_per_s=per(num_served, makespan_s),
        goodput_rps=per(sum(c.num_good for c in classes), makespan_s),
        num_preemptions=recording.preemptions.total(),
        preemptions={
            reason.value: count
            for reason, count in sorted(recording.preemptions.items(), key=lambda item: item[0].value)
        },
        num_computed_tokens=recording.num_computed_tokens,
        num_recomputed_tokens=recording.num_recomputed_tokens,
        recompute_tax=per(recording.num_recomputed_tokens, recording.num_computed_tokens),
        num_cached_tokens=recording.num_cached_tokens,
        longest_stall_s=max((r.longest_stall_s for r in records), default=0.0),
        num_inversions=recording.num_inversions,
        inversion_s=recording.inversion_s,
        classes=classes,
    )
