"""A device's steps launched ahead, from the engine to the model: the tokens are the same."""

import asyncio
import queue
import random

import pytest
import structlog

from engine.events import Delta, Finished, Preempted
from engine.loop import Engine
from engine.request import FinishReason, RequestId, RequestSpec
from engine.runner.base import LaunchingModel, ModelInfo
from engine.runner.child import RunnerLimits
from engine.runner.device_runner import DeviceModel
from engine.runner.process import ProcessRunner
from engine.runner.scripted import ScriptedTokenizer
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Grant, Plan
from tests.support.device_models import SlowDeviceSource, device_executor, device_model
from tests.support.grants import grant
from tests.support.peers_in_threads import on_every_rank

pytestmark = pytest.mark.usefixtures("kernels_restored")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def specs():
    """Greedy and seeded, some of which meet a stop token."""
    rng = random.Random(5)
    for index in range(10):
        prompt = tuple(rng.randrange(3, 256) for _ in range(rng.randrange(1, 50)))
        sampling = SamplingParams(
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
            max_tokens=20,
            stop_token_ids=tuple(range(3, 23)),
        )
        yield RequestSpec(RequestId(f"r{index}"), prompt, sampling, index % 3, frozenset({2}))


async def served(runner, depth):
    config = SchedulerConfig(max_running_requests=5, max_step_tokens=40, max_chunk_tokens=16)
    engine = Engine(runner, ScriptedTokenizer(), config, check_integrity=True, pipeline_depth=depth)
    assert engine.pipeline_depth == depth
    task = asyncio.create_task(engine.run())
    try:
        handles = [engine.submit(spec) for spec in specs()]
        return [[event async for event in handle.events()] for handle in handles]
    finally:
        task.cancel()
        await asyncio.wait([task])


def tokens_of(events):
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.asyncio
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.deep)])
async def test_steps_launched_ahead_give_the_tokens_of_steps_one_after_another(num_ranks, folder):
    outputs, ahead = {}, {}
    source = SlowDeviceSource(str(folder), num_blocks=12, num_ranks=num_ranks)
    with structlog.testing.capture_logs() as lines:
        runner = await ProcessRunner.start(source, RunnerLimits(hang_s=10))
        try:
            for depth in (0, 1):
                outputs[depth] = await served(runner, depth)
                ahead[depth] = sum(line["event"] == "launched.ahead" for line in lines)
            assert runner.statistics().num_restarts == 0
        finally:
            await runner.close()
    assert [tokens_of(events) for events in outputs[1]] == [tokens_of(events) for events in outputs[0]]
    assert ahead[0] == 0
    assert ahead[1] > 20, "no step took its tokens on the device"
    ends = [events[-1] for events in outputs[1]]
    assert all(isinstance(end, Finished) for end in ends)
    assert {end.reason for end in ends} >= {FinishReason.STOP_TOKEN, FinishReason.LENGTH}
    for events in outputs.values():
        assert any(isinstance(event, Preempted) for each in events for event in each), "the pool is too large"


def plans(names):
    """A prefill each, then two decodes each, in another order, of the token that the plan before samples."""
    grants = [
        grant(name, 0, 3, 0, token_ids=[7, 8, 9 + i], block_table=[i], sampling=GREEDY)
        for i, name in enumerate(names)
    ]
    yield Plan(1, tuple(grants))
    for step in (2, 3):
        grants.reverse()
        yield Plan(step, tuple(Grant(g.request, step + 1, 1, g.block_table, step - 1) for g in grants))


def ahead(model, first, second, third):
    """What each of three plans samples, launched as the worker does; ids are known to the device alone."""
    tickets = [model.launch(first), model.launch(second)]
    sampled = [model.collect(tickets[0]).sampled]
    tickets.append(model.launch(third))
    return [*sampled, *(model.collect(ticket).sampled for ticket in tickets[1:])]


def test_other_ranks_are_told_the_ids_that_the_first_sampled_once_a_step_needs_them(folder):
    plain = device_model(folder)
    assert isinstance(plain, LaunchingModel)
    wanted = ahead(plain, *plans("abc"))
    assert all(len(set(sampled.values())) > 1 for sampled in wanted), "the test could not tell them apart"
    steps = queue.SimpleQueue()

    class Others:
        def announce(self, shape, words):
            steps.put((shape, words.clone()))

    def rank(peers):
        executor = device_executor(folder, peers)
        if peers.shard.rank:
            for _ in wanted:
                executor.compute(*steps.get(timeout=20))
            return executor.last_ids[:3].tolist()
        info = ModelInfo("tiny", "LlamaForCausalLM", 259, 512, frozenset())
        return ahead(DeviceModel(info, executor, others=Others()), *plans("abc"))

    found, ids = on_every_rank(2, rank)

    assert found == wanted
    assert ids == list(wanted[1].values()), "of the step before the last"
