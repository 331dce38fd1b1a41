"""A plan as flat tensors: what the model reads, in which rows it samples, and how."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import VorrangError
from engine.events import PositionLogProbs, PromptLogProbs
from engine.models.lora import AdapterRows
from engine.request import RequestId
from engine.runner.choices import Choices, LastTokens, choices_of
from engine.runner.grammars.constraint import Constrained, Found, go_on
from engine.runner.grammars.masks import Masks
from engine.sampling import Needs
from engine.scheduler.plan import Grant, Plan, StepResult
from kernels.ops import AttentionInputs, SamplingInputs, TokenMask

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of a prompt whose log probabilities were asked for, as far as a step computes what they follow.

    Attributes:
        request_id: whose.
        first_index: place of the first of them in the prompt.
        num_tokens: how many.
        num_top: how many of the likeliest.
    """

    request_id: RequestId
    first_index: int
    num_tokens: int
    num_top: int


_NO_ROWS = torch.zeros(0, dtype=torch.int64)
_LOGPROBS, _TYPICAL = int(Needs.LOGPROBS), int(Needs.TYPICAL)


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
        dead_ends: requests that may choose nothing, and why; they fail.
        constrained: rows under a grammar.
        void: requests whose last token never was; nothing of theirs counts.
        num_logprobs: row of each request that wants the log probability of its token, and of how
            many likeliest.
        scored: whose prompts are scored, in order.
        score_rows: ``[N]`` int64, the tokens whose logits score the next one.
        score_ids: ``[N]`` int64, those next ones.
        adapters: which tokens are computed with which adapter.
    """

    request_ids: tuple[RequestId, ...]
    token_ids: torch.Tensor
    attention: AttentionInputs
    sampling_ids: tuple[RequestId, ...]
    sample_rows: torch.Tensor
    sampling: SamplingInputs
    unknown: tuple[tuple[int, RequestId], ...] = ()
    dead_ends: tuple[tuple[RequestId, VorrangError], ...] = ()
    constrained: tuple[Constrained, ...] = ()
    void: frozenset[RequestId] = frozenset()
    num_logprobs: tuple[tuple[int, int], ...] = ()
    scored: tuple[Scored, ...] = ()
    score_rows: torch.Tensor = _NO_ROWS
    score_ids: torch.Tensor = _NO_ROWS
    adapters: tuple[AdapterRows, ...] = ()

    def result(
        self,
        token_ids: Iterable[int],
        failures: Mapping[RequestId, VorrangError],
        logprobs: Mapping[RequestId, PositionLogProbs],
        prompt_logprobs: Mapping[RequestId, PromptLogProbs],
        found: Found | None = None,
        masks: Masks | None = None,
    ) -> StepResult:
        """What the step has brought, of tokens in the order of ``sampling_ids``.

        ``found`` is what was known of rows under grammars, whose next masks ``masks`` is asked for.
        """
        silent = self.void if found is None else self.void | found.silent
        sampled: dict[RequestId, int] = {}
        after_drafts: dict[RequestId, list[int]] = {}
        for request_id, token_id in zip(self.sampling_ids, token_ids, strict=True):
            if request_id in failures or request_id in silent:
                continue
            if request_id in sampled:
                after_drafts.setdefault(request_id, []).append(token_id)
            else:
                sampled[request_id] = token_id
        if found is None and not self.void:
            return StepResult(sampled, failures, logprobs, prompt_logprobs, after_drafts=after_drafts)
        complete, sat_out = frozenset[RequestId](), self.void
        awaiting = frozenset[RequestId]()
        if found is not None:
            complete, sat_out = frozenset(found.complete), sat_out | found.sat_out
        if masks is not None and self.constrained:
            awaiting = go_on(self.constrained, sampled, silent | failures.keys(), masks)
        told = {i: each for i, each in logprobs.items() if i not in silent} if silent else logprobs
        return StepResult(
            sampled, failures, told, prompt_logprobs, complete, after_drafts,
            sat_out=sat_out - failures.keys(), awaiting=awaiting - failures.keys(),
        )  # fmt: skip


def build_batch(
    plan: Plan,
    block_size: int,
    last_tokens: LastTokens | None = None,
    masks: Masks | None = None,
) -> Batch:
    """Lay out the grants of ``plan`` one after the other, without padding. CPU tensors.

    ``last_tokens`` is asked when a request lacks its last token and can't choose without it, ``masks``
    when it has a grammar.

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
    rows = [row for row, grant in enumerate(grants) if grant.output_index is not None]
    sampling, sample_rows = [grants[row] for row in rows], query_start[1:][rows] - 1
    is_decode = len(token_ids) == len(rows)  # a token each, and all sample: nothing guessed, no prompt scored
    if not is_decode and any(grant.num_drafts for grant in sampling):
        sampling, sample_rows = _with_drafts(sampling, sample_rows)
    inputs, needs, choices = _sampling_inputs(sampling, last_tokens, masks)
    sampling_ids = tuple(grant.request_id for grant in sampling)
    wanting = np.flatnonzero(needs & _LOGPROBS).tolist()
    scored, score_rows, score_ids = _NO_SCORES if is_decode else _scores(grants, query_start)
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
        sampling_ids=sampling_ids,
        sample_rows=torch.from_numpy(sample_rows),
        sampling=inputs,
        unknown=tuple((int(query_start[row + 1]) - 1, grants[row].request_id) for row in unknown),
        dead_ends=tuple((sampling_ids[row], error) for row, error in choices.dead_ends),
        constrained=choices.constrained,
        void=frozenset(sampling_ids[row] for row in choices.void),
        num_logprobs=tuple((row, sampling[row].sampling.logprobs or 0) for row in wanting),
        scored=scored,
        score_rows=score_rows,
        score_ids=score_ids,
        adapters=_adapters(grants, owners),
    )


def _adapters(grants: Sequence[Grant], owners: Int64Array) -> tuple[AdapterRows, ...]:
    """The rows of each adapter; ``owners`` is ``[T]``, whose row it is."""
    names = [grant.request.adapter for grant in grants]
    if not any(names):
        return ()
    of_row = np.array(names)[owners]
    return tuple(
        AdapterRows(name, torch.from_numpy(np.flatnonzero(of_row == name)))
        for name in dict.fromkeys(names)
        if name
    )


def _with_drafts(sampling: Sequence[Grant], rows: Int64Array) -> tuple[list[Grant], Int64Array]:
    """A grant for every token that is followed by a sampled one, and the row of that token.

    A request with drafts samples after its known token and after each draft, as if it had been
    granted the tokens up to there.
    """
    grants: list[Grant] = []
    places: list[int] = []
    for grant, last in zip(sampling, rows.tolist(), strict=True):
        request, start, num_tokens, table, index = grant
        num_drafts = grant.num_drafts
        assert index is not None
        for place in range(num_drafts + 1):
            grants.append(Grant(request, start, num_tokens - num_drafts + place, table, index + place))
            places.append(last - num_drafts + place)
    return grants, np.array(places, dtype=np.int64)


def _block_tables(grants: Sequence[Grant], num_blocks: Int64Array) -> Int64Array:
    """``[S, max_blocks]``; no more of each table than its context needs, 0 after it."""
    tables = np.zeros((len(grants), int(num_blocks.max())), dtype=np.int64)
    for row, (grant, count) in enumerate(zip(grants, num_blocks.tolist(), strict=True)):
        tables[row, :count] = grant.block_table[:count]
    return tables


def _sampling_inputs(
    grants: Sequence[Grant], last_tokens: LastTokens | None, masks: Masks | None
) -> tuple[SamplingInputs, Int64Array, Choices]:
    """How the rows choose, what each of them ``Needs``, and what else is to be said of their choices."""
    packed = np.frombuffer(b"".join([grant.request.sampling.packed for grant in grants]), dtype=np.int64)
    columns = packed.reshape(-1, 7).T.copy()
    temperature, top_p, min_p, typical_p = columns[:4].view(np.float64)
    top_k, seed, needs = columns[4:]
    choices = choices_of(grants, needs, last_tokens, masks)
    inputs = SamplingInputs(
        temperature=torch.from_numpy(temperature),
        top_k=torch.from_numpy(top_k),
        top_p=torch.from_numpy(top_p),
        min_p=torch.from_numpy(min_p),
        seed=torch.from_numpy(seed),
        output_index=torch.tensor([grant.output_index for grant in grants], dtype=torch.int64),
        banned_rows=torch.from_numpy(choices.banned_rows),
        banned_ids=torch.from_numpy(choices.banned_ids),
        adjustments=choices.adjustments,
        allowed=choices.allowed,
        typical_p=torch.from_numpy(typical_p) if (needs & _TYPICAL).any() else None,
    )
    return inputs, needs, choices


_NO_SCORES: tuple[tuple[Scored, ...], torch.Tensor, torch.Tensor] = ((), _NO_ROWS, _NO_ROWS)


def _scores(
    grants: Sequence[Grant], query_start: Int64Array
) -> tuple[tuple[Scored, ...], torch.Tensor, torch.Tensor]:
    """Whose prompts are scored, from which rows, and for which ids. A prompt's last token scores no other."""
    scored: list[Scored] = []
    rows, ids = [_NO_ROWS], [_NO_ROWS]
    for grant, begin in zip(grants, query_start.tolist(), strict=False):
        request, num_top = grant.request, grant.request.sampling.prompt_logprobs
        if num_top is None:
            continue
        first = grant.start + 1
        following = request.token_ids[first : min(first + grant.num_tokens, request.num_prompt_tokens)]
        if following:
            scored.append(Scored(request.request_id, first, len(following), num_top))
            rows.append(torch.arange(begin, begin + len(following)))
            ids.append(torch.tensor(following, dtype=torch.int64))
    return (tuple(scored), torch.cat(rows), torch.cat(ids)) if scored else _NO_SCORES


def with_masks(sampling: SamplingInputs, found: Found) -> SamplingInputs:
    """How rows choose, with the masks that were found."""
    if not found.masks:
        return sampling
    rows = torch.tensor(list(found.masks), dtype=torch.int64)
    words = torch.from_numpy(np.stack(list(found.masks.values())))
    return dataclasses.replace(sampling, mask=TokenMask(rows, words))
