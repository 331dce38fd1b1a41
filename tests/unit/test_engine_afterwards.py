"""What is told after the readers: order, faults, and who comes first."""

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from engine.afterwards import Afterwards
from engine.events import TERMINAL
from engine.loop import Engine
from engine.request import RequestId, RequestSpec
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig

pytestmark = pytest.mark.asyncio


async def test_calls_are_made_in_order_after_everybody_woken_in_this_turn() -> None:
    seen: list[str] = []
    afterwards, woken = Afterwards(), asyncio.Event()

    async def read() -> None:
        await woken.wait()
        seen.append("reader")

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    afterwards(seen.append, "first")
    woken.set()  # after the first call was put off
    afterwards(seen.append, "second")
    await reading
    await asyncio.sleep(0)
    assert seen == ["reader", "first", "second"]


async def test_a_call_that_raises_is_logged_and_keeps_none_from_being_made() -> None:
    seen: list[str] = []
    afterwards = Afterwards()

    def broken() -> None:
        raise ValueError("told too much")

    afterwards(broken)
    afterwards(seen.append, "next")
    with capture_logs() as logs:
        afterwards.make()
    assert seen == ["next"]
    assert [(line["event"], line["what"].rpartition(".")[2]) for line in logs] == [
        ("afterwards.failed", "broken")
    ]


async def test_a_call_put_off_by_a_call_is_made_too() -> None:
    seen: list[str] = []
    afterwards = Afterwards()
    afterwards(lambda: afterwards(seen.append, "inner"))
    afterwards.make()
    assert seen == ["inner"]


class Listener:
    """Notes what it is told."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def submitted(self, spec: RequestSpec) -> None:
        self.seen.append("submitted")

    def step_made(self, plan: object, duration_s: float) -> None:
        self.seen.append("told of a step")

    def produced(self, spec: RequestSpec, num_tokens: int, gap_s: float | None) -> None:
        self.seen.append("told of a token")

    def happened(self, spec: RequestSpec, event: object) -> None:
        self.seen.append("told of " + type(event).__name__)

    def ended(self, spec: RequestSpec, event: object, ttft_s: float | None, total_s: float) -> None:
        self.seen.append("told of the end")


async def test_a_reader_has_the_end_before_observers_and_they_hear_all_of_it_in_order() -> None:
    seen: list[str] = []
    engine = Engine(ScriptedRunner(), ScriptedTokenizer(), SchedulerConfig(), observer=Listener(seen))
    running = asyncio.create_task(engine.run())
    spec = RequestSpec(RequestId("r"), (1, 2, 3), SamplingParams(max_tokens=2, temperature=0))
    handle = engine.submit(spec)
    async for event in handle.events():
        seen.append("read the end" if isinstance(event, TERMINAL) else "read")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    told = [what for what in seen if not what.startswith("read")]
    assert told == [
        "submitted",
        "told of Started",
        "told of a token",
        "told of a step",
        "told of a token",
        "told of the end",
        "told of a step",
    ]
    assert seen.index("read the end") < seen.index("told of the end")


async def test_what_was_put_off_is_told_before_the_engine_is_over() -> None:
    seen: list[str] = []
    engine = Engine(ScriptedRunner(), ScriptedTokenizer(), SchedulerConfig(), observer=Listener(seen))
    running = asyncio.create_task(engine.run())
    engine.submit(RequestSpec(RequestId("r"), (1, 2, 3), SamplingParams(max_tokens=1000, temperature=0)))
    await asyncio.sleep(0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert seen[-1] == "told of the end"
