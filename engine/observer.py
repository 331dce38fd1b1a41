"""What the loop tells of what happens, as it happens: for metrics, accounts and spans.

Nobody who listens changes anything, and the loop pays nothing where nobody does.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.events import Failed, Finished, LevelChanged, Preempted, Resumed, Started
from engine.request import RequestSpec
from engine.scheduler.plan import Plan


class EngineObserver(Protocol):
    """Who listens. Called on the event loop's thread; must be quick and must not raise."""

    def submitted(self, spec: RequestSpec) -> None:
        """A request has joined the queue."""
        ...

    def step_made(self, plan: Plan, duration_s: float) -> None:
        """A step was computed and booked."""
        ...

    def produced(self, spec: RequestSpec, num_tokens: int, gap_s: float | None) -> None:
        """A request got output tokens, ``gap_s`` seconds after its last ones; None = its first."""
        ...

    def happened(self, spec: RequestSpec, event: Started | Preempted | Resumed | LevelChanged) -> None:
        """Something else happened to a request."""
        ...

    def ended(
        self, spec: RequestSpec, event: Finished | Failed, ttft_s: float | None, total_s: float
    ) -> None:
        """A request has ended, ``total_s`` seconds after it arrived."""
        ...


class Observers:
    """Several that listen, as one."""

    def __init__(self, observers: Sequence[EngineObserver]) -> None:
        self._observers = tuple(observers)

    def submitted(self, spec: RequestSpec) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.submitted(spec)

    def step_made(self, plan: Plan, duration_s: float) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.step_made(plan, duration_s)

    def produced(self, spec: RequestSpec, num_tokens: int, gap_s: float | None) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.produced(spec, num_tokens, gap_s)

    def happened(self, spec: RequestSpec, event: Started | Preempted | Resumed | LevelChanged) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.happened(spec, event)

    def ended(
        self, spec: RequestSpec, event: Finished | Failed, ttft_s: float | None, total_s: float
    ) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.ended(spec, event, ttft_s, total_s)


def all_of(observers: Sequence[EngineObserver]) -> EngineObserver | None:
    """One observer for several; None for none."""
    return None if not observers else observers[0] if len(observers) == 1 else Observers(observers)
