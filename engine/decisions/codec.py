"""Decision records as lines of JSON, and the calls in them back again.

The first line says what the scheduler was made of, every further one is a call
with its outcome, the last one says why the log ends. What the scheduler never
looks at stays out: a request's label and its stop strings. Outcomes are not read
back: a replay makes its own and compares them as they are written.

Pure: it knows no files.
"""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest, VorrangError
from engine.events import Failed, Finished, LevelChanged, Preempted, Resumed, Started
from engine.request import RequestId, RequestSpec, Usage
from engine.sampling import SamplingParams
from engine.scheduler.commands import (
    Allow,
    Fail,
    Finish,
    LoseKv,
    MaskReady,
    Park,
    Preempt,
    SetLevel,
    Unpark,
)
from engine.scheduler.config import ClassConfig, SchedulerConfig, TenantConfig
from engine.scheduler.decisions import Applied, Call, Committed, Origin, Planned, Record, Submitted
from engine.scheduler.plan import StepResult

FORMAT = "vorrang_decision_log"
VERSION = 1
#: Larger pools are taken for damage: a replay would have to make them.
MAX_POOL_BLOCKS = 2**24

_DECISION = ("step", "grants", "gate", "num_running", "num_waiting", "num_free_blocks")
_COMMANDS = {c.__name__: c for c in (Finish, Fail, SetLevel, Preempt, Park, Unpark, Allow, MaskReady, LoseKv)}
_TAGGED = {
    *_COMMANDS.values(), Started, Preempted, Resumed, LevelChanged, Finished, Failed,
}  # fmt: skip
_UNTAGGED = (RequestSpec, SamplingParams, Usage, SchedulerConfig, ClassConfig, TenantConfig)
#: What no decision depends on.
_LEFT_OUT = {
    "label", "stop_strings", "include_stop_string", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "allowed_token_ids", "banned_token_ids", "banned_sequences",
    "logprobs", "packed", "grammar",
}  # fmt: skip
#: Written only where they say something: logs without them are read, and replayed, as they always were.
_OPTIONAL: Mapping[str, object] = {
    "family": "", "adapter": "", "prompt_logprobs": None, "num_output_tokens": None, "speculation_tokens": 0,
    "speculation_max_running": 8, "drafted_tokens": 0, "accepted_tokens": 0,
}  # fmt: skip
_FIELDS: Mapping[type, tuple[str, ...]] = {
    cls: tuple(f.name for f in dataclasses.fields(cls) if f.name not in _LEFT_OUT)
    for cls in (*_TAGGED, *_UNTAGGED)
}


class Malformed(Exception):
    """A line is not what it must be; the message is the rule it breaks."""


class RecordedError(VorrangError):
    """An error of a recorded run, by the name of its class and its text."""

    def __init__(self, class_name: str, text: str) -> None:
        super().__init__(text)
        self.class_name = class_name


@dataclass(frozen=True, slots=True)
class End:
    """Why a log ends.

    Attributes:
        reason: ``closed``, ``max_bytes``, ``backlog`` (the disk was too slow) or ``failed``.
        num_records: calls in it.
    """

    reason: str
    num_records: int


# Writing


def origin_line(origin: Origin) -> str:
    """The first line, without its newline."""
    pool = {
        "num_blocks": origin.num_blocks,
        "block_size": origin.block_size,
        "prefix_cache": origin.prefix_cache,
    }
    return _dumps({FORMAT: VERSION, "config": origin.config, "pool": pool})


def record_line(record: Record) -> str:
    """A line of a call, without its newline."""
    return _dumps(_body(record))


def end_line(end: End) -> str:
    """The last line, without its newline."""
    return _dumps({"end": end.reason, "num_records": end.num_records})


def _body(record: Record) -> dict[str, Any]:
    body: dict[str, Any] = {"call": "", "now": record.now}
    match record.call:
        case Submitted(spec=spec):
            body |= {"call": "submit", "spec": spec}
        case Applied(command=command):
            body |= {"call": "apply", "command": command}
        case Planned(decision=decision):
            body["call"] = "plan"
            if decision is not None:
                body |= {name: getattr(decision, name) for name in _DECISION}
        case Committed(step=step, result=result):
            body |= {"call": "commit", "step": step, "sampled": dict(result.sampled)}
            if result.failures:
                body["failures"] = dict(result.failures)
            if result.after_drafts:
                body["after_drafts"] = dict(result.after_drafts)
            if result.complete:
                body["complete"] = result.complete
            if result.sat_out:
                body["sat_out"] = result.sat_out
            if result.awaiting:
                body["awaiting"] = result.awaiting
    if record.events:
        body["events"] = record.events
    if record.error is not None:
        body["error"] = record.error
    return body


def _dumps(body: object) -> str:
    return json.dumps(body, separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    """What JSON has no word for."""
    names = _FIELDS.get(type(value))
    if names is not None:
        tag = {"type": type(value).__name__} if type(value) in _TAGGED else {}
        fields = {name: getattr(value, name) for name in names}
        return tag | {n: v for n, v in fields.items() if n not in _OPTIONAL or v != _OPTIONAL[n]}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, RecordedError):
        return {"type": value.class_name, "text": str(value)}
    if isinstance(value, Exception):
        return {"type": type(value).__name__, "text": str(value)}
    if hasattr(value, "__index__"):  # an integer of some library
        return int(value)
    raise TypeError(f"a {type(value).__name__} can't be written")


# Reading


def parse(line: bytes) -> dict[str, Any]:
    """A line as a JSON object.

    Raises:
        Malformed: it is none.
    """
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Malformed("must be a JSON object")
    return body


def read_origin(body: Mapping[str, Any]) -> Origin:
    """What the first line says.

    Raises:
        Malformed: it is not the first line of a log this version reads.
    """
    if FORMAT not in body:
        raise Malformed(f"must begin a decision log with {FORMAT!r}")
    if body[FORMAT] != VERSION:
        raise Malformed(f"{FORMAT} must be {VERSION}, got {body[FORMAT]!r}")
    pool = _member(body, "pool", dict)
    config = _read(SchedulerConfig, body.get("config"), "config")
    num_blocks, block_size = (_read(int, pool.get(n), f"pool.{n}") for n in ("num_blocks", "block_size"))
    for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
        if not 1 <= value <= MAX_POOL_BLOCKS:
            raise Malformed(f"pool.{name} must be between 1 and {MAX_POOL_BLOCKS}, got {value}")
    return Origin(config, num_blocks, block_size, _read(bool, pool.get("prefix_cache"), "pool.prefix_cache"))


def read_call(body: Mapping[str, Any]) -> tuple[Call, float]:
    """The call of a line, and its time.

    Raises:
        Malformed: it holds no call this version knows.
    """
    now = _read(float, body.get("now"), "now")
    match body.get("call"):
        case "submit":
            return Submitted(_read(RequestSpec, body.get("spec"), "spec")), now
        case "apply":
            command = _member(body, "command", dict)
            cls = _COMMANDS.get(str(command.get("type")))
            if cls is None:
                known = ", ".join(_COMMANDS)
                raise Malformed(f"command.type must be one of {known}, got {command.get('type')!r}")
            fields = {name: value for name, value in command.items() if name != "type"}
            return Applied(_read(cls, fields, "command")), now
        case "plan":
            return Planned(), now
        case "commit":
            sampled = _member(body, "sampled", dict)
            failures = _member(body, "failures", dict) if "failures" in body else {}
            after_drafts = _member(body, "after_drafts", dict) if "after_drafts" in body else {}
            complete, sat_out, awaiting = (
                frozenset(map(RequestId, _read(frozenset[str], body.get(name, []), name)))
                for name in ("complete", "sat_out", "awaiting")
            )
            result = StepResult(
                {RequestId(i): _read(int, token, f"sampled.{i}") for i, token in sampled.items()},
                {RequestId(i): _read(VorrangError, e, f"failures.{i}") for i, e in failures.items()},
                complete=complete,
                after_drafts={
                    RequestId(i): _read(tuple[int, ...], token_ids, f"after_drafts.{i}")
                    for i, token_ids in after_drafts.items()
                },
                sat_out=sat_out,
                awaiting=awaiting,
            )
            return Committed(_read(int, body.get("step"), "step"), result), now
        case other:
            raise Malformed(f"call must be one of submit, apply, plan, commit, got {other!r}")


def read_end(body: Mapping[str, Any]) -> End | None:
    """Why the log ends; None when this is not its last line.

    Raises:
        Malformed: an end without its number of calls.
    """
    if "end" not in body:
        return None
    return End(_read(str, body["end"], "end"), _read(int, body.get("num_records"), "num_records"))


def _member(body: Mapping[str, Any], name: str, cls: type) -> Any:
    value = body.get(name)
    if not isinstance(value, cls):
        raise Malformed(f"{name} must be a JSON {'object' if cls is dict else 'array'}")
    return value


def _read(hint: Any, value: Any, where: str) -> Any:
    """A value of the type a hint names, from what JSON made of it.

    Raises:
        Malformed: it is of another type, or breaks the type's own rules.
    """
    hint = getattr(hint, "__supertype__", hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
        return _read(hint, value, where)
    if origin in (tuple, frozenset) and isinstance(value, list):
        kind = typing.get_args(hint)[0]
        return origin(_read(kind, item, f"{where}[{i}]") for i, item in enumerate(value))
    if hint in (int, bool, str) and type(value) is hint:
        return value
    if hint is float and type(value) in (int, float):
        return value
    if isinstance(hint, type) and isinstance(value, dict):
        if issubclass(hint, VorrangError):
            name, text = (_read(str, value.get(part), f"{where}.{part}") for part in ("type", "text"))
            return RecordedError(name, text)
        if dataclasses.is_dataclass(hint):
            return _read_fields(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and value in [member.value for member in hint]:
        return hint(value)
    shown = json.dumps(value)
    raise Malformed(f"{where} must be {_described(hint)}, got {shown[:60]}")


def _read_fields(cls: type, value: dict[str, Any], where: str) -> Any:
    names = tuple(name for name in _FIELDS[cls] if name in value or name not in _OPTIONAL)
    if odd := sorted(set(names) ^ set(value)):
        state = "is missing" if odd[0] in names else "is unknown to this version"
        raise Malformed(f"{where}.{odd[0]} {state}")
    hints = _hints(cls)
    fields = {name: _read(hints[name], value[name], f"{where}.{name}") for name in names}
    try:
        return cls(**fields)
    except InvalidRequest as error:
        raise Malformed(f"{where}: {error}") from None


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _described(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}.get(hint, "given")
