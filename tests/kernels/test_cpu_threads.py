"""Threads that share parts, and how many of them: the C++ header by itself, a process for each case."""

import re
import subprocess
from pathlib import Path

import pytest

from kernels import cpu_build

SOURCE = Path(__file__).with_name("cpu_threads_test.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The cases, compiled."""
    path = tmp_path_factory.mktemp("threads") / "cases"
    compiler = cpu_build._compiler()
    assert compiler is not None
    flags = ("-O2", "-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{cpu_build.HEADER.parent}")
    subprocess.run([compiler, *flags, "-o", path, SOURCE], check=True, timeout=120)
    return path


CASES = re.findall(r'\{"(\w+)", \1\}', SOURCE.read_text())


@pytest.mark.parametrize("case", CASES)
def test_threads(case, program):
    done = subprocess.run([program, case], capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")
