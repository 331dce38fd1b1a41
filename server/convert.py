"""Between wire messages and engine values. Decides nothing and awaits nothing.

Field paths in errors are relative to ``GenerationSpec``, as its caller wrote
them: ``prompt``, ``sampling.temperature``, ``priority.level``.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from engine import events as ev
from engine.errors import InvalidRequest, UnknownModel
from engine.priority import check_level, level_named
from engine.request import FinishReason, PreemptReason, RequestId, RequestSpec, Usage
from engine.runner.base import ModelInfo
from engine.sampling import SamplingParams
from engine.text import ChatMessage, PromptLimit
from engine.text_work.jobs import EncodeChat, EncodeText
from server.convert_sampling import (
    bad_words_of,
    check_allowed,
    check_sampling_ids,
    check_token_ids,
    grammar_of,
    num_outputs_of,
    sampling_of,
)
from server.errors import status_of
from timeline.printable import has_controls
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

MAX_LABEL_BYTES = 128
MAX_MESSAGES = 4096
_NANOSECONDS = 1_000_000_000

_FINISH_REASONS = {
    FinishReason.STOP: types.FINISH_REASON_STOP,
    FinishReason.STOP_STRING: types.FINISH_REASON_STOP_STRING,
    FinishReason.STOP_TOKEN: types.FINISH_REASON_STOP_TOKEN,
    FinishReason.LENGTH: types.FINISH_REASON_LENGTH,
    FinishReason.CAPACITY: types.FINISH_REASON_CAPACITY,
    FinishReason.TIME_LIMIT: types.FINISH_REASON_TIME_LIMIT,
    FinishReason.CANCELLED: types.FINISH_REASON_CANCELLED,
}
_PREEMPT_REASONS = {
    PreemptReason.SEATS: types.PREEMPT_REASON_SEATS,
    PreemptReason.BLOCKS: types.PREEMPT_REASON_BLOCKS,
    PreemptReason.GROWTH: types.PREEMPT_REASON_GROWTH,
    PreemptReason.OPERATOR: types.PREEMPT_REASON_OPERATOR,
    PreemptReason.RUNNER: types.PREEMPT_REASON_RUNNER,
}


#: Token ids, or what makes them of a text.
Prompt = tuple[int, ...] | EncodeText | EncodeChat


@dataclass(frozen=True, slots=True)
class Draft:
    """A request that is valid as far as one can say before its prompt is tokenised.

    Attributes:
        prompt: the prompt's token ids, or the job that makes them.
        sampling: parameters; ``max_tokens`` is the server's default when none was given.
        max_tokens_given: whether the client chose ``max_tokens``.
        level: the request's own priority; None when it has none.
        label: free text for logs.
        credit_tokens: output tokens its client is ready for at first; None when it does not say.
        queue_deadline: time of the engine's clock at which it ends if it never got a seat.
        total_deadline: time of the engine's clock at which it ends whatever it has.
        num_outputs: how many outputs are wanted.
        bad_words: words that must not be said, to be banned as ids once they are tokenised.
        adapter: name of an adapter; empty = none.
    """

    prompt: "Prompt"
    sampling: SamplingParams
    max_tokens_given: bool
    level: int | None
    label: str
    credit_tokens: int | None
    queue_deadline: float | None
    total_deadline: float | None
    num_outputs: int = 1
    bad_words: tuple[str, ...] = ()
    adapter: str = ""


def draft_of(
    spec: types.GenerationSpec,
    *,
    info: ModelInfo,
    limit: PromptLimit,
    default_max_tokens: int,
    now: float = 0.0,
    max_request_s: float | None = None,
) -> Draft:
    """Validate all of a spec but the prompt's tokens.

    Args:
        spec: what is asked for.
        info: of the model.
        limit: of the prompt's length.
        default_max_tokens: output tokens when it does not say.
        now: when it arrived, on the engine's clock.
        max_request_s: longest total time there is; None = no bound.

    Raises:
        InvalidRequest: a field breaks a rule.
        Unimplemented: a field that this version does not support has a value.
        UnknownModel: it names a model that is not served.
    """
    if spec.model and spec.model != info.name:
        raise UnknownModel(f"no model {spec.model[:80]!r} is served, only {info.name!r}")
    size = len(spec.label.encode())
    if size > MAX_LABEL_BYTES:
        raise InvalidRequest("label", f"must be at most {MAX_LABEL_BYTES} bytes", size)
    check_plain("label", spec.label)
    sampling = sampling_of(spec.sampling, default_max_tokens)
    if spec.HasField("grammar"):
        sampling = dataclasses.replace(sampling, grammar=grammar_of(spec.grammar))
    check_sampling_ids(sampling, info)
    queue_s, total_s = (_timeout_s(spec, field) for field in ("queue_timeout", "total_timeout"))
    total_s = min((bound for bound in (total_s, max_request_s) if bound is not None), default=None)
    return Draft(
        prompt=prompt_of(spec.prompt, limit, info),
        sampling=sampling,
        max_tokens_given=spec.sampling.HasField("max_tokens"),
        level=level_of(spec.priority) if spec.HasField("priority") else None,
        label=spec.label,
        credit_tokens=spec.credit_tokens if spec.HasField("credit_tokens") else None,
        queue_deadline=None if queue_s is None else now + queue_s,
        total_deadline=None if total_s is None else now + total_s,
        num_outputs=num_outputs_of(spec, sampling),
        bad_words=bad_words_of(spec.sampling),
        adapter=spec.adapter,
    )


def check_plain(field: str, text: str) -> None:
    """Refuse text with control characters, line ends or marks that turn its direction: it is shown to people.

    Raises:
        InvalidRequest: it holds one.
    """
    if has_controls(text):
        raise InvalidRequest(field, "must hold no control characters", text)


def fingerprint(spec: types.GenerationSpec) -> bytes:
    """Equal for equal specs, and for no others."""
    return hashlib.sha256(spec.SerializeToString(deterministic=True)).digest()


def _timeout_s(spec: types.GenerationSpec, field: str) -> float | None:
    if not spec.HasField(field):
        return None
    timeout = getattr(spec, field)
    seconds = float(timeout.seconds + timeout.nanos / _NANOSECONDS)
    if seconds <= 0:
        raise InvalidRequest(field, "must be more than 0 s", seconds)
    return seconds


def request_spec(
    draft: Draft,
    token_ids: Iterable[int],
    request_id: RequestId,
    level: int,
    *,
    info: ModelInfo,
    context_tokens: int,
    deadline: float | None = None,
) -> RequestSpec:
    """The engine's spec of a draft whose prompt is tokenised.

    ``deadline`` is one more bound on the total time, on the engine's clock.

    Raises:
        InvalidRequest: ``min_tokens`` exceeds what the context leaves, or no token is left to be sampled.
    """
    prompt = tuple(token_ids)
    sampling = draft.sampling
    if not draft.max_tokens_given:
        room = max(1, context_tokens - len(prompt))  # a prompt without room is the engine's to refuse
        sampling = dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens, room))
    eos = frozenset[int]() if sampling.ignore_eos else info.eos_token_ids
    check_allowed(sampling, eos)
    deadlines = [time for time in (draft.total_deadline, deadline) if time is not None]
    return RequestSpec(
        request_id,
        prompt,
        sampling,
        level,
        eos_token_ids=eos,
        queue_deadline=draft.queue_deadline,
        total_deadline=min(deadlines, default=None),
        label=draft.label,
        adapter=draft.adapter,
    )


def level_of(priority: types.Priority, *, field: str = "priority") -> int:
    """The level a priority stands for.

    Raises:
        InvalidRequest: no form is set, the level is out of range or the class unknown.
    """
    match priority.WhichOneof("value"):
        case "level":
            return check_level(priority.level, field=f"{field}.level")
        case "class_name":
            return level_named(priority.class_name, field=f"{field}.class_name")
        case _:
            raise InvalidRequest(field, "must be a level or the name of a class", None)


def prompt_of(prompt: types.Prompt, limit: PromptLimit, info: ModelInfo) -> Prompt:
    """A prompt's token ids, or the job that makes them. What is too long is refused before it is looked at.

    Raises:
        InvalidRequest: the prompt has no form, or ids outside the vocabulary.
        ContextExceeded: it is too long for the context, whatever its tokens are.
    """
    match prompt.WhichOneof("value"):
        case "text":
            job = EncodeText(prompt.text, limit)
            limit.check_bytes(job.num_bytes)
            return job
        case "tokens":
            limit.check_tokens(len(prompt.tokens.ids))
            ids = tuple(prompt.tokens.ids)
            check_token_ids(ids, info, field="prompt.tokens.ids")
            return ids
        case "chat":
            return _chat_of(prompt.chat, limit)
        case _:
            raise InvalidRequest("prompt", "must be text, tokens or chat", None)


def _chat_of(chat: types.ChatPrompt, limit: PromptLimit) -> EncodeChat:
    num_messages = len(chat.messages)
    if not 1 <= num_messages <= MAX_MESSAGES:
        rule = "must hold at least one message" if not num_messages else f"must hold at most {MAX_MESSAGES}"
        raise InvalidRequest("prompt.chat.messages", rule, num_messages)
    limit.check_bytes(chat.ByteSize() - 8 * num_messages)
    return EncodeChat(
        tuple(ChatMessage(message.role, message.content) for message in chat.messages),
        chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        chat.tools_json,
        limit,
    )


def fill_event(
    frame: gen.SessionResponse | gen.GenerateStreamResponse,
    event: ev.RequestEvent,
    *,
    priority_ignored: bool = False,
) -> None:
    """Set the event of a frame. ``Failed`` has a place in session frames alone."""
    match event:
        case ev.Delta():
            delta = frame.delta
            delta.first_token_index = event.first_index
            delta.token_ids.extend(event.token_ids)
            delta.text = event.text
            if event.logprobs:
                delta.logprobs.extend(map(position_logprobs, event.logprobs))
        case ev.PromptLogProbs():
            frame.prompt_logprobs.first_token_index = event.first_index
            frame.prompt_logprobs.positions.extend(map(position_logprobs, event.positions))
        case ev.Started():
            frame.started.prompt_tokens = event.num_prompt_tokens
            frame.started.cached_tokens = event.num_cached_tokens
        case ev.Preempted():
            frame.preempted.reason = _PREEMPT_REASONS[event.reason]
            frame.preempted.count = event.count
        case ev.Resumed():
            frame.resumed.SetInParent()
            frame.resumed.recomputed_tokens = event.num_recomputed_tokens
        case ev.LevelChanged():
            frame.priority_changed.SetInParent()
            frame.priority_changed.level = event.level
            frame.priority_changed.priority_ignored = priority_ignored
        case ev.OutputFinished():
            frame.output_finished.CopyFrom(finished(event.finished))
        case ev.Finished():
            frame.finished.CopyFrom(finished(event))
        case ev.Failed():
            assert isinstance(frame, gen.SessionResponse), "a failed call ends with a status"
            frame.failed.CopyFrom(failed(event.error, usage(event.usage)))


def position_logprobs(position: ev.PositionLogProbs) -> types.PositionLogprobs:
    """Log probabilities at one place of a text."""
    return types.PositionLogprobs(
        sampled=types.TokenLogprob(token_id=position.token_id, logprob=position.logprob),
        top=[
            types.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in zip(position.top_ids, position.top, strict=True)
        ],
    )


def preempt_reason(reason: PreemptReason) -> types.PreemptReason:
    """Why somebody lost its place, as the wire has it."""
    return _PREEMPT_REASONS[reason]


def finished(event: ev.Finished) -> gen.FinishedEvent:
    """The terminal event of an output."""
    return gen.FinishedEvent(
        reason=_FINISH_REASONS[event.reason],
        usage=usage(event.usage),
        stop_string=event.stop_string or "",
        stop_token_id=event.stop_token_id,
    )


def failed(error: Exception, cost: types.Usage | None = None) -> gen.FailedEvent:
    """The terminal event of a request that was refused or failed."""
    retryable = bool(getattr(error, "retryable", False))
    return gen.FailedEvent(status=status_of(error), retryable=retryable, usage=cost or types.Usage())


def accepted(
    spec: RequestSpec, *, requested_level: int, queue_position: int, priority_ignored: bool
) -> gen.AcceptedEvent:
    """The first event of a request that was taken."""
    return gen.AcceptedEvent(
        level=spec.level,
        capped=spec.level != requested_level,
        requested_level=requested_level,
        queue_position=queue_position,
        priority_ignored=priority_ignored,
        prompt_tokens=len(spec.prompt_token_ids),
        seed=spec.sampling.seed,
    )


def usage(cost: Usage) -> types.Usage:
    """What a request has cost."""
    return types.Usage(
        prompt_tokens=cost.prompt_tokens,
        cached_tokens=cost.cached_tokens,
        output_tokens=cost.output_tokens,
        recomputed_tokens=cost.recomputed_tokens,
        preemptions=cost.preemptions,
        queued=duration(cost.queued_s),
        prefill=duration(cost.prefill_s),
        decode=duration(cost.decode_s),
        preempted=duration(cost.preempted_s),
        parked=duration(cost.parked_s),
        drafted_tokens=cost.drafted_tokens,
        accepted_tokens=cost.accepted_tokens,
    )


def duration(seconds: float) -> Duration:
    """Seconds as a wire duration."""
    whole, nanos = divmod(round(seconds * _NANOSECONDS), _NANOSECONDS)
    return Duration(seconds=whole, nanos=nanos)
