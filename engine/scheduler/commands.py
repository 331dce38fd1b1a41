"""What can happen to requests from outside, between two steps."""

from dataclasses import dataclass

from engine.errors import VorrangError
from engine.request import FinishReason, RequestId


@dataclass(frozen=True, slots=True)
class Finish:
    """End a request with its output so far: the client cancelled, a stop string appeared, time ran out.

    Attributes:
        num_output_tokens: the output's length, where its end was not in its last token; None = all of it.
    """

    request_id: RequestId
    reason: FinishReason = FinishReason.CANCELLED
    stop_string: str | None = None
    num_output_tokens: int | None = None


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


@dataclass(frozen=True, slots=True)
class Allow:
    """Say how long a request's output may become for now; who waits for more is parked, not held by this.

    It bounds what is guessed: a step that brings several tokens must not exceed what a client is ready for.
    """

    request_id: RequestId
    num_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MaskReady:
    """Say that what a request's grammar lets come next is known.

    Attributes:
        output_index: of the output token that may be sampled now; an older one changes nothing.
    """

    request_id: RequestId
    output_index: int


@dataclass(frozen=True, slots=True)
class LoseKv:
    """All KV is lost: the runner died, or a step raised and nobody knows what it has written.

    Who holds blocks is preempted and computed again. The requests of the step it
    happened in are suspects; one that is found guilty fails (``engine.scheduler.quarantine``).

    Attributes:
        suspects: requests of the step it died in; none when it died between two steps.
        from_outside: somebody killed or stopped it, as far as one can tell.
        error: what a guilty request fails with.
    """

    suspects: tuple[RequestId, ...]
    from_outside: bool
    error: VorrangError


Command = Finish | Fail | SetLevel | Preempt | Park | Unpark | Allow | MaskReady | LoseKv
