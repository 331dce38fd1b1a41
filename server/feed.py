"""The scheduler's decisions for whoever watches: the last steps, and every further one.

A sink of the engine that never waits. Every watcher has a queue of its own, bounded
in steps; one that does not read loses the oldest and is told how many.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.scheduler.decisions import Decision, DecisionSink, Origin, Planned, Record
from server.errors import TooManyCalls

#: Calls between two steps, or in lost ones, that are kept for a watcher; older ones are lost.
MAX_BETWEEN = 4096


@dataclass(frozen=True, slots=True)
class Watched:
    """A step for a watcher.

    Attributes:
        decision: what was decided.
        num_lost: steps before it that this watcher lost.
        between: calls since the step before, for a watcher that asked for them; those of lost steps are kept.
    """

    decision: Decision
    num_lost: int
    between: tuple[Record, ...] = ()


class Watcher:
    """One who watches; iterate it.

    Args:
        past: steps to begin with.
        max_steps: steps kept for it.
        wants_between: whether it wants to know what happens between the steps.
    """

    def __init__(self, past: Sequence[Decision], max_steps: int, *, wants_between: bool = False) -> None:
        self.wants_between = wants_between
        self._steps: deque[tuple[Decision, tuple[Record, ...]]] = deque((step, ()) for step in past)
        self._max_steps = max(max_steps, len(past))
        self._num_lost = 0
        self._lost: tuple[Record, ...] = ()
        self._filled = asyncio.Event()
        self._ended = False
        if past:
            self._filled.set()

    def put(self, decision: Decision, between: tuple[Record, ...] = ()) -> None:
        """Add a step; the oldest is lost when too many wait."""
        if len(self._steps) >= self._max_steps:
            _, lost = self._steps.popleft()
            self._num_lost += 1
            if lost:
                self._lost = (*self._lost, *lost)[-MAX_BETWEEN:]
        self._steps.append((decision, between))
        self._filled.set()

    def end(self) -> None:
        """Let the iteration end after what waits."""
        self._ended = True
        self._filled.set()

    def __aiter__(self) -> "Watcher":
        return self

    async def __anext__(self) -> Watched:
        """The next step. Cancellation: loses none."""
        while not self._steps:
            if self._ended:
                raise StopAsyncIteration
            self._filled.clear()
            await self._filled.wait()
        decision, between = self._steps.popleft()
        watched = Watched(decision, self._num_lost, (*self._lost, *between) if self._lost else between)
        self._num_lost, self._lost = 0, ()
        return watched


class DecisionFeed:
    """A sink that keeps the last steps and hands every step to who watches.

    Steps in which nothing was granted and nobody was preempted are passed over, unless a
    watcher wants to know what happens between the steps, and something has.

    Args:
        past_steps: how many to keep.
        max_watchers: who may watch at once.
        max_watcher_steps: steps kept for a watcher that does not read.
    """

    def __init__(self, *, past_steps: int, max_watchers: int, max_watcher_steps: int) -> None:
        self._past: deque[Decision] = deque(maxlen=past_steps)
        self._max_watchers = max_watchers
        self._max_watcher_steps = max_watcher_steps
        self._watchers: set[Watcher] = set()
        self._between: deque[Record] = deque(maxlen=MAX_BETWEEN)
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether anything is kept, or anybody watches."""
        return self._past.maxlen != 0 or bool(self._watchers)

    @property
    def num_watchers(self) -> int:
        """Who watches."""
        return len(self._watchers)

    def begin(self, origin: Origin) -> None:
        """Nothing to do."""

    def record(self, record: Record) -> None:
        """Keep a plan; other calls are passed over."""
        if not isinstance(record.call, Planned):
            if any(watcher.wants_between for watcher in self._watchers):
                self._between.append(record)
            return
        decision = record.call.decision
        if decision is None:
            return
        is_step = bool(decision.grants or decision.events)
        if is_step:
            self._past.append(decision)
        if not is_step and not self._between:
            return
        between = tuple(self._between)
        self._between.clear()
        for watcher in self._watchers:
            if watcher.wants_between:
                watcher.put(decision, between)
            elif is_step:
                watcher.put(decision)

    def watch(self, num_past_steps: int, *, wants_between: bool = False) -> Watcher:
        """Watch from now on; ``leave`` must follow.

        Raises:
            TooManyCalls: as many watch as may.
        """
        if len(self._watchers) >= self._max_watchers:
            raise TooManyCalls("watchers of decisions", str(self._max_watchers))
        past = tuple(self._past)[max(0, len(self._past) - num_past_steps) :]
        watcher = Watcher(past, self._max_watcher_steps, wants_between=wants_between)
        if self._closed:
            watcher.end()
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Watch no more."""
        self._watchers.discard(watcher)

    def close(self) -> None:
        """Let all who watch end after what waits for them."""
        self._closed = True
        for watcher in self._watchers:
            watcher.end()


class Sinks:
    """Several sinks as one.

    Args:
        sinks: at least one.
    """

    def __init__(self, sinks: Sequence[DecisionSink]) -> None:
        self._sinks = tuple(sinks)

    @property
    def is_open(self) -> bool:
        """Whether any listens."""
        return any(sink.is_open for sink in self._sinks)

    def begin(self, origin: Origin) -> None:
        """Tell all."""
        for sink in self._sinks:
            sink.begin(origin)

    def record(self, record: Record) -> None:
        """Tell those that listen."""
        for sink in self._sinks:
            if sink.is_open:
                sink.record(record)
