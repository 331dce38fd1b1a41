"""Whether the Triton kernels can run here, and why not.

Knows nothing of the kernels. Imports torch and triton late: the server's process
meets the error below without either.
"""

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kernels import private_folder

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
    _check_cache()
    return torch.device("cuda")


def _check_cache() -> None:
    """Triton runs what it finds in its cache; a folder that can't be made is Triton's own to report.

    Raises:
        TritonKernelsUnavailable: others may write there.
    """
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    try:
        private_folder.made(folder)
    except private_folder.UntrustedPath as error:
        raise TritonKernelsUnavailable(
            f"kernels triton: cache folder {folder} cannot be used: {error}"
        ) from error
    except OSError:
        return


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
