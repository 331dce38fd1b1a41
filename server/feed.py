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


@dataclass(frozen=True, slots=True)
class Watched:
    """A step for a watcher.

    Attributes:
        decision: what was decided.
        num_lost: steps before it that this watcher lost.
    """

    decision: Decision
    num_lost: int


class Watcher:
    """One who watches; iterate it.

    Args:
        past: steps to begin with.
        max_steps: steps kept for it.
    """

    def __init__(self, past: Sequence[Decision], max_steps: int) -> None:
        self._steps: deque[Decision] = deque(past)
        self._max_steps = max(max_steps, len(past))
        self._num_lost = 0
        self._filled = asyncio.Event()
        self._ended = False
        if past:
            self._filled.set()

    def put(self, decision: Decision) -> None:
        """Add a step; the oldest is lost when too many wait."""
        if len(self._steps) >= self._max_steps:
            self._steps.popleft()
            self._num_lost += 1
        self._steps.append(decision)
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
        watched = Watched(self._steps.popleft(), self._num_lost)
        self._num_lost = 0
        return watched


class DecisionFeed:
    """A sink that keeps the last steps and hands every step to who watches.

    Steps in which nothing was granted and nobody was preempted are passed over.

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
            return
        decision = record.call.decision
        if decision is None or not (decision.grants or decision.events):
            return
        self._past.append(decision)
        for watcher in self._watchers:
            watcher.put(decision)

    def watch(self, num_past_steps: int) -> Watcher:
        """Watch from now on; ``leave`` must follow.

        Raises:
            TooManyCalls: as many watch as may.
        """
        if len(self._watchers) >= self._max_watchers:
            raise TooManyCalls("watchers of decisions", str(self._max_watchers))
        past = tuple(self._past)[max(0, len(self._past) - num_past_steps) :]
        watcher = Watcher(past, self._max_watcher_steps)
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
