"""Speculation by prompt lookup: guess the next tokens of a decode from what it has said before.

A decode computes one token and samples the next. If that one is guessed right, the
token after it can be computed in the same step, for hardly more than the step costs
anyway. So a decode may be granted its known token and some *drafts* behind it; the
runner samples after each of them, and ``verified`` keeps what the model itself says:
every sampled token up to the first one that differs from its draft. Since the sampled
token is a function of the tokens before it (and, beyond temperature 0, of noise that
depends on seed and output index alone), the output is that of a run without drafts,
token for token, whatever the drafts are.

Drafts are the continuation of the last place where the output's last tokens stood
before, in prompt or output (prompt lookup, Saxena 2023; as vLLM's ``ngram``). They take
what a step has left: never a token of the budget, a block or a place in the queue that
anybody else could use. A request whose drafts bring nothing rests from them, longer
each time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import Request, RequestId
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import StepDraft
from engine.scheduler.state import SchedulerState

#: Lengths of the ends that are looked for, in order.
NGRAM_SIZES = (4, 2)
#: Tokens before the end of what is known that are looked through.
LOOKUP_TOKENS_MAX = 8192
#: Drafts in a row that bring nothing, after which a request rests.
MISSES_MAX = 2
#: Output tokens of the first rest; each further one is twice as long, up to the last.
REST_TOKENS, REST_TOKENS_MAX = 16, 256


class NgramIndex:
    """Where the last occurrence of every short run of tokens is followed by what.

    Args:
        token_ids: prompt + output, append-only; a live view.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._first = max(0, len(token_ids) - LOOKUP_TOKENS_MAX)
        self._end = self._first  # runs that are followed by a token before this place are indexed
        self._places: dict[tuple[int, ...], int] = {}

    def continuation(self, num_tokens: int) -> list[int]:
        """What followed the last tokens when they were said before, at most ``num_tokens``; [] = never.

        A continuation that reaches the end goes on with itself, so a short cycle is guessed at any length.
        """
        token_ids, places = self._token_ids, self._places
        known = len(token_ids)
        for place in range(self._end, known):
            for size in NGRAM_SIZES:
                if place - size >= self._first:
                    places[tuple(token_ids[place - size : place])] = place
        self._end = known
        for size in NGRAM_SIZES:
            if known - size < self._first:
                continue
            found = places.get(tuple(token_ids[known - size : known]))
            if found is not None:
                guessed = list(token_ids[found : found + num_tokens])
                period = known - found
                while len(guessed) < num_tokens:
                    guessed.append(guessed[len(guessed) - period])
                return guessed
        return []


@dataclass(slots=True)
class _Drafter:
    """A request's index, and how its drafts fared.

    Attributes:
        length: drafts it gets next time.
        num_misses: drafts in a row that brought nothing.
        rest_tokens: output tokens of its last rest; 0 = it never rested.
        rests_until: output tokens at which it may draft again.
    """

    index: NgramIndex
    length: int
    num_misses: int = 0
    rest_tokens: int = 0
    rests_until: int = 0


@dataclass(slots=True)
class Speculation:
    """Gives drafts to decodes, and learns who profits.

    Attributes:
        config: ``speculation_tokens`` and ``speculation_max_running``.
    """

    config: SchedulerConfig
    _drafters: dict[RequestId, _Drafter] = field(default_factory=dict)

    @property
    def _watermark(self) -> float:
        config = self.config
        return max(rules.watermark for rules in (config.interactive, config.standard, config.batch))

    def fill(self, state: SchedulerState, draft: StepDraft) -> None:
        """Add drafts to the decodes of a step that is complete otherwise."""
        num_max = self.config.speculation_tokens
        if not num_max or not 0 < len(draft.decodes) <= self.config.speculation_max_running:
            return
        if len(self._drafters) > 2 * self.config.max_running_requests:
            self._drafters = {i: d for i, d in self._drafters.items() if i in state.requests}
        for request in draft.decodes:
            num_tokens = min(draft.budget_tokens, request.num_tokens_max - request.num_tokens - 1)
            if request.num_outputs_allowed is not None:
                num_tokens = min(num_tokens, request.num_outputs_allowed - request.num_output_tokens - 1)
            if num_tokens <= 0:
                continue
            drafter = self._drafter(request)
            if request.num_output_tokens < drafter.rests_until:
                continue
            guessed = drafter.index.continuation(min(drafter.length, num_tokens, num_max))
            if guessed and (room := self._room(request, len(guessed), state)):
                draft.add_drafts(request, guessed[:room])

    def learned(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Of a request's drafts so many were right."""
        drafter = self._drafters.get(request.request_id)
        if drafter is None:
            return
        if num_accepted:
            drafter.num_misses = drafter.rest_tokens = 0
            longer = 2 * drafter.length if num_accepted == num_drafted else num_accepted + 1
            drafter.length = min(self.config.speculation_tokens, longer)
            return
        drafter.length = 1
        drafter.num_misses += 1
        if drafter.num_misses >= MISSES_MAX:
            drafter.num_misses = 0
            drafter.rest_tokens = min(REST_TOKENS_MAX, 2 * drafter.rest_tokens or REST_TOKENS)
            drafter.rests_until = request.num_output_tokens + drafter.rest_tokens

    def _drafter(self, request: Request) -> _Drafter:
        drafter = self._drafters.get(request.request_id)
        if drafter is None:
            length = min(2, self.config.speculation_tokens)
            drafter = self._drafters[request.request_id] = _Drafter(NgramIndex(request.token_ids), length)
        return drafter

    def _room(self, request: Request, num_tokens: int, state: SchedulerState) -> int:
        """Drafts that its blocks have room for; it gets more of them only where nobody will miss them."""
        blocks = state.blocks
        room = len(request.block_table) * blocks.block_size - request.num_tokens
        if room >= num_tokens:
            return num_tokens
        wanted = blocks.blocks_for(request.num_tokens + num_tokens) - len(request.block_table)
        nobody_waits = not state.waiting and not state.parked
        kept = max(len(state.running), math.ceil(self._watermark * blocks.num_blocks))
        if nobody_waits and blocks.num_free_blocks - wanted >= kept:
            grown = blocks.grow(request, request.num_tokens + num_tokens)
            assert grown
            return num_tokens
        return max(0, room)


def verified(drafts: Sequence[int], first: int, following: Sequence[int]) -> list[int]:
    """What a model that was given drafts has said.

    Args:
        drafts: the guesses, k of them.
        first: what it sampled before the first of them.
        following: what it sampled after each, k of them.

    Returns:
        1 to k + 1 tokens: all up to the first that differs from its draft.
    """
    said = [first]
    for draft, token_id in zip(drafts, following, strict=True):
        if said[-1] != draft:
            break
        said.append(token_id)
    return said
