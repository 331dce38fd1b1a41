"""``vorrang trace`` and ``vorrang explain``: a decision log as a timeline, and the life of one request in it.

Both replay the log, so the same code makes them that a server uses, and a log that this
version does not reproduce is refused instead of being told wrongly.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine.decisions.file import DecisionLog, Line
from engine.decisions.replay import replay
from engine.errors import InvalidRequest, UnknownRequest, VorrangError
from engine.events import Failed, Finished, LevelChanged, Preempted, SchedulerEvent
from engine.lives.recorder import LifeRecorder
from engine.priority import CLASSES, class_of
from engine.scheduler.commands import Park, Unpark
from engine.scheduler.decisions import (
    Applied,
    Committed,
    Decision,
    DecisionSink,
    Origin,
    Planned,
    Record,
    Submitted,
)
from timeline.builder import Granted, RunBuilder
from timeline.chrome import write
from timeline.console import PlainConsole
from timeline.run import Run
from timeline.show import print_account

S = TypeVar("S", bound=DecisionSink)
CLASS_NAMES = tuple(one.name for one in CLASSES)
#: Lives of a log that may be asked for.
_MAX_LIVES = 1_000_000


class LogDiffers(VorrangError):
    """This version decides otherwise than the log says."""


class RunSink:
    """A sink of decisions that makes a run of them.

    Args:
        every_step: see ``RunBuilder``.
    """

    is_open = True

    def __init__(self, *, every_step: bool = False) -> None:
        self._every_step = every_step
        self._builder = RunBuilder(CLASS_NAMES)

    def begin(self, origin: Origin) -> None:
        """A scheduler was made."""
        self._builder = RunBuilder(
            CLASS_NAMES,
            num_seats=origin.config.max_running_requests,
            num_blocks=origin.num_blocks,
            every_step=self._every_step,
        )

    def record(self, record: Record) -> None:
        """A call was made."""
        if record.error is not None:
            return
        call, now = record.call, record.now
        if isinstance(call, Submitted):
            self._builder.arrived(call.spec.request_id, class_of(call.spec.level).name, now)
        elif isinstance(call, Committed):
            self._builder.computed(call.step, now, record.guesses)
        self._happened(record.events, now)
        if isinstance(call, Planned) and call.decision is not None:
            self._planned(call.decision)
        elif isinstance(call, Applied):
            if isinstance(call.command, Park):
                self._builder.parked(call.command.request_id, now)
            elif isinstance(call.command, Unpark):
                self._builder.unparked(call.command.request_id, now)

    def finish(self) -> Run:
        """The run; once."""
        return self._builder.finish()

    def _planned(self, decision: Decision) -> None:
        self._builder.planned(
            decision.step,
            decision.now,
            (
                (Granted(request_id, start, num_tokens, output_index is not None), class_of(level).name)
                for request_id, start, num_tokens, output_index, level in decision.grants
            ),
            num_free_blocks=decision.num_free_blocks,
            gate=decision.gate.value if decision.gate else "",
        )

    def _happened(self, events: tuple[SchedulerEvent, ...], now: float) -> None:
        for event in events:
            match event:
                case Preempted():
                    self._builder.cut(
                        event.request_id,
                        event.beneficiary or "",
                        event.reason.value,
                        event.num_lost_tokens,
                        now,
                    )
                case LevelChanged():
                    self._builder.changed_class(event.request_id, class_of(event.level).name, now)
                case Finished():
                    self._builder.ended(event.request_id, event.reason.value, now)
                case Failed():
                    self._builder.ended(event.request_id, "failed", now)


def trace(
    log: Path,
    output: Path | None,
    image: Path | None,
    *,
    every_step: bool = False,
    window: tuple[float, float] | None = None,
) -> str:
    """Write the timeline of a decision log.

    Args:
        log: which.
        output: the trace; None = none.
        image: a PNG or SVG of it, by its ending; None = none.
        every_step: keep every decode, not one slice for those that follow each other.
        window: seconds of the run from which on and up to which it is written; None = all.

    Returns:
        What was written, in words.

    Raises:
        VorrangError: the log can't be read, is damaged, or is not reproduced.
        InvalidRequest: nothing was asked for.
        timeline.picture.PictureUnavailable: an image was asked for and can't be drawn.
        OSError: a file can't be written.
    """
    if output is None and image is None:
        raise InvalidRequest("output", "must be given, or --image", None)
    run = _replayed(log, lambda: RunSink(every_step=every_step)).finish()
    if window is not None:
        run = run.between(*window)
    told = []
    if output is not None:
        with output.open("w", encoding="utf-8") as file:
            num_events = write(run, file)
        told.append(f"{output}: {num_events:,} events; open it at https://ui.perfetto.dev")
    if image is not None:
        from timeline.picture import draw

        draw(run, image)
        told.append(f"{image}: drawn")
    return "\n".join(told)


def explain(log: Path, request_id: str, *, as_json: bool) -> None:
    """Print the life of one request of a log.

    Raises:
        VorrangError: the log can't be read, is damaged, is not reproduced, or holds no such request.
    """
    clock = _Last()

    class Lives(LifeRecorder):
        def __init__(self) -> None:
            super().__init__(_MAX_LIVES)

        def record(self, record: Record) -> None:
            clock.now = max(clock.now, record.now)
            super().record(record)

    account = _replayed(log, Lives).account(request_id, clock.now)
    if account is None:
        raise UnknownRequest(request_id)
    if as_json:
        sys.stdout.write(json.dumps(account.as_json(), indent=2) + "\n")
    else:
        print_account(PlainConsole() if sys.stdout.isatty() else PlainConsole(width=110), account)


class _Last:
    now = 0.0


def _replayed(log: Path, make: Callable[[], S]) -> S:
    sink = make()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    console = PlainConsole(stderr=True)
    with (
        DecisionLog(log) as decisions,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("reading", total=log.stat().st_size)

        def show(line: Line) -> None:
            if line.number % 1024 == 0:
                progress.update(task, completed=decisions.num_bytes_read)

        done = replay(decisions, show, sink)
    if done.difference is not None:
        raise LogDiffers(f"{log}: this version of Vorrang decides otherwise: {done.difference}")
    return sink
