"""The account of one request's life: where every moment of its time went. Plain data.

A life is cut into intervals that touch each other, so their lengths add up to the
whole. Made by ``engine.lives`` where the decisions are, carried by
``ControlService.ExplainRequest``, told by ``timeline.sentences``.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: What a request's time may be spent on, in the order in which most lives go, and what that means.
PHASES = {
    "intake": "read, checked and tokenised",
    "queued": "waited for its first seat",
    "prefill": "computed its prompt",
    "held": "had a seat, and got no tokens of the step for its prompt",
    "decode": "produced output",
    "stalled": "had a seat, and got no token of the step for its output",
    "preempted": "had lost its seat and waited for another",
    "recompute": "computed again what it had lost",
    "parked": "was not to be computed",
    "returning": "waited for a seat after it was parked",
    "delivery": "its last event waited to be written",
}
WAITING = ("queued", "preempted", "returning")
#: What keeps a waiting request out; with ``behind:`` in front it kept out the first of those before it.
GATES = {
    "arrival": "a step was being computed when it came",
    "behind": "others were first in the queue",
    "seat": "no seat was free",
    "blocks": "too few KV blocks were free",
    "watermark": "the last free KV blocks were kept for growth and for more urgent ones",
    "budget": "the step's tokens were used up",
    "just_preempted": "it had lost its seat in the same step",
    "prefix": "another request was computing its prompt's beginning",
    "in_flight": "its last token was being computed",
    "tenant": "its tenant held as many seats or blocks as it may",
    "grammar": "what its grammar lets come next was not known yet",
}
#: What kept out the first of those that a waiting request stands behind, where one must tell it apart.
GATES_OF_FIRST = {
    "just_preempted": "the first of them had lost its seat in the same step",
    "prefix": "the beginning of the first one's prompt was being computed for another request",
    "in_flight": "the last token of the first of them was being computed",
    "tenant": "the tenant of the first of them held as many seats or blocks as it may",
    "grammar": "what the grammar of the first of them lets come next was not known yet",
}
#: Why a request is parked.
PARKINGS = {
    "credit": "its client had granted no more tokens",
    "reader": "too much of its output waited to be read",
    "paused": "its client had paused it",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of a life.

    Attributes:
        phase: one of ``PHASES``.
        gate: what kept it waiting, one of ``GATES``; why it was parked, one of ``PARKINGS``; else empty.
        begin_s: seconds since the life began.
        end_s: seconds since the life began.
    """

    phase: str
    gate: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """All stretches of one kind.

    Attributes:
        phase: one of ``PHASES``.
        gate: as in ``Interval``; ``behind:GATE`` where another request stood before it.
        before_s: seconds of it before the first output token.
        after_s: seconds of it afterwards.
    """

    phase: str
    gate: str
    before_s: float
    after_s: float

    @property
    def total_s(self) -> float:
        """Seconds of it in all."""
        return self.before_s + self.after_s


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another request, as far as one must know it."""

    server_request_id: str
    request_id: str
    level: int

    @property
    def name(self) -> str:
        """The id its client chose, where there is one."""
        return self.request_id or self.server_request_id


@dataclass(frozen=True, slots=True)
class Loss:
    """A preemption.

    Attributes:
        at_s: when, in seconds since the life began.
        reason: what was needed: ``seats``, ``blocks``, ``growth``, ``operator`` or ``runner``.
        beneficiary: for whom; None = for nobody in particular.
        num_blocks: KV blocks it gave back.
        num_lost_tokens: computed tokens it lost.
        num_recomputed_tokens: tokens of them the prefix cache did not give back.
        waited_s: seconds until it had a seat again.
        recompute_s: seconds from then until it stood where it had been.
        resumed: whether it had a seat again.
    """

    at_s: float
    reason: str
    beneficiary: Neighbour | None
    num_blocks: int
    num_lost_tokens: int
    num_recomputed_tokens: int = 0
    waited_s: float = 0.0
    recompute_s: float = 0.0
    resumed: bool = False

    @property
    def lost_s(self) -> float:
        """Seconds it cost."""
        return self.waited_s + self.recompute_s


@dataclass(frozen=True, slots=True)
class Account:
    """One request's life.

    Invariant: the parts add up to ``total_s``, those before the first token to ``ttft_s``.

    Attributes:
        server_request_id: made by the server.
        request_id: chosen by the client; may be empty.
        tenant: whose.
        label: the client's.
        level: in force.
        class_name: of that level.
        phase: where it is, one of ``PHASES``; empty once it has ended.
        end: why it ended, such as ``stop`` or ``failed: Displaced``; empty while it lives.
        delivered: whether its last event was written to the client; None = not known.
        total_s: seconds from its arrival to its end, delivery included where there was one, or to now.
        ttft_s: seconds from its arrival to its first output token; None = it has none.
        num_prompt_tokens: in its prompt.
        num_cached_tokens: of them found in the prefix cache.
        num_output_tokens: produced.
        num_ahead: requests before it in the queue when it came; None = not known.
        num_seated: requests that were given a seat while it waited for its first.
        seated: the last of them.
        num_holders: requests that held the seats when it was first kept waiting.
        holders: the first of them.
        num_prefill_steps: steps in which it computed tokens that were known.
        num_decode_steps: steps made while it produced output.
        num_drafted_tokens: guessed for its output (speculation).
        num_accepted_tokens: of these, the ones that were right.
        beside_prefill_s: seconds of ``decode`` in steps that computed prompts of others, too.
        losses: its preemptions, the first ones where they are many.
        num_losses: how many they are.
        parts: where its time went, in the order of ``PHASES``.
        intervals: the same in its order, the first ones where they are many.
        num_intervals: how many they are.
    """

    server_request_id: str
    request_id: str
    tenant: str
    label: str
    level: int
    class_name: str
    phase: str
    end: str
    delivered: bool | None
    total_s: float
    ttft_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_ahead: int | None
    num_seated: int
    seated: tuple[Neighbour, ...]
    num_holders: int
    holders: tuple[Neighbour, ...]
    num_prefill_steps: int
    num_decode_steps: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    beside_prefill_s: float
    losses: tuple[Loss, ...]
    num_losses: int
    parts: tuple[Part, ...]
    intervals: tuple[Interval, ...]
    num_intervals: int

    @property
    def name(self) -> str:
        """The id its client chose, where there is one."""
        return self.request_id or self.server_request_id

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, to its end or to now; None = there are none."""
        if self.ttft_s is None or self.num_output_tokens < 2:
            return None
        return (self.total_s - self.spent_s("delivery") - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again, as far as the preemptions are listed."""
        return sum(loss.num_recomputed_tokens for loss in self.losses)

    def spent_s(self, *phases: str) -> float:
        """Seconds spent on these phases."""
        return sum(part.total_s for part in self.parts if part.phase in phases)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON has it, with the derived figures."""
        return dataclasses.asdict(self) | {
            "tpot_s": self.tpot_s,
            "num_recomputed_tokens": self.num_recomputed_tokens,
        }


def in_order(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts in the order of ``PHASES``, the longest first within one."""
    rank = {phase: index for index, phase in enumerate(PHASES)}
    return tuple(sorted(parts, key=lambda part: (rank[part.phase], -part.total_s)))
