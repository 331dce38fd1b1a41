"""Being batched, chunked, preempted or resumed changes no token of the real model."""

import asyncio
import functools

import pytest
import torch

from engine.events import Delta, Finished, Preempted
from engine.loop import Engine
from engine.models.registry import LoadedModel, load
from engine.request import Request, RequestId, RequestSpec, RequestStatus
from engine.runner.base import PoolShape
from engine.runner.inline import InlineRunner
from engine.sampling import SamplingParams
from engine.scheduler.commands import Preempt
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from engine.text import ChatMessage
from kv.block_manager import BlockManager
from tests.support.models import default_model, reference_model, tiny_llama

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTIONS = [
    "Hi!",
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about the sea.",
    "How many days are there in 2024, and why is it not 365?",
    "Explain in one sentence what a compiler does.",
    "Translate 'good morning' into Spanish.",
    "List the first ten prime numbers.",
    "Why is the sky blue? Answer for a child of seven.",
    "Give me a recipe for pancakes with 2 eggs, 250 ml of milk and 150 g of flour.",
    "What is the difference between a virus and a bacterium?",
    "Who wrote 'Don Quixote'?",
    "Write a short story about a lighthouse keeper who has not seen a ship for a year.",
    "Is 91 a prime number? Show how you know.",
    "Summarise: the quick brown fox jumps over the lazy dog, again and again, until the dog moves away.",
    "Suggest a name for a black cat.",
    "What should I see in Vienna in two days? I like music, old books, coffee houses and long walks.",
    "Count from 1 to 12.",
    "Write a polite e-mail that moves a meeting from Tuesday at 10:30 to Thursday at 16:45, and say sorry.",
    "Describe the water cycle step by step, from the ocean to the clouds, the rain, the rivers and back "
    "again; then say in two sentences how forests, cities and dams change it, and give one example of each.",
]
NUM_TOKENS = 6


@functools.cache
def prompts() -> list[list[int]]:
    encode = default_model().tokenizer.encode_chat
    return [encode([ChatMessage("user", question)]) for question in QUESTIONS]


@functools.cache
def reference(every: int) -> dict[int, list[int]]:
    """What transformers' ``generate`` says to every so manyth question, up to and with the end token."""
    model = reference_model(default_model().folder)
    asked = prompts()[::every]
    longest = max(map(len, asked))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in asked])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in asked])
    with torch.inference_mode():
        out = model.generate(
            padded, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
    eos = default_model().info.eos_token_ids
    rows = [row[longest:].tolist() for row in out]
    ended = [next((row[: i + 1] for i, t in enumerate(row) if t in eos), row) for row in rows]
    return dict(zip(range(0, len(QUESTIONS), every), ended, strict=True))


class SmallPool(InlineRunner):
    """The shared model with fewer blocks than it has."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(default_model().model)
        self._num_blocks = num_blocks

    @property
    def pool(self) -> PoolShape:
        return PoolShape(self._num_blocks, super().pool.block_size)


async def generate(engine: Engine, index: int, level: int, under_way: asyncio.Event | None = None) -> list:
    """All events of one request; ``under_way`` is set when it has produced four tokens."""
    spec = RequestSpec(
        RequestId(f"r{index}"),
        tuple(prompts()[index]),
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
        level,
        engine.info.eos_token_ids,
    )
    events = []
    async for event in engine.submit(spec).events():
        events.append(event)
        if under_way is not None and len(tokens_of(events)) >= 3:
            under_way.set()
    return events


def tokens_of(events: list) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.deep
@pytest.mark.asyncio
async def test_greedy_output_alone_equals_transformers_generate():
    engine = Engine(SmallPool(512), default_model().tokenizer, SchedulerConfig(), check_integrity=True)
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(engine.run())
        for index in range(0, len(QUESTIONS), 3):
            events = await generate(engine, index, 0)
            assert tokens_of(events) == reference(1)[index], QUESTIONS[index]
        loop.cancel()


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("every", "depth"),
    [(2, 0), pytest.param(1, 0, marks=pytest.mark.deep), pytest.param(1, 1, marks=pytest.mark.deep)],
)
async def test_greedy_output_of_all_at_once_on_a_small_pool_equals_transformers_generate(every, depth):
    """vLLM 68; every so manyth of the questions."""
    config = SchedulerConfig(max_running_requests=4, max_step_tokens=48, max_chunk_tokens=16)
    engine = Engine(
        SmallPool(12), default_model().tokenizer, config, check_integrity=True, pipeline_depth=depth
    )
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(engine.run())
        tasks = []
        under_way = asyncio.Event()
        under_way.set()
        asked = range(0, len(QUESTIONS), every)
        for index in asked:
            # Batch first, then standard, then interactive ones, each class once the one before computes.
            if index in (0, 6, 12):
                await under_way.wait()
                under_way = asyncio.Event()
            level = [10, 0, -10][min(2, index // 6)]
            tasks.append(group.create_task(generate(engine, index, level, under_way)))
        outputs = await asyncio.gather(*tasks)
        loop.cancel()
    for index, events in zip(asked, outputs, strict=True):
        assert tokens_of(events) == reference(every)[index], QUESTIONS[index]
        text = "".join(event.text for event in events if isinstance(event, Delta))
        assert text == default_model().tokenizer.decode(reference(every)[index])
        assert isinstance(events[-1], Finished)
    num_preemptions = sum(isinstance(event, Preempted) for events in outputs for event in events)
    assert num_preemptions >= 5, "the pool was not small enough to mean anything"


def run_preempted(
    loaded: LoadedModel, sampling: SamplingParams, every: list[int], *, prefix_cache: bool
) -> dict[int, list[int]]:
    """Outputs of one request per ``k`` of ``every``, preempted after each k-th output token (0 = never)."""
    model = loaded.model
    config = SchedulerConfig(max_running_requests=64, max_step_tokens=512, max_chunk_tokens=64)
    blocks = BlockManager(model.pool.num_blocks, model.pool.block_size, enable_prefix_cache=prefix_cache)
    scheduler = Scheduler(config, blocks)
    prompt = tuple(loaded.tokenizer.encode("The old harbour"))
    requests: dict[int, Request] = {}
    for k in every:
        scheduler.submit(RequestSpec(RequestId(f"{k}"), prompt, sampling), 0.0)
        request = scheduler.find(RequestId(f"{k}"))
        assert request is not None
        requests[k] = request
    while scheduler.has_requests:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, model.run(plan), 0.0)
        scheduler.check_integrity()
        for k, request in requests.items():
            due = k and request.num_output_tokens == (request.num_preemptions + 1) * k
            if due and request.status is RequestStatus.RUNNING:
                scheduler.apply(Preempt(request.request_id), 0.0)
    for k, request in requests.items():
        assert request.num_preemptions == (40 // k if k else 0)
    return {k: request.output_token_ids for k, request in requests.items()}


GREEDY = SamplingParams(temperature=0.0, max_tokens=41)
SEEDED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=2026, max_tokens=41)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return load(str(folder), num_blocks=512, num_threads=1)


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["from nothing", "from its own blocks"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_preemption_after_every_kth_token_changes_no_token(
    tiny: LoadedModel, sampling: SamplingParams, prefix_cache: bool
) -> None:  # vLLM 68
    outputs = run_preempted(tiny, sampling, list(range(41)), prefix_cache=prefix_cache)
    assert len(outputs[0]) == 41
    assert {k: tokens == outputs[0] for k, tokens in outputs.items()} == dict.fromkeys(range(41), True)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("sampling", "prefix_cache"),
    [
        pytest.param(GREEDY, False, id="greedy"),
        pytest.param(SEEDED, True, id="seeded"),
    ],
)
def test_nor_does_it_with_the_real_model(sampling: SamplingParams, prefix_cache: bool) -> None:
    every = [0, 1, 4, 13, 40]
    outputs = run_preempted(default_model(), sampling, every, prefix_cache=prefix_cache)
    assert len(outputs[0]) == 41
    assert {k: tokens == outputs[0] for k, tokens in outputs.items()} == dict.fromkeys(every, True)
