"""Which card this is, and whether there is one at all: what launchers pick their configurations by."""

from typing import Literal

import torch
import triton
from torch import Tensor

#: Architectures that configurations exist for and kernels are compiled for in tests.
TargetName = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
TARGETS: tuple[TargetName, ...] = ("sm_80", "sm_90", "sm_100", "gfx942")

#: Triton's interpreter runs the kernels, on CPU tensors. Decided when triton is imported.
INTERPRETING: bool = bool(triton.knobs.runtime.interpret)

#: How Triton writes the data types that kernels read and write.
TYPE_NAMES: dict[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}

_target_of_device: dict[int, TargetName] = {}


def target_of(tensor: Tensor) -> TargetName:
    """The architecture whose configurations suit the card that ``tensor`` is on.

    Other cards take those of the nearest: Turing-like and consumer ones sm_80's,
    whose kernels stay within 99 KiB of shared memory where that costs nothing.
    The interpreter takes sm_80's.
    """
    if INTERPRETING:
        return "sm_80"
    index = tensor.get_device()
    if index not in _target_of_device:
        _target_of_device[index] = _target(index)
    return _target_of_device[index]


def _target(index: int) -> TargetName:
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(index)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")  # type: ignore[return-value]


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


def check_device(name: str, tensor: Tensor) -> None:
    """A kernel reads memory of a card, or of the CPU under the interpreter.

    Raises:
        ValueError: ``tensor`` is elsewhere.
    """
    wanted = "cpu" if INTERPRETING else "cuda"
    if tensor.device.type != wanted:
        raise ValueError(f"{name} must be on a {wanted} device, got {tensor.device}")
