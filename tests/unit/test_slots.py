"""Turns at dear work: whose comes next, who is turned away, and what leaving does."""

import asyncio
from collections.abc import Callable

import pytest

from engine.errors import Cancelled, Displaced, QueueFull
from server.slots import Slots, Turn
from tests.support.process import HANGS_S

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(HANGS_S)]


class Held:
    """Slots whose one turn is being had, until ``go`` is set; what is done after it is written down."""

    def __init__(self, *, max_waiting: int = 100, max_waiting_bytes: int = 1_000_000) -> None:
        self.slots = Slots("tests", 1, max_waiting=max_waiting, max_waiting_bytes=max_waiting_bytes)
        self.go = asyncio.Event()
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.turns: dict[str, Turn] = {}

    async def come(
        self, name: str, level: int | Callable[[], int] = 0, tenant: str = "", num_bytes: int = 1
    ) -> "asyncio.Task[None]":
        async def work() -> None:
            self.order.append(name)
            await self.go.wait()

        turn = self.turns[name] = Turn(level if callable(level) else lambda: level, tenant)
        task = self.tasks[name] = asyncio.create_task(self.slots.run(work, turn, num_bytes))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def all_done(self) -> None:
        self.go.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        stands = self.slots.statistics()
        assert (stands.num_running, stands.num_waiting, stands.num_waiting_bytes) == (0, 0, 0)


async def test_the_most_urgent_comes_first_and_then_the_first() -> None:
    held = Held()
    for name, level in (("now", 0), ("b", 5), ("a", -5), ("c", 5), ("z", 100)):
        await held.come(name, level)
    await held.all_done()
    assert held.order == ["now", "a", "b", "c", "z"]


async def test_tenants_of_a_level_take_turns_by_what_they_had() -> None:
    held = Held()
    await held.come("now")
    for number in range(4):
        await held.come(f"a{number}", tenant="a", num_bytes=10_000)
    for number in range(4):
        await held.come(f"b{number}", tenant="b", num_bytes=10_000)
    await held.all_done()
    assert held.order == ["now", "a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


async def test_turns_cannot_be_saved_up() -> None:
    held = Held()
    held.go.set()
    for _ in range(50):
        await (await held.come("a", tenant="a", num_bytes=10_000))
    held.go.clear()
    held.order.clear()
    await held.come("now", tenant="a")
    for number in range(4):
        await held.come(f"b{number}", tenant="b", num_bytes=1000)
        await held.come(f"a{number}", tenant="a", num_bytes=1000)
    await held.all_done()
    assert held.order.index("a1") < held.order.index("b3")


async def test_a_level_that_changes_while_it_waits_counts() -> None:
    held, level = Held(), [50]
    await held.come("now")
    await held.come("a", lambda: level[0])
    await held.come("b", 0)
    level[0] = -50
    await held.all_done()
    assert held.order == ["now", "a", "b"]


@pytest.mark.parametrize("how", ["cancel", "leave"])
async def test_who_leaves_waits_no_more_and_takes_nobodys_turn(how: str) -> None:
    held = Held()
    await held.come("now")
    gone, after = await held.come("gone"), await held.come("after")
    if how == "cancel":
        gone.cancel()
    else:
        held.turns["gone"].leave()
    with pytest.raises(asyncio.CancelledError if how == "cancel" else Cancelled):
        await gone
    assert held.slots.statistics().num_waiting == 1
    await held.all_done()
    assert after.done()
    assert held.order == ["now", "after"]


async def test_work_that_was_begun_keeps_its_slot_when_nobody_waits_for_it_any_more() -> None:
    held = Held()
    now = await held.come("now")
    after = await held.come("after")
    now.cancel()
    with pytest.raises(asyncio.CancelledError):
        await now
    assert held.order == ["now"]
    held.go.set()
    await after
    assert held.order == ["now", "after"]
    held.turns["now"].leave()  # harmless


async def test_a_turn_that_comes_at_the_moment_of_its_cancellation_is_given_to_the_next() -> None:
    held = Held()
    await held.come("now")
    first, second = await held.come("first"), await held.come("second")
    held.go.set()
    await held.tasks["now"]
    for _ in range(3):  # whenever its turn comes meanwhile
        first.cancel()
        await asyncio.sleep(0)
    await second
    assert held.slots.statistics().num_running == 0


async def test_in_a_full_queue_the_last_of_the_order_is_turned_away() -> None:
    held = Held(max_waiting=2)
    await held.come("now")
    slow = await held.come("slow", 10)
    await held.come("middle", 5)
    with pytest.raises(QueueFull) as refused:
        await (await held.come("slower", 20))
    assert refused.value.retryable
    assert str(refused.value) == "the queue of tests holds as many waiting requests as it may, 2"
    await held.come("quick", -5)
    with pytest.raises(Displaced):
        await slow
    await held.all_done()
    assert held.order == ["now", "quick", "middle"]
    assert held.slots.statistics().num_refused == 2


async def test_a_tenant_that_fills_the_queue_is_turned_away_before_another() -> None:
    held = Held(max_waiting_bytes=50_000)
    await held.come("now")
    for number in range(5):
        await held.come(f"a{number}", tenant="a", num_bytes=10_000)
    other = await held.come("b", tenant="b", num_bytes=10_000)
    with pytest.raises(Displaced):
        await held.tasks["a4"]
    with pytest.raises(QueueFull, match="waiting bytes"):
        await (await held.come("a5", tenant="a", num_bytes=10_000))
    await held.all_done()
    assert other.done()
    assert "b" in held.order


async def test_what_the_work_raises_reaches_who_waits_and_frees_the_slot() -> None:
    slots = Slots("tests", 1, max_waiting=1, max_waiting_bytes=1)

    async def fails() -> None:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await slots.run(fails, Turn(lambda: 0, ""), 5)
    assert slots.statistics().num_done == 3
