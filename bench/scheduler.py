"""What planning costs: medians on one core, printed as tables.

Usage: ``make bench``. Steady state: every running request decodes, and the queue
holds less urgent requests that can't be admitted.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from engine.request import RequestId, RequestSpec
from engine.sampling import SamplingParams
from engine.scheduler.commands import Finish
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.scheduler.plan import StepResult
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager

PROMPT_TOKENS = 128
SAMPLING = SamplingParams(temperature=0.0, max_tokens=50_000)


def spec(name: str, index: int, level: int) -> RequestSpec:
    """A request with a prompt of its own."""
    prompt = tuple((index * 31 + position) % 50_000 for position in range(PROMPT_TOKENS))
    return RequestSpec(RequestId(name), prompt, SAMPLING, level)


def scheduler_with(num_running: int, num_waiting: int) -> Scheduler:
    """A scheduler in steady decode."""
    config = SchedulerConfig(
        max_running_requests=num_running,
        max_step_tokens=max(8192, num_running),
        max_chunk_tokens=PROMPT_TOKENS,
        max_context_tokens=100_000,
        max_waiting_requests=10**9,
        max_tenant_waiting_requests=10**9,
        max_tenant_waiting_tokens=10**9,
        standard=ClassConfig(1e9, 0.0, max_waiting_requests=10**9, max_waiting_tokens=10**9),
        batch=ClassConfig(1e9, 0.0, max_waiting_requests=10**9, max_waiting_tokens=10**9),
    )
    scheduler = Scheduler(config, BlockManager(num_running * 80, 16))
    for index in range(num_running + num_waiting):
        scheduler.submit(spec(f"r{index}", index, 0 if index < num_running else 10), 0.0)
    while not scheduler.num_running or any(r.num_output_tokens == 0 for r in scheduler.running()):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    """Plan and commit one step."""
    plan = scheduler.plan(1.0)
    sampled = {grant.request_id: 7 for grant in plan.grants if grant.output_index is not None}
    scheduler.commit(plan, StepResult(sampled), 1.0)


def median_us(work: Callable[[], None], repeats: int) -> float:
    """Median time of one call, in microseconds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def steps_table(repeats: int) -> Table:
    """Plan + commit by size."""
    table = Table(title="plan + commit, steady decode, median us")
    table.add_column("running", justify="right")
    queues = (0, 10_000, 100_000)
    for queue in queues:
        table.add_column(f"{queue:,} waiting", justify="right")
    for running in (32, 256, 1024):
        row = []
        for queue in queues:
            scheduler = scheduler_with(running, queue)
            gc.collect()
            row.append(f"{median_us(lambda s=scheduler: step(s), repeats):,.0f}")  # type: ignore[misc]
        table.add_row(f"{running:,}", *row)
    return table


def calls_table(repeats: int) -> Table:
    """Submit and cancel with a long queue."""
    table = Table(title="one call, median us")
    table.add_column("call")
    table.add_column("us", justify="right")
    scheduler = scheduler_with(32, 100_000)
    new = [spec(f"new{index}", index, 5) for index in range(repeats)]
    names = iter(new)
    table.add_row(
        "submit, 100,000 waiting", f"{median_us(lambda: _submit(scheduler, next(names)), repeats):.1f}"
    )
    ends = iter(new)
    cancel = median_us(lambda: _cancel(scheduler, next(ends)), repeats)
    table.add_row("cancel, 100,000 waiting", f"{cancel:.1f}")
    return table


def _submit(scheduler: Scheduler, one: RequestSpec) -> None:
    scheduler.submit(one, 1.0)


def _cancel(scheduler: Scheduler, one: RequestSpec) -> None:
    scheduler.apply(Finish(one.request_id), 1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    repeats = parser.parse_args().repeats
    console = Console()
    console.print(steps_table(repeats))
    console.print(calls_table(repeats))
