"""The scheduler's output for one step, and what the runner makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import VorrangError
from engine.events import SchedulerEvent
from engine.request import RequestId
from engine.sampling import SamplingParams
from engine.scheduler.draft import Gate


@dataclass(frozen=True, slots=True)
class Grant:
    """Tokens one request may compute in this step.

    ```
    token_ids of the request:  |<- computed ->|<- token_ids (granted) ->|<- later ->|
    position                   0              start                     start + n
    ```

    Attributes:
        request_id: whose.
        start: tokens computed before; position of the first granted token.
        token_ids: ids to compute, at positions ``start ..``; at least one.
        block_table: logical to physical blocks, covering every position up to
            the last granted one. A live view: valid until the plan is committed.
        output_index: index of the output token to sample after the last granted
            token, or None when known tokens remain to be computed (mid-prefill).
        sampling: the request's parameters.
        banned_token_ids: ids that must not be sampled (end and stop ids before ``min_tokens``).
        level: effective level, for the record.
    """

    request_id: RequestId
    start: int
    token_ids: Sequence[int]
    block_table: Sequence[int]
    output_index: int | None
    sampling: SamplingParams
    banned_token_ids: frozenset[int] = frozenset()
    level: int = 0


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
        return sum(len(grant.token_ids) for grant in self.grants)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner made of a plan.

    Attributes:
        sampled: one token id per grant that has an ``output_index``.
        failures: requests whose own computation failed (such as NaN logits); they fail alone.
    """

    sampled: Mapping[RequestId, int]
    failures: Mapping[RequestId, VorrangError] = field(default_factory=dict)
