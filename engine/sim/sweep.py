"""A workload simulated under several configurations, at several rates, with several seeds.

Every run is a process's work of its own; a result is whatever ``reduce`` makes of a
run, since a whole one is too large to hand from process to process.
"""

import dataclasses
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from engine.errors import VorrangError
from engine.runner.simulated import SimulatedRunner
from engine.scheduler.config import SchedulerConfig
from engine.sim.profiles import HardwareProfile
from engine.sim.requests import BlockHashes
from engine.sim.runs import run_of
from engine.sim.simulator import simulate
from workloads.arrivals import Workload
from workloads.records import Run
from workloads.sources import workload_from

T = TypeVar("T")

#: Samples of the scheduler's state in a run, about.
_NUM_SAMPLES = 300


class SweepFailed(VorrangError):
    """Not all runs of a sweep could be made."""


@dataclass(frozen=True, slots=True)
class Source:
    """A workload that every process makes for itself.

    Attributes:
        name: see ``workload_from``.
        trace_format: of a trace.
        duration_s: arrivals end before then, at the workload's own rate; None: where it says.
        limit: only the first requests.
        max_prompt_tokens: longer prompts are left out.
        classes: class -> share, drawn for the requests; empty: as they are.
        tenants: tenants drawn for the requests; 0: as they are.
    """

    name: str
    trace_format: str = "auto"
    duration_s: float | None = None
    limit: int | None = None
    max_prompt_tokens: int | None = None
    classes: tuple[tuple[str, float], ...] = ()
    tenants: int = 0

    def make(self, seed: int) -> Workload:
        """The workload.

        Raises:
            InvalidWorkload: there is none, or it breaks a rule.
            OSError: a file can't be read.
        """
        workload = workload_from(
            self.name, seed=seed, duration_s=self.duration_s, trace_format=self.trace_format
        )
        if self.max_prompt_tokens is not None:
            workload = workload.with_prompts_up_to(self.max_prompt_tokens)
        if self.limit is not None:
            workload = workload.limited(self.limit)
        if self.classes:
            workload = workload.with_classes(dict(self.classes), seed)
        return workload.with_tenants(self.tenants, seed) if self.tenants else workload


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: of the configuration.
        config: of the scheduler.
        rate_rps: mean arrivals a second; None: the workload's own.
        seed: of the workload.
    """

    name: str
    config: SchedulerConfig
    rate_rps: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is simulated.

    Attributes:
        source: what arrives.
        hardware: what steps cost.
        num_blocks: KV blocks; None: the hardware's.
        cells: the runs.
    """

    source: Source
    hardware: HardwareProfile
    num_blocks: int | None
    cells: Sequence[Cell]


def run_cell(sweep: Sweep, cell: Cell) -> Run:
    """Simulate one cell in this process."""
    return run_cells(sweep, [cell])[0]


def run_cells(sweep: Sweep, cells: Sequence[Cell]) -> list[Run]:
    """Simulate cells that differ in their names alone, or in what makes no difference: once for all."""
    cell = cells[0]
    workload = _made(sweep.source, cell.seed)
    if cell.rate_rps is not None:
        workload = workload.at_rate(cell.rate_rps)
    runner = SimulatedRunner(sweep.hardware, num_blocks=sweep.num_blocks)
    last_s = workload.requests[-1].arrival_s if workload.requests else 0.0
    every_s = max(0.01, last_s / _NUM_SAMPLES)
    # Millions of small objects come and go and none is part of a cycle: the collector only costs time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        recording = simulate(
            workload,
            runner,
            cell.config,
            sample_every_s=every_s,
            hashes=_hashes(sweep.source, runner.pool.block_size),
        )
    finally:
        if was_enabled:
            gc.enable()
    rate_rps = workload.mean_rate_rps if last_s > 0 else None
    offered_rps = cell.rate_rps or rate_rps
    return [run_of(c.name, recording, offered_rps=offered_rps, seed=c.seed) for c in cells]


def run_sweep(
    sweep: Sweep, reduce: Callable[[Run], T], *, num_processes: int | None = None
) -> Iterator[tuple[Cell, T]]:
    """Simulate all cells, as many at a time as there are cores; gives results as they come.

    Args:
        sweep: what to simulate.
        reduce: a function of a module, called in the process that simulated.
        num_processes: at a time; None: one for each core this process may use.

    Raises:
        InvalidWorkload: the workload can't be made, or brought to a rate.
        SweepFailed: a process died.
    """
    groups = list(_alike(sweep).values())
    num_processes = min(num_processes or num_cores(), len(groups))
    if num_processes <= 1:
        for cells in groups:
            yield from zip(cells, map(reduce, run_cells(sweep, cells)), strict=True)
        return
    # Spawned: a fork of a process that has threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_end_with_parent) as pool:
        waiting = {pool.submit(_work, sweep, cells, reduce): cells for cells in groups}
        try:
            for done in as_completed(waiting):
                yield from zip(waiting[done], done.result(), strict=True)
        except BrokenProcessPool:
            raise SweepFailed("a process that simulated died; perhaps there was too little memory") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def num_cores() -> int:
    """Cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _end_with_parent() -> None:
    """Leave no process behind: a pool's own wait for ever when the one that started them was killed.

    Ctrl-C reaches all processes of a terminal; those that only work need not tell of it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _alike(sweep: Sweep) -> dict[Cell, list[Cell]]:
    """Cells that make the same steps, by one that stands for them.

    ``fair`` ranks requests of one level by what their tenants were served, then by arrival; with
    a single tenant that is the order of ``priority``. A test holds whole recordings to it.

    Raises:
        InvalidWorkload: the workload can't be made.
    """
    seeds = {cell.seed for cell in sweep.cells}
    num_tenants = {seed: len({r.tenant for r in sweep.source.make(seed).requests}) for seed in seeds}
    groups: dict[Cell, list[Cell]] = {}
    for cell in sweep.cells:
        config = cell.config
        if config.policy == "fair" and num_tenants[cell.seed] == 1:
            config = dataclasses.replace(config, policy="priority")
        groups.setdefault(dataclasses.replace(cell, name="", config=config), []).append(cell)
    return groups


def _work(sweep: Sweep, cells: Sequence[Cell], reduce: Callable[[Run], T]) -> list[T]:
    results = [reduce(run) for run in run_cells(sweep, cells)]
    gc.collect()
    return results


@lru_cache(maxsize=4)
def _made(source: Source, seed: int) -> Workload:
    return source.make(seed)


@lru_cache(maxsize=1)
def _hashes(source: Source, block_size: int) -> BlockHashes:
    """For all runs of a source: seeds draw classes and tenants, seldom prompts."""
    return BlockHashes()
