"""The pure parts of the Python client's sessions."""

import random

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.python.credit import Credit
from clients.python.errors import ConnectionLost, InvalidRequest, Overloaded, ServerUnavailable, VorrangError
from clients.python.reconnection import Attempts, is_broken


@given(
    window=st.integers(1, 20),
    steps=st.lists(st.tuples(st.sampled_from(["send", "read", "lose"]), st.integers(1, 20)), max_size=60),
)
def test_a_request_is_never_further_ahead_than_its_window_and_never_stands_still(
    window: int, steps: list[tuple[str, int]]
) -> None:
    credit = Credit(window, window)
    at_server, waiting, excess = window, 0, 0
    for what, number in steps:
        if what == "send":
            number = min(number, at_server)
            credit.receive(number)
            at_server, waiting = at_server - number, waiting + number
        elif what == "read":
            number = min(number, waiting)
            waiting -= number
            excess = max(0, excess - number)
            at_server += credit.read(number)
        else:
            at_server = window + credit.renew()
            excess = waiting  # what waited when the connection was lost was granted twice
        assert at_server + waiting <= window + excess
    if waiting:
        at_server += credit.read(waiting)
    assert at_server * 2 >= window, "all is read, so at least half of the window is there"


@given(
    start=st.integers(0, 10),
    grants=st.lists(st.integers(1, 10), max_size=5),
    arrived=st.lists(st.integers(0, 10), max_size=5),
)
def test_credit_by_hand_adds_up_however_often_the_connection_is_lost(
    start: int, grants: list[int], arrived: list[int]
) -> None:
    credit = Credit(start, 0)
    num_received, at_server = 0, start
    for number in grants:
        credit.grant(number)  # may be lost on its way
    for number in arrived:
        at_server = start + credit.renew()
        assert num_received + at_server >= start + sum(grants)
        number = min(number, at_server)
        credit.receive(number)
        num_received += number
    assert num_received <= max(start + sum(grants), start * (len(arrived) + 1) + sum(arrived))


def test_attempts_wait_longer_each_time_by_chance_and_end_with_the_patience() -> None:
    broken = ConnectionLost("broken")
    waits: list[list[float]] = []
    for seed in (1, 2):
        attempts = Attempts(100.0, 10.0, random.Random(seed))
        now_s, own = 100.0, []
        while (wait_s := attempts.next_wait_s(now_s, broken)) is not None:
            own.append(wait_s)
            now_s += wait_s
        assert now_s < 110
        waits.append(own)
        for wait_s, longest_s in zip(own, [0.05, 0.1, 0.2, 0.4, 0.8, *[1.0] * 20], strict=False):
            assert longest_s / 2 <= wait_s <= longest_s
    assert waits[0] != waits[1]


def test_a_server_that_asks_for_time_gets_it() -> None:
    attempts = Attempts(0.0, 10.0)
    full = Overloaded("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=3.0)
    assert attempts.next_wait_s(0.0, full) == 3.0
    assert attempts.next_wait_s(8.0, full) is None


@pytest.mark.parametrize(
    ("loss", "broken", "worth_while"),
    [
        (ConnectionLost("gone"), True, True),
        (VorrangError("reset", code=grpc.StatusCode.CANCELLED), True, True),
        (ServerUnavailable("stops", code=grpc.StatusCode.UNAVAILABLE, reason="DRAINING"), False, True),
        (InvalidRequest("no", code=grpc.StatusCode.INVALID_ARGUMENT), False, False),
        (
            VorrangError("taken", code=grpc.StatusCode.FAILED_PRECONDITION, reason="SESSION_STATE"),
            False,
            False,
        ),
    ],
)
def test_only_what_may_pass_is_waited_for(loss: VorrangError, broken: bool, worth_while: bool) -> None:
    assert is_broken(loss) is broken
    assert (Attempts(0.0, 10.0).next_wait_s(0.0, loss) is not None) is worth_while
