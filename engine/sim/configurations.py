"""Names for scheduler configurations, and how they are written on a command line.

``NAME`` or ``NAME:field=value,field=value``, where NAME is a preset and fields are
those of ``SchedulerConfig``: ``field``, or ``part.field`` where a field is a group
of settings; a field that only such groups have is set in all of them. What this
version's scheduler can't do is refused by name.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.runner.simulated import CONTEXT_TOKENS
from engine.scheduler.config import InvalidSetting, SchedulerConfig
from engine.scheduler.policies import policy_named
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager

#: A field's value.
Value = str | int | float | bool | None

#: What vLLM runs an 8B model with; limits on the queue are out of the way.
BASE: Mapping[str, Value] = {
    "max_running_requests": 256,
    "max_step_tokens": 2048,
    "max_chunk_tokens": 2048,
    "max_context_tokens": CONTEXT_TOKENS,
    "max_waiting_requests": 1_000_000,
}

_DEFAULT = SchedulerConfig()
_FIELDS = {field.name for field in dataclasses.fields(SchedulerConfig)}
_GROUPS: Mapping[str, Any] = {
    name: group for name in _FIELDS if dataclasses.is_dataclass(group := getattr(_DEFAULT, name))
}
#: Lists, which no command line has a form for.
_LISTS = {name for name in _FIELDS if isinstance(getattr(_DEFAULT, name), tuple)}


def _places(name: str) -> list[tuple[str, str]]:
    """Where a setting goes: (group, field), the group empty for a field of the configuration itself."""
    group, dot, field = name.rpartition(".")
    if not dot and name in _FIELDS - set(_GROUPS) - _LISTS:
        return [("", name)]
    groups = [group] if dot else sorted(_GROUPS)
    return [(g, field) for g in groups if g in _GROUPS and hasattr(_GROUPS[g], field)]


def _known(values: Mapping[str, Value]) -> dict[str, Value]:
    """Those settings that this version's scheduler has."""
    return {name: value for name, value in values.items() if _places(name)}


#: Where there is no switch, a gap that no two levels have keeps arrivals from preempting.
_NO_ARRIVALS = _known({"preempt_for_arrivals": False}) or {"preempt_level_gap": 1000}

#: What Vorrang has and vLLM has not, switched off: a watermark, passing a request that
#: does not fit, waiting for a prefix, a share for whoever starves, bounds on preemption.
LIKE_VLLM: Mapping[str, Value] = _known(
    {
        "watermark": 0.0,
        "max_bypass": 0,
        "prefix_wait_tokens": 1_000_000_000,
        "max_wait_s": 1e9,
        "max_preemptions": 1_000_000,
        "resume_quantum_tokens": 0,
    }
)

PRESETS: Mapping[str, Mapping[str, Value]] = {
    "fcfs": {"policy": "fcfs"},
    "priority": {"policy": "priority"},
    "priority-no-arrivals": {"policy": "priority", **_NO_ARRIVALS},
    # Overtaking in the queue alone, as with vLLM's --scheduling-policy priority.
    "vllm-like": {"policy": "priority", **_NO_ARRIVALS, **LIKE_VLLM},
    "fair": {"policy": "fair"},
    # Its steps of prefills are as large as SGLang's.
    "prefill-first": {
        "policy": "priority",
        "discipline": "prefill_first",
        "max_step_tokens": 8192,
        "max_chunk_tokens": 8192,
    },
    "static": {"policy": "priority", "discipline": "static"},
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A scheduler configuration with a name for the report."""

    name: str
    config: SchedulerConfig


def parse_configuration(text: str, defaults: Mapping[str, Value] | None = None) -> Configuration:
    """Read ``PRESET[:field=value,...]``.

    Args:
        text: what was written; becomes the name.
        defaults: fields that apply unless preset or text say otherwise; on top of ``BASE``.

    Raises:
        InvalidSetting: no such preset, field, policy or discipline, or a bad value.
    """
    preset, _, rest = text.partition(":")
    if preset not in PRESETS:
        raise InvalidSetting("compare", f"must begin with one of {', '.join(PRESETS)}", preset)
    values = dict(BASE) | dict(defaults or {}) | dict(PRESETS[preset])
    for assignment in filter(None, rest.split(",")):
        values |= parse_assignment(assignment)
    return Configuration(text, build(values))


def parse_assignment(text: str) -> dict[str, Value]:
    """Read ``field=value``.

    Raises:
        InvalidSetting: no such field, or not a value of its type.
    """
    name, equals, value = text.partition("=")
    places = _checked_places(name)
    if not equals:
        raise InvalidSetting(f"scheduler.{name}", "must be written as field=value", text)
    return {name: _parse(name, _hint(*places[0]), value)}


def build(values: Mapping[str, Value]) -> SchedulerConfig:
    """A configuration that this version's scheduler really accepts.

    Raises:
        InvalidSetting: a field, policy or discipline it does not have, or a bad value.
    """
    flat: dict[str, Any] = {}
    groups: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        for group, field in _checked_places(name):
            if group:
                groups.setdefault(group, {})[field] = value
            else:
                flat[field] = value
    flat |= {group: dataclasses.replace(_GROUPS[group], **fields) for group, fields in groups.items()}
    config = SchedulerConfig(**flat)
    policy_named(config.policy)
    Scheduler(config, BlockManager(1, 1))  # whatever else it checks, it checks now
    return config


def available_presets() -> tuple[str, ...]:
    """Presets that this version's scheduler can run."""
    return tuple(name for name in PRESETS if _is_available(name))


def _is_available(preset: str) -> bool:
    try:
        parse_configuration(preset)
    except InvalidSetting:
        return False
    return True


def _checked_places(name: str) -> list[tuple[str, str]]:
    places = _places(name)
    if not places:
        known = sorted(_FIELDS - set(_GROUPS) - _LISTS)
        known += sorted(f"{g}.{f.name}" for g, part in _GROUPS.items() for f in dataclasses.fields(part))
        rule = f"is no setting of this version's scheduler; it has {', '.join(known)}"
        raise InvalidSetting(f"scheduler.{name}", rule, name)
    return places


def _hint(group: str, field: str) -> object:
    return typing.get_type_hints(type(_GROUPS[group]) if group else SchedulerConfig)[field]


def _parse(name: str, hint: object, text: str) -> Value:
    kinds = _kinds(hint)
    if type(None) in kinds and text in ("", "none"):
        return None
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if str in kinds:
        return text
    raise InvalidSetting(f"scheduler.{name}", f"must be {' or '.join(k.__name__ for k in kinds)}", text)


def _kinds(hint: object) -> tuple[type, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,) if isinstance(hint, type) else ()
