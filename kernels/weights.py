"""What the weight types do to the values of a matrix, whichever implementation packs it."""

import torch
from torch import Tensor

from kernels.interface import WeightType

DTYPES: dict[WeightType, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def rounded(weight: Tensor, weight_type: WeightType) -> Tensor:
    """``weight`` in the floating point dtype of ``weight_type``; itself where it has it already."""
    return weight.to(DTYPES[weight_type])


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers and one scale a row: ``integers * scale`` is near ``weight``, by half a scale at most.

    Symmetric, so that zero stays zero; a row of zeros has scale 1.

    Args:
        weight: ``[n_out, n_in]``, floating point.

    Returns:
        ``[n_out, n_in]`` int8 within -127..127 and ``[n_out]`` float32.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    scales[scales == 0] = 1.0
    return (wide / scales.unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8), scales


#: Largest finite e4m3 number.
FP8_MAX = 448.0


def quantised_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 numbers and one scale a row: ``numbers * scale`` is near ``weight``.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022. A row of zeros has scale 1.

    Args:
        weight: ``[n_out, n_in]``, floating point.

    Returns:
        ``[n_out, n_in]`` float8_e4m3fn, all finite, and ``[n_out]`` float32.
    """
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / FP8_MAX
    scales[scales == 0] = 1.0
    return (wide / scales.unsqueeze(1)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales
