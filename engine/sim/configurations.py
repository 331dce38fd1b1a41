"""Names for scheduler configurations, and how they are written on a command line.

``NAME`` or ``NAME:field=value,field=value``, where NAME is a preset and fields are
those of ``SchedulerConfig``. What this version's scheduler can't do is refused by name.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from engine.runner.simulated import CONTEXT_TOKENS
from engine.scheduler.config import InvalidSetting, SchedulerConfig
from engine.scheduler.order import policy_named
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager

Value = str | int | float | bool | None

#: What vLLM runs an 8B model with; limits on the queue are out of the way.
BASE: Mapping[str, Value] = {
    "max_running_requests": 256,
    "max_step_tokens": 2048,
    "max_chunk_tokens": 2048,
    "max_context_tokens": CONTEXT_TOKENS,
    "max_waiting_requests": 1_000_000,
}

_FIELDS = {field.name for field in dataclasses.fields(SchedulerConfig)}
_TYPES = typing.get_type_hints(SchedulerConfig)

#: Where there is no switch, a gap that no two levels have keeps arrivals from preempting.
_NO_ARRIVALS: Mapping[str, Value] = (
    {"preempt_for_arrivals": False} if "preempt_for_arrivals" in _FIELDS else {"preempt_level_gap": 1000}
)

PRESETS: Mapping[str, Mapping[str, Value]] = {
    "fcfs": {"policy": "fcfs"},
    "priority": {"policy": "priority"},
    "priority-no-arrivals": {"policy": "priority", **_NO_ARRIVALS},
    "fair": {"policy": "fair"},
    "prefill-first": {"policy": "priority", "discipline": "prefill_first"},
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
    _check_field(name)
    if not equals:
        raise InvalidSetting(f"scheduler.{name}", "must be written as field=value", text)
    return {name: _parse(name, value)}


def build(values: Mapping[str, Value]) -> SchedulerConfig:
    """A configuration that this version's scheduler really accepts.

    Raises:
        InvalidSetting: a field, policy or discipline it does not have, or a bad value.
    """
    for name in values:
        _check_field(name)
    config = SchedulerConfig(**values)  # type: ignore[arg-type]
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


def _check_field(name: str) -> None:
    if name not in _FIELDS:
        rule = f"is no setting of this version's scheduler; it has {', '.join(sorted(_FIELDS))}"
        raise InvalidSetting(f"scheduler.{name}", rule, name)


def _parse(name: str, text: str) -> Value:
    kinds = _kinds(_TYPES[name])
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
