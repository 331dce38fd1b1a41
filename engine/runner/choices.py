"""What choosing tokens takes beside a row of numbers: bans, allowed ids, penalties, biases. CPU tensors.

Most requests need none of it, and a step of such requests costs nothing here. What is kept of a
request between two steps (how often it said what) is a function of its tokens alone; it goes when
the request does.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import InvalidRequest, Unimplemented, VorrangError
from engine.request import RequestId
from engine.runner.grammars.constraint import Constrained
from engine.runner.grammars.masks import Masks
from engine.sampling import Needs, SamplingParams
from engine.scheduler.plan import Grant, Granted
from kernels.ops import AllowedIds, LogitAdjustments

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
        constrained: rows under a grammar; what they may choose is asked for later.
        void: rows whose last token never was, since its step has sampled none for the request.
        dead_ends: rows that may choose nothing, and why; they fail.
    """

    banned_rows: Int64Array
    banned_ids: Int64Array
    adjustments: LogitAdjustments | None = None
    allowed: AllowedIds | None = None
    constrained: tuple[Constrained, ...] = ()
    void: tuple[int, ...] = ()
    dead_ends: tuple[tuple[int, VorrangError], ...] = ()


_NO_IDS = np.zeros(0, dtype=np.int64)
# As plain integers, with which one calculates ten times as quickly.
_SPECIAL = int(Needs.BANS | Needs.ADJUSTMENTS | Needs.ALLOWED | Needs.GRAMMAR)
_TOKENS, _ADJUSTMENTS, _GRAMMAR = int(Needs.TOKENS), int(Needs.ADJUSTMENTS), int(Needs.GRAMMAR)
NOTHING = Choices(_NO_IDS, _NO_IDS)


def choices_of(
    grants: Sequence[Grant],
    needs: Int64Array,
    last_tokens: LastTokens | None,
    masks: Masks | None = None,
) -> Choices:
    """What the sampling ``grants`` need, ``needs[row]`` telling which of it.

    Args:
        grants: one a row.
        needs: ``[R]``, ``Needs`` of each.
        last_tokens: asked, at most once, when a token must be known that is not.
        masks: of grammars; None = there are none.
    """
    special = np.flatnonzero(needs & _SPECIAL).tolist()
    if not special:
        return NOTHING
    unknown: Mapping[RequestId, int] | None = None
    banned: list[tuple[int, Int64Array]] = []
    allowed: list[tuple[int, Int64Array]] = []
    adjusted: list[tuple[int, _Row]] = []
    constrained: list[Constrained] = []
    void: list[int] = []
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
                if wanted & _GRAMMAR and grant.request_id not in unknown:
                    void.append(place)
                    continue
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
            if masks is None:
                dead_ends.append((place, Unimplemented("grammar")))
                continue
            request, index = grant.request, grant.output_index
            assert index is not None
            assert row.params.grammar is not None
            first = request.num_prompt_tokens
            tokens = [*request.token_ids[first : first + index], *lacking]
            output = masks.follow(request.request_id, row.params.grammar, tokens)
            row.forget_with(request, masks)
            constrained.append(Constrained(place, request, output, tokens, bans))
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
        tuple(constrained),
        tuple(void),
        tuple(dead_ends),
    )


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
        self._is_followed = False

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

    def forget_with(self, request: Granted, masks: Masks) -> None:
        """Have an output followed no longer than its request is known here."""
        if not self._is_followed:
            self._is_followed = True
            request_id = request.request_id
            _followed[request_id] = _followed.get(request_id, 0) + 1
            weakref.finalize(request, _unfollow, request_id, masks).atexit = False

    def bans(self, grant: Grant) -> Int64Array:
        """Ids that the token may not be."""
        early = grant.banned_token_ids
        if not early and not self._completing:
            return self.always_banned
        more = np.array([*early, *self._completing], dtype=np.int64)
        return np.concatenate([self.always_banned, more])


#: How many objects that are alive tell of a request; a process may be told of one anew.
_followed: dict[RequestId, int] = {}


def _unfollow(request_id: RequestId, masks: Masks) -> None:
    _followed[request_id] -= 1
    if not _followed[request_id]:
        del _followed[request_id]
        masks.forget(request_id)


#: Tokens of a text that any banned sequence can begin with.
_LONGEST_TAIL = 64

_rows: "WeakKeyDictionary[Granted, _Row]" = WeakKeyDictionary()


def _row_of(request: Granted) -> _Row:
    row = _rows.get(request)
    if row is None:
        row = _rows[request] = _Row(request.sampling)
    return row
