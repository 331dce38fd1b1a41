"""Reads a trace as strictly as its readers may: the schema, and what slices, arrows and counters must be."""

import json
from collections import defaultdict
from pathlib import Path

from jsonschema import Draft202012Validator

SCHEMA = json.loads((Path(__file__).parent / "trace_event.schema.json").read_text())


def checked(text: str) -> list[dict]:
    """The events of a trace, which holds what the format asks for.

    Slices of a track are nested or apart; an arrow has one tail and one head, the head not
    before the tail, and both lie inside a slice of their track; a counter's times do not go back;
    every track has a name.
    """
    trace = json.loads(text)
    Draft202012Validator(SCHEMA).validate(trace)
    events = trace["traceEvents"]
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in slices.values():
        check_nesting(spans)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert slices.keys() <= named
    check_arrows(events, slices)
    times = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            times[event["pid"], event["name"]].append(event["ts"])
    assert all(series == sorted(series) for series in times.values())
    return events


def check_nesting(spans):
    open_ends = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= begin + 2e-3:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 2e-3, "slices of a track overlap"
        open_ends.append(end)


def check_arrows(events, slices):
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["cat"], event["id"]].append(event)
    for ends in arrows.values():
        assert [end["ph"] for end in ends] == ["s", "f"]
        tail, head = ends
        assert tail["ts"] <= head["ts"]
        assert (tail["name"], tail["args"]) == (head["name"], head["args"])
        for end in ends:
            spans = slices[end["pid"], end["tid"]]
            assert any(begin <= end["ts"] <= stop for begin, stop in spans), "an arrow is bound to nothing"
