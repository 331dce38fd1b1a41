"""The benchmark of static against continuous batching: the classic example can be worked out by hand."""

import pytest

from bench.static_batching import CONSTANT, CONTINUOUS, STATIC, classic, run

PROMPT, OUTPUTS, LATE_OUTPUT = 10, (10, 50, 100, 500), 50
ASKED = sum(PROMPT + output - 1 for output in (*OUTPUTS, LATE_OUTPUT))


def test_a_static_batch_computes_rectangles_and_lets_the_late_one_wait_for_the_longest() -> None:
    outcome = run(classic(), CONSTANT, 4, STATIC)
    assert outcome.steps == 500 + 50
    padded = 4 * (PROMPT + 499) + (PROMPT + LATE_OUTPUT - 1)
    assert outcome.useful_share == pytest.approx(ASKED / padded)
    assert outcome.late_wait_steps == 500 - 20
    assert outcome.late_latency_s == pytest.approx((500 - 20 + 50) * 0.020)


def test_continuous_batching_gives_the_late_one_the_seat_that_is_free() -> None:
    outcome = run(classic(), CONSTANT, 4, CONTINUOUS)
    assert outcome.steps == 500
    assert outcome.useful_share == 1
    assert outcome.late_wait_steps == 0
    assert outcome.late_latency_s == pytest.approx(50 * 0.020)
