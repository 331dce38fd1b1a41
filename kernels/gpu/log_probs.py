"""What rows of logits say: the likeliest id, log probabilities, and the likeliest few.

``log p(i) = x_i - lse``, ``lse = max + log(sum(exp(x - max)))``. The contracts
are those of ``kernels.ops.argmax``, ``log_sum_exp`` and ``log_probs``. One program
computes one row in one order, so a row's bits depend on that row alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.aot import AotEntry
from kernels.gpu.rows import NO_ID, best_of, row_argmax
from kernels.gpu.units import UNITS, unit_of
from kernels.interface import LogProbs

#: Logits a program reads at a time.
BLOCK = 4096
NUM_WARPS = 8
#: The loops over a row hold no matrix product, which alone is pipelined.
NUM_STAGES = 1


@triton.jit(do_not_specialize=["vocab"])
def argmax_kernel(
    out_ptr: tl.tensor, logits_ptr: tl.tensor, vocab: tl.tensor, UNIT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One row; ``vocab`` counts ``UNIT`` logits."""
    vocab = vocab * UNIT
    row = tl.program_id(0).to(tl.int64)
    top_id = row_argmax(logits_ptr + row * vocab, vocab, True, BLOCK)[1]
    tl.store(out_ptr + row, tl.minimum(top_id, vocab - 1).to(tl.int64))


@triton.jit
def _log_sum_exp(row_ptr: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    top = row_argmax(row_ptr, vocab, True, BLOCK)[0]
    sums = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
        sums += tl.exp(logit - top)
    return top + tl.log(tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["vocab"])
def log_sum_exp_kernel(
    out_ptr: tl.tensor, logits_ptr: tl.tensor, vocab: tl.tensor, UNIT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One row; ``vocab`` counts ``UNIT`` logits."""
    vocab = vocab * UNIT
    row = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + row, _log_sum_exp(logits_ptr + row * vocab, vocab, BLOCK))


@triton.jit(do_not_specialize=["vocab", "num_top"])
def log_probs_kernel(
    chosen_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    top_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    vocab: tl.tensor,
    num_top: tl.tensor,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row; ``vocab`` counts ``UNIT`` logits. Each of the likeliest is a pass over the row."""
    vocab = vocab * UNIT
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocab
    total = _log_sum_exp(row_ptr, vocab, BLOCK)
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row))
    tl.store(chosen_ptr + row, chosen - total)
    last = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int32)
    for place in range(num_top):
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_id = tl.full((BLOCK,), NO_ID, tl.int32)
        for begin in range(0, vocab, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            logit = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
            after = (logit < last) | ((logit == last) & (token > last_id))
            # The first clause lets minus infinity in, where nothing larger is left. What fills up a block
            # is minus infinity as well, and comes after every id there is.
            better = after & ((best_id == NO_ID) | (logit > best))
            best, best_id = tl.where(better, logit, best), tl.where(better, token, best_id)
        last, last_id = best_of(best, best_id)
        tl.store(top_ids_ptr + row * num_top + place, tl.minimum(last_id, vocab - 1).to(tl.int64))
        tl.store(top_ptr + row * num_top + place, last - total)


def argmax(logits: Tensor) -> Tensor:
    """The likeliest id of each row, the lowest on ties: ``[R, vocab]`` float32 to ``[R]`` int64.

    Without meaning, but an id that exists, where a row holds what is no number.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _launch(argmax_kernel, (out, logits), logits)
    return out


def log_sum_exp(logits: Tensor) -> Tensor:
    """``log(sum(exp(row)))``: ``[R, vocab]`` float32 to ``[R]`` float32."""
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _launch(log_sum_exp_kernel, (out, logits), logits)
    return out


def log_probs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogProbs:
    """Log probabilities of one id a row and of the likeliest ones; see ``kernels.ops.log_probs``."""
    num_rows = logits.shape[0]
    assert token_ids.shape == (num_rows,)
    assert 0 <= num_top <= logits.shape[1]
    device = logits.device
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    top = torch.empty((num_rows, num_top), dtype=torch.float32, device=device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
    _launch(log_probs_kernel, (chosen, top_ids, top, logits, token_ids), logits, num_top)
    return LogProbs(chosen, top_ids, top)


def _launch(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], logits: Tensor, *more: int) -> None:
    """A program for each row; ``more`` comes after the size of the vocabulary."""
    num_rows, vocab = logits.shape
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    if num_rows == 0:
        return
    unit = unit_of(vocab)
    kernel[(num_rows,)](
        *tensors, vocab // unit, *more, UNIT=unit, BLOCK=BLOCK, num_warps=NUM_WARPS, num_stages=NUM_STAGES
    )


def aot_entries() -> list[AotEntry]:
    """The three kernels, each in both units."""
    pointers = {
        "argmax_kernel": (("out_ptr", "*i64"), ("logits_ptr", "*fp32")),
        "log_sum_exp_kernel": (("out_ptr", "*fp32"), ("logits_ptr", "*fp32")),
        "log_probs_kernel": (
            ("chosen_ptr", "*fp32"),
            ("top_ids_ptr", "*i64"),
            ("top_ptr", "*fp32"),
            ("logits_ptr", "*fp32"),
            ("token_ids_ptr", "*i64"),
        ),
    }
    return [
        AotEntry(
            kernel=f"kernels.gpu.log_probs:{name}",
            case=f"unit {unit}",
            arguments=(
                *arguments,
                ("vocab", "i32"),
                *((("num_top", "i32"),) if name == "log_probs_kernel" else ()),
            ),
            constants=(("UNIT", unit), ("BLOCK", BLOCK)),
            divisible=tuple(pointer for pointer, _ in arguments),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        for name, arguments in pointers.items()
        for unit in UNITS
    ]
