"""What tests of real, tiny models share. Nothing heavy is imported before a test asks for it."""

import pytest


@pytest.fixture
def kernels_restored():
    """One thread, and afterwards the kernels that were active before."""
    from kernels import ops, registry

    before = registry.active_name()
    ops.set_num_threads(1)
    yield
    registry.use(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny random Llama checkpoint; not to be written to."""
    from tests.support.models import tiny_llama

    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama(folder)
    return folder
