"""A plan as flat tensors: what the model reads, in which rows it samples, and how."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import VorrangError
from engine.request import RequestId
from engine.scheduler.plan import Grant, Plan, StepResult
from kernels.ops import AttentionInputs, SamplingInputs

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one step with ``T`` tokens of ``S`` requests, of which ``R`` sample.

    Attributes:
        request_ids: the S requests, in order of their tokens.
        token_ids: ``[T]`` int64.
        attention: where the tokens are.
        sampling_ids: whose the R rows that sample are, in order; a request that was granted drafts has one
            row for its known token and one for each draft.
        sample_rows: ``[R]`` int64, the token whose logits each of them samples from.
        sampling: how.
        unknown: place of each token that nobody knows yet, because the step before samples it, and
            whose it is; its id is 0.
    """

    request_ids: tuple[RequestId, ...]
    token_ids: torch.Tensor
    attention: AttentionInputs
    sampling_ids: tuple[RequestId, ...]
    sample_rows: torch.Tensor
    sampling: SamplingInputs
    unknown: tuple[tuple[int, RequestId], ...] = ()

    def result(self, token_ids: Iterable[int], failures: Mapping[RequestId, VorrangError]) -> StepResult:
        """What the step has brought, of tokens in the order of ``sampling_ids``."""
        sampled: dict[RequestId, int] = {}
        after_drafts: dict[RequestId, list[int]] = {}
        for request_id, token_id in zip(self.sampling_ids, token_ids, strict=True):
            if request_id in failures:
                continue
            if request_id in sampled:
                after_drafts.setdefault(request_id, []).append(token_id)
            else:
                sampled[request_id] = token_id
        return StepResult(sampled, failures, after_drafts)


def build_batch(plan: Plan, block_size: int) -> Batch:
    """Lay out the grants of ``plan`` one after the other, without padding. CPU tensors.

    Invariant: ``plan`` has at least one grant, and every grant at least one token.
    """
    grants = plan.grants
    counts = np.array([grant.num_tokens for grant in grants], dtype=np.int64)
    starts = np.array([grant.start for grant in grants], dtype=np.int64)
    query_start = np.zeros(len(grants) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    context_lens = starts + counts
    known = [np.asarray(grant.token_ids, dtype=np.int64) for grant in grants]
    unknown = [row for row, ids in enumerate(known) if len(ids) < counts[row]]
    for row in unknown:
        known[row] = np.append(known[row], 0)
    token_ids = np.concatenate(known)
    # Position of each token: its place in the flat order, moved by where its request starts.
    positions = np.arange(len(token_ids), dtype=np.int64) + np.repeat(starts - query_start[:-1], counts)
    tables = _block_tables(grants, -(-context_lens // block_size))
    owners = np.repeat(np.arange(len(grants)), counts)
    slots = tables[owners, positions // block_size] * block_size + positions % block_size
    sampling = [
        (int(query_start[row + 1]) - 1 - num_later, grant, grant.output_index + grant.num_drafts - num_later)
        for row, grant in enumerate(grants)
        if grant.output_index is not None
        for num_later in range(grant.num_drafts, -1, -1)
    ]
    return Batch(
        request_ids=tuple(grant.request_id for grant in grants),
        token_ids=torch.from_numpy(token_ids),
        attention=AttentionInputs(
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots),
            block_tables=torch.from_numpy(tables),
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(context_lens),
        ),
        sampling_ids=tuple(grant.request_id for _, grant, _ in sampling),
        sample_rows=torch.tensor([row for row, _, _ in sampling], dtype=torch.int64),
        sampling=_sampling_inputs([(grant, output_index) for _, grant, output_index in sampling]),
        unknown=tuple((int(query_start[row + 1]) - 1, grants[row].request_id) for row in unknown),
    )


def _block_tables(grants: Sequence[Grant], num_blocks: Int64Array) -> Int64Array:
    """``[S, max_blocks]``; no more of each table than its context needs, 0 after it."""
    tables = np.zeros((len(grants), int(num_blocks.max())), dtype=np.int64)
    for row, (grant, count) in enumerate(zip(grants, num_blocks.tolist(), strict=True)):
        tables[row, :count] = grant.block_table[:count]
    return tables


def _sampling_inputs(rows: Sequence[tuple[Grant, int]]) -> SamplingInputs:
    """How each row samples: for which grant, which of its output tokens."""
    params = [grant.sampling for grant, _ in rows]
    banned = [
        (row, token_id)
        for row, (grant, output_index) in enumerate(rows)
        for token_id in grant.banned_at(output_index)
    ]
    seeds = np.array([param.seed for param in params], dtype=np.uint64)
    return SamplingInputs(
        temperature=torch.tensor([param.temperature for param in params], dtype=torch.float64),
        top_k=torch.tensor([param.top_k for param in params], dtype=torch.int64),
        top_p=torch.tensor([param.top_p for param in params], dtype=torch.float64),
        min_p=torch.tensor([param.min_p for param in params], dtype=torch.float64),
        seed=torch.from_numpy(seeds.view(np.int64)),
        output_index=torch.tensor([output_index for _, output_index in rows], dtype=torch.int64),
        banned_rows=torch.tensor([row for row, _ in banned], dtype=torch.int64),
        banned_ids=torch.tensor([token_id for _, token_id in banned], dtype=torch.int64),
    )
