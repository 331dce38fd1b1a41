"""How many threads a process gets by itself: no more than cores it may use, or its control groups grant."""

import os

import pytest
import torch

from engine.runner import cores


@pytest.fixture
def groups(tmp_path):
    """Writes the files of control groups; the quota they make."""

    def quota(membership, **files):
        (tmp_path / "self").write_text(membership)
        for path, text in files.items():
            file = tmp_path / "fs" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return cores.cpu_quota(tmp_path / "fs", tmp_path / "self")

    return quota


@pytest.mark.parametrize(
    ("membership", "files", "granted"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3.0),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "300000 100000"}, 1.0),
        ("0::/../../other\n", {"cpu.max": "50000 100000"}, 0.5),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000"}, 4.0),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("0::/\n", {"cpu.max": "100000 0"}, None),
        (
            "4:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        ("1:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2.0),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("1:memory:/\n0::/s\n", {"unified/s/cpu.max": "300000 100000"}, 3.0),
    ],
)
def test_the_tightest_quota_counts(membership, files, granted, groups):
    assert groups(membership, **files) == granted


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert cores.cpu_quota(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("torch_threads", "affinity", "quota", "threads"),
    [(8, 8, None, 8), (8, 2, None, 2), (8, 8, 3.9, 3), (8, 8, 0.5, 1), (1, 8, 4.0, 1), (4, 8, 16.0, 4)],
)
def test_the_default_is_the_least_of_all(torch_threads, affinity, quota, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)

    assert cores.default_threads() == threads
