"""What can be done to a request from outside, between two steps."""

from dataclasses import dataclass

from engine.errors import VorrangError
from engine.request import FinishReason, RequestId


@dataclass(frozen=True, slots=True)
class Finish:
    """End a request with its output so far: the client cancelled, a stop string appeared, time ran out."""

    request_id: RequestId
    reason: FinishReason = FinishReason.CANCELLED
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """End a request with an error."""

    request_id: RequestId
    error: VorrangError


@dataclass(frozen=True, slots=True)
class SetLevel:
    """Give a request another level."""

    request_id: RequestId
    level: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take seat and blocks from a running request; it returns to the queue. For operators and tests."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Park:
    """Compute a request no more for now; it keeps its blocks and gives back its seat."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Unpark:
    """Let a parked request go on."""

    request_id: RequestId


Command = Finish | Fail | SetLevel | Preempt | Park | Unpark
