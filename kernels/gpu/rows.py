"""What kernels over rows of logits share: the argmax of a row. No launcher of its own.

One program reads a whole row in blocks. Each place of the block keeps its own
best, and the places are compared at the end, so ids of one place come in order
and the first of equal values stays.
"""

import triton
import triton.language as tl

#: Larger than any id.
NO_ID: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def best_of(values: tl.tensor, ids: tl.tensor) -> tl.tuple:
    """The largest value and, of its ids, the lowest."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, NO_ID), axis=0)


@triton.jit
def row_argmax(row_ptr: tl.tensor, vocab: tl.tensor, NEGATIVE: tl.constexpr, BLOCK: tl.constexpr) -> tl.tuple:
    """The largest logit, the lowest id that has it, and how many logits are not finite.

    With ``NEGATIVE`` minus infinity counts as finite: it marks ids that are banned. Numbers that are
    none are passed over; the id is ``NO_ID`` where nothing else is left.
    """
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), NO_ID, tl.int32)
    strange = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < vocab
        logit = tl.load(row_ptr + token, mask=inside, other=float("-inf"))
        finite = logit < float("inf")
        if not NEGATIVE:
            finite = finite & (logit > float("-inf"))
        strange += (inside & (finite == 0)).to(tl.int32)
        better = inside & (logit > best)
        best, best_id = tl.where(better, logit, best), tl.where(better, token, best_id)
    top, top_id = best_of(best, best_id)
    return top, top_id, tl.sum(strange, axis=0)
