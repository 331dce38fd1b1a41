"""For all tests: one thread for each operation, unless a test asks for more, and compiled modules are kept.

Tests run side by side, and two OpenMP threads beside a busy neighbour wait for each
other at every operation: the suite took half as long again. Tests start many programs;
where ``PYTHONDONTWRITEBYTECODE`` is set, as in many containers, every one of them would
compile all our modules anew. No example of Hypothesis fails for being slow. Whatever a
test prints or logs is searched for the secrets that tests plant.
"""

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import canaries

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: "pytest.CallInfo[None]"
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test whose output holds a secret has failed, whatever else it says."""
    report = yield
    found: list[Any] = [(name, place) for name, text in report.sections for place in canaries.leaks(text)]
    if found and report.passed:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: something secret was printed or logged: {found}"
    return report
