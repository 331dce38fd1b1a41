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
