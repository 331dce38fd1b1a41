"""The scheduler's output for one step, and what the runner makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.errors import VorrangError
from engine.events import PositionLogProbs, PromptLogProbs, SchedulerEvent
from engine.request import RequestId
from engine.sampling import SamplingParams
from engine.scheduler.draft import Gate

_NOTHING: frozenset[int] = frozenset()


class Granted(Protocol):
    """What a runner may know of a request. Nothing of it changes while the step is computed.

    Attributes:
        token_ids: prompt + output, append-only; it alone may get a token meanwhile, from the step before.
        draft_token_ids: guesses of what comes after them, granted in this step; empty but for decodes.
        num_prompt_tokens: how many of them are the prompt's.
        adapter: name of the adapter it is computed with; empty = none.
    """

    token_ids: list[int]
    draft_token_ids: Sequence[int]
    num_prompt_tokens: int
    adapter: str

    @property
    def request_id(self) -> RequestId:
        """Unique in the process."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """Its parameters."""
        ...

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that end its output."""
        ...

    @property
    def level(self) -> int:
        """Effective level, for the record."""
        ...


class Grant(NamedTuple):
    """Tokens one request may compute in this step; a tuple, since a step makes hundreds of them.

    ```
    token_ids of the request:  |<- computed ->|<- token_ids (granted) ->|<- later ->|
    position                   0              start                     start + n
    ```

    Attributes:
        request: whose.
        start: tokens computed before; position of the first granted token.
        num_tokens: how many; at least one.
        block_table: logical to physical blocks, covering every position up to
            the last granted one. A live view: valid until the plan is committed.
        output_index: index of the output token to sample after the last granted
            token, or None when known tokens remain to be computed (mid-prefill).

    The last granted tokens may be drafts (``num_drafts``), of a decode and where no plan is
    made ahead. Then ``output_index`` is that of the token to sample before the first draft,
    and one more is to be sampled after each: they are ``StepResult.after_drafts``.

    A plan that is made while the step before is computed may grant a token that nobody
    knows yet: the last one, which that step samples for the same request
    (``has_unknown_token``). Whoever computes both takes it from its own sample.
    """

    request: Granted
    start: int
    num_tokens: int
    block_table: Sequence[int]
    output_index: int | None

    @property
    def request_id(self) -> RequestId:
        """Whose."""
        return self.request.request_id

    @property
    def token_ids(self) -> Sequence[int]:
        """Ids to compute, at positions ``start ..``; the last one is missing while it is unknown."""
        known = self.request.token_ids[self.start : self.start + self.num_tokens]
        return known + list(self.request.draft_token_ids) if self.num_drafts else known

    @property
    def has_unknown_token(self) -> bool:
        """Whether the last id is still being sampled, by the step before."""
        return self.start + self.num_tokens - self.num_drafts > len(self.request.token_ids)

    @property
    def num_drafts(self) -> int:
        """How many of the tokens are guesses."""
        return len(self.request.draft_token_ids)

    @property
    def sampling(self) -> SamplingParams:
        """The request's parameters."""
        return self.request.sampling

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Ids that must not be sampled: those that would end the output before ``min_tokens``."""
        return _NOTHING if self.output_index is None else self.banned_at(self.output_index)

    def banned_at(self, output_index: int) -> frozenset[int]:
        """Those that must not be the output token of that index."""
        if output_index >= self.request.sampling.min_tokens:
            return _NOTHING
        return self.request.ending_token_ids

    @property
    def level(self) -> int:
        """Effective level, for the record."""
        return self.request.level


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does. An empty plan is legal: nothing can run.

    Attributes:
        step: number of the step, from 1.
        grants: decodes first, then prefill chunks, each in policy order.
        events: what planning decided (started, resumed, preempted, finished), in order.
        gate: what kept the first request out that could not be admitted; None when nothing waits.
    """

    step: int
    grants: tuple[Grant, ...]
    events: tuple[SchedulerEvent, ...] = ()
    gate: Gate | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(grant.num_tokens for grant in self.grants)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner made of a plan.

    Attributes:
        sampled: one token id per grant that has an ``output_index``.
        failures: requests whose own computation failed (such as NaN logits); they fail alone.
        logprobs: of the sampled tokens, for who asked for them.
        prompt_logprobs: of the prompt's tokens that the computed ones score, likewise.
        complete: requests whose output says all that its grammar has, with the token that was sampled; or
            without it, where that is known too late and nothing was sampled.
        after_drafts: for each grant with drafts, what was sampled after each of them.
        sat_out: requests that sample nothing, because what their grammar lets come next was not known in
            time: as if the last of their tokens had not been granted. So does one whose last token is
            what a request that sat out the step before was to sample.
        awaiting: requests that are to be granted no token to sample before ``MaskReady``.
    """

    sampled: Mapping[RequestId, int]
    failures: Mapping[RequestId, VorrangError] = field(default_factory=dict)
    logprobs: Mapping[RequestId, PositionLogProbs] = field(default_factory=dict)
    prompt_logprobs: Mapping[RequestId, PromptLogProbs] = field(default_factory=dict)
    complete: frozenset[RequestId] = frozenset()
    after_drafts: Mapping[RequestId, Sequence[int]] = field(default_factory=dict)
    sat_out: frozenset[RequestId] = frozenset()
    awaiting: frozenset[RequestId] = frozenset()
