"""What ``vorrangctl admin`` shows, without a server."""

import io

import pytest
from rich.console import Console

from clients.python import admin_view
from clients.python.admin_types import (
    ClassLoad,
    Drained,
    Grant,
    LiveRequest,
    Preemption,
    ServerLoad,
    Step,
)
from clients.python.events import Usage


def request(**fields: object) -> LiveRequest:
    values: dict[str, object] = {
        "server_request_id": "r1", "request_id": "mine", "tenant": "a", "level": 0, "state": "DECODE",
        "usage": Usage(prompt_tokens=7, output_tokens=3), "age_s": 1.25, "num_blocks": 2, "label": "",
        "max_output_tokens": 10, "num_computed_tokens": 9, "num_known_tokens": 10, "starved": False,
    }  # fmt: skip
    return LiveRequest(**{**values, **fields})  # type: ignore[arg-type]


def text_of(renderable: object) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_request_is_a_row() -> None:
    text = text_of(
        admin_view.requests_table(
            [request(state="PREEMPTED", starved=True, usage=Usage(7, 0, 3, 9, 2), age_s=125.0)]
        )
    )
    for part in ("r1", "mine", "preempted (starved)", "3/10", "2:05 min", "2x"):
        assert part in text


@pytest.mark.parametrize(("age_s", "text"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (3600.4, "60:00 min")])
def test_ages_are_short(age_s: float, text: str) -> None:
    assert admin_view.age_of(request(age_s=age_s)) == text


def test_the_load_says_what_is_used() -> None:
    load = ServerLoad(
        (ClassLoad("batch", 5, 3, 1, 2),), 4, 1, 200, 50, 0.0123, 9, 80, 40, 6, 0, draining=True
    )
    text = text_of(admin_view.load_table(load))
    for part in ("3 of 4 seats", "150 of 200 KV blocks (75%)", "DRAINING", "12.3 ms", "6 preemptions"):
        assert part in text
    assert load.classes[0].num_queued == 6


def test_a_step_is_a_line() -> None:
    step = Step(
        17, "", (Grant("r2", 0, 12, -10), Grant("r1", 9, 1, 10)), (Preemption("r3", "SEATS", "r2", 4, 60),),
        "seat", 5, 70, 8,
    )  # fmt: skip
    line = admin_view.step_line(step).plain
    for part in ("17", "8 steps not seen", "r2+12 r1+1", "r3 preempted for r2: SEATS, 4 blocks, 60 tokens"):
        assert part in line
    assert "5 wait, short of seat; 70 blocks free" in line


def test_draining_is_told() -> None:
    assert admin_view.drained_line(Drained(2, 3)) == "draining; 2 requests run and 3 wait"
