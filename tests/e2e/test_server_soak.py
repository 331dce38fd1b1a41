"""A short soak with books; ``make soak-server`` is the long one, with the default model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import HANGS_S, ROOT, environment


@pytest.mark.slow
@pytest.mark.parametrize(
    "minutes", [0.15, pytest.param(3.0, marks=[pytest.mark.deep, pytest.mark.timeout(600)])]
)
def test_every_accepted_request_ends_once_whatever_is_done_to_it(minutes: float, tmp_path: Path) -> None:
    flags = [
        "--model",
        "scripted",
        "--minutes",
        str(minutes),
        "--kill-every-s",
        "2.5",
        "--retention-s",
        "0.5",
    ]
    command = [sys.executable, "bench/soak.py", *flags, "--folder", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=minutes * 60 + HANGS_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    books = json.loads((tmp_path / "soak.json").read_text())
    assert books["accepted"] > 30
    assert books["kills"] >= 1
    assert books["num_problems"] == 0
    kinds = {"started", "delta", "preempted", "resumed", "output_finished", "finished", "failed"}
    assert kinds <= books["events"].keys()
