"""The load of an OpenAI-compatible server: true times, an open loop, and every failure in its record."""

import asyncio

import pytest

from clients.python.openai_load import OpenAiTarget, run_openai_load
from tests.support.openai_server import CUT, FAIL, GARBAGE, REFUSE, openai_server
from workloads.arrivals import Arrival, Workload
from workloads.records import Run


async def run(*requests: Arrival, step_s: float = 0.002, **options: object) -> tuple[Run, list[dict]]:
    async with openai_server(step_s) as server:
        target = OpenAiTarget(server.url, "any", **options)
        return await run_openai_load(target, Workload("test", requests)), server.bodies


def test_tokens_usage_and_reason_are_recorded() -> None:
    done, bodies = asyncio.run(run(Arrival(0, 0.0, 7, 5, level=-10), send_level=True))
    (record,) = done.records
    assert (record.num_output_tokens, record.reason, record.error) == (5, "length", None)
    assert len(record.token_times_s) == 5
    assert record.token_times_s == sorted(record.token_times_s)
    assert record.num_cached_tokens == 3
    assert (len(bodies[0]["prompt"]), bodies[0]["priority"], bodies[0]["ignore_eos"]) == (7, -10, True)


def test_prompts_may_be_words() -> None:
    _, bodies = asyncio.run(run(Arrival(0, 0.0, 7, 1), prompts="words"))
    assert len(bodies[0]["prompt"].split()) == 7


def test_requests_start_when_they_are_due_however_long_the_others_take() -> None:
    slow = Arrival(0, 0.0, 4, 50)
    due = [Arrival(i, 0.02 * i, 4, 1) for i in range(1, 5)]
    done, _ = asyncio.run(run(slow, *due, step_s=0.01))
    first, *others = done.records
    assert first.ended_s is not None
    for record in others:
        assert record.sent_s is not None
        assert record.sent_s >= record.request.arrival_s
        assert record.sent_s < first.ended_s  # a closed loop would have waited


@pytest.mark.parametrize(
    ("num_tokens", "error"),
    [(REFUSE, "HTTP_429"), (CUT, "RemoteProtocolError"), (GARBAGE, "MALFORMED"), (FAIL, "SERVER_ERROR")],
)
def test_what_goes_wrong_with_one_request_is_in_its_record(num_tokens: int, error: str) -> None:
    done, _ = asyncio.run(run(Arrival(0, 0.0, 4, num_tokens), Arrival(1, 0.0, 4, 3)))
    failed, other = done.records
    assert failed.error == error
    assert failed.reason is None
    assert failed.ended_s is not None
    assert (other.reason, other.num_output_tokens) == ("length", 3)


def test_a_server_that_is_not_there_is_an_error_of_each_request() -> None:
    target = OpenAiTarget("http://127.0.0.1:9", "any")
    done = asyncio.run(run_openai_load(target, Workload("test", (Arrival(0, 0.0, 4, 3),))))
    assert [record.error for record in done.records] == ["ConnectError"]
