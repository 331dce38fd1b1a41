"""Turns at work that is dear: so many at a time, most urgent first, tenants of a level in turn.

Everything that a caller can make the server's own process do, and that is not small, waits
here for its turn (``server.isolation`` says what). Knows neither texts nor messages.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.errors import Cancelled, Displaced, QueueFull, VorrangError

#: What a turn costs beside its bytes, so that many small ones are not free.
TURN_BYTES = 1024

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SlotsStatistics:
    """A look at the turns.

    Attributes:
        num_running: turns being had.
        num_waiting: those who wait.
        num_waiting_bytes: size of what they wait with.
        num_done: turns had so far.
        num_refused: those who were refused or displaced, for want of room to wait.
        longest_wait_s: longest wait for a turn so far.
        longest_turn_s: longest turn so far.
    """

    num_running: int
    num_waiting: int
    num_waiting_bytes: int
    num_done: int
    num_refused: int
    longest_wait_s: float
    longest_turn_s: float


class Turn:
    """One who comes for turns, one at a time. For the event loop's thread.

    Args:
        level: tells how urgent it is; lower is more urgent; may change while it waits.
        tenant: whose it is.
    """

    __slots__ = ("_future", "arrival", "level", "num_bytes", "tenant")

    def __init__(self, level: Callable[[], int], tenant: str) -> None:
        self.level = level
        self.tenant = tenant
        self.num_bytes = 0
        self.arrival = 0
        self._future: asyncio.Future[None] | None = None

    def leave(self) -> None:
        """Wait no more: the waiting ends with ``Cancelled``. Harmless where it does not wait."""
        self.end(Cancelled("it was cancelled while it waited for its turn"))

    def begin(self) -> bool:
        """For ``Slots``: it is its turn; False when it does not wait any more."""
        if self._future is None or self._future.done():
            return False
        self._future.set_result(None)
        return True

    def end(self, error: VorrangError) -> None:
        """For ``Slots``: its turn never comes."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)

    async def come(self) -> None:
        """For ``Slots``: wait for ``begin``.

        Raises:
            VorrangError: what ``end`` was given.
        """
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            if not self._future.done():
                self._future.cancel()

    @property
    def has_begun(self) -> bool:
        """Whether ``begin`` was called, and seen by nobody else."""
        future = self._future
        return future is not None and future.done() and not future.cancelled() and not future.exception()


class Slots:
    """Gives turns. All methods are for the event loop's thread.

    Who is next: the least level, of those the tenant whose turns had the fewest bytes, of those
    the first to come. A tenant that comes when nothing of it waits begins where the others
    are, so turns can't be saved up. Where no room is left to wait, the last of this order, of
    the tenant that waits with most, is turned away, the newcomer included.

    Args:
        name: of what is done, for errors.
        num_slots: turns at a time.
        max_waiting: how many may wait.
        max_waiting_bytes: with how much.
    """

    def __init__(self, name: str, num_slots: int, *, max_waiting: int, max_waiting_bytes: int) -> None:
        assert num_slots >= 1
        self._name = name
        self._num_free = num_slots
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[Turn] = []
        self._had_bytes: dict[str, float] = {}
        self._last_had = 0.0
        self._num_arrivals = 0
        self._running: set[asyncio.Task[Any]] = set()
        self._num_done = self._num_refused = 0
        self._longest_wait_s = self._longest_turn_s = 0.0

    def statistics(self) -> SlotsStatistics:
        """How things stand."""
        return SlotsStatistics(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_bytes=sum(one.num_bytes for one in self._waiting),
            num_done=self._num_done,
            num_refused=self._num_refused,
            longest_wait_s=self._longest_wait_s,
            longest_turn_s=self._longest_turn_s,
        )

    async def run(
        self,
        work: Callable[[], Coroutine[Any, Any, Result]],
        turn: Turn,
        num_bytes: int,
    ) -> Result:
        """Do some work when it is its turn.

        Args:
            work: what is done in the turn.
            turn: whose turn; it waits for no other meanwhile.
            num_bytes: size of the work.

        Raises:
            QueueFull: too many wait, and no other is to be turned away.
            Displaced: it was turned away for another.
            Cancelled: ``turn.leave`` was called.
            Exception: whatever the work raises.

        Cancellation: what waits leaves at once; work that was begun has its turn to the end, for nobody.
        """
        loop = asyncio.get_running_loop()
        came_at = loop.time()
        turn.num_bytes, turn.arrival = num_bytes, self._num_arrivals
        await self._come(turn)
        began_at = loop.time()
        self._longest_wait_s = max(self._longest_wait_s, began_at - came_at)
        task = asyncio.create_task(work(), name=f"turn-{self._name}")
        self._running.add(task)

        def over(task: "asyncio.Task[Any]") -> None:
            self._running.discard(task)
            self._num_done += 1
            self._longest_turn_s = max(self._longest_turn_s, loop.time() - began_at)
            if not task.cancelled():
                task.exception()  # whoever wanted it may be gone
            self._give_back()

        task.add_done_callback(over)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End what is being done; nobody may come any more."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _come(self, newcomer: Turn) -> None:
        """Wait for a turn; it must be given back.

        Cancellation: leaves the queue.
        """
        self._num_arrivals += 1
        self._lift(newcomer.tenant)
        if self._num_free and not self._waiting:
            self._take(newcomer)
            return
        self._make_room(newcomer)
        self._waiting.append(newcomer)
        try:
            await newcomer.come()
        except BaseException:
            if newcomer in self._waiting:
                self._waiting.remove(newcomer)
            elif newcomer.has_begun:
                self._give_back()  # it was its turn at this very moment
            raise

    def _take(self, one: Turn) -> None:
        self._num_free -= 1
        self._last_had = self._had_bytes[one.tenant]
        self._had_bytes[one.tenant] += one.num_bytes + TURN_BYTES

    def _give_back(self) -> None:
        self._num_free += 1
        while self._num_free and self._waiting:
            first = min(self._waiting, key=self._place)
            self._waiting.remove(first)
            if first.begin():
                self._take(first)

    def _place(self, one: Turn) -> tuple[int, float, int]:
        return one.level(), self._had_bytes[one.tenant], one.arrival

    def _lift(self, tenant: str) -> None:
        """Start a tenant of which nothing waits at the least of the others that do, or at the last turn."""
        waiting = [self._had_bytes[one.tenant] for one in self._waiting]
        if any(one.tenant == tenant for one in self._waiting):
            return
        begin = min(waiting, default=self._last_had)
        self._had_bytes[tenant] = max(self._had_bytes.get(tenant, 0.0), begin)

    def _make_room(self, newcomer: Turn) -> None:
        """Turn others away, or the newcomer.

        Raises:
            QueueFull: it is the newcomer.
        """
        while self._waiting:
            there = [*self._waiting, newcomer]
            num_bytes = sum(one.num_bytes for one in there)
            too_many = len(there) > self._max_waiting
            if not too_many and num_bytes <= self._max_waiting_bytes:
                return
            by_tenant: dict[str, int] = {}
            for one in there:
                by_tenant[one.tenant] = by_tenant.get(one.tenant, 0) + one.num_bytes + TURN_BYTES
            last = max(there, key=lambda one: (one.level(), by_tenant[one.tenant], one.arrival))
            self._num_refused += 1
            if last is newcomer:
                unit, limit = (
                    ("requests", self._max_waiting) if too_many else ("bytes", self._max_waiting_bytes)
                )
                raise QueueFull(f"queue of {self._name}", unit, limit)
            self._waiting.remove(last)
            last.end(Displaced())
