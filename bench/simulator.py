"""How many steps a second the simulator makes: medians on one core, as a table and a JSON file.

Usage: ``python bench/simulator.py``. *At once*: as in ``vorrang sim report``, decodes
made together, stretches of steps in which nothing else can happen made at once, and
blocks hashed in the first round for all. *Step by step*: every step planned and
committed by the scheduler. *Scheduler alone*: plan + commit of the same steps, without
cost model and books.

``steady``: all requests arrive at the start and decode. ``busy``: as many run, but one
of them ends, and another arrives, every few steps.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.scheduler import scheduler_with, step_us
from engine.runner.simulated import SimulatedRunner
from engine.sim.configurations import parse_configuration
from engine.sim.profiles import profile_named
from engine.sim.requests import BlockHashes
from engine.sim.simulator import simulate
from workloads.arrivals import Arrival, Workload

#: Steps a second at 64 running requests that the simulator must make.
TARGET_STEPS_PER_S = 20_000
NUM_RUNNING = 64


def steady(num_running: int, num_steps: int) -> Workload:
    """Everybody decodes from the first step on."""
    return Workload("steady", tuple(Arrival(i, 0.0, 64, num_steps) for i in range(num_running)))


def busy(num_running: int, num_steps: int) -> Workload:
    """Seats are full all the time; outputs of 150 to 250 tokens end one after the other."""
    num_requests = max(num_running, num_running * num_steps // 200)
    return Workload("busy", tuple(Arrival(i, 0.0, 64, 150 + i * 37 % 101) for i in range(num_requests)))


def steps_per_s(workload: Workload, *, step_by_step: bool, rounds: int) -> float:
    """Median of simulated steps by seconds of this process's time."""
    config = parse_configuration(f"priority:max_running_requests={NUM_RUNNING}").config
    rates = []
    hashes = BlockHashes()
    for _ in range(rounds):
        runner = SimulatedRunner(profile_named("h100"))
        gc.collect()
        begin = time.process_time()
        recording = simulate(workload, runner, config, step_by_step=step_by_step, hashes=hashes)
        rates.append(recording.num_steps / (time.process_time() - begin))
    return statistics.median(rates)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    console = Console()
    gc.disable()  # as a sweep does
    figures = {
        f"{make.__name__}, {'step by step' if one_by_one else 'at once'}": steps_per_s(
            make(NUM_RUNNING, options.steps), step_by_step=one_by_one, rounds=options.rounds
        )
        for make in (steady, busy)
        for one_by_one in (False, True)
    }
    figures["scheduler alone"] = 1e6 / step_us(scheduler_with(NUM_RUNNING, 0), options.steps)
    table = Table(title=f"simulated steps a second, {NUM_RUNNING} running, median of {options.rounds} rounds")
    table.add_column("what")
    table.add_column("steps/s", justify="right")
    for name, rate in figures.items():
        table.add_row(name, f"{rate:,.0f}")
    console.print(table)
    options.folder.mkdir(parents=True, exist_ok=True)
    body = {"steps_per_s": figures, "num_running": NUM_RUNNING, "target": TARGET_STEPS_PER_S}
    (options.folder / "bench-simulator.json").write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
