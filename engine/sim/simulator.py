"""Drives the real scheduler, or the whole real engine, through a workload in virtual time.

Two drivers, one result:

- ``simulate`` calls the scheduler directly, as the loop would: for long runs.
- ``simulate_engine`` runs ``Engine`` itself, its loop, inbox, handles and text, in
  an event loop whose time jumps: for fidelity. A test holds the two to the same plans.

Requests join the queue when they arrive, and are seen by the first step that is planned
at or after that; a step that is under way is never disturbed.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.clock import Clock
from engine.errors import InternalError, VorrangError
from engine.handle import RequestHandle
from engine.loop import Engine
from engine.runner.base import ModelInfo, PoolShape
from engine.runner.simulated import OUTPUT, SimulatedRunner, SimulatedTokenizer
from engine.scheduler.bulk import BulkScheduler
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.decisions import DecisionSink, RecordingScheduler
from engine.scheduler.plan import Plan, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.sim.bulk_recorder import BulkRecorder
from engine.sim.drivers import Arrivals, Driver, EachStep, InBulk, PlanObserver
from engine.sim.recorder import Recorder, Recording
from engine.sim.requests import BlockHashes, spec_of
from engine.sim.virtual_time import VirtualTimeLoop, run_in_virtual_time
from kv.block_manager import BlockManager
from workloads.arrivals import Workload

#: Arrivals closer than that come together: the clock's sums of floats differ by less.
_AT_ONCE_S = 1e-9


class SimulationStuck(VorrangError):
    """Requests are alive, nothing is to arrive, and the scheduler plans nothing."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a simulation is.

    Attributes:
        now_s: virtual time.
        num_arrived: requests that have arrived.
        num_alive: of those, the ones not ended.
    """

    now_s: float
    num_arrived: int
    num_alive: int


def simulate(
    workload: Workload,
    runner: SimulatedRunner,
    config: SchedulerConfig,
    *,
    plans_ahead: int = 0,
    enable_prefix_cache: bool = True,
    on_plan: PlanObserver | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    check_integrity: bool = False,
    decisions: DecisionSink | None = None,
    step_by_step: bool = False,
    sample_every_s: float = math.inf,
    hashes: BlockHashes | None = None,
) -> Recording:
    """Run a workload through the scheduler.

    Args:
        workload: what arrives.
        runner: what steps cost; its pool.
        config: of the scheduler.
        plans_ahead: how many steps are planned, or under way, when a step is planned.
            0: a step is planned when the one before has ended, as the engine does.
            1: it is planned when the one before *begins* (vLLM's asynchronous
            scheduling); here that delays arrivals only, to the step after next.
        enable_prefix_cache: whether freed blocks stay findable.
        on_plan: sees every plan.
        on_progress: called about every 1,024 steps.
        check_integrity: recount everything after every step.
        decisions: is told of every call that drives the scheduler.
        step_by_step: plan every step with all its grants. Otherwise decodes are made together
            (``engine.scheduler.bulk``), and steps of nothing else at once, with the same outcome;
            never when plans are watched, recorded or made ahead, nor when tokens are guessed.
        sample_every_s: virtual seconds between two samples of the scheduler's state, at least.
        hashes: kept from run to run of a workload, with pools of one block size.

    Raises:
        SimulationStuck: nothing can happen any more.
    """
    blocks = BlockManager(
        runner.pool.num_blocks, runner.pool.block_size, enable_prefix_cache=enable_prefix_cache
    )
    scheduler: Scheduler
    recorder: Recorder
    driver: Driver
    if step_by_step or plans_ahead or on_plan or decisions or config.speculation_tokens:
        scheduler = RecordingScheduler(config, blocks, decisions) if decisions else Scheduler(config, blocks)
        recorder = Recorder()
        driver = EachStep(scheduler, runner, recorder, on_plan, plans_ahead)
    else:
        scheduler = bulk_scheduler = BulkScheduler(config, blocks, OUTPUT)
        recorder = bulk_recorder = BulkRecorder()
        driver = InBulk(bulk_scheduler, runner, bulk_recorder, hashes)
    arrivals = Arrivals(workload, driver, recorder)
    planned_at = deque([0.0] * (plans_ahead + 1), maxlen=plans_ahead + 1)
    now = 0.0
    next_progress = 1024
    next_sample_s = 0.0 if math.isfinite(sample_every_s) else math.inf
    while arrivals or scheduler.has_requests:
        planned_at.append(now)
        arrivals.join(planned_at[0] if scheduler.has_requests else now)
        events, computes = driver.plan(now)
        recorder.happened(events, now)
        if not computes:
            if arrivals:
                now = max(now, arrivals.next_s)
            elif scheduler.has_requests and not events:
                left = f"{scheduler.num_running} running, {scheduler.num_waiting} waiting"
                raise SimulationStuck(f"the next step, at {now:.3f} s, plans nothing: {left}")
            continue
        now = driver.make(now, next_sample_s, arrivals)
        if check_integrity:
            scheduler.check_integrity()
        if now >= next_sample_s:
            next_sample_s = now + sample_every_s
            recorder.sample(now, scheduler.num_running, 1 - blocks.num_free_blocks / blocks.num_blocks)
        if on_progress is not None and recorder.recording.num_steps >= next_progress:
            next_progress = recorder.recording.num_steps + 1024
            num_alive = scheduler.num_running + scheduler.num_waiting
            on_progress(Progress(now, len(workload.requests) - len(arrivals), num_alive))
    return recorder.recording


def simulate_engine(
    workload: Workload,
    runner: SimulatedRunner,
    config: SchedulerConfig,
    *,
    on_plan: PlanObserver | None = None,
    check_integrity: bool = False,
    decisions: DecisionSink | None = None,
) -> Recording:
    """Run a workload through the whole engine, in virtual time. Arguments as in ``simulate``."""
    loop = VirtualTimeLoop()
    main = _serve(
        workload,
        runner,
        config,
        loop.clock,
        on_plan,
        check_integrity=check_integrity,
        decisions=decisions,
    )
    return run_in_virtual_time(main, loop)


async def _serve(
    workload: Workload,
    runner: SimulatedRunner,
    config: SchedulerConfig,
    clock: Clock,
    on_plan: PlanObserver | None,
    *,
    check_integrity: bool,
    decisions: DecisionSink | None,
) -> Recording:
    recorder = Recorder()
    recording_runner = _RecordingRunner(runner, recorder, clock, on_plan)
    engine = Engine(
        recording_runner,
        SimulatedTokenizer(),
        config,
        clock=clock,
        check_integrity=check_integrity,
        decisions=decisions,
    )

    def take(handle: RequestHandle) -> None:
        recorder.happened(handle.take(), clock.now())

    async def arrive() -> None:
        for request in workload.requests:
            if (delay_s := request.arrival_s - clock.now()) > _AT_ONCE_S:
                await asyncio.sleep(delay_s)
            try:
                engine.submit(spec_of(request), take)
            except VorrangError as error:
                recorder.refused(request, error)
            else:
                recorder.arrived(request)
        await engine.wait_until_idle()

    serving = asyncio.ensure_future(engine.run())
    arriving = asyncio.ensure_future(arrive())
    try:
        await asyncio.wait({serving, arriving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        arriving.result()
    finally:
        serving.cancel()
        arriving.cancel()
        await asyncio.gather(serving, arriving, return_exceptions=True)
    for failure in recorder.recording.failures.values():
        if isinstance(failure, InternalError):
            raise failure
    return recorder.recording


class _RecordingRunner:
    """A simulated runner whose steps are booked."""

    def __init__(
        self, runner: SimulatedRunner, recorder: Recorder, clock: Clock, on_plan: PlanObserver | None
    ) -> None:
        self._runner = runner
        self._recorder = recorder
        self._clock = clock
        self._on_plan = on_plan

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    @property
    def pool(self) -> PoolShape:
        return self._runner.pool

    async def execute(self, plan: Plan) -> StepResult:
        if self._on_plan is not None:
            self._on_plan(plan)
        start = self._clock.now()
        # Booked at once: who arrives while it computes did not wait when it was planned.
        self._recorder.stepped(plan.grants, start, start + self._runner.step_s(plan))
        return await self._runner.execute(plan)

    async def close(self) -> None:
        await self._runner.close()
