"""Sampling parameters on tiny real models: against transformers, and through everything that may happen.

Whatever is batched, chunked, preempted, launched ahead or started again: the same tokens and
the same log probabilities.
"""

import asyncio
import os
import queue
import random
import signal

import pytest
import torch

from engine.errors import InvalidRequest
from engine.events import Delta, Failed, Finished, Preempted, PromptLogProbs
from engine.loop import Engine
from engine.models.registry import load
from engine.request import Request, RequestId, RequestSpec
from engine.runner.base import ModelInfo
from engine.runner.child import RunnerLimits
from engine.runner.device_runner import DeviceModel
from engine.runner.inline import InlineRunner
from engine.runner.process import ProcessRunner
from engine.runner.scripted import ScriptedTokenizer
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Grant, Plan
from tests.support.device_models import Remembered, SlowDeviceSource, device_executor, device_model
from tests.support.models import tiny_llama
from tests.support.peers_in_threads import on_every_rank
from tests.support.wire import settled

pytestmark = pytest.mark.usefixtures("kernels_restored")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def theirs(folder):
    return tiny_llama(folder)


def cpu_model(folder, num_blocks=64, **more):
    return load(str(folder), num_threads=1, num_blocks=num_blocks, **more).model


def spec(name, prompt, level=0, **sampling):
    return RequestSpec(RequestId(name), tuple(prompt), SamplingParams(**sampling), level)


PARAMETERS = [
    {"repetition_penalty": 1.4, "temperature": 0.8},
    {"presence_penalty": 1.0, "frequency_penalty": 0.8, "temperature": 0.0},
    {"temperature": 0.0},
    {"allowed_token_ids": tuple(range(60, 75)), "logprobs": 2},
    {"banned_sequences": tuple((a, b) for a in range(60, 75) for b in range(60, 67)),
     "allowed_token_ids": tuple(range(60, 75)), "temperature": 1.5},
    {"typical_p": 0.5, "min_tokens": 9, "logprobs": 0},
    {"logit_bias": ((70, 4.0), (80, -50.0)), "frequency_penalty": 2.0, "logprobs": 5},
    {"temperature": 1.2, "top_k": 20, "prompt_logprobs": 3},
    {"banned_token_ids": tuple(range(3, 130)), "prompt_logprobs": 0, "logprobs": 1},
    {"repetition_penalty": 0.7, "typical_p": 0.8, "logprobs": 3, "prompt_logprobs": 20},
]  # fmt: skip


def specs():
    rng = random.Random(11)
    for index, parameters in enumerate(PARAMETERS):
        prompt = [rng.randrange(3, 256) for _ in range(rng.randrange(2, 60))]
        yield spec(f"r{index}", prompt, index % 3, seed=index, max_tokens=16, **parameters)


async def served(runner, requests, *, depth=0, after=None, **config):
    """The events of each request."""
    config = {"max_running_requests": 6, "max_step_tokens": 40, "max_chunk_tokens": 16} | config
    engine = Engine(
        runner, ScriptedTokenizer(), SchedulerConfig(**config), check_integrity=True, pipeline_depth=depth
    )
    task = asyncio.create_task(engine.run())
    try:
        handles = [engine.submit(each) for each in requests]
        if after is not None:
            await after(engine, handles)
        return [[event async for event in handle.events()] for handle in handles]
    finally:
        task.cancel()
        await asyncio.wait([task])


async def served_by(model, requests, **how):
    runner = InlineRunner(model)
    try:
        return await served(runner, requests, **how)
    finally:
        await runner.close()


def tokens_of(events):
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def logprobs_of(events):
    return [each for event in events if isinstance(event, Delta) for each in event.logprobs]


def scored_of(events):
    found = [event for event in events if isinstance(event, PromptLogProbs)]
    positions = [each for event in found for each in event.positions]
    index = 1
    for event in found:
        assert event.first_index == index, "a gap, or the same twice"
        index += len(event.positions)
    return positions


def assert_same(found, wanted):
    """The same tokens, and log probabilities as close as other shapes of batches allow."""
    assert [tokens_of(events) for events in found] == [tokens_of(events) for events in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        for of in (logprobs_of, scored_of):
            assert [(p.token_id, p.top_ids) for p in of(mine)] == [
                (p.token_id, p.top_ids) for p in of(theirs)
            ]
            for one, other in zip(of(mine), of(theirs), strict=True):
                assert (one.logprob, *one.top) == pytest.approx((other.logprob, *other.top), abs=2e-4)


@pytest.fixture(scope="module")
def alone(folder, theirs):
    """Each request by itself, on a pool that never runs out."""

    async def each():
        model = cpu_model(folder)
        return [(await served_by(model, [one]))[0] for one in specs()]

    return asyncio.run(each())


def is_preempted(outputs):
    return any(isinstance(event, Preempted) for events in outputs for event in events)


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [0, 1])
async def test_neither_batch_nor_chunks_nor_preemption_change_anything(depth, folder, alone):
    together = await served_by(cpu_model(folder, 14), specs(), depth=depth)

    assert is_preempted(together), "the pool is too large"
    assert_same(together, alone)
    assert all(isinstance(events[-1], Finished) for events in together)


@pytest.mark.asyncio
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
async def test_a_device_does_the_same(graphs, folder, alone):
    model = device_model(folder, num_blocks=14, backend=Remembered() if graphs else None)
    assert_same(await served_by(model, specs()), alone)


@pytest.mark.deep
@pytest.mark.asyncio
async def test_so_do_steps_that_are_launched_ahead_in_a_process_that_dies(folder, alone):
    """Whoever must know its last token waits for it; the others go on."""

    async def kill(engine, handles):
        await settled(lambda: any(handle.num_output_tokens > 4 for handle in handles))
        os.kill(runner.pid, signal.SIGKILL)

    runner = await ProcessRunner.start(SlowDeviceSource(str(folder), num_blocks=14), RunnerLimits(hang_s=20))
    try:
        found = await served(runner, specs(), depth=1, after=kill)
        assert runner.statistics().num_restarts == 1
    finally:
        await runner.close()
    assert_same(found, alone)


@pytest.mark.asyncio
async def test_parameters_do_what_they_say(alone):
    outputs = [tokens_of(events) for events in alone]
    assert set(outputs[3]) <= set(range(60, 75))
    banned = {(a, b) for a in range(60, 75) for b in range(60, 67)}
    assert not banned & set(zip(outputs[4], outputs[4][1:], strict=False))
    assert not set(outputs[8]) & set(range(3, 130))
    assert [len(p.top_ids) for p in logprobs_of(alone[3])] == [2] * 16
    assert [len(p.top_ids) for p in logprobs_of(alone[5])] == [0] * 16
    assert [p.token_id for p in logprobs_of(alone[6])] == outputs[6]
    assert not logprobs_of(alone[7])
    assert not scored_of(alone[6])


@pytest.mark.asyncio
async def test_log_probabilities_are_those_of_transformers(folder, theirs, alone):
    for one, events in zip(specs(), alone, strict=True):
        text = [*one.prompt_token_ids, *tokens_of(events)]
        with torch.inference_mode():
            wanted = theirs(torch.tensor([text])).logits[0].log_softmax(dim=-1)
        num_prompt = len(one.prompt_token_ids)
        places = [(num_prompt + i, p) for i, p in enumerate(logprobs_of(events))]
        places += [(1 + i, p) for i, p in enumerate(scored_of(events))]
        assert len(scored_of(events)) == (0 if one.sampling.prompt_logprobs is None else num_prompt - 1)
        for place, position in places:
            row = wanted[place - 1]
            assert position.token_id == text[place]
            assert position.logprob == pytest.approx(row[text[place]].item(), abs=2e-4)
            best = row.topk(len(position.top_ids))
            assert list(position.top) == pytest.approx(best.values.tolist(), abs=2e-4)
            assert list(position.top_ids) == best.indices.tolist()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.8},
        {"banned_sequences": ((70,), (80, 81))},
        {"logit_bias": ((90, 3.0),), "repetition_penalty": 1.2},
    ],
    ids=str,
)
async def test_greedy_text_is_that_of_transformers_generate(settings, folder, theirs):
    prompt = [random.Random(3).randrange(3, 256) for _ in range(20)]
    options = {"repetition_penalty": settings.get("repetition_penalty", 1.0)}
    if "banned_sequences" in settings:
        options["bad_words_ids"] = [list(sequence) for sequence in settings["banned_sequences"]]
    if "logit_bias" in settings:
        options["sequence_bias"] = [[[token], bias] for token, bias in settings["logit_bias"]]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0,
            eos_token_id=None, **options,
        )  # fmt: skip

    found = await served_by(
        cpu_model(folder), [spec("a", prompt, temperature=0.0, max_tokens=40, **settings)]
    )

    assert tokens_of(found[0]) == out[0, len(prompt) :].tolist()


@pytest.mark.asyncio
async def test_a_prompt_that_is_scored_is_computed_though_it_is_in_the_cache(folder, theirs):
    prompt = list(range(3, 83))
    plain = spec("first", prompt, temperature=0.0, max_tokens=4)
    scored = spec("second", prompt, temperature=0.0, max_tokens=4, prompt_logprobs=1)
    again = spec("third", prompt, temperature=0.0, max_tokens=4)
    model = cpu_model(folder)
    runner = InlineRunner(model)
    engine = Engine(runner, ScriptedTokenizer(), SchedulerConfig(max_chunk_tokens=16), check_integrity=True)
    task = asyncio.create_task(engine.run())
    outputs = []
    for one in (plain, scored, again):
        outputs.append([event async for event in engine.submit(one).events()])
    task.cancel()
    await asyncio.wait([task])
    await runner.close()

    assert [len(scored_of(events)) for events in outputs] == [0, 79, 0]
    assert [events[0].num_cached_tokens for events in outputs] == [0, 0, 64]
    assert len({tuple(tokens_of(events)) for events in outputs}) == 1


@pytest.mark.asyncio
async def test_where_nothing_may_be_said_the_request_fails_alone_and_says_why(folder):
    dead = spec("dead", [9, 70], allowed_token_ids=(70, 71), banned_sequences=((70, 70), (70, 71)))
    for model in (cpu_model(folder), device_model(folder)):
        found = await served_by(model, [dead, spec("other", [9, 70], temperature=0.0)])
        assert isinstance(found[0][-1], Failed)
        assert isinstance(found[0][-1].error, InvalidRequest)
        assert found[0][-1].error.field == "sampling.allowed_token_ids"
        assert isinstance(found[1][-1], Finished)


def test_two_ranks_score_a_prompt_and_penalise_as_one_does(folder, theirs):
    sampling = SamplingParams(
        seed=3, logprobs=2, prompt_logprobs=4, repetition_penalty=1.3, allowed_token_ids=tuple(range(50, 90))
    )
    prompt = tuple(random.Random(8).randrange(3, 256) for _ in range(90))  # more than are scored at a time

    def plan():
        request = Request(RequestSpec(RequestId("a"), prompt, sampling), 0, 0.0)
        return Plan(1, (Grant(request, 0, len(prompt), list(range(6)), 0),))

    wanted = device_model(folder).run(plan())
    steps = queue.SimpleQueue()

    class Others:
        def announce(self, shape, words):
            steps.put((shape, words.clone()))

        def explain(self, error):
            return error

    def rank(peers):
        executor = device_executor(folder, peers)
        if peers.shard.rank:
            return executor.compute(*steps.get(timeout=20))[1].scores
        info = ModelInfo("tiny", "LlamaForCausalLM", 259, 512, frozenset())
        return DeviceModel(info, executor, others=Others()).run(plan())

    found, nothing = on_every_rank(2, rank)

    assert nothing is None, "the logits are the first rank's"
    assert found.sampled == wanted.sampled
    mine, other = found.prompt_logprobs["a"], wanted.prompt_logprobs["a"]
    assert (mine.first_index, len(mine.positions)) == (1, 89)
    for one, two in zip((*mine.positions, found.logprobs["a"]), (*other.positions, wanted.logprobs["a"]),
                        strict=True):  # fmt: skip
        assert (one.token_id, one.top_ids) == (two.token_id, two.top_ids)
        assert (one.logprob, *one.top) == pytest.approx((two.logprob, *two.top), abs=2e-4)
