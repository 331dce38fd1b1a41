"""A simulation as a run, which reports take from wherever it comes."""

from engine.sim.recorder import Recording
from workloads.records import Run


def run_of(name: str, recording: Recording, *, offered_rps: float | None = None, seed: int = 0) -> Run:
    """What a simulation has shown, under the name of its configuration. Times are virtual seconds."""
    return Run(
        name,
        offered_rps=offered_rps,
        seed=seed,
        end_s=recording.end_s,
        figures={
            "num_steps": recording.num_steps,
            "busy_s": recording.busy_s,
            "num_computed_tokens": recording.num_computed_tokens,
            "num_recomputed_tokens": recording.num_recomputed_tokens,
            "num_cached_tokens": recording.num_cached_tokens,
            "num_inversions": recording.num_inversions,
            "inversion_s": recording.inversion_s,
        },
        records=list(recording.records.values()),
        samples=recording.samples,
    )
