"""Makes every decision of a log again and compares."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.decisions.codec import record_line
from engine.decisions.file import DamagedDecisionLog, DecisionLog, Line
from engine.errors import VorrangError
from engine.scheduler.decisions import (
    Applied,
    Committed,
    DecisionSink,
    GrantDecision,
    Origin,
    Planned,
    Record,
    RecordingScheduler,
    Submitted,
)
from engine.scheduler.plan import Plan
from kv.block_manager import BlockManager

#: Plans that are kept until they are committed; one that failed never is.
MAX_STEPS_IN_FLIGHT = 64

_ABSENT = "nothing"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that came out differently.

    Attributes:
        line: of the log.
        step: the step that was planned, or else the last one planned before the call.
        what: the call and the place in its outcome, such as ``plan grants[2].num_tokens``.
        recorded: its value in the log.
        now: its value in the replay.
    """

    line: int
    step: int
    what: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"step {self.step} (line {self.line}): {self.what}: recorded {self.recorded}, now {self.now}"


@dataclass(frozen=True, slots=True)
class Replay:
    """How a replay went.

    Attributes:
        num_steps: steps whose decision was the same.
        num_calls: calls whose outcome was the same.
        difference: the first one; None when there is none.
    """

    num_steps: int
    num_calls: int
    difference: Difference | None


def replay(
    log: DecisionLog,
    on_line: Callable[[Line], None] | None = None,
    sink: DecisionSink | None = None,
) -> Replay:
    """Give a new scheduler every call of a log, and compare what comes of it.

    Args:
        log: which; it is read to its end, or to the first difference.
        on_line: is told of every line.
        sink: is told of every call as it is made again.

    Raises:
        DamagedDecisionLog: a line is not what it must be.
        DecisionLogUnavailable: the file can't be read any further.
    """
    outcome = _Outcome(sink)
    try:
        scheduler = _Replayed(log, outcome)
    except VorrangError as error:  # a policy or discipline of another version
        raise DamagedDecisionLog(log.path, 1, str(error)) from None
    num_steps = num_calls = 0
    for line in log:
        if on_line is not None:
            on_line(line)
        scheduler.call(line)
        made = json.loads(record_line(outcome.last))
        if made != line.body:
            step = line.body.get("step", made.get("step", scheduler.step))
            what, recorded, now = _first_difference(line.body, made, "")
            call = f"{line.body['call']} {what}"
            return Replay(num_steps, num_calls, Difference(line.number, step, call, recorded, now))
        num_calls += 1
        num_steps += isinstance(line.call, Planned)
    return Replay(num_steps, num_calls, None)


class _Outcome:
    """A sink that keeps the last record, and hands it on."""

    is_open = True
    last: Record

    def __init__(self, further: DecisionSink | None) -> None:
        self._further = further

    def begin(self, origin: Origin) -> None:
        if self._further is not None:
            self._further.begin(origin)

    def record(self, record: Record) -> None:
        self.last = record
        if self._further is not None:
            self._further.record(record)


class _Replayed:
    """A scheduler that is given the calls of a log."""

    def __init__(self, log: DecisionLog, outcome: _Outcome) -> None:
        origin = log.origin
        blocks = BlockManager(origin.num_blocks, origin.block_size, enable_prefix_cache=origin.prefix_cache)
        self._scheduler = RecordingScheduler(origin.config, blocks, outcome)
        self._path = log.path
        self._plans: dict[int, Plan] = {}
        self.step = 0

    def call(self, line: Line) -> None:
        """Do it; what it raises is part of its outcome."""
        if isinstance(line.call, Committed) and line.call.step not in self._plans:
            rule = f"step must be one of the last that were planned and not committed, got {line.call.step}"
            raise DamagedDecisionLog(self._path, line.number, rule)
        with contextlib.suppress(Exception):
            self._do(line)

    def _do(self, line: Line) -> None:
        match line.call:
            case Submitted(spec=spec):
                self._scheduler.submit(spec, line.now)
            case Applied(command=command):
                self._scheduler.apply(command, line.now)
            case Planned():
                plan = self._scheduler.plan(line.now)
                self.step = plan.step
                self._plans[plan.step] = plan
                self._plans.pop(plan.step - MAX_STEPS_IN_FLIGHT, None)
            case Committed(step=step, result=result):
                self._scheduler.commit(self._plans.pop(step), result, line.now)


def _first_difference(recorded: Any, now: Any, where: str) -> tuple[str, str, str]:
    """Place and both values of the first difference; they do differ."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for name in dict.fromkeys(["error", *recorded, *now]):
            one, other = recorded.get(name, _ABSENT), now.get(name, _ABSENT)
            if one != other:
                return _first_difference(one, other, f"{where}.{name}".removeprefix("."))
    if isinstance(recorded, list) and isinstance(now, list):
        for index in range(max(len(recorded), len(now))):
            one = recorded[index] if index < len(recorded) else _ABSENT
            other = now[index] if index < len(now) else _ABSENT
            if one != other:
                return _first_difference(one, other, _place(where, index))
    return where, _shown(recorded), _shown(now)


def _place(where: str, index: int) -> str:
    is_grant = where.startswith("grants[") and index < len(GrantDecision._fields)
    return f"{where}.{GrantDecision._fields[index]}" if is_grant else f"{where}[{index}]"


def _shown(value: Any) -> str:
    text = value if value == _ABSENT else json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
