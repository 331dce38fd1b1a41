"""The Triton kernels against the reference: on a card, or on CPU under Triton's interpreter.

Whether kernels are interpreted is decided when triton is imported, so these
tests run in a process of their own with ``TRITON_INTERPRET=1``, which
``make test-kernels`` starts (and ``make test`` with it). Without that and
without a card they are not collected. The interpreter takes 10 to 15 ms for
each inner iteration of a program: keep a test below 50 of them.
"""

import os

import numpy as np
import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETING and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header():
    if INTERPRETING:
        return "kernels/gpu: interpreted, on CPU"
    return (
        "kernels/gpu: on a card" if torch.cuda.is_available() else "kernels/gpu: left out, see its conftest"
    )


@pytest.fixture(scope="session")
def device():
    """Where the kernels under test run."""
    return torch.device("cpu" if INTERPRETING else "cuda")


@pytest.fixture
def rows_of_products_stand_alone(monkeypatch):
    """Under the interpreter, a row of a matrix product depends on that row alone.

    It calls numpy's ``matmul``, whose BLAS adds in an order that depends on where in
    the matrix a row is; tests that compare bits would see that instead of the kernel.
    """
    if not INTERPRETING:
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.einsum("ik,kj->ij", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def nothing_is_written_past_the_end(monkeypatch):
    """What launchers allocate is followed by guards, which must be intact when the test ends."""
    allocate = torch.empty
    guarded = []

    def with_guard(*shape, **options):
        size = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        whole = allocate(size.numel() + 256, **options).fill_(77)
        guarded.append(whole[size.numel() :])
        return whole[: size.numel()].view(size)

    monkeypatch.setattr(torch, "empty", with_guard)
    yield
    assert guarded
    assert all(bool((guard == 77).all()) for guard in guarded)


@pytest.fixture
def programs_run_backwards(monkeypatch):
    """The interpreter takes a grid's programs from the last to the first: order must not matter."""
    if not INTERPRETING:
        return
    from triton.runtime import interpreter

    forwards = interpreter.InterpreterBuilder.set_grid_idx

    def backwards(self, *place):
        forwards(self, *(size - 1 - at for size, at in zip(self.grid_dim, place, strict=True)))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", backwards)
