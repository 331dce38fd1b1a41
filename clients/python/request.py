"""How a caller says what to generate: keyword options, turned into a ``GenerationSpec``."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from google.protobuf.duration_pb2 import Duration

from vorrang.v1 import types_pb2

#: A conversation: mappings with the keys "role" and "content", oldest first.
Messages = Sequence[Mapping[str, str]]
#: A level (lower is more urgent) or the name of a class; a name that reads as an integer is a level.
PriorityLike = int | str


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen; what is left out is the server's default (see ``SamplingParams``)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_string: bool
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    banned_sequences: Sequence[Sequence[int]]
    bad_words: Sequence[str]
    logprobs: int
    prompt_logprobs: int


class RequestOptions(SamplingOptions, total=False):
    """Options of one request: exactly one of ``prompt``, ``messages``, ``token_ids``, and how to run it.

    ``queue_timeout_s`` bounds the wait for the first computation and
    ``total_timeout_s`` the whole request, both in seconds; at expiry the
    partial output stands. ``credit_tokens`` are the output tokens a request in a
    session may be ahead of its reader; None = the session's. ``label`` is free text
    for the server's logs. ``n`` is the number of outputs (``Result.outputs``).
    ``adapter`` is the name of a LoRA adapter of the model.
    """

    messages: Messages
    token_ids: Sequence[int]
    priority: PriorityLike | None
    label: str
    model: str
    queue_timeout_s: float
    total_timeout_s: float
    credit_tokens: int | None
    n: int
    adapter: str


_SAMPLING_NAMES = SamplingOptions.__annotations__.keys()
_SPEC_NAMES = RequestOptions.__annotations__.keys() - _SAMPLING_NAMES


def encode_priority(priority: PriorityLike) -> types_pb2.Priority:
    """A level or class name as the wire has it."""
    if isinstance(priority, int):
        return types_pb2.Priority(level=priority)
    try:
        return types_pb2.Priority(level=int(priority))
    except ValueError:
        return types_pb2.Priority(class_name=priority)


def encode_prompt(
    prompt: str | None = None, *, messages: Messages | None = None, token_ids: Sequence[int] | None = None
) -> types_pb2.Prompt:
    """The one given form of a prompt as the wire has it.

    Raises:
        ValueError: none or several forms are given, or a message lacks role or content.
    """
    if [prompt is None, messages is None, token_ids is None].count(False) != 1:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    if prompt is not None:
        return types_pb2.Prompt(text=prompt)
    if token_ids is not None:
        return types_pb2.Prompt(tokens=types_pb2.TokenIds(ids=token_ids))
    assert messages is not None
    if any("role" not in m or "content" not in m for m in messages):
        raise ValueError("every message needs a role and a content")
    turns = [types_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    return types_pb2.Prompt(chat=types_pb2.ChatPrompt(messages=turns))


def encode_spec(prompt: str | None, options: RequestOptions) -> types_pb2.GenerationSpec:
    """A request as the wire has it.

    Raises:
        ValueError: see ``encode_prompt``; also a value the wire can't carry, such as a negative count.
        TypeError: an option of no known name, or of a wrong type.
    """
    unknown = options.keys() - _SAMPLING_NAMES - _SPEC_NAMES
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    spec = types_pb2.GenerationSpec(
        prompt=encode_prompt(prompt, messages=options.get("messages"), token_ids=options.get("token_ids")),
        sampling=_encode_sampling(options),
        label=options.get("label", ""),
        model=options.get("model", ""),
        adapter=options.get("adapter", ""),
    )
    priority = options.get("priority")
    if priority is not None:
        spec.priority.CopyFrom(encode_priority(priority))
    credit_tokens = options.get("credit_tokens")
    if credit_tokens is not None:
        spec.credit_tokens = credit_tokens
    if "n" in options:
        spec.num_outputs = options["n"]
    if "queue_timeout_s" in options:
        spec.queue_timeout.CopyFrom(_duration(options["queue_timeout_s"]))
    if "total_timeout_s" in options:
        spec.total_timeout.CopyFrom(_duration(options["total_timeout_s"]))
    return spec


def _encode_sampling(options: RequestOptions) -> types_pb2.SamplingParams:
    values = {name: value for name, value in options.items() if name in _SAMPLING_NAMES}
    stop = options.get("stop", ())
    values.pop("stop", None)
    for name in ("logit_bias", "banned_sequences"):
        values.pop(name, None)
    sampling = types_pb2.SamplingParams(**values)  # type: ignore[arg-type]  # The names are the same on the wire.
    sampling.stop_strings.extend([stop] if isinstance(stop, str) else stop)
    for token_id, bias in options.get("logit_bias", {}).items():
        sampling.logit_bias.add(token_id=token_id, bias=bias)
    for sequence in options.get("banned_sequences", ()):
        sampling.banned_sequences.add(ids=sequence)
    return sampling


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
