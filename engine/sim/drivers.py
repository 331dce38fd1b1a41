"""How a simulation makes steps: each planned for itself, or decodes together and many at once."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from engine.events import SchedulerEvent
from engine.runner.simulated import SimulatedRunner
from engine.scheduler.bulk import BulkScheduler, BulkStep
from engine.scheduler.plan import Plan
from engine.scheduler.scheduler import Scheduler
from engine.sim.bulk_recorder import BulkRecorder
from engine.sim.recorder import Recorder
from engine.sim.requests import BlockHashes, spec_of
from workloads.arrivals import Arrival

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

    def make(self, now: float, until: float) -> float:
        """Make the planned step, and perhaps some after it that begin before ``until``.

        Returns:
            When the last of them ended.
        """
        ...


class EachStep:
    """Plans every step, and shows it to whoever watches."""

    def __init__(
        self, scheduler: Scheduler, runner: SimulatedRunner, recorder: Recorder, on_plan: PlanObserver | None
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._recorder = recorder
        self._on_plan = on_plan
        self._plan: Plan | None = None

    def submit(self, arrival: Arrival) -> list[SchedulerEvent]:
        """As in ``Driver``."""
        return self._scheduler.submit(spec_of(arrival), arrival.arrival_s)

    def plan(self, now: float) -> tuple[Sequence[SchedulerEvent], bool]:
        """As in ``Driver``."""
        self._plan = plan = self._scheduler.plan(now)
        return plan.events, bool(plan.grants)

    def make(self, now: float, until: float) -> float:
        """As in ``Driver``; a single step."""
        plan = self._plan
        assert plan is not None
        if self._on_plan is not None:
            self._on_plan(plan)
        end = now + self._runner.step_s(plan)
        self._recorder.stepped(plan.grants, now, end)
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

    def make(self, now: float, until: float) -> float:
        """As in ``Driver``."""
        step = self._step
        assert step is not None
        num_decodes = len(step.decodes)
        num_kv_tokens = sum([request.num_computed_tokens for request in step.decodes]) + num_decodes
        end = now + self._runner.mixed_s(num_decodes, num_kv_tokens, step.grants)
        self._recorder.mixed(num_decodes, step.grants, now, end)
        self._recorder.happened(self._scheduler.end(step, end), end)
        while end < until and (later := self._pass_stretch(end, until)) > end:
            end = later
        return end

    def _pass_stretch(self, now: float, until: float) -> float:
        """Make steps at once; returns when the last of them ended, ``now`` if there are none."""
        stretch = self._scheduler.stretch()
        until = min(until, stretch.until)
        if not stretch.num_steps or now >= until:
            return now
        num_decodes = len(stretch.requests)
        num_kv_tokens = sum([request.num_computed_tokens for request in stretch.requests]) + num_decodes
        times = [now]
        for duration_s in islice(self._runner.decodes_s(num_decodes, num_kv_tokens), stretch.num_steps):
            if now >= until:
                break
            now += duration_s
            times.append(now)
        self._recorder.stretched(times)
        self._recorder.happened(self._scheduler.pass_stretch(len(times) - 1, times[-2], now), now)
        return now
