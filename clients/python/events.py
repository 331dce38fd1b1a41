"""What a request tells its caller: typed events, their cost, and the collected result.

Plain frozen values, read from the wire by ``decode``. Names of enum values are
strings without their prefix ("STOP", "SEATS"), so that a value a newer server
adds arrives as its number instead of failing.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from google.protobuf.duration_pb2 import Duration

from vorrang.v1 import generation_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request has cost: counts in tokens, durations in seconds.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens whose KV was in the prefix cache at first admission.
        output_tokens: tokens produced.
        recomputed_tokens: tokens computed again after preemptions.
        preemptions: how often it was preempted.
        queued_s: waiting before the first admission.
        prefill_s: from first admission to the first output token, less preempted and parked time.
        decode_s: from the first output token to the end, less preempted and parked time.
        preempted_s: waiting after preemptions.
        parked_s: paused, or without credit.
        drafted_tokens: output tokens that the server guessed and verified.
        accepted_tokens: of these, the ones that were right.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    parked_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at one place of a text, sampled or the prompt's, and the likeliest ones, likeliest first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is valid and queued.

    Attributes:
        level: level in force; lower is more urgent.
        capped: the tenant's cap made it less urgent than ``requested_level``.
        requested_level: level that was asked for.
        queue_position: requests that wait and would be served before it.
        priority_ignored: the policy in force does not look at priority.
        prompt_tokens: tokens of the prompt.
        seed: seed in force.
    """

    level: int
    capped: bool = False
    requested_level: int = 0
    queue_position: int = 0
    priority_ignored: bool = False
    prompt_tokens: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class QueueUpdate:
    """Its place in the queue has changed."""

    queue_position: int


@dataclass(frozen=True, slots=True)
class Started:
    """It has a seat and is being computed for the first time; ``cached_tokens`` were in the cache."""

    prompt_tokens: int
    cached_tokens: int = 0
    output_index: int = 0


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of tokens of the prompt, each told once, the first token's never.

    Attributes:
        first_token_index: index of the first of them in the prompt, from 1.
        positions: one entry a token.
    """

    first_token_index: int
    positions: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New output; several tokens when the reader lags. Text may lag behind the ids.

    Attributes:
        text: new text.
        token_ids: new token ids.
        first_token_index: index of the first of them in the output, from 0.
        logprobs: one entry per new token, if asked for.
        output_index: which of several outputs it belongs to.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    first_token_index: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    output_index: int = 0


@dataclass(frozen=True, slots=True)
class Preempted:
    """It lost its seat to a more urgent request; the output goes on later without a gap.

    Attributes:
        reason: what was needed: "SEATS", "BLOCKS", "GROWTH", "OPERATOR" or "RUNNER".
        count: how often it has been preempted, this time included.
        output_index: which of several outputs it is.
    """

    reason: str
    count: int
    output_index: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """It is being computed again; ``recomputed_tokens`` were not found in the cache."""

    recomputed_tokens: int
    output_index: int = 0


@dataclass(frozen=True, slots=True)
class PriorityChanged:
    """Its priority has changed to ``level``."""

    level: int
    capped: bool = False
    priority_ignored: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """It ended with an output; always the last event.

    Attributes:
        reason: "STOP", "STOP_STRING", "STOP_TOKEN", "LENGTH", "CAPACITY", "TIME_LIMIT" or "CANCELLED".
        usage: what it cost.
        stop_string: the stop string that ended it; empty when none did.
        stop_token_id: the stop token that ended it; None when none did.
    """

    reason: str
    usage: Usage
    stop_string: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """One of several outputs has ended; ``Finished`` follows when all have.

    Attributes:
        output_index: which.
        finished: why, and what it cost by itself.
    """

    output_index: int
    finished: Finished


Event: TypeAlias = (
    Accepted
    | QueueUpdate
    | Started
    | PromptLogprobs
    | Delta
    | Preempted
    | Resumed
    | PriorityChanged
    | OutputFinished
    | Finished
)


@dataclass(frozen=True, slots=True)
class Output:
    """One of the outputs of a request.

    Attributes:
        text: the text.
        token_ids: the token ids.
        finished: why it ended, and what it cost; None if the server did not say.
        logprobs: one entry per token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finished: Finished | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The whole output of a request.

    Attributes:
        text: the text; of several outputs the first one's.
        token_ids: the token ids, likewise.
        finish_reason: as in ``Finished.reason``.
        usage: what it cost.
        logprobs: one entry per token, if asked for; likewise.
        accepted: what was accepted (level, seed); None if the server did not say.
        ttft_s: from sending the request to its first token; None when there was none, or the call is unary.
        tpot_s: mean time between tokens after the first, preempted time included; None below two tokens.
        duration_s: from sending the request to its end.
        prompt_logprobs: one entry per token of the prompt but the first, if asked for.
        outputs: all outputs in order; the only one, too.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logprobs: tuple[PositionLogprobs, ...] = ()
    accepted: Accepted | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    duration_s: float = 0.0
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    outputs: tuple[Output, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server accepts, as in ``vorrang.v1.Limits``; times in seconds; 0 = not said, or no bound."""

    max_request_tokens: int = 0
    max_output_tokens: int = 0
    max_stop_strings: int = 0
    max_stop_string_bytes: int = 0
    max_stop_token_ids: int = 0
    max_logprobs: int = 0
    max_frame_bytes: int = 0
    max_session_requests: int = 0
    max_bad_frames: int = 0
    max_request_id_bytes: int = 0
    max_buffered_tokens: int = 0
    max_label_bytes: int = 0
    max_prompt_logprobs: int = 0
    max_outputs: int = 0
    max_logit_biases: int = 0
    max_listed_token_ids: int = 0
    max_banned_sequences: int = 0
    max_sequence_tokens: int = 0
    max_grammar_bytes: int = 0
    max_choices: int = 0
    slow_client_timeout_s: float = 0.0
    resume_grace_s: float = 0.0
    retention_s: float = 0.0
    max_request_time_s: float = 0.0
    reprioritize_burst: int = 0
    reprioritize_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is served."""

    name: str
    context_tokens: int
    vocabulary_size: int
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    architecture: str
    limits: Limits
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the server said when the session was opened.

    Attributes:
        session_token: names the session; empty when resume is not offered.
        limits: what the server accepts.
        default_level: level of starts that carry no priority.
        policy: scheduling policy in force.
        server_version: version of the server program.
        default_credit_tokens: credit of starts that carry none; 0 = the server enforces none.
    """

    session_token: str
    limits: Limits
    default_level: int
    policy: str
    server_version: str
    default_credit_tokens: int = 0


def seconds(duration: Duration) -> float:
    """A protobuf duration as seconds."""
    return duration.seconds + duration.nanos / 1e9


def enum_name(enum: Any, number: int) -> str:
    """Name of an enum value without the prefix all names of its enum share; the number if unknown."""
    descriptor = enum.DESCRIPTOR
    value = descriptor.values_by_number.get(number)
    if value is None:
        return str(number)
    zero: str = descriptor.values_by_number[0].name
    name: str = value.name
    return name.removeprefix(zero.removesuffix("UNSPECIFIED"))


def decode_usage(usage: types_pb2.Usage) -> Usage:
    """Read usage from the wire."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        recomputed_tokens=usage.recomputed_tokens,
        preemptions=usage.preemptions,
        queued_s=seconds(usage.queued),
        prefill_s=seconds(usage.prefill),
        decode_s=seconds(usage.decode),
        preempted_s=seconds(usage.preempted),
        parked_s=seconds(usage.parked),
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
    )


def decode_limits(limits: types_pb2.Limits) -> Limits:
    """Read limits from the wire."""
    known = limits.DESCRIPTOR.fields_by_name
    read: dict[str, Any] = {
        name: getattr(limits, name) if name in known else seconds(getattr(limits, name.removesuffix("_s")))
        for name in (field.name for field in fields(Limits))
    }
    return Limits(**read)


def decode_opened(opened: generation_pb2.OpenedEvent) -> SessionInfo:
    """Read the answer to ``open`` from the wire."""
    return SessionInfo(
        session_token=opened.session_token,
        limits=decode_limits(opened.limits),
        default_level=opened.default_level,
        policy=opened.policy,
        server_version=opened.server_version,
        default_credit_tokens=opened.default_credit_tokens,
    )


def decode_accepted(event: generation_pb2.AcceptedEvent) -> Accepted:
    """Read ``accepted`` from the wire."""
    return Accepted(
        event.level,
        event.capped,
        event.requested_level,
        event.queue_position,
        event.priority_ignored,
        event.prompt_tokens,
        event.seed,
    )


def decode_logprobs(positions: Any) -> tuple[PositionLogprobs, ...]:
    """Read a repeated ``PositionLogprobs`` from the wire."""
    return tuple(
        PositionLogprobs(
            TokenLogprob(position.sampled.token_id, position.sampled.logprob),
            tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in position.top),
        )
        for position in positions
    )


def decode_finished(event: generation_pb2.FinishedEvent) -> Finished:
    """Read ``finished`` from the wire."""
    return Finished(
        enum_name(types_pb2.FinishReason, event.reason),
        decode_usage(event.usage),
        event.stop_string,
        event.stop_token_id if event.HasField("stop_token_id") else None,
    )


def decode_outputs(response: generation_pb2.GenerateResponse) -> tuple[Output, ...]:
    """Read the outputs of a unary call from the wire; an only one is not repeated there."""
    return tuple(
        Output(
            each.text, tuple(each.token_ids), decode_finished(each.finished), decode_logprobs(each.logprobs)
        )
        for each in response.outputs or [response]
    )


_DECODERS: dict[str, Callable[[Any], Event]] = {
    "accepted": decode_accepted,
    "queue_update": lambda e: QueueUpdate(e.queue_position),
    "started": lambda e: Started(e.prompt_tokens, e.cached_tokens),
    "delta": lambda e: Delta(e.text, tuple(e.token_ids), e.first_token_index, decode_logprobs(e.logprobs)),
    "preempted": lambda e: Preempted(enum_name(types_pb2.PreemptReason, e.reason), e.count),
    "resumed": lambda e: Resumed(e.recomputed_tokens),
    "prompt_logprobs": lambda e: PromptLogprobs(e.first_token_index, decode_logprobs(e.positions)),
    "output_finished": lambda e: OutputFinished(0, decode_finished(e)),
    "priority_changed": lambda e: PriorityChanged(e.level, e.capped, e.priority_ignored),
    "finished": decode_finished,
}


def decode(response: Any) -> Event | None:
    """The event in a ``SessionResponse`` or ``GenerateStreamResponse``.

    Returns:
        None for a case that is no event of a request, or that this version does not know.
    """
    case = response.WhichOneof("event")
    decoder = _DECODERS.get(case) if case else None
    event = decoder(getattr(response, case)) if decoder else None
    if response.output_index and isinstance(event, Started | Delta | Preempted | Resumed | OutputFinished):
        return replace(event, output_index=response.output_index)
    return event
