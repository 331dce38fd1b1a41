"""The parts of a session that decide something: credit, what is kept, whose turn it is, how often."""

import asyncio
from dataclasses import dataclass, field

import pytest

from engine.errors import SlowConsumer, VorrangError
from server.bucket import Bucket
from server.flow import Flow
from server.outbox import Outbox
from server.replay import FRAME_OVERHEAD_BYTES, ReplayBuffer


@dataclass
class FakeHandle:
    """A handle that notes what it is told."""

    num_output_tokens: int = 0
    finished: bool = False
    told: list[str] = field(default_factory=list)
    error: VorrangError | None = None
    allowed: int | None = None

    def allow(self, num_output_tokens: int | None) -> None:
        self.allowed = num_output_tokens

    def park(self) -> None:
        self.told.append("park")

    def unpark(self) -> None:
        self.told.append("unpark")

    def fail(self, error: VorrangError) -> None:
        self.error = error


def make_flow(handle: FakeHandle, granted_tokens: int | None = 5, timeout_s: float = 60.0) -> Flow:
    return Flow(
        handle,  # type: ignore[arg-type]
        granted_tokens=granted_tokens,
        max_unsent_tokens=10,
        slow_client_timeout_s=timeout_s,
    )


@pytest.mark.asyncio
async def test_the_engine_knows_how_long_the_output_may_become() -> None:
    handle = FakeHandle()
    flow = make_flow(handle)
    assert handle.allowed == 5
    flow.grant(3)
    assert handle.allowed == 8
    flow.unbind(True)
    assert handle.allowed is None
    flow.unbind(False)
    flow.renew(20)
    assert handle.allowed == 20
    assert make_flow(handle, None) is not None
    assert handle.allowed is None


def produce(flow: Flow, handle: FakeHandle, num_tokens: int, num_unsent: int = 0) -> None:
    handle.num_output_tokens += num_tokens
    flow.update(num_unsent)


@pytest.mark.asyncio
async def test_the_last_token_of_the_credit_parks_and_a_grant_unparks() -> None:
    handle = FakeHandle()
    flow = make_flow(handle)
    produce(flow, handle, 4)
    assert handle.told == []
    produce(flow, handle, 1)
    flow.grant(0)
    assert handle.told == ["park"]
    flow.grant(1)
    produce(flow, handle, 1)
    assert handle.told == ["park", "unpark", "park"]
    flow.close()


@pytest.mark.asyncio
async def test_without_credit_from_the_start_it_is_parked_at_once() -> None:
    handle = FakeHandle()
    flow = make_flow(handle, granted_tokens=0)
    assert handle.told == ["park"]
    flow.close()


@pytest.mark.asyncio
async def test_every_hold_must_be_lifted_before_it_goes_on() -> None:
    handle = FakeHandle()
    flow = make_flow(handle)
    flow.pause()
    produce(flow, handle, 5, num_unsent=10)
    assert handle.told == ["park"]
    flow.unpause()
    flow.grant(10)
    assert handle.told == ["park"], "ten tokens wait to be sent"
    flow.update(6)
    assert handle.told == ["park"], "more than half of them still do"
    flow.update(5)
    assert handle.told == ["park", "unpark"]
    flow.close()


@pytest.mark.asyncio
async def test_who_can_say_nothing_any_more_is_held_by_the_transport_alone() -> None:
    handle = FakeHandle()
    flow = make_flow(handle, granted_tokens=0)
    flow.pause()
    flow.unbind(True)
    assert handle.told == ["park", "unpark"]
    flow.update(10)
    assert handle.told[-1] == "park"
    flow.update(0)
    flow.unbind(False)
    assert handle.told[-1] == "park"
    assert flow.paused
    assert flow.out_of_credit
    flow.close()


@pytest.mark.asyncio
async def test_the_clock_runs_for_who_could_read_and_does_not() -> None:
    handle = FakeHandle()
    flow = make_flow(handle, granted_tokens=0, timeout_s=0.02)
    flow.pause()
    await asyncio.sleep(0.03)
    assert handle.error is None, "a pause is no fault"
    flow.unpause()
    flow.watch(False)
    await asyncio.sleep(0.03)
    assert handle.error is None, "nobody is there"
    flow.watch(True)
    await asyncio.sleep(0.03)
    assert isinstance(handle.error, SlowConsumer)


@pytest.mark.asyncio
async def test_what_has_ended_is_told_nothing() -> None:
    handle = FakeHandle()
    flow = make_flow(handle, timeout_s=0.01)
    produce(flow, handle, 5)
    handle.finished = True
    flow.update(0)
    flow.grant(5)
    flow.pause()
    await asyncio.sleep(0.02)
    assert handle.told == ["park"]
    assert handle.error is None


def test_frames_are_kept_as_far_as_they_fit_and_those_not_sent_in_any_case() -> None:
    size = 10 + FRAME_OVERHEAD_BYTES
    kept = ReplayBuffer(max_bytes=3 * size)
    for number in range(1, 7):
        kept.append(b"%010d" % number, num_tokens=2 * number)
    kept.trim(sent_sequence=0)
    assert kept.num_bytes == 6 * size
    kept.trim(sent_sequence=2)
    assert not kept.holds_after(1)
    assert kept.holds_after(2)
    kept.trim(sent_sequence=6)
    assert [int(frame.raw) for frame in kept.after(3)] == [4, 5, 6]
    assert [int(frame.raw) for frame in kept.after(5)] == [6]
    assert [kept.num_tokens_at(sequence) for sequence in (3, 4, 6)] == [6, 8, 12]
    assert [kept.holds_after(sequence) for sequence in (2, 3, 6, 7)] == [False, True, True, False]
    kept.acknowledge(100)
    assert (kept.num_bytes, kept.last_sequence, kept.num_tokens_at(6)) == (0, 6, 12)
    assert list(kept.after(6)) == []


def test_the_most_urgent_goes_first_and_equals_take_turns() -> None:
    levels = {"a": 0, "b": 0, "urgent": -5, "c": 0}
    outbox = Outbox[str](lambda name: levels[name])
    for name in ("a", "b", "c"):
        outbox.put(name)
    order = []
    for turn in range(8):
        if turn == 4:
            outbox.put("urgent")
        order.append(outbox.take())
        outbox.put(order[-1])  # it has more
        if turn == 5:
            levels["urgent"] = 7
            outbox.put("urgent")
    assert order == ["a", "b", "c", "a", "urgent", "urgent", "b", "c"]
    assert len(outbox) == 4
    for name in levels:
        outbox.discard(name)
        outbox.discard(name)
    assert len(outbox) == 0


def test_a_rate_is_for_long_and_a_burst_at_once() -> None:
    limit = Bucket(per_s=2.0, size=3)
    assert [limit.take(10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert limit.take(10.25) == pytest.approx(0.25)
    assert limit.take(10.5) == 0.0
    assert limit.take(10.5) == 0.5
    assert [limit.take(1000.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
