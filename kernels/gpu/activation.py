"""Gated activations: ``silu(gate) * up`` and ``gelu(gate) * up`` over rows ``[gate, up]``.

``silu(x) = x * sigmoid(x)``. Source: Shazeer, "GLU Variants Improve
Transformer", 2020. ``gelu(x) = x * Phi(x)`` with the normal distribution
function, or its approximation by ``tanh``. Source: Hendrycks and Gimpel,
"Gaussian Error Linear Units", 2016.

Float32 between load and store; each element by itself.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.aot import AotEntry
from kernels.gpu.device import TYPE_NAMES
from kernels.gpu.units import UNITS, unit_of

Kind = Literal["silu", "gelu", "gelu_tanh"]
KINDS: tuple[Kind, ...] = ("silu", "gelu", "gelu_tanh")

#: Columns of a program; one row of an MLP takes a few programs.
BLOCK_COLUMNS = 1024
NUM_WARPS = 4
#: Nothing is loaded in a loop.
NUM_STAGES = 1


@triton.jit(do_not_specialize=["num_columns"])
def gated_kernel(
    out_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    num_columns: tl.tensor,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """``BLOCK_COLUMNS`` results of one row; ``num_columns`` counts ``UNIT`` results of a row."""
    num_columns = num_columns * UNIT
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = column < num_columns
    gate_ptr = gate_up_ptr + row * 2 * num_columns
    gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + num_columns + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        activated = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # (1 + tanh(z)) / 2 is sigmoid(2 z), which needs no tanh; 2 * sqrt(2 / pi) = 1.5957691216057308.
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    product = activated * up
    tl.store(out_ptr + row * num_columns + column, product.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``[T, 2 * n]``, gate then up, contiguous, to ``[T, n]`` of the same dtype."""
    return _gated(gate_up, "silu")


def gelu_mul(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """``[T, 2 * n]``, gate then up, contiguous, to ``[T, n]`` of the same dtype."""
    return _gated(gate_up, "gelu_tanh" if tanh else "gelu")


def _gated(gate_up: Tensor, kind: Kind) -> Tensor:
    assert gate_up.is_contiguous()
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    unit = unit_of(num_columns)
    gated_kernel[(num_rows, triton.cdiv(num_columns, BLOCK_COLUMNS))](
        out,
        gate_up,
        num_columns // unit,
        KIND=kind,
        UNIT=unit,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out


def aot_entries() -> list[AotEntry]:
    """Every activation, data type and unit."""
    return [
        AotEntry(
            kernel="kernels.gpu.activation:gated_kernel",
            case=f"{name}, {kind}, unit {unit}",
            arguments=(("out_ptr", f"*{name}"), ("gate_up_ptr", f"*{name}"), ("num_columns", "i32")),
            constants=(("KIND", kind), ("UNIT", unit), ("BLOCK_COLUMNS", BLOCK_COLUMNS)),
            divisible=("out_ptr", "gate_up_ptr"),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        for kind in KINDS
        for name in TYPE_NAMES.values()
        for unit in UNITS
    ]
