"""Finds a workload by what somebody wrote: a ready one, a mix, a workload file or a trace."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from workloads.arrivals import Workload
from workloads.errors import InvalidWorkload
from workloads.files import read_workload
from workloads.mixes import MIXES, synthetic
from workloads.traces import read_trace

#: Shares of a trace's requests, which has no classes of its own.
TRACE_CLASSES: Mapping[str, float] = {"interactive": 0.2, "batch": 0.8}
#: Seconds of arrivals of a mix, unless said otherwise.
MIX_DURATION_S = 600.0


def ready_workloads() -> dict[str, Path]:
    """The workload files that come with Vorrang, by name."""
    folder = Path(str(resources.files("workloads"))) / "ready"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def workload_from(
    source: str, *, seed: int = 0, duration_s: float | None = None, trace_format: str = "auto"
) -> Workload:
    """Find a workload.

    Args:
        source: name of a ready one (``ready_workloads``) or of a mix (``MIXES``), or a path: a
            workload file when it ends in ``.toml``, else a trace.
        seed: of whatever is drawn.
        duration_s: arrivals end before then; None: where the workload itself says, 600 s for a mix.
        trace_format: of a trace.

    Raises:
        InvalidWorkload: there is none of that name, or it breaks a rule.
        OSError: a file can't be read.
    """
    ready = ready_workloads()
    if source in ready:
        return read_workload(ready[source], seed, duration_s)
    if source in MIXES:
        return synthetic(source, duration_s=duration_s or MIX_DURATION_S, seed=seed)
    path = Path(source)
    if not path.is_file():
        rule = f"must be a file or one of {', '.join((*ready, *MIXES))}"
        raise InvalidWorkload("workload", rule, source)
    if path.suffix == ".toml":
        return read_workload(path, seed, duration_s)
    workload = read_trace(path, trace_format)
    if duration_s is None:
        return workload
    kept = tuple(r for r in workload.requests if r.arrival_s < duration_s)
    return Workload(workload.name, kept)


def is_trace(source: str) -> bool:
    """Whether a source is a trace, which has no classes of its own."""
    return source not in ready_workloads() and source not in MIXES and not source.endswith(".toml")
