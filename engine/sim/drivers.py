"""How a simulation makes steps: each planned for itself, or decodes together and many at once."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from engine.errors import VorrangError
from engine.events import SchedulerEvent
from engine.runner.simulated import SimulatedRunner
from engine.scheduler.bulk import BulkScheduler, BulkStep
from engine.scheduler.plan import Plan
from engine.scheduler.scheduler import Scheduler
from engine.sim.bulk_recorder import BulkRecorder
from engine.sim.recorder import Recorder
from engine.sim.requests import BlockHashes, spec_of
from workloads.arrivals import Arrival, Workload

#: Called with every plan that computes something, when it is made.
PlanObserver = Callable[[Plan], None]


class Driver(Protocol):
    """Makes steps one after the other: first ``plan``, then ``make``."""

    def submit(self, arrival: Arrival) -> list[SchedulerEvent]:
        """A request arrives; returns what became of others.

        Raises:
            VorrangError: it is refused.
        """
        ...

    def plan(self, now: float) -> tuple[Sequence[SchedulerEvent], bool]:
        """Plan a step; returns what was decided, and whether anything is computed."""
        ...

    def make(self, now: float, until: float, arrivals: "Arrivals") -> float:
        """Make the planned step, and perhaps some after it that begin before ``until`` and the next arrival.

        Whoever arrives while the step is computed joins the queue before its outcome is booked.

        Returns:
            When the last of them ended.
        """
        ...


class Arrivals:
    """What is still to come of a workload, and how it joins the queue.

    Args:
        workload: what arrives.
        driver: takes the requests.
        recorder: is told of them.
    """

    def __init__(self, workload: Workload, driver: Driver, recorder: Recorder) -> None:
        self._coming = deque(workload.requests)
        self._driver = driver
        self._recorder = recorder

    def __len__(self) -> int:
        """Requests that have not arrived yet."""
        return len(self._coming)

    @property
    def next_s(self) -> float:
        """When the next one arrives."""
        return self._coming[0].arrival_s if self._coming else math.inf

    def join(self, until: float) -> None:
        """Let those join the queue, or be refused, that have arrived by then."""
        while self._coming and self._coming[0].arrival_s <= until:
            request = self._coming.popleft()
            try:
                displaced = self._driver.submit(request)
            except VorrangError as error:
                self._recorder.refused(request, error)
            else:
                self._recorder.arrived(request)
                self._recorder.happened(displaced, request.arrival_s)


class EachStep:
    """Plans every step, and shows it to whoever watches.

    Args:
        scheduler: plans.
        runner: says what a step costs.
        recorder: books it.
        on_plan: sees every plan.
        plans_ahead: as in ``simulate``; with any, who arrives in a step is seen late, by ``simulate``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: SimulatedRunner,
        recorder: Recorder,
        on_plan: PlanObserver | None,
        plans_ahead: int,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._recorder = recorder
        self._on_plan = on_plan
        self._plans_ahead = plans_ahead
        self._plan: Plan | None = None

    def submit(self, arrival: Arrival) -> list[SchedulerEvent]:
        """As in ``Driver``."""
        return self._scheduler.submit(spec_of(arrival), arrival.arrival_s)

    def plan(self, now: float) -> tuple[Sequence[SchedulerEvent], bool]:
        """As in ``Driver``."""
        self._plan = plan = self._scheduler.plan(now)
        return plan.events, bool(plan.grants)

    def make(self, now: float, until: float, arrivals: Arrivals) -> float:
        """As in ``Driver``; a single step."""
        plan = self._plan
        assert plan is not None
        if self._on_plan is not None:
            self._on_plan(plan)
        end = now + self._runner.step_s(plan)
        self._recorder.stepped(plan.grants, now, end)
        if not self._plans_ahead:
            arrivals.join(end)
        self._recorder.happened(self._scheduler.commit(plan, self._runner.run(plan), end), end)
        return end


class InBulk:
    """Makes decodes together, and steps at once that must be alike."""

    def __init__(
        self,
        scheduler: BulkScheduler,
        runner: SimulatedRunner,
        recorder: BulkRecorder,
        hashes: BlockHashes | None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._recorder = recorder
        self._hashes = hashes
        self._step: BulkStep | None = None

    def submit(self, arrival: Arrival) -> list[SchedulerEvent]:
        """As in ``Driver``."""
        spec = spec_of(arrival)
        block_hashes = None if self._hashes is None else self._hashes.of(arrival)
        return self._scheduler.submit(spec, arrival.arrival_s, block_hashes)

    def plan(self, now: float) -> tuple[Sequence[SchedulerEvent], bool]:
        """As in ``Driver``."""
        self._step = step = self._scheduler.begin(now)
        return step.events, bool(step.decodes or step.grants)

    def make(self, now: float, until: float, arrivals: Arrivals) -> float:
        """As in ``Driver``."""
        step = self._step
        assert step is not None
        num_decodes = len(step.decodes)
        num_kv_tokens = sum([request.num_computed_tokens for request in step.decodes]) + num_decodes
        end = now + self._runner.mixed_s(num_decodes, num_kv_tokens, step.grants)
        self._recorder.mixed(step.decodes, step.grants, now, end)
        arrivals.join(end)
        self._recorder.happened(self._scheduler.end(step, end), end)
        while end < until and (later := self._pass_stretch(end, until, arrivals.next_s)) > end:
            end = later
            arrivals.join(end)
        return end

    def _pass_stretch(self, now: float, until: float, next_arrival_s: float) -> float:
        """Make steps at once; returns when the last of them ended, ``now`` if there are none.

        The last of them may be one in which somebody arrives, who then joins after its tokens are
        booked, unless the policy tells that from joining before.
        """
        stretch = self._scheduler.stretch()
        until = min(until, stretch.until, next_arrival_s)
        last_end = next_arrival_s if not self._scheduler.policy.is_fixed else math.inf
        if not stretch.num_steps or now >= until:
            return now
        num_decodes = len(stretch.requests)
        num_kv_tokens = sum([request.num_computed_tokens for request in stretch.requests]) + num_decodes
        times = [now]
        for duration_s in islice(self._runner.decodes_s(num_decodes, num_kv_tokens), stretch.num_steps):
            if now >= until or now + duration_s >= last_end:
                break
            now += duration_s
            times.append(now)
        if len(times) == 1:
            return now
        self._recorder.stretched(stretch.requests, times)
        self._recorder.happened(self._scheduler.pass_stretch(len(times) - 1, times[-2], now), now)
        return now
