"""How a caller says what to generate: keyword options, turned into a ``GenerationSpec``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

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

    The output must match one of ``json_schema`` (JSON, or what ``json.dumps`` makes JSON of),
    ``regex``, ``ebnf`` and ``choice`` (the answers), where one is given.
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
    json_schema: str | Mapping[str, Any] | bool
    regex: str
    ebnf: str
    choice: Sequence[str]
    adapter: str


#: What the names of classes stand for.
CLASS_LEVELS = {"interactive": -10, "standard": 0, "batch": 10}
_LEVELS = range(-100, 101)

_GRAMMARS = ("json_schema", "regex", "ebnf", "choice")
_SAMPLING_NAMES = SamplingOptions.__annotations__.keys()
_SPEC_NAMES = RequestOptions.__annotations__.keys() - _SAMPLING_NAMES


def level_of(priority: PriorityLike) -> int | None:
    """The level a priority stands for; None for a class this version does not know."""
    try:
        return int(priority)
    except ValueError:
        return CLASS_LEVELS.get(str(priority))


def check_priority(priority: PriorityLike) -> None:
    """Find a mistake without asking the server.

    Raises:
        ValueError: it is neither a level nor the name of a class.
    """
    if level_of(priority) not in _LEVELS:
        raise ValueError(
            f"priority must be {', '.join(CLASS_LEVELS)} or a level from {_LEVELS[0]} to {_LEVELS[-1]}, "
            f"got {priority!r}"
        )


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
        ValueError: see ``encode_prompt``; several grammars; also a value the wire can't carry, such as a
            negative count.
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
    if grammar := [name for name in _GRAMMARS if name in options]:
        spec.grammar.CopyFrom(_encode_grammar(grammar, options))
    return spec


def _encode_grammar(names: Sequence[str], options: RequestOptions) -> types_pb2.Grammar:
    if len(names) > 1:
        raise ValueError(f"give at most one of {', '.join(_GRAMMARS)}")
    if "choice" in options:
        choice = options["choice"]
        if isinstance(choice, str):
            raise TypeError("choice must be several strings")
        return types_pb2.Grammar(choice=types_pb2.Choice(options=choice))
    if "json_schema" in options:
        schema = options["json_schema"]
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return types_pb2.Grammar(json_schema=text)
    if "regex" in options:
        return types_pb2.Grammar(regex=options["regex"])
    return types_pb2.Grammar(ebnf=options["ebnf"])


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
