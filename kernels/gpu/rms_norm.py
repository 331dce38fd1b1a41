"""Root mean square norm, alone or with the residual add before it.

``y = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension. Source:
Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

Everything between load and store is float32, the multiplication by ``weight``
included, so a result is rounded once. A row is reduced by one program in one
fixed tree: its bits depend on the row and its width alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.aot import AotEntry
from kernels.gpu.device import TYPE_NAMES
from kernels.gpu.units import UNITS, unit_of

#: Widest row; one program holds it in registers.
COLUMNS_MAX = 16384
#: Widest row that is no multiple of 16; a wider one would not fit the registers.
ODD_COLUMNS_MAX = 8192
#: Nothing is loaded in a loop.
NUM_STAGES = 1


@dataclass(frozen=True, slots=True)
class Config:
    """How a width is computed.

    Attributes:
        block_columns: columns a program holds, a power of two.
        rows: rows a program computes, so that narrow ones (heads) fill it.
        num_warps: warps of a program.
    """

    block_columns: int
    rows: int
    num_warps: int


#: By the smallest ``block_columns`` that holds a row.
CONFIGS: tuple[Config, ...] = (
    Config(64, 16, 4),
    Config(128, 8, 4),
    Config(256, 4, 4),
    Config(512, 2, 4),
    Config(1024, 1, 4),
    Config(2048, 1, 4),
    Config(4096, 1, 8),
    Config(8192, 1, 8),
    Config(16384, 1, 16),
)


def config_for(num_columns: int) -> Config:
    """The configuration for rows of ``num_columns``.

    Raises:
        ValueError: rows are wider than ``COLUMNS_MAX``, or ``ODD_COLUMNS_MAX`` where that holds.
    """
    if num_columns > COLUMNS_MAX:
        raise ValueError(f"rms_norm columns must be at most {COLUMNS_MAX}, got {num_columns}")
    if num_columns > ODD_COLUMNS_MAX and num_columns % 16:
        raise ValueError(
            f"rms_norm columns must be a multiple of 16 above {ODD_COLUMNS_MAX}, got {num_columns}"
        )
    return next(config for config in CONFIGS if num_columns <= config.block_columns)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "x_stride_token", "x_stride_head", "num_columns"])
def rms_norm_kernel(
    out_ptr: tl.tensor,
    total_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    x_stride_token: tl.tensor,
    x_stride_head: tl.tensor,
    num_columns: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """``ROWS`` rows; row ``r`` is head ``r % num_heads`` of token ``r // num_heads``.

    ``out``, ``total`` and ``residual`` are contiguous; ``x`` has a stride for tokens and one for heads.
    With ``ADD``, ``total = x + residual``, rounded to its dtype, is what is normed. Width and strides
    count ``UNIT`` elements.
    """
    x_stride_token, x_stride_head = x_stride_token * UNIT, x_stride_head * UNIT
    num_columns = num_columns * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    token, head = row // num_heads, row % num_heads
    value = tl.load(x_ptr + token * x_stride_token + head * x_stride_head + column, mask=inside, other=0.0)
    value = value.to(tl.float32)
    flat = row * num_columns + column
    if ADD:
        value += tl.load(residual_ptr + flat, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + flat, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean = tl.sum(value * value, axis=1) / num_columns
    scale = 1.0 / tl.sqrt(mean + eps)
    gain = tl.load(weight_ptr + column, mask=column < num_columns, other=0.0)
    normed = value * scale[:, None] * gain
    tl.store(out_ptr + flat, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each row, or of each head.

    Args:
        x: ``[T, hidden]`` or ``[T, H, D]``, any floating point dtype; the last dimension without gaps.
        weight: ``[hidden]`` or ``[D]`` float32.
        eps: added to the mean square.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: see ``config_for``.
    """
    assert x.stride(-1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    _launch(
        out, out, x, out, weight, eps, heads=heads, head_stride=x.stride(1) if heads > 1 else 0, add=False
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` and its norm: ``(norm, s)``.

    Args:
        x: ``[T, hidden]``, contiguous.
        residual: ``[T, hidden]``, contiguous; overwritten by the sum, rounded to its dtype.
        weight: ``[hidden]`` float32.
        eps: added to the mean square.

    Returns:
        The norm in the dtype of ``x``, and ``residual``. Invariant: the norm has the bits of
        ``rms_norm(s)`` where both have one dtype.
    """
    assert x.is_contiguous()
    assert residual.is_contiguous()
    assert x.shape == residual.shape
    out = torch.empty_like(x)
    _launch(out, residual, x, residual, weight, eps, heads=1, head_stride=0, add=True)
    return out, residual


def _launch(
    out: Tensor,
    total: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    heads: int,
    head_stride: int,
    add: bool,
) -> None:
    num_columns = x.shape[-1]
    assert weight.shape == (num_columns,)
    assert weight.is_contiguous()
    assert weight.dtype is torch.float32
    config = config_for(num_columns)
    num_rows = x.shape[0] * heads
    if num_rows == 0:
        return
    unit = unit_of(num_columns, x.stride(0), head_stride)
    assert unit > 1 or num_columns <= ODD_COLUMNS_MAX
    rms_norm_kernel[(triton.cdiv(num_rows, config.rows),)](
        out,
        total,
        x,
        residual,
        weight,
        num_rows,
        heads,
        x.stride(0) // unit,
        head_stride // unit,
        num_columns // unit,
        eps,
        ADD=add,
        UNIT=unit,
        ROWS=config.rows,
        BLOCK_COLUMNS=config.block_columns,
        num_warps=config.num_warps,
        num_stages=NUM_STAGES,
    )


def aot_entries() -> list[AotEntry]:
    """Every width, data type and unit, with and without the residual add."""
    return [
        _aot_entry(config, name, unit, add)
        for config in CONFIGS
        for name in TYPE_NAMES.values()
        for unit in UNITS
        for add in (False, True)
        if unit > 1 or config.block_columns <= ODD_COLUMNS_MAX
    ]


def _aot_entry(config: Config, name: str, unit: int, add: bool) -> AotEntry:
    pointers = ("out_ptr", "total_ptr", "x_ptr", "residual_ptr")
    integers = ("num_rows", "num_heads", "x_stride_token", "x_stride_head", "num_columns")
    return AotEntry(
        kernel="kernels.gpu.rms_norm:rms_norm_kernel",
        case=f"{name}, up to {config.block_columns} columns, unit {unit}{', add' if add else ''}",
        arguments=(
            *((pointer, f"*{name}") for pointer in pointers),
            ("weight_ptr", "*fp32"),
            *((integer, "i32") for integer in integers),
            ("eps", "fp32"),
        ),
        constants=(
            ("ADD", add),
            ("UNIT", unit),
            ("ROWS", config.rows),
            ("BLOCK_COLUMNS", config.block_columns),
        ),
        divisible=(*pointers, "weight_ptr"),
        num_warps=config.num_warps,
        num_stages=NUM_STAGES,
    )
