"""Penalties and biases of single logits, in place, before a token is chosen.

``x + bias`` first. For a token that came up in prompt or output then ``x /
repetition`` where ``x > 0``, else ``x * repetition``. Source: Keskar et al.,
"CTRL", 2019, section 4.1. Then ``x - presence - count * frequency`` for one that
came up ``count > 0`` times in the output (the OpenAI API's definition).

The pairs of row and id are unique, so no two places of a program, and no two
programs, write the same logit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.aot import AotEntry
from kernels.interface import LogitAdjustments

BLOCK_PAIRS = 256
NUM_WARPS = 4
#: Nothing is loaded in a loop.
NUM_STAGES = 1


@triton.jit(do_not_specialize=["num_pairs", "vocab"])
def adjust_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    num_pairs: tl.tensor,
    vocab: tl.tensor,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    """``BLOCK_PAIRS`` pairs."""
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    is_pair = pair < num_pairs
    row = tl.load(rows_ptr + pair, mask=is_pair, other=0)
    place = row * vocab + tl.load(token_ids_ptr + pair, mask=is_pair, other=0)
    seen = tl.load(seen_ptr + pair, mask=is_pair, other=0) != 0
    count = tl.load(counts_ptr + pair, mask=is_pair, other=0)
    bias = tl.load(bias_ptr + pair, mask=is_pair, other=0.0)
    repetition = tl.load(repetition_ptr + row, mask=is_pair, other=1.0)
    presence = tl.load(presence_ptr + row, mask=is_pair, other=0.0)
    frequency = tl.load(frequency_ptr + row, mask=is_pair, other=0.0)
    logit = tl.load(logits_ptr + place, mask=is_pair, other=0.0) + bias
    repeated = tl.where(logit > 0, logit / repetition, logit * repetition)
    logit = tl.where(seen | (count > 0), repeated, logit)
    logit = tl.where(count > 0, logit - presence - count.to(tl.float32) * frequency, logit)
    tl.store(logits_ptr + place, logit, mask=is_pair)


def adjust_logits(logits: Tensor, adjustments: LogitAdjustments) -> None:
    """Penalise and bias in place; see ``kernels.interface.LogitAdjustments``.

    Args:
        logits: ``[R, vocab]`` float32, contiguous.
        adjustments: on any device.
    """
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    num_pairs = adjustments.rows.shape[0]
    if num_pairs == 0:
        return
    columns = (
        adjustments.rows,
        adjustments.token_ids,
        adjustments.in_prompt,
        adjustments.output_counts,
        adjustments.bias,
        adjustments.repetition,
        adjustments.presence,
        adjustments.frequency,
    )
    adjust_kernel[(triton.cdiv(num_pairs, BLOCK_PAIRS),)](
        logits,
        *(column.to(logits.device, non_blocking=True) for column in columns),
        num_pairs,
        logits.shape[1],
        BLOCK_PAIRS=BLOCK_PAIRS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def aot_entries() -> list[AotEntry]:
    """There is one."""
    pointers = {
        "logits_ptr": "fp32",
        "rows_ptr": "i64",
        "token_ids_ptr": "i64",
        "seen_ptr": "i1",
        "counts_ptr": "i64",
        "bias_ptr": "fp32",
        "repetition_ptr": "fp32",
        "presence_ptr": "fp32",
        "frequency_ptr": "fp32",
    }
    return [
        AotEntry(
            kernel="kernels.gpu.adjust_logits:adjust_kernel",
            case="any",
            arguments=(
                *((pointer, f"*{name}") for pointer, name in pointers.items()),
                ("num_pairs", "i32"),
                ("vocab", "i32"),
            ),
            constants=(("BLOCK_PAIRS", BLOCK_PAIRS),),
            divisible=tuple(pointers),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
    ]
