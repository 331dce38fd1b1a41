"""What choosing tokens takes beside a row of numbers: bans, allowed ids, penalties, biases. CPU tensors.

Most requests need none of it, and a step of such requests costs nothing here. What is kept of a
request between two steps (how often it said what) is a function of its tokens alone; it goes when
the request does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import InvalidRequest, Unimplemented, VorrangError
from engine.request import RequestId
from engine.runner.grammars.cache import Grammars
from engine.runner.grammars.compiled import Mask
from engine.runner.grammars.constraint import Constraint
from engine.sampling import Needs, SamplingParams
from engine.scheduler.plan import Grant, Granted
from kernels.ops import AllowedIds, LogitAdjustments, TokenMask

Int64Array = NDArray[np.int64]

#: Tells the last token of each request, where a plan was made before it was known.
LastTokens = Callable[[], Mapping[RequestId, int]]


@dataclass(frozen=True, slots=True)
class Choices:
    """What rows of a step may choose, beside how.

    Attributes:
        banned_rows: row of each banned pair.
        banned_ids: id of each banned pair.
        adjustments: penalties and biases; None = none.
        allowed: rows that may choose certain ids alone; None = none.
        mask: rows under a grammar; None = none.
        dead_ends: rows that may choose nothing, and why; they fail.
    """

    banned_rows: Int64Array
    banned_ids: Int64Array
    adjustments: LogitAdjustments | None = None
    allowed: AllowedIds | None = None
    mask: TokenMask | None = None
    dead_ends: tuple[tuple[int, VorrangError], ...] = ()


_NO_IDS = np.zeros(0, dtype=np.int64)
# As plain integers, with which one calculates ten times as quickly.
_SPECIAL = int(Needs.BANS | Needs.ADJUSTMENTS | Needs.ALLOWED | Needs.GRAMMAR)
_TOKENS, _ADJUSTMENTS, _GRAMMAR = int(Needs.TOKENS), int(Needs.ADJUSTMENTS), int(Needs.GRAMMAR)
NOTHING = Choices(_NO_IDS, _NO_IDS)


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """Where a model has its grammars from.

    Attributes:
        grammars: compiles and keeps them.
        vocab_size: ids that logits are computed for.
    """

    grammars: Grammars
    vocab_size: int


def choices_of(
    grants: Sequence[Grant],
    needs: Int64Array,
    last_tokens: LastTokens | None,
    source: GrammarSource | None = None,
) -> Choices:
    """What the sampling ``grants`` need, ``needs[row]`` telling which of it.

    Args:
        grants: one a row.
        needs: ``[R]``, ``Needs`` of each.
        last_tokens: asked, at most once, when a token must be known that is not.
        source: of grammars; None = there are none.
    """
    special = np.flatnonzero(needs & _SPECIAL).tolist()
    if not special:
        return NOTHING
    unknown: Mapping[RequestId, int] | None = None
    banned: list[tuple[int, Int64Array]] = []
    allowed: list[tuple[int, Int64Array]] = []
    adjusted: list[tuple[int, _Row]] = []
    masks: list[tuple[int, Mask]] = []
    dead_ends: list[tuple[int, VorrangError]] = []
    for place in special:
        grant = grants[place]
        row = _row_of(grant.request)
        wanted = int(needs[place])
        lacking: tuple[int, ...] = ()
        if wanted & _TOKENS:
            if grant.has_unknown_token:
                if unknown is None:
                    unknown = last_tokens() if last_tokens is not None else {}
                lacking = (unknown.get(grant.request_id, 0),)
            row.read(grant, lacking)
        bans = row.bans(grant)
        if bans.size:
            banned.append((place, bans))
        if row.allowed.size:
            allowed.append((place, row.allowed))
            # What is banned at all places leaves an allowed id, or the parameters were not valid.
            if bans is not row.always_banned and np.isin(row.allowed, bans).all():
                index = grant.output_index
                rule = "must hold an id that is not banned at this place of the output"
                dead_ends.append((place, InvalidRequest("sampling.allowed_token_ids", rule, index)))
        if wanted & _ADJUSTMENTS:
            adjusted.append((place, row))
        if wanted & _GRAMMAR:
            try:
                mask = row.mask(grant, lacking, bans, source)
            except VorrangError as error:
                dead_ends.append((place, error))
            else:
                if mask is not None:
                    masks.append((place, mask))
    banned_rows, banned_ids = _pairs(banned)
    allowed_rows, allowed_ids = _pairs(allowed)
    restricted = torch.tensor([place for place, _ in allowed], dtype=torch.int64)
    return Choices(
        banned_rows,
        banned_ids,
        _adjustments(adjusted, len(grants)) if adjusted else None,
        AllowedIds(restricted, torch.from_numpy(allowed_rows), torch.from_numpy(allowed_ids))
        if allowed
        else None,
        _token_mask(masks) if masks else None,
        tuple(dead_ends),
    )


def completed(
    constrained: Sequence[tuple[Granted, int]], sampled: Mapping[RequestId, int]
) -> frozenset[RequestId]:
    """Requests that have said all their grammar has, with what a step has sampled for them.

    Args:
        constrained: requests under a grammar, each with the place of that token in its output.
        sampled: tokens of the step; who failed has none.
    """
    return frozenset(
        request.request_id
        for request, index in constrained
        if (token_id := sampled.get(request.request_id)) is not None
        and token_id not in request.ending_token_ids
        and _row_of(request).completes(request, index, token_id)
    )


def _token_mask(masks: Sequence[tuple[int, Mask]]) -> TokenMask:
    rows = torch.tensor([place for place, _ in masks], dtype=torch.int64)
    return TokenMask(rows, torch.from_numpy(np.stack([mask for _, mask in masks])))


def _pairs(ids_by_row: Sequence[tuple[int, Int64Array]]) -> tuple[Int64Array, Int64Array]:
    if not ids_by_row:
        return _NO_IDS, _NO_IDS
    ids = [ids for _, ids in ids_by_row]
    rows = np.array([row for row, _ in ids_by_row], dtype=np.int64)
    return np.repeat(rows, [len(each) for each in ids]), np.concatenate(ids)


def _adjustments(adjusted: Sequence[tuple[int, "_Row"]], num_rows: int) -> LogitAdjustments:
    rows, token_ids = _pairs([(place, row.counted.ids) for place, row in adjusted])
    repetition = np.ones(num_rows, dtype=np.float32)
    presence, frequency = np.zeros((2, num_rows), dtype=np.float32)
    for place, row in adjusted:
        repetition[place] = row.params.repetition_penalty
        presence[place] = row.params.presence_penalty
        frequency[place] = row.params.frequency_penalty
    counted = [row.counted for _, row in adjusted]
    return LogitAdjustments(
        rows=torch.from_numpy(rows),
        token_ids=torch.from_numpy(token_ids),
        in_prompt=torch.from_numpy(np.concatenate([each.in_prompt for each in counted])),
        output_counts=torch.from_numpy(np.concatenate([each.counts for each in counted])),
        bias=torch.from_numpy(np.concatenate([each.bias for each in counted])),
        repetition=torch.from_numpy(repetition),
        presence=torch.from_numpy(presence),
        frequency=torch.from_numpy(frequency),
    )


class _Counted:
    """Ids with a bias, or that were said: each once, with what is known of it. Grows as needed."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._in_prompt = np.zeros(64, dtype=np.bool_)
        self._counts = np.zeros(64, dtype=np.int64)
        self._bias = np.zeros(64, dtype=np.float32)
        for token_id, value in bias:
            place = self._place(token_id)
            self._bias[place] = value

    @property
    def ids(self) -> Int64Array:
        return self._ids[: len(self._places)]

    @property
    def in_prompt(self) -> NDArray[np.bool_]:
        return self._in_prompt[: len(self._places)]

    @property
    def counts(self) -> Int64Array:
        return self._counts[: len(self._places)]

    @property
    def bias(self) -> NDArray[np.float32]:
        return self._bias[: len(self._places)]

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        for token_id in set(token_ids):
            place = self._place(token_id)
            self._in_prompt[place] = True

    def add_output(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = self._place(token_id)
            self._counts[place] += 1

    def _place(self, token_id: int) -> int:
        """Where an id stands; the columns are other ones afterwards when it is one too many for them."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            for name in ("_ids", "_in_prompt", "_counts", "_bias"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._ids[place] = token_id
        return place


class _Row:
    """One request: what it may not or must say, and what it has said."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self.counted = _Counted(params.logit_bias)
        self.always_banned = np.array(params.always_banned(), dtype=np.int64)
        self._sequences: dict[int, list[tuple[int, ...]]] = {}  # by their last token but one
        for sequence in params.banned_sequences:
            if len(sequence) > 1:
                self._sequences.setdefault(sequence[-2], []).append(sequence)
        self._num_read = 0
        self._completing: list[int] = []
        self._constraint: Constraint | None = None

    def read(self, grant: Grant, lacking: tuple[int, ...]) -> None:
        """Take in the tokens before the one that ``grant`` samples; ``lacking`` is the last, if unknown."""
        token_ids = grant.request.token_ids
        end, index = grant.start + grant.num_tokens, grant.output_index
        assert index is not None
        num_prompt, first = end - index, self._num_read
        if self.params.penalises:
            if first < num_prompt and self.params.repetition_penalty != 1:
                self.counted.add_prompt(token_ids[:num_prompt])
            self.counted.add_output((*token_ids[max(first, num_prompt) : end], *lacking))
        self._num_read = end
        if self._sequences:
            tail = (*token_ids[max(0, end - _LONGEST_TAIL) : end], *lacking)
            self._completing = [
                sequence[-1]
                for sequence in self._sequences.get(tail[-1], ())
                if tail[1 - len(sequence) :] == sequence[:-1]
            ]

    def mask(
        self, grant: Grant, lacking: tuple[int, ...], bans: Int64Array, source: GrammarSource | None
    ) -> Mask | None:
        """What the grammar allows ``grant`` to sample; None = its output has ended already.

        Raises:
            VorrangError: nothing, or there are no grammars here.
        """
        request, index = grant.request, grant.output_index
        assert index is not None
        if self._constraint is None:
            if source is None:
                raise Unimplemented("grammar")
            ending = request.ending_token_ids
            self._constraint = Constraint(self.params, ending, source.grammars, source.vocab_size)
        first = request.num_prompt_tokens
        self._constraint.follow([*request.token_ids[first : first + index], *lacking])
        if self._constraint.is_complete and index:
            return None  # the step before has completed it, and this one was planned meanwhile
        return self._constraint.mask(bans, self.params.allowed_token_ids)

    def completes(self, request: Granted, index: int, token_id: int) -> bool:
        """Whether nothing but an end may follow once ``token_id`` is the output's token ``index``."""
        if self._constraint is None:
            return False
        first = request.num_prompt_tokens
        try:
            self._constraint.follow([*request.token_ids[first : first + index], token_id])
        except VorrangError:  # what was sampled without a mask is nobody's any more
            return False
        return self._constraint.is_complete

    def bans(self, grant: Grant) -> Int64Array:
        """Ids that the token may not be."""
        early = grant.banned_token_ids
        if not early and not self._completing:
            return self.always_banned
        more = np.array([*early, *self._completing], dtype=np.int64)
        return np.concatenate([self.always_banned, more])


#: Tokens of a text that any banned sequence can begin with.
_LONGEST_TAIL = 64

_rows: "WeakKeyDictionary[Granted, _Row]" = WeakKeyDictionary()


def _row_of(request: Granted) -> _Row:
    row = _rows.get(request)
    if row is None:
        row = _rows[request] = _Row(request.sampling)
    return row
