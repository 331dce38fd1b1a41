"""One thread for all kernel tests: small operations on two lose far more than they win beside other work.

Tests of one implementation import its module; what goes through ``ops`` runs on
the reference here.
"""

import pytest

from kernels import cpu_build, ops, registry

# Not on a broken source: that must fail, not be passed over.
if cpu_build.capability() not in cpu_build.TARGETS or cpu_build._compiler() is None:
    collect_ignore_glob = ["test_cpu_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    ops.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _reference():
    before = registry.active_name()
    registry.use("reference")
    yield
    registry.use(before)
