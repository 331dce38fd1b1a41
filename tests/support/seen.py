"""What a ``Driver`` has seen of requests, and where they stood."""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.events import SchedulerEvent
from engine.request import FinishReason, Request, RequestId, RequestSpec


@dataclass(slots=True)
class Seen:
    """What a client would have seen of one request, and what it must see.

    Attributes:
        end: output tokens, and reason, with which it ends if nothing is done to it.
        progress_at: when it last arrived or got a token.
        idle_at: the same for ageing, which also begins anew when it is unparked or preempted.
        num_earlier: older requests alive at ``progress_at``.
        disturbed: preempted or parked by hand; it can't ask for a bounded wait.
        num_passed: admissions of later requests that passed it while it waited.
    """

    spec: RequestSpec
    expected: list[int]
    end: tuple[int, FinishReason]
    progress_at: float
    idle_at: float
    num_earlier: int
    tokens: list[int] = field(default_factory=list)
    events: list[SchedulerEvent] = field(default_factory=list)
    terminal: SchedulerEvent | None = None
    holds: bool = False
    started: bool = False
    num_preemptions: int = 0
    num_tokens_at_resume: int | None = None
    num_passed: int = 0
    starved: bool = False
    disturbed: bool = False


class Standing(NamedTuple):
    """Who stood where at one moment."""

    running: tuple[Request, ...]
    waiting: tuple[Request, ...]
    parked: tuple[Request, ...]
    num_alive: int
    seated: set[RequestId]
    idle: set[RequestId]  # holds blocks without a seat

    @property
    def alive(self) -> tuple[Request, ...]:
        """All of them."""
        return self.running + self.waiting + self.parked
