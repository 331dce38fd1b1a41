"""``x @ weight.T + bias`` in tiles, for weights in floating point, int8 or fp8.

Integers and fp8 become the dtype of ``x`` on the way to the tensor cores,
without loss, and the scale of a row of the weight multiplies the finished sum.
Sums are float32.

The tile is the transposed product: rows of the weight are the left operand and
tokens the right one, so that a converted weight stays in registers where the
hardware takes its left operand from there, and a few tokens do not fill a tile
of 64. Source: the swap of operands is common in kernels for small batches; the
order of programs, which keeps a weight in the cache while all tokens pass, is
that of Triton's matrix multiplication tutorial.

One program computes the whole sum of its results, in steps of ``BLOCK_INPUTS``
from the first input to the last. So with one ``Config`` the bits of
a row depend on that row and the weight alone, whatever is beside it: that is
the batch-invariant mode. It takes for granted that a tensor core treats the
columns of a tile alike. Source: He et al., "Defeating Nondeterminism in LLM
Inference", 2025.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.aot import AotEntry
from kernels.gpu.device import INTERPRETING, TYPE_NAMES, TargetName, target_of
from kernels.gpu.units import UNITS, unit_of

#: What the elements of a weight are to the kernel; ``fp8`` is e4m3 in bytes.
WeightKind = Literal["float", "int8", "fp8"]
KINDS: tuple[WeightKind, ...] = ("float", "int8", "fp8")

#: Tiles of the weight that are computed for all tokens before the next ones are begun.
GROUP_OUTPUT_TILES = 8


@dataclass(frozen=True, slots=True)
class Config:
    """A tile.

    Attributes:
        tokens: rows of ``x``.
        outputs: rows of the weight.
        inputs: elements of the sum in one step.
        num_warps: warps of a program.
        num_stages: steps whose loads are under way at once.
    """

    tokens: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Table:
    """The tiles of one architecture. None of them was timed on a card yet.

    Attributes:
        fixed: the one tile of the batch-invariant mode.
        by_tokens: for up to ``tokens`` tokens each; the last one also for more.
        odd: for sums whose length is no multiple of 16, in every mode: narrow loads take more registers.
        float32: products of float32, without tensor cores: for tests, and models kept in float32.
    """

    fixed: Config
    by_tokens: tuple[Config, ...]
    odd: Config
    float32: Config


_NVIDIA = Table(
    fixed=Config(64, 64, 64, 4, 3),
    by_tokens=(Config(16, 64, 128, 4, 3), Config(64, 64, 64, 4, 3), Config(128, 128, 64, 8, 3)),
    odd=Config(32, 64, 32, 4, 2),
    float32=Config(32, 32, 32, 4, 2),
)
TABLES: dict[TargetName, Table] = {
    "sm_80": _NVIDIA,
    "sm_90": _NVIDIA,
    "sm_100": _NVIDIA,
    "gfx942": Table(
        fixed=Config(64, 64, 64, 4, 2),
        by_tokens=(Config(16, 64, 128, 4, 2), Config(64, 64, 64, 4, 2), Config(128, 128, 64, 8, 2)),
        odd=Config(32, 64, 32, 4, 2),
        float32=Config(32, 32, 32, 4, 2),
    ),
}


def config_for(target: TargetName, num_tokens: int, dtype: torch.dtype, unit: int, *, fixed: bool) -> Config:
    """The tile for this many tokens; the same for any number where it is ``fixed``."""
    table = TABLES[target]
    if dtype is torch.float32:
        return table.float32
    if unit == 1:
        return table.odd
    if fixed:
        return table.fixed
    return next((c for c in table.by_tokens if num_tokens <= c.tokens), table.by_tokens[-1])


@triton.jit
def _fp8_to_fp16(byte: tl.tensor) -> tl.tensor:
    """The value of an e4m3 byte; never called with the two bytes that mean "no number".

    Its bits in the place of float16's are the value times 2**-8, for the exponent's bias is smaller by 8;
    numbers too small for a full exponent work out as well.
    """
    bits = byte.to(tl.int16)
    halved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return halved.to(tl.float16, bitcast=True) * 256.0


@triton.jit(do_not_specialize=["num_tokens", "num_outputs", "num_inputs", "x_stride", "has_bias"])
def linear_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    has_bias: tl.tensor,
    KIND: tl.constexpr,
    UPCAST: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
) -> None:
    """One tile of ``out [tokens, outputs]``. ``num_inputs`` and ``x_stride`` count ``UNIT`` elements.

    ``weight`` is ``[outputs, inputs]`` without gaps. ``UPCAST`` multiplies in float32, which the
    interpreter needs for bfloat16.
    """
    num_inputs, x_stride = num_inputs * UNIT, x_stride * UNIT
    output_tiles, token_tiles = tl.cdiv(num_outputs, BLOCK_OUTPUTS), tl.cdiv(num_tokens, BLOCK_TOKENS)
    group_programs = GROUP * token_tiles
    first_tile = tl.program_id(0) // group_programs * GROUP
    group_tiles = tl.minimum(output_tiles - first_tile, GROUP)
    within = tl.program_id(0) % group_programs
    output = (first_tile + within % group_tiles) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    token = within // group_tiles * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    step = tl.arange(0, BLOCK_INPUTS)
    is_output, is_token = output < num_outputs, token < num_tokens
    weight_row_ptr = weight_ptr + output.to(tl.int64)[:, None] * num_inputs
    x_row_ptr = x_ptr + token.to(tl.int64)[None, :] * x_stride
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), dtype=tl.float32)
    for begin in range(0, num_inputs, BLOCK_INPUTS):
        place = begin + step
        is_input = place < num_inputs
        left = tl.load(weight_row_ptr + place[None, :], mask=is_output[:, None] & is_input[None, :], other=0)
        right = tl.load(x_row_ptr + place[:, None], mask=is_input[:, None] & is_token[None, :], other=0.0)
        if KIND == "fp8":
            left = _fp8_to_fp16(left)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        elif KIND == "int8":
            left = left.to(dtype)
        elif KIND == "fp8":
            left = left.to(tl.float32).to(dtype)
        total = tl.dot(left, right, total, input_precision="ieee")
    if KIND != "float":
        total *= tl.load(scales_ptr + output, mask=is_output, other=0.0)[:, None]
    if has_bias != 0:
        total += tl.load(bias_ptr + output, mask=is_output, other=0.0)[:, None]
    place = token.to(tl.int64)[None, :] * num_outputs + output[:, None]
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, rounded, mask=is_output[:, None] & is_token[None, :])


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    fixed: bool,
) -> Tensor:
    """The product, in tiles.

    Args:
        x: ``[T, n_in]`` of one of ``TYPE_NAMES``, the last dimension without gaps.
        weight: ``[n_out, n_in]`` contiguous: the dtype of ``x``, int8, or uint8 with e4m3 in it.
        scales: ``[n_out]`` float32 for int8 and fp8, else None.
        bias: ``[n_out]`` float32 or None.
        out_dtype: dtype of ``x`` or float32.
        fixed: use the one tile that makes a row's bits independent of ``T``.

    Returns:
        ``[T, n_out]``, contiguous.
    """
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0]
    assert x.stride(1) == 1
    assert weight.shape == (num_outputs, num_inputs)
    assert weight.is_contiguous()
    assert out_dtype in (x.dtype, torch.float32)
    kind = _kind(x, weight, scales)
    out = torch.empty((num_tokens, num_outputs), dtype=out_dtype, device=x.device)
    if num_tokens == 0:
        return out
    unit = unit_of(num_inputs, x.stride(0))
    config = config_for(target_of(x), num_tokens, x.dtype, unit, fixed=fixed)
    num_programs = triton.cdiv(num_tokens, config.tokens) * triton.cdiv(num_outputs, config.outputs)
    linear_kernel[(num_programs,)](
        out,
        x,
        weight,
        _nothing(x.device) if scales is None else scales,
        _nothing(x.device) if bias is None else bias,
        num_tokens,
        num_outputs,
        num_inputs // unit,
        x.stride(0) // unit,
        int(bias is not None),
        KIND=kind,
        UPCAST=INTERPRETING,
        UNIT=unit,
        GROUP=GROUP_OUTPUT_TILES,
        BLOCK_TOKENS=config.tokens,
        BLOCK_OUTPUTS=config.outputs,
        BLOCK_INPUTS=config.inputs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    """Stands in where there are no scales or no bias, so that types, and so the kernel, stay the same."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def _kind(x: Tensor, weight: Tensor, scales: Tensor | None) -> WeightKind:
    kinds: dict[torch.dtype, WeightKind] = {x.dtype: "float", torch.int8: "int8", torch.uint8: "fp8"}
    kind = kinds[weight.dtype]
    assert (scales is None) is (kind == "float")
    return kind


def aot_entries() -> list[AotEntry]:
    """What ``linear`` picks for what ``implementation`` asks of it.

    Weights in floating point come here in the batch-invariant mode, or for results in float32 (logits);
    else torch multiplies them.
    """
    return [
        _aot_entry(target, config, kind, name, out_name, unit)
        for target, table in TABLES.items()
        for name in TYPE_NAMES.values()
        for unit in UNITS
        for config in _configs(table, name, unit)
        for kind in KINDS
        for out_name in dict.fromkeys((name, "fp32"))
        if kind != "float" or out_name == "fp32" or config in (table.fixed, table.odd)
    ]


def _configs(table: Table, name: str, unit: int) -> tuple[Config, ...]:
    if name == "fp32":
        return (table.float32,)
    return (table.odd,) if unit == 1 else tuple(dict.fromkeys((table.fixed, *table.by_tokens)))


def _aot_entry(
    target: TargetName, config: Config, kind: WeightKind, name: str, out_name: str, unit: int
) -> AotEntry:
    weight_name = {"float": name, "int8": "i8", "fp8": "u8"}[kind]
    integers = ("num_tokens", "num_outputs", "num_inputs", "x_stride", "has_bias")
    pointers = {
        "out_ptr": out_name,
        "x_ptr": name,
        "weight_ptr": weight_name,
        "scales_ptr": "fp32",
        "bias_ptr": "fp32",
    }
    tile = f"{config.tokens}x{config.outputs}x{config.inputs}"
    return AotEntry(
        kernel="kernels.gpu.linear:linear_kernel",
        case=f"{kind} weight, {name} to {out_name}, tile {tile}, unit {unit}",
        arguments=(
            *((pointer, f"*{type_name}") for pointer, type_name in pointers.items()),
            *((integer, "i32") for integer in integers),
        ),
        constants=(
            ("KIND", kind),
            ("UPCAST", False),
            ("UNIT", unit),
            ("GROUP", GROUP_OUTPUT_TILES),
            ("BLOCK_TOKENS", config.tokens),
            ("BLOCK_OUTPUTS", config.outputs),
            ("BLOCK_INPUTS", config.inputs),
        ),
        divisible=tuple(pointers),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        targets=(target,),
        needs_wgmma=name != "fp32",
    )
