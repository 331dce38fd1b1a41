"""How many threads this process can keep busy: cores it may run on, and what its control groups grant."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

_CGROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def default_threads() -> int:
    """Threads of one operation where nobody chose: torch's choice, or what this process may use if less.

    A part of a core makes no thread: with 1.5 cores two threads use up the quota before its period
    ends, and then both stand still until the next.
    """
    quota = cpu_quota()
    counts = [torch.get_num_threads(), len(os.sched_getaffinity(0))]
    if quota is not None:
        counts.append(int(quota))
    return max(1, min(counts))


def cpu_quota(cgroups: Path | None = None, membership: Path | None = None) -> float | None:
    """Cores that the control groups of this process grant it, the tightest of them; None = no limit.

    Args:
        cgroups: where they are mounted.
        membership: says which are ours, a line a hierarchy: ``number:controllers:path``.
    """
    cgroups, membership = cgroups or _CGROUPS, membership or _MEMBERSHIP
    granted = []
    for controllers, path in _groups(membership):
        if not controllers:  # version 2; beside version 1 it is mounted in a folder of its own
            mounts, read = (cgroups, cgroups / "unified"), _quota_v2
        elif "cpu" in controllers.split(","):
            mounts, read = (cgroups / controllers, cgroups / "cpu"), _quota_v1
        else:
            continue
        for mount in mounts:
            granted += [quota for folder in _upwards(mount, path) if (quota := read(folder)) is not None]
    return min(granted, default=None)


def _groups(membership: Path) -> Iterator[tuple[str, str]]:
    """Controllers and path of each hierarchy."""
    try:
        lines = membership.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield controllers, path


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Folders from a group to the mount; in a container the path may be one that only the host sees."""
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:
        parts = ()
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else _cores(int(quota), int(period))
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return _cores(quota, int((folder / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        return None


def _cores(quota_us: int, period_us: int) -> float | None:
    """None where either is no limit: version 1 says -1."""
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None
