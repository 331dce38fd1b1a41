"""What happens to a request, in the order in which it happens.

Scheduler events come out of ``Scheduler.plan``, ``apply`` and ``commit``. The
loop turns ``TokensSampled`` into ``Delta`` by adding text. Every request's
events are: ``Started``, then any number of ``PromptLogProbs`` / ``Delta`` /
``Preempted`` / ``Resumed`` / ``LevelChanged``, then exactly one of ``Finished`` or ``Failed``.
Of a request with several outputs each has such events, with ``OutputFinished`` in the place
of ``Finished``, which comes when all have ended (``engine.siblings``).
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import VorrangError
from engine.request import FinishReason, PreemptReason, RequestId, Usage


@dataclass(frozen=True, slots=True)
class Started:
    """First admission."""

    request_id: RequestId
    num_prompt_tokens: int
    num_cached_tokens: int


class PositionLogProbs(NamedTuple):
    """Log probabilities of the model's own distribution at one place of a text.

    Attributes:
        token_id: the token that stands there.
        logprob: natural logarithm of its probability.
        top_ids: the likeliest ids there, likeliest first, equal ones by id.
        top: theirs.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogProbs:
    """Log probabilities of tokens of the prompt, for who asked; each place once, in order, from index 1.

    Attributes:
        first_index: place of the first of them in the prompt.
        positions: one entry a token.
    """

    request_id: RequestId
    first_index: int
    positions: tuple[PositionLogProbs, ...]


class TokensSampled(NamedTuple):
    """New output tokens, as the scheduler sees them; ``first_index`` counts from 0.

    A tuple, since a step makes hundreds of them.
    """

    request_id: RequestId
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New output as a client sees it: ids, and text that may lag behind them.

    Attributes:
        logprobs: one entry a token, for who asked for them.
    """

    request_id: RequestId
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogProbs, ...] = ()


@dataclass(frozen=True, slots=True)
class Preempted:
    """It lost seat and blocks.

    Attributes:
        count: how often, this time included.
        beneficiary: the request it was preempted for, if any.
        num_blocks: blocks it gave back.
        num_lost_tokens: computed tokens it lost.
    """

    request_id: RequestId
    reason: PreemptReason
    count: int
    beneficiary: RequestId | None
    num_blocks: int
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Admitted again; ``num_recomputed_tokens`` were not found in the prefix cache."""

    request_id: RequestId
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class LevelChanged:
    """It has a new level."""

    request_id: RequestId
    level: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal: it ended with an output."""

    request_id: RequestId
    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """One of several outputs has ended; the request ends when all have."""

    request_id: RequestId
    finished: Finished


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: it ended without."""

    request_id: RequestId
    error: VorrangError
    usage: Usage


SchedulerEvent = Started | TokensSampled | Preempted | Resumed | LevelChanged | Finished | Failed
RequestEvent = (
    Started | PromptLogProbs | Delta | Preempted | Resumed | LevelChanged | OutputFinished | Finished | Failed
)
TERMINAL = (Finished, Failed)
