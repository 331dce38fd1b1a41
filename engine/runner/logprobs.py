"""Log probabilities on their way from a step to its result: rows of numbers, then positions of requests."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.events import PositionLogProbs, PromptLogProbs
from engine.request import RequestId
from engine.runner.batch import Batch
from kernels import ops
from kernels.ops import LogProbs

#: Rows of logits that are looked at together when a prompt is scored: they are as long as the vocabulary.
SCORE_ROWS = 64


def wanted_rows(batch: Batch) -> tuple[list[int], int]:
    """Rows whose sampled token's log probability is wanted, and the most of the likeliest that any wants."""
    rows = [row for row, _ in batch.num_logprobs]
    return rows, max((num_top for _, num_top in batch.num_logprobs), default=0)


def sampled_logprobs(
    batch: Batch, token_ids: Sequence[int], found: LogProbs
) -> dict[RequestId, PositionLogProbs]:
    """``found`` (CPU tensors, a row for each of ``wanted_rows``) by request."""
    rows = [row for row, _ in batch.num_logprobs]
    nums_top = [num_top for _, num_top in batch.num_logprobs]
    positions = _positions([token_ids[row] for row in rows], nums_top, found)
    return {batch.sampling_ids[row]: position for row, position in zip(rows, positions, strict=True)}


def prompt_logprobs(batch: Batch, found: LogProbs) -> dict[RequestId, PromptLogProbs]:
    """``found`` (CPU tensors, a row for each of ``batch.score_rows``) by request."""
    nums_top = [scored.num_top for scored in batch.scored for _ in range(scored.num_tokens)]
    positions = _positions(batch.score_ids.tolist(), nums_top, found)
    spans: dict[RequestId, PromptLogProbs] = {}
    begin = 0
    for scored in batch.scored:
        end = begin + scored.num_tokens
        spans[scored.request_id] = PromptLogProbs(
            scored.request_id, scored.first_index, tuple(positions[begin:end])
        )
        begin = end
    return spans


def score(
    rows: Tensor,
    token_ids: Tensor,
    num_top: int,
    logits_of: Callable[[Tensor], Tensor],
    *,
    is_first: bool = True,
) -> LogProbs | None:
    """Log probabilities of ``token_ids`` by the logits of ``rows``, a few rows at a time.

    Args:
        rows: ``[N]`` int64, tokens of the step; ``N`` is at least one.
        token_ids: ``[N]`` int64.
        num_top: how many of the likeliest.
        logits_of: makes logits of rows, ``[n]`` int64 to ``[n, vocab]``.
        is_first: whether this rank has the whole logits; the others only help to make them.
    """
    parts: list[LogProbs] = []
    for begin in range(0, rows.shape[0], SCORE_ROWS):
        logits = logits_of(rows[begin : begin + SCORE_ROWS])
        if is_first:
            parts.append(ops.log_probs(logits, token_ids[begin : begin + SCORE_ROWS], num_top))
    if not is_first:
        return None
    return LogProbs(*(torch.cat([getattr(p, name) for p in parts]) for name in ("chosen", "top_ids", "top")))


def num_words(num_rows: int, num_top: int) -> int:
    """Words that ``to_words`` makes of so many rows."""
    return num_rows * (1 + 2 * num_top)


def to_words(found: LogProbs) -> Tensor:
    """As one row of 64-bit words."""
    numbers = torch.cat([found.chosen, found.top.flatten()]).double().view(torch.int64)
    return torch.cat([numbers, found.top_ids.flatten()])


def from_words(words: Tensor, num_rows: int, num_top: int) -> LogProbs:
    """The other way."""
    num_pairs = num_rows * num_top
    top, top_ids = words[num_rows : num_rows + num_pairs], words[num_rows + num_pairs :]
    return LogProbs(
        words[:num_rows].view(torch.float64),
        top_ids.view(num_rows, num_top),
        top.view(torch.float64).view(num_rows, num_top),
    )


def _positions(token_ids: Sequence[int], nums_top: Sequence[int], found: LogProbs) -> list[PositionLogProbs]:
    rows = zip(
        token_ids, nums_top, found.chosen.tolist(), found.top_ids.tolist(), found.top.tolist(), strict=True
    )
    return [
        PositionLogProbs(token_id, chosen, tuple(top_ids[:num]), tuple(top[:num]))
        for token_id, num, chosen, top_ids, top in rows
    ]
