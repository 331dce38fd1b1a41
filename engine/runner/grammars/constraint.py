"""Rows of a step under grammars: what they may sample, as far as it is known in time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.errors import VorrangError
from engine.grammar import GrammarRefused
from engine.request import RequestId
from engine.runner.grammars.compiled import Mask
from engine.runner.grammars.following import Answer
from engine.runner.grammars.masks import Masks, Output
from engine.sampling import SamplingParams
from engine.scheduler.plan import Granted

#: A step waits at most this share of its own time for the masks of its rows, and seconds at least and most.
WAIT_SHARE, WAIT_S_MIN, WAIT_S_MAX = 0.25, 0.001, 0.02


@dataclass(frozen=True, slots=True)
class Constrained:
    """A row under a grammar.

    Attributes:
        row: its place among those that sample.
        request: whose.
        output: what was asked for; by the time this step's tokens are known it may have been asked for more.
        tokens: those it had.
        banned: ids that may not be sampled whatever the grammar says.
    """

    row: int
    request: Granted
    output: Output
    tokens: list[int]
    banned: Sequence[int] | NDArray[np.int64]


@dataclass(slots=True)
class Found:
    """What is known of the rows of a step when it samples.

    Attributes:
        masks: by row.
        failures: requests that may sample nothing, and why.
        sat_out: requests whose mask is late.
        complete: requests whose output is whole as it is.
    """

    masks: dict[int, Mask] = field(default_factory=dict)
    failures: dict[RequestId, VorrangError] = field(default_factory=dict)
    sat_out: set[RequestId] = field(default_factory=set)
    complete: set[RequestId] = field(default_factory=set)

    @property
    def silent(self) -> set[RequestId]:
        """Requests for which nothing that is sampled counts."""
        return self.sat_out | self.complete | self.failures.keys()


def wait_s(step_s: float) -> float:
    """How long a step may wait for masks that has taken so many seconds."""
    return min(WAIT_S_MAX, max(WAIT_S_MIN, WAIT_SHARE * step_s))


def find(rows: Sequence[Constrained], masks: Masks, wait_s: float, vocab_size: int) -> Found:
    """What the rows may sample; waits for at most ``wait_s`` seconds."""
    masks.wait([each.output for each in rows], wait_s)
    found = Found()
    for each in rows:
        output, request_id = each.output, each.request.request_id
        if output.error is not None:
            found.failures[request_id] = output.error
        elif output.answer is None:
            found.sat_out.add(request_id)
        elif output.answer.is_complete and output.tokens:
            found.complete.add(request_id)
        else:
            ending = [token_id for token_id in each.request.ending_token_ids if token_id < vocab_size]
            try:
                mask = allowed(each.request.sampling, output.answer, ending, each.banned, len(output.tokens))
            except GrammarRefused as error:
                found.failures[request_id] = error
            else:
                found.masks[each.row] = mask
    return found


def allowed(
    params: SamplingParams,
    answer: Answer,
    ending: Iterable[int],
    banned: Sequence[int] | NDArray[np.int64],
    num_tokens: int,
) -> Mask:
    """What may be sampled next, ``[ceil(vocab / 32)]`` int32; ids that end the output only where it may.

    Raises:
        GrammarRefused: nothing is left.
    """
    mask: Mask = np.frombuffer(answer.text, dtype=np.int32).copy()
    bits = mask.view(np.uint32)
    if answer.may_end:
        for token_id in ending:
            bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    only = params.allowed_token_ids
    if len(banned) or only:
        left = np.unpackbits(mask.view(np.uint8), bitorder="little")
        left[np.asarray(banned, dtype=np.int64)] = 0
        has_any = left[np.asarray(only, dtype=np.int64)].any() if only else left.any()
    else:
        has_any = mask.any()
    if not has_any:
        assert params.grammar is not None
        rule = "must leave a token that is not banned at this place of the output"
        raise GrammarRefused(params.grammar, rule, num_tokens)
    return mask


def go_on(
    rows: Sequence[Constrained], sampled: Mapping[RequestId, int], silent: Iterable[RequestId], masks: Masks
) -> frozenset[RequestId]:
    """Ask what may come after the tokens that were sampled, and for those that are still missing.

    Returns:
        Requests that are to be granted no token to sample before their next mask is known.
    """
    quiet, awaiting = frozenset(silent), set[RequestId]()
    for each in rows:
        request, output = each.request, each.output
        request_id = request.request_id
        token_id = sampled.get(request_id)
        if token_id is not None and request_id not in quiet:
            if token_id in request.ending_token_ids:
                continue
            assert request.sampling.grammar is not None
            output = masks.follow(request_id, request.sampling.grammar, [*each.tokens, token_id])
            if output.is_slow and masks.awaits(output):
                awaiting.add(request_id)
        elif not output.is_known and masks.awaits(output):
            awaiting.add(request_id)
    return frozenset(awaiting)
