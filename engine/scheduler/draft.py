"""A plan in the making."""

import enum
from collections.abc import Iterable

from engine.events import SchedulerEvent
from engine.request import Request, RequestId


class Gate(enum.Enum):
    """What kept a request out."""

    SEAT = "seat"
    BLOCKS = "blocks"
    WATERMARK = "watermark"
    BUDGET = "budget"
    JUST_PREEMPTED = "just_preempted"
    PREFIX = "prefix"
    IN_FLIGHT = "in_flight"
    TENANT = "tenant"
    GRAMMAR = "grammar"


class StepDraft:
    """Tokens granted so far, budget left, events.

    Attributes:
        step: number of the step.
        now: when it is planned, in seconds of the caller's clock.
        budget_tokens: tokens that may still be granted.
        decodes: requests that decode: a token each, before all other grants.
        num_drafts: tokens guessed and granted beyond that (``engine.scheduler.speculation``).
        granted: tokens by request, in order of the grants, decodes aside.
        events: what was decided, in order.
        gate: what kept the first request out that could not be admitted; None when nothing waits.
        kept_out: what kept those out that were looked at; those behind them are not.
        num_preemptions: preemptions for arrivals so far.
        max_requests: requests that may be granted tokens; None = no limit but the tokens.
        num_scored: tokens granted whose log probabilities are told.
    """

    def __init__(self, step: int, now: float, budget_tokens: int, max_scored_tokens: int) -> None:
        self.step = step
        self.now = now
        self.budget_tokens = budget_tokens
        self.num_scored = 0
        self._max_scored_tokens = max_scored_tokens
        self.decodes: list[Request] = []
        self.num_drafts = 0
        self.granted: dict[Request, int] = {}
        self.events: list[SchedulerEvent] = []
        self.gate: Gate | None = None
        self.kept_out: dict[RequestId, Gate] = {}
        self.num_preemptions = 0
        self.max_requests: int | None = None

    def grant(self, request: Request, num_tokens: int) -> None:
        """Let a request compute ``num_tokens`` more in this step."""
        assert 0 < num_tokens <= self.budget_tokens
        granted = self.granted.get(request, 0)
        if request.num_scored_tokens is not None:
            to_score = request.num_tokens_to_score
            self.num_scored += min(granted + num_tokens, to_score) - min(granted, to_score)
        self.granted[request] = granted + num_tokens
        self.budget_tokens -= num_tokens

    @property
    def is_empty(self) -> bool:
        """Whether nothing is granted yet."""
        return not self.decodes and not self.granted

    def decode(self, requests: list[Request]) -> None:
        """Let requests that decode compute their token; called once."""
        assert not self.decodes
        assert len(requests) <= self.budget_tokens
        self.decodes = requests.copy()
        self.budget_tokens -= len(requests)

    def add_drafts(self, request: Request, token_ids: list[int]) -> None:
        """Let a request that decodes compute guesses behind its own token; once, when all else is granted."""
        assert 0 < len(token_ids) <= self.budget_tokens
        request.draft_token_ids = token_ids
        self.num_drafts += len(token_ids)
        self.budget_tokens -= len(token_ids)

    def grant_chunk(self, request: Request, max_chunk_tokens: int, limit_tokens: int | None = None) -> int:
        """Let a request compute what chunk, budget and ``limit_tokens`` allow; returns the tokens granted.

        Of tokens that are scored the step has ``max_scored_tokens``, and one for each request beyond them.
        """
        if request.awaits_mask and request.num_missing_tokens == 1:
            return 0
        granted = self.granted.get(request, 0)
        if not granted and self._is_full(len(self.granted) + len(self.decodes)):
            return 0
        num_tokens = min(request.num_missing_tokens, max_chunk_tokens) - granted
        num_tokens = min(num_tokens, self.budget_tokens)
        if limit_tokens is not None:
            num_tokens = min(num_tokens, limit_tokens)
        left = max(self._max_scored_tokens - self.num_scored, 0 if granted else 1)
        if request.num_tokens_to_score - granted > left:
            num_tokens = min(num_tokens, left)
        if num_tokens > 0:
            self.grant(request, num_tokens)
        return max(0, num_tokens)

    def has_room(self, without: Iterable[Request] = ()) -> bool:
        """Whether one more request may be granted a token, if ``without`` gave theirs back."""
        tokens = [self.granted.get(r, 1) for r in without if r in self.granted or r in self.decodes]
        num_requests = len(self.granted) + len(self.decodes) - len(tokens)
        return self.budget_tokens + sum(tokens) >= 1 and not self._is_full(num_requests)

    def _is_full(self, num_requests: int) -> bool:
        return self.max_requests is not None and num_requests >= self.max_requests

    def take_back(self, request: Request) -> None:
        """Undo a grant; harmless when there is none."""
        if request in self.granted:
            granted = self.granted.pop(request)
            self.budget_tokens += granted
            self.num_scored -= min(granted, request.num_tokens_to_score)
        elif request in self.decodes:
            self.decodes.remove(request)
            self.budget_tokens += 1
