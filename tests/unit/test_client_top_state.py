"""What ``vorrangctl top`` makes of readings, without a screen or a server."""

import pytest

from clients.python.admin_types import ClassLoad, LiveRequest, ServerLoad
from clients.python.events import Usage
from clients.python.top_state import COLUMNS, RATE_WINDOW_S, Board, Rates, Reading, bar_text, curve_text
from workloads.classes import class_of


def load(steps: int = 0, output: int = 0, computed: int = 0) -> ServerLoad:
    return ServerLoad(
        (ClassLoad("batch"),), 4, 2, 64, 32, 0.01, steps, computed, output, 0, 0, draining=False
    )


def request(name: str, level: int = 0, state: str = "DECODE", age_s: float = 1.0) -> LiveRequest:
    return LiveRequest(
        name, f"of-{name}", "", level, state, Usage(), age_s, 0, "", 10, 0, 0, starved=False
    )  # fmt: skip


def test_rates_are_means_over_the_window() -> None:
    board = Board()
    assert board.rates() == Rates()
    for second in range(10):
        board.take(Reading(float(second), load(steps=20 * second, output=80 * second, computed=100 * second)))
    assert board.rates() == Rates(80.0, 100.0, 20.0)
    assert board.readings[-1].time_s - board.readings[0].time_s == RATE_WINDOW_S
    board.take(Reading(12.0, load(steps=180, output=720, computed=900)))  # nothing for three seconds
    assert board.rates() == Rates()


def test_a_server_that_started_again_has_no_negative_rates() -> None:
    board = Board(trouble="gone")
    board.take(Reading(0.0, load(steps=500, output=9000)))
    board.take(Reading(1.0, load(steps=510, output=9100)))
    board.take(Reading(2.0, load(steps=3, output=5)))
    assert board.rates() == Rates()
    assert list(board.curve) == [0.0]
    board.take(Reading(3.0, load(steps=13, output=45)))
    assert board.rates() == Rates(40.0, 0.0, 10.0)
    assert board.trouble == ""


def test_rows_are_sorted_both_ways_and_filtered() -> None:
    board = Board()
    shown = (
        request("r1", -10),
        request("r10", 0, age_s=9.0),
        request("r2", 0, "WAITING", 3.0),
        request("r3", 10),
    )
    board.take(Reading(0.0, load(), shown))
    names = [column.name for column in COLUMNS]

    def ids() -> list[str]:
        return [r.server_request_id for r in board.rows(class_of)]

    assert ids() == ["r1", "r10", "r2", "r3"]
    board.sort_by(names.index("age"))
    assert ids() == ["r10", "r2", "r1", "r3"]
    board.sort_by(names.index("id"))
    assert ids() == ["r1", "r2", "r3", "r10"]
    board.sort_by(names.index("id"))
    assert ids() == ["r10", "r3", "r2", "r1"]
    board.sort_by(names.index("state"))
    assert ids() == ["r1", "r10", "r3", "r2"]
    board.class_name = "standard"
    assert ids() == ["r10", "r2"]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_every_column_orders_any_request(column) -> None:
    assert sorted([request("r2", state="SOMETHING NEW"), request("r1")], key=column.key)


@pytest.mark.parametrize(
    ("values", "text"),
    [([], "    "), ([0, 0], "    "), ([0, 4, 8], "  ▄█"), ([1, 2, 3, 4, 8, 8], "▃▄██"), ([8], "   █")],
)
def test_a_curve_ends_at_the_right_and_its_top_is_the_largest(values: list[float], text: str) -> None:
    assert curve_text(values, 4) == text


@pytest.mark.parametrize(("share", "filled"), [(0, 0), (0.5, 2), (1, 4), (7, 4), (-1, 0)])
def test_a_bar_is_filled_by_its_share(share: float, filled: int) -> None:
    assert [len(part) for part in bar_text(share, 4)] == [filled, 4 - filled]
