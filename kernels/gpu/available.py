"""Whether the Triton kernels can run here, and why not.

Knows nothing of the kernels. Imports torch and triton late: the server's process
meets the error below without either.
"""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class TritonKernelsUnavailable(Exception):
    """There is no GPU for the Triton kernels, or no Triton; the message is for an operator."""


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: ``TRITON_INTERPRET=1``.

    Invariant: what held when the first kernel was imported holds for all of them; Triton decides it then.
    """
    import triton

    return bool(triton.knobs.runtime.interpret)


def device() -> "torch.device":
    """Where the kernels run here.

    Raises:
        TritonKernelsUnavailable: nowhere.
    """
    import torch

    if importlib.util.find_spec("triton") is None:
        raise TritonKernelsUnavailable("kernels triton needs the package triton, which is not installed")
    if interpreting():
        return torch.device("cpu")
    if not torch.cuda.is_available():  # true for ROCm builds of torch as well
        raise TritonKernelsUnavailable("kernels triton needs a GPU, and torch finds none")
    return torch.device("cuda")


def description() -> str:
    """What runs the kernels, in words.

    Raises:
        TritonKernelsUnavailable: nothing does.
    """
    import torch

    where = device()
    if where.type == "cpu":
        return "Triton's interpreter, for tests"
    return f"the GPU {torch.cuda.get_device_name(where)}"
