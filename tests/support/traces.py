"""Where the traces and calibration data are: beside the project, not in it."""

from pathlib import Path

import pytest

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def trace(name):
    """Path of a trace; skips the test when the data is not there."""
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"the trace {name} is not there: {TRACES} is kept beside the project, not in it")
    return path
