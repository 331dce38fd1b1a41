"""An engine in the test's own process, and what tests ask of it."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from engine.events import Delta
from engine.loop import Engine
from engine.request import RequestId, RequestSpec
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig


class GatedRunner(ScriptedRunner):
    """Computes a step only when told to; notes which plans it was given."""

    def __init__(self, **more):
        super().__init__(**{"num_blocks": 32, "block_size": 4} | more)
        self.gate = asyncio.Semaphore(0)
        self.handed_in, self.num_computed = [], 0
        self.error = None

    def submit(self, plan):
        self.handed_in.append(plan)
        return super().submit(plan)

    async def pass_time(self, time_s):
        await self.gate.acquire()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.num_computed += 1

    async def step(self, num_steps=1):
        for _ in range(num_steps):
            self.gate.release()
            for _ in range(8):
                await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    runner=None, tokenizer=None, *, depth=0, decisions=None, max_buffered_tokens=8192, **config
):
    """An engine that must leave nothing behind: no request, no block. Closes the runner.

    ``config``: of the scheduler; small steps and few seats where a test does not say.
    """
    config = {"max_running_requests": 4, "max_step_tokens": 32, "max_chunk_tokens": 16} | config
    runner = runner or ScriptedRunner(num_blocks=32, block_size=4)
    engine = Engine(
        runner,
        tokenizer or ScriptedTokenizer(),
        SchedulerConfig(**config),
        max_buffered_tokens=max_buffered_tokens,
        check_integrity=True,
        decisions=decisions,
        pipeline_depth=depth,
    )
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        statistics = engine.statistics()
        assert statistics.num_alive == 0
        assert statistics.num_free_blocks == statistics.num_blocks
        await runner.close()


def spec(name, prompt="hello", *, level=0, **sampling):
    """A greedy request of eight tokens, unless ``sampling`` says otherwise."""
    sampling = {"max_tokens": 8, "temperature": 0} | sampling
    return RequestSpec(RequestId(name), tuple(prompt.encode()), SamplingParams(**sampling), level)


async def collect(handle):
    """All its events."""
    return [event async for event in handle.events()]


def tokens_of(events):
    """Output tokens, whatever came between them."""
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]
