"""A run in the Chrome trace event format, which Perfetto and chrome://tracing open.

Three processes: the seats, a track each; the queue, a track for each place that
somebody waits in; counters. Names begin with the class, since Perfetto colours a slice
by its name without the numbers in it. Format: "Trace Event Format", Google, public.
"""

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

from timeline.run import Cut, Paths, Piece, Run, Stay, Wait

SEATS, QUEUE, COUNTERS = 1, 2, 3
#: Colours by class where the viewer lets one choose (chrome://tracing), most urgent first.
_COLOR_NAMES = ("terrible", "rail_response", "generic_work")
_US = 1e6
#: How far inside a slice an arrow must begin or end to be bound to it, at most.
_INSIDE_S = 1e-6


def events(run: Run) -> Iterator[dict[str, Any]]:
    """The trace's events: descriptions of the tracks, then slices, arrows and counters."""
    yield from _tracks(run)
    for stay in run.stays:
        yield from _stay(run, stay)
    for wait in run.waits:
        yield _wait(run, wait)
    paths = Paths(run)
    for number, cut in enumerate(run.cuts):
        yield from _arrows(paths, number, cut)
    yield from _counters(run)


def write(run: Run, file: IO[str]) -> int:
    """Write the trace, an event a line; returns how many they are."""
    num_events = 0
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for event in events(run):
        file.write(("," if num_events else "") + json.dumps(event, separators=(",", ":")) + "\n")
        num_events += 1
    file.write("]}\n")
    return num_events


def _tracks(run: Run) -> Iterator[dict[str, Any]]:
    for order, (pid, name) in enumerate(((SEATS, "seats"), (QUEUE, "queue"), (COUNTERS, "counters"))):
        yield _meta("process_name", pid, 0, name=name)
        yield _meta("process_sort_index", pid, 0, sort_index=order)
    num_seats = max((stay.seat + 1 for stay in run.stays), default=0)
    for seat in range(max(num_seats, run.num_seats or 0) if num_seats else 0):
        yield _meta("thread_name", SEATS, seat + 1, name=f"seat {seat + 1}")
        yield _meta("thread_sort_index", SEATS, seat + 1, sort_index=seat)
    for lane in range(max((wait.lane + 1 for wait in run.waits), default=0)):
        yield _meta("thread_name", QUEUE, lane + 1, name=f"place {lane + 1}")
        yield _meta("thread_sort_index", QUEUE, lane + 1, sort_index=lane)


def _meta(what: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


#: Process, track, begin and end in seconds.
_Span = tuple[int, int, float, float]


def _slice(run: Run, name: str, class_name: str, span: _Span, args: Mapping[str, object]) -> dict[str, Any]:
    pid, tid, begin_s, end_s = span
    rank = run.classes.index(class_name) if class_name in run.classes else len(run.classes) - 1
    return {
        "name": f"{class_name} {name}",
        "cat": class_name,
        "ph": "X",
        "ts": _us(begin_s),
        "dur": round(_us(end_s) - _us(begin_s), 3),
        "pid": pid,
        "tid": tid,
        "cname": _COLOR_NAMES[min(max(rank, 0), len(_COLOR_NAMES) - 1)],
        "args": dict(args),
    }


def _us(seconds: float) -> float:
    return round(seconds * _US, 3)


def _stay(run: Run, stay: Stay) -> Iterator[dict[str, Any]]:
    name = f"{stay.request_id} resumed" if stay.is_resume else stay.request_id
    args = {"request": stay.request_id, "left": stay.left or "still there"}
    span = (SEATS, stay.seat + 1, stay.begin_s, stay.end_s)
    yield _slice(run, name, stay.class_name, span, args)
    for piece in stay.pieces:
        yield _piece(run, stay, piece)


def _piece(run: Run, stay: Stay, piece: Piece) -> dict[str, Any]:
    end_s = min(piece.end_s, stay.end_s)  # what was computed for one that was gone by then
    args = {"request": stay.request_id, "tokens": piece.num_tokens, "steps": piece.num_steps}
    if piece.num_drafted:
        args |= {"guessed": piece.num_drafted, "right": piece.num_accepted}
    span = (SEATS, stay.seat + 1, min(piece.begin_s, end_s), end_s)
    return _slice(run, piece.kind, stay.class_name, span, args)


def _wait(run: Run, wait: Wait) -> dict[str, Any]:
    word = {"queued": "waits", "preempted": "preempted, waits", "parked": "parked"}[wait.kind]
    name = f"{wait.request_id} {word}"
    span = (QUEUE, wait.lane + 1, wait.begin_s, wait.end_s)
    return _slice(run, name, wait.class_name, span, {"request": wait.request_id, "kind": wait.kind})


def _arrows(paths: Paths, number: int, cut: Cut) -> Iterator[dict[str, Any]]:
    """From where the beneficiary waited to the seat it took, to where the victim waits, to where it resumes.

    An arrow is bound to the slice that holds its end, so both ends lie a moment inside.
    """
    lost, gap, wait = paths.lost(cut), paths.gap(cut), paths.before(cut)
    if lost is None:
        return
    args = {"victim": cut.victim, "beneficiary": cut.beneficiary, "reason": cut.reason}
    args |= {"lost tokens": str(cut.num_lost_tokens)}
    end_of_stay = _end(lost, SEATS, lost.seat)
    if wait is not None:
        yield from _arrow(3 * number, "gives way to", _end(wait, QUEUE, wait.lane), end_of_stay, args)
    if gap is not None:
        yield from _arrow(3 * number + 1, "preempted", end_of_stay, _begin(gap, QUEUE, gap.lane), args)
        resumed = paths.resumed(gap)
        if resumed is not None:
            begin_of_stay = _begin(resumed, SEATS, resumed.seat)
            yield from _arrow(3 * number + 2, "resumes", _end(gap, QUEUE, gap.lane), begin_of_stay, args)


_Place = tuple[float, int, int]


def _begin(one: Stay | Wait, pid: int, row: int) -> _Place:
    return one.begin_s + min(_INSIDE_S, (one.end_s - one.begin_s) / 2), pid, row + 1


def _end(one: Stay | Wait, pid: int, row: int) -> _Place:
    return one.end_s - min(_INSIDE_S, (one.end_s - one.begin_s) / 2), pid, row + 1


def _arrow(
    arrow: int, name: str, tail: _Place, head: _Place, args: dict[str, str]
) -> Iterator[dict[str, Any]]:
    at_s = min(tail[0], head[0])  # it never points back in time
    for phase, (begin_s, pid, tid) in (("s", (at_s, *tail[1:])), ("f", head)):
        event = {"name": name, "cat": "preemption", "ph": phase, "id": arrow, "ts": _us(begin_s)}
        event |= {"pid": pid, "tid": tid, "args": args}
        yield event | {"bp": "e"} if phase == "f" else event


def _counters(run: Run) -> Iterator[dict[str, Any]]:
    last: dict[str, object] = {}
    for sample in run.samples:
        shown: dict[str, dict[str, int]] = {
            "queue": {name: sample.waiting.get(name, 0) for name in run.classes},
            "running": {"requests": sample.num_running},
            "step tokens": {"tokens": sample.step_tokens},
        }
        if run.num_blocks is not None:
            shown["KV blocks in use"] = {"blocks": sample.used_blocks}
        for name, values in shown.items():
            if last.get(name) != values:
                last[name] = values
                yield {
                    "name": name,
                    "ph": "C",
                    "ts": _us(sample.at_s),
                    "pid": COUNTERS,
                    "tid": 0,
                    "args": values,
                }
