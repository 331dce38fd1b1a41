"""What a step costs beside its computation: the runner on a thread, and in a process of its own.

The model answers at once, so all that is measured is the way there and back. Rounds
of both kinds alternate, and medians are compared, so that a busy machine disturbs
both alike.

    PYTHONPATH=.:protos python bench/runner.py [--steps 300]
"""

# ruff: noqa: T201

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass

from engine.request import Request, RequestId, RequestSpec
from engine.runner.base import ModelInfo, PoolShape, Runner
from engine.runner.inline import InlineRunner
from engine.runner.process import ProcessRunner
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan, StepResult

CONTEXT_TOKENS, BLOCK_SIZE = 512, 16
NUM_ROUNDS = 7


class InstantModel:
    """Says 1 to everything."""

    info = ModelInfo("instant", "None", 10, 10**6, frozenset())
    pool = PoolShape(10**6, BLOCK_SIZE)

    def run(self, plan: Plan) -> StepResult:
        """No computation at all."""
        return StepResult({g.request_id: 1 for g in plan.grants if g.output_index is not None})


@dataclass(frozen=True)
class InstantSource:
    """``InstantModel`` in another process."""

    def load(self, pool: PoolShape | None) -> InstantModel:
        """See ``ModelSource``."""
        return InstantModel()


class Decodes:
    """A batch that decodes on and on."""

    def __init__(self, num_requests: int) -> None:
        prompt = tuple(range(CONTEXT_TOKENS))
        self.requests = [
            Request(RequestSpec(RequestId(f"r{i}"), prompt, SamplingParams()), i, 0.0)
            for i in range(num_requests)
        ]
        for request in self.requests:
            request.block_table = list(range(CONTEXT_TOKENS // BLOCK_SIZE))
        self.step = 0

    def plan(self) -> Plan:
        """The next step; every sixteenth gives each a block."""
        self.step += 1
        grants = []
        for request in self.requests:
            known = len(request.token_ids)
            if known > len(request.block_table) * BLOCK_SIZE:
                request.block_table.append(known)
            grants.append(Grant(request, known - 1, 1, request.block_table, known - CONTEXT_TOKENS))
        return Plan(self.step, tuple(grants))

    def commit(self) -> None:
        """Every request has one more token."""
        for request in self.requests:
            request.token_ids.append(1)


async def round_of(runner: Runner, decodes: Decodes, num_steps: int) -> float:
    """Median time of a step, in seconds, planning left out."""
    times = []
    for _ in range(num_steps):
        plan = decodes.plan()
        began = time.perf_counter()
        await runner.execute(plan)
        times.append(time.perf_counter() - began)
        decodes.commit()
    return statistics.median(times)


async def main(num_steps: int) -> None:
    """Print a line for each batch size."""
    inline, process = InlineRunner(InstantModel()), await ProcessRunner.start(InstantSource())
    print(f"median of {NUM_ROUNDS} rounds of {num_steps} steps, in microseconds a step")
    print("requests  inline  process  difference")
    for num_requests in (1, 8, 16, 32, 64, 128):
        decodes = {runner: Decodes(num_requests) for runner in (inline, process)}
        rounds: dict[Runner, list[float]] = {inline: [], process: []}
        for _ in range(NUM_ROUNDS):
            for runner, times in rounds.items():
                times.append(await round_of(runner, decodes[runner], num_steps))
        near, far = (statistics.median(times) * 1e6 for times in rounds.values())
        print(f"{num_requests:8} {near:7.0f} {far:8.0f} {far - near:11.0f}")
    await process.close()
    await inline.close()


if __name__ == "__main__":
    from bench.runner import main  # the other process can't import what is in __main__

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    asyncio.run(main(parser.parse_args().steps))
