"""The library made of ``cpu.cpp``, its functions, and what is handed to them.

Importing builds the library where the cache has none, and raises
``CpuKernelsUnavailable`` where that cannot be done.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels import cpu_build
from kernels.interface import WeightType

#: Numbers of the weight types, as in ``cpu.cpp``.
TYPES: dict[WeightType, int] = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3}

_library = cpu_build.load()
_KINDS: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


def function(name: str, *arguments: str, result: Any = None) -> Any:
    """A function of the library by what it takes: ``p`` pointer, ``i`` int64, ``f`` float."""
    found = getattr(_library, f"vorrang_{name}")
    found.argtypes = [_KINDS[kind] for kind in "".join(arguments)]
    found.restype = result
    return found


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor lies; None for none."""
    return None if tensor is None else tensor.data_ptr()


def is_plain(tensor: Tensor) -> bool:
    """Whether it is float32 without gaps, as the functions take it."""
    return tensor.dtype is torch.float32 and tensor.is_contiguous()
