"""A step's inputs as one row of 64-bit words, and decode batches padded to a few sizes. Pure.

One buffer is one transfer to a device and one message to another rank; the other
end makes views of it. Everything here runs on CPU tensors, but for ``unpack``,
which works wherever the words are.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from engine.runner.batch import Batch
from kernels.ops import AttentionInputs, SamplingInputs

#: Sections begin at multiples of 128 bytes: kernels are compiled for aligned addresses.
ALIGN_WORDS = 16
#: Rows of the block tables have a multiple of so many entries, for the same reason.
ALIGN_TABLE = 16
#: Sizes of decode batches that have a graph: these, then multiples of the last one.
SMALL_BUCKETS = (1, 2, 4, 8)


class StepShape(NamedTuple):
    """What a step's words hold; every rank and every buffer derives the same places from it.

    Attributes:
        num_tokens: T.
        num_requests: S.
        num_sampling: R.
        num_banned: banned pairs of row and id.
        table_width: entries of a row of the block tables.
        num_scored: N, tokens of prompts that are scored.
        num_score_top: how many of the likeliest come with each of these.
    """

    num_tokens: int
    num_requests: int
    num_sampling: int
    num_banned: int
    table_width: int
    num_scored: int = 0
    num_score_top: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """Views of a step's words, on their device.

    Attributes:
        token_ids: ``[T]`` int64.
        attention: where the tokens are.
        sample_rows: ``[R]`` int64, the token whose logits each row samples from.
        sampling: how, but for what is not packed: adjustments, allowed ids, masses of typical sampling.
            They are for the rank that samples, and seldom there.
        score_rows: ``[N]`` int64, the token whose logits score each of ``score_ids``.
        score_ids: ``[N]`` int64.
        num_score_top: how many of the likeliest come with each of them.
    """

    token_ids: Tensor
    attention: AttentionInputs
    sample_rows: Tensor
    sampling: SamplingInputs
    score_rows: Tensor
    score_ids: Tensor
    num_score_top: int


def sections(shape: StepShape) -> dict[str, range]:
    """Places of the words, by name.

    Invariant: those before ``banned_rows`` are the
    same for all shapes with the same T, S and R, so that a graph finds them where it was captured.
    """
    tokens, requests, sampling, banned, width, scored, _ = shape
    counts = {
        "token_ids": tokens,
        "positions": tokens,
        "slots": tokens,
        "query_start": requests + 1,
        "context_lens": requests,
        "sample_rows": sampling,
        "temperature": sampling,
        "top_k": sampling,
        "top_p": sampling,
        "min_p": sampling,
        "seed": sampling,
        "output_index": sampling,
        "banned_rows": banned,
        "banned_ids": banned,
        "score_rows": scored,
        "score_ids": scored,
        "block_tables": requests * width,
    }
    places, begin = {}, 0
    for name, count in counts.items():
        places[name] = range(begin, begin + count)
        begin += -(-count // ALIGN_WORDS) * ALIGN_WORDS
    return places


def num_words(shape: StepShape) -> int:
    """Words of a step."""
    return sections(shape)["block_tables"].stop


def num_fixed_words(shape: StepShape) -> int:
    """Words before those that a graph can't expect in one place."""
    return sections(shape)["banned_rows"].start


def shape_of(batch: Batch) -> StepShape:
    """The shape of ``batch``."""
    num_requests, width = batch.attention.block_tables.shape
    return StepShape(
        num_tokens=batch.token_ids.shape[0],
        num_requests=num_requests,
        num_sampling=batch.sample_rows.shape[0],
        num_banned=batch.sampling.banned_ids.shape[0],
        table_width=-(-width // ALIGN_TABLE) * ALIGN_TABLE,
        num_scored=batch.score_rows.shape[0],
        num_score_top=max((scored.num_top for scored in batch.scored), default=0),
    )


def pack(batch: Batch, words: Tensor) -> None:
    """Write ``batch`` into ``words``, ``[num_words(shape_of(batch))]`` int64.

    What lies between the sections is left as it is, and never read.
    """
    places = sections(shape_of(batch))
    attention, sampling = batch.attention, batch.sampling
    for name, values in {
        "token_ids": batch.token_ids,
        "positions": attention.positions,
        "slots": attention.slots,
        "query_start": attention.query_start,
        "context_lens": attention.context_lens,
        "sample_rows": batch.sample_rows,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "output_index": sampling.output_index,
        "banned_rows": sampling.banned_rows,
        "banned_ids": sampling.banned_ids,
        "score_rows": batch.score_rows,
        "score_ids": batch.score_ids,
    }.items():
        place = places[name]
        words[place.start : place.stop] = values.view(torch.int64)
    num_requests, width = attention.block_tables.shape
    place = places["block_tables"]
    tables = words[place.start : place.stop].view(num_requests, -1)
    tables[:, :width] = attention.block_tables
    tables[:, width:] = 0


def unpack(shape: StepShape, words: Tensor) -> StepInputs:
    """The step in ``words``, as views."""
    places = sections(shape)

    def take(name: str) -> Tensor:
        return words[places[name].start : places[name].stop]

    return StepInputs(
        token_ids=take("token_ids"),
        attention=AttentionInputs(
            positions=take("positions"),
            slots=take("slots"),
            block_tables=take("block_tables").view(shape.num_requests, shape.table_width),
            query_start=take("query_start"),
            context_lens=take("context_lens"),
        ),
        sample_rows=take("sample_rows"),
        sampling=SamplingInputs(
            temperature=take("temperature").view(torch.float64),
            top_k=take("top_k"),
            top_p=take("top_p").view(torch.float64),
            min_p=take("min_p").view(torch.float64),
            seed=take("seed"),
            output_index=take("output_index"),
            banned_rows=take("banned_rows"),
            banned_ids=take("banned_ids"),
        ),
        score_rows=take("score_rows"),
        score_ids=take("score_ids"),
        num_score_top=shape.num_score_top,
    )


def decode_buckets(max_requests: int) -> tuple[int, ...]:
    """Sizes that decode batches are padded to: 1, 2, 4, 8, 16, 24 and so on, up to ``max_requests``."""
    step = SMALL_BUCKETS[-1]
    sizes = (*SMALL_BUCKETS, *range(2 * step, max_requests + step, step))
    return tuple(sorted({min(size, max_requests) for size in sizes}))


def bucket_for(batch: Batch, buckets: Sequence[int]) -> int | None:
    """The smallest of ``buckets`` (ascending) that holds ``batch``.

    None when a request computes more than one token, not all of them sample, or they are too many.
    """
    num_requests = batch.attention.context_lens.shape[0]
    if batch.token_ids.shape[0] != num_requests or batch.sample_rows.shape[0] != num_requests:
        return None
    at = bisect.bisect_left(buckets, num_requests)
    return buckets[at] if at < len(buckets) else None


def padded(batch: Batch, num_requests: int, scratch_block: int, block_size: int) -> Batch:
    """A decode batch with rows added, which write into a block that is nobody's and read that one token.

    The rows sample greedily, each on its own, so that what they choose is known to mean nothing:
    only the first ``len(batch.request_ids)`` results are anybody's. What is not packed of ``sampling`` is
    left out.

    Args:
        batch: one token for each request, and all of them sample.
        num_requests: rows in the result.
        scratch_block: a block that no request is given.
        block_size: its tokens.
    """
    own = batch.attention
    missing = num_requests - own.context_lens.shape[0]
    if not missing:
        return batch
    tables = F.pad(own.block_tables, (0, 0, 0, missing), value=scratch_block)
    sampling = batch.sampling

    def pad(values: Tensor, value: float = 0) -> Tensor:
        return F.pad(values, (0, missing), value=value)

    rows = torch.arange(num_requests + 1)
    return dataclasses.replace(
        batch,
        token_ids=pad(batch.token_ids),
        attention=AttentionInputs(
            positions=pad(own.positions),
            slots=pad(own.slots, scratch_block * block_size),
            block_tables=tables,
            query_start=rows,
            context_lens=pad(own.context_lens, 1),
        ),
        sample_rows=rows[:-1],
        sampling=SamplingInputs(
            temperature=pad(sampling.temperature),
            top_k=pad(sampling.top_k),
            top_p=pad(sampling.top_p, 1),
            min_p=pad(sampling.min_p),
            seed=pad(sampling.seed),
            output_index=pad(sampling.output_index),
            banned_rows=sampling.banned_rows,
            banned_ids=sampling.banned_ids,
        ),
    )
