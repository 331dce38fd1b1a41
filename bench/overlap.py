"""What planning a step while the one before it is computed brings: tokens a second at depth 0 and 1.

Rounds of both depths alternate, and medians are compared. *scripted* computes its
arithmetic on the event loop after a step's time has passed, so only the time that
passes can be overlapped; *process* is a model in another process that takes a step's
time and says the same token always, as a device would that is never the bottleneck.

    PYTHONPATH=.:protos python bench/overlap.py [--step-ms 2] [--running 64] [--tokens 128] [--rounds 5]
"""

# ruff: noqa: T201

import argparse
import asyncio
import logging
import statistics
import time
from dataclasses import dataclass

import structlog

from engine.handle import RequestHandle
from engine.loop import Engine
from engine.request import RequestId, RequestSpec
from engine.runner.base import ModelInfo, PoolShape, Runner
from engine.runner.process import ProcessRunner
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Plan, StepResult

PROMPT_TOKENS = 16
POOL = PoolShape(8192, 16)


class PacedModel:
    """Says 65 to everything, after a step's time."""

    info = ModelInfo("paced", "None", 257, 4096, frozenset())
    pool = POOL

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def run(self, plan: Plan) -> StepResult:
        """Let the time pass."""
        time.sleep(self._step_s)
        return StepResult({g.request_id: 65 for g in plan.grants if g.output_index is not None})


@dataclass(frozen=True)
class PacedSource:
    """``PacedModel`` in another process."""

    step_s: float

    def load(self, pool: PoolShape | None) -> PacedModel:
        """See ``ModelSource``."""
        return PacedModel(self.step_s)


async def read(handle: RequestHandle) -> None:
    """Take what comes, as a session's writer does."""
    async for _ in handle.events():
        pass


async def tokens_per_s(runner: Runner, depth: int, name: str, num_running: int, num_tokens: int) -> float:
    """Output tokens a second of one batch, from its arrival to its end."""
    config = SchedulerConfig(max_running_requests=num_running, max_step_tokens=8192, max_chunk_tokens=256)
    engine = Engine(runner, ScriptedTokenizer(), config, pipeline_depth=depth)
    assert engine.pipeline_depth == depth
    task = asyncio.create_task(engine.run())
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    began = time.perf_counter()
    await asyncio.gather(
        *(
            read(engine.submit(RequestSpec(RequestId(f"{name}/{i}"), (i % 256,) * PROMPT_TOKENS, sampling)))
            for i in range(num_running)
        )
    )
    took_s = time.perf_counter() - began
    task.cancel()
    await asyncio.wait([task])
    return num_running * num_tokens / took_s


async def main(step_s: float, num_running: int, num_tokens: int, num_rounds: int) -> None:
    """Print a line for each runner."""
    process = await ProcessRunner.start(PacedSource(step_s))
    scripted = ScriptedRunner(POOL.num_blocks, POOL.block_size, 4096, step_s)
    print(f"{num_running} running, {num_tokens} tokens each, a step of {step_s * 1000:g} ms; median of")
    print(f"{num_rounds} rounds. At most {num_running / step_s:,.0f} tokens/s.")
    print("runner     depth 0   depth 1   tokens/s    gain   a step beyond its time, us")
    for what, runner in (("scripted", scripted), ("process", process)):
        rates: dict[int, list[float]] = {0: [], 1: []}
        for number in range(num_rounds + 1):
            for depth, found in rates.items():
                name = f"{what}/{number}/{depth}"
                rate = await tokens_per_s(runner, depth, name, num_running, num_tokens)
                if number:  # the first round warms up
                    found.append(rate)
        before, after = (statistics.median(found) for found in rates.values())
        beyond = [(num_running / rate - step_s) * 1e6 for rate in (before, after)]
        print(
            f"{what:9} {before:8,.0f} {after:9,.0f} {after / before - 1:18.1%}   "
            f"{beyond[0]:.0f}, {beyond[1]:.0f}"
        )
    await process.close()


if __name__ == "__main__":
    from bench.overlap import main  # the other process can't import what is in __main__

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(main(arguments.step_ms / 1000, arguments.running, arguments.tokens, arguments.rounds))
