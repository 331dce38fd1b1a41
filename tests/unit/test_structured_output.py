"""Grammars on a tiny real model with random weights: whatever it would like to say, it says what it must."""

import asyncio
import json
import os
import random
import re
import signal

import jsonschema
import pytest
import torch

from engine.events import Delta, Failed, Finished, Preempted
from engine.grammar import GrammarKind, GrammarRefused, GrammarSpec
from engine.loop import Engine
from engine.models.registry import load
from engine.models.tokenizer import HfTokenizer
from engine.request import FinishReason, RequestId, RequestSpec
from engine.runner.child import RunnerLimits
from engine.runner.inline import InlineRunner
from engine.runner.process import ProcessRunner
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from kernels import ops, registry
from kernels.interface import SamplingInputs, TokenMask
from tests.support.device_models import SlowDeviceSource, device_model
from tests.support.schemas import random_schema
from tests.support.wire import settled

pytestmark = pytest.mark.usefixtures("kernels_restored")

END = 2


@pytest.fixture(scope="module")
def big_pool(folder):
    """A model whose pool never runs out; its compiled grammars are kept for all tests."""
    return load(str(folder), num_threads=1, num_blocks=256).model


@pytest.fixture(scope="module")
def small_pool(folder):
    return load(str(folder), num_threads=1, num_blocks=14).model


def schema_spec(schema):
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def request(name, grammar, *, level=0, max_tokens=150, prompt=(9, 70, 71), **sampling):
    params = SamplingParams(
        grammar=grammar, max_tokens=max_tokens, **({"temperature": 1.0, "seed": len(name)} | sampling)
    )
    eos = frozenset[int]() if params.ignore_eos else frozenset({END})
    return RequestSpec(RequestId(name), prompt, params, level, eos_token_ids=eos)


async def served(runner, requests, folder, *, depth=0, after=None, **config):
    """The events of each request."""
    config = {"max_running_requests": 8, "max_step_tokens": 64, "max_chunk_tokens": 16} | config
    engine = Engine(
        runner, HfTokenizer(folder), SchedulerConfig(**config), check_integrity=True, pipeline_depth=depth
    )
    task = asyncio.create_task(engine.run())
    try:
        for each in requests:
            if each.sampling.grammar is not None:
                await engine.prepare(each.sampling.grammar, 60)
        handles = [engine.submit(each) for each in requests]
        if after is not None:
            await after(engine, handles)
        return [[event async for event in handle.events()] for handle in handles]
    finally:
        task.cancel()
        await asyncio.wait([task])


async def served_by(model, requests, folder, **how):
    runner = InlineRunner(model)
    try:
        return await served(runner, requests, folder, **how)
    finally:
        await runner.close()


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, Delta))


def tokens_of(events):
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def assert_valid(schema, events):
    assert isinstance(events[-1], Finished), events[-1]
    assert events[-1].reason is FinishReason.STOP, (schema, text_of(events))
    jsonschema.validate(json.loads(text_of(events)), schema)


def many(count, seed=0):
    rng = random.Random(seed)
    return [random_schema(rng) for _ in range(count)]


def requests_for(schemas):
    rng = random.Random(1)
    return [
        request(
            f"r{index}", schema_spec(schema), level=index % 3, seed=index,
            prompt=tuple(rng.randrange(3, 256) for _ in range(rng.randrange(2, 40))),
        )
        for index, schema in enumerate(schemas)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.asyncio
async def test_random_schemas_are_obeyed_and_preemption_changes_nothing(big_pool, small_pool, folder):
    schemas = many(24)
    calm = await served_by(big_pool, requests_for(schemas), folder)
    pressed = await served_by(small_pool, requests_for(schemas), folder, depth=1, max_running_requests=14)

    for schema, events in zip(schemas, calm, strict=True):
        assert_valid(schema, events)
    assert not any(isinstance(event, Preempted) for events in calm for event in events)
    assert any(isinstance(event, Preempted) for events in pressed for event in events)
    assert [tokens_of(events) for events in pressed] == [tokens_of(events) for events in calm]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_200_of_200_random_schemas_are_obeyed_under_preemption(small_pool, folder):
    schemas = many(200, seed=7)
    found = await served_by(small_pool, requests_for(schemas), folder, max_running_requests=14)

    for schema, events in zip(schemas, found, strict=True):
        assert_valid(schema, events)
    assert sum(isinstance(event, Preempted) for events in found for event in events) > 10


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [0, 1])
async def test_a_device_does_the_same(depth, folder, big_pool):
    schemas = many(8, seed=3)
    calm = await served_by(big_pool, requests_for(schemas), folder)
    found = await served_by(device_model(folder, num_blocks=24), requests_for(schemas), folder, depth=depth)
    assert [tokens_of(events) for events in found] == [tokens_of(events) for events in calm]


@pytest.mark.deep
@pytest.mark.asyncio
async def test_a_runner_that_dies_goes_on_where_it_was(folder, big_pool):
    schemas = many(12, seed=3)
    calm = await served_by(big_pool, requests_for(schemas), folder)

    async def kill(engine, handles):
        await settled(lambda: sum(handle.num_output_tokens for handle in handles) > 20)
        os.kill(runner.pid, signal.SIGKILL)

    runner = await ProcessRunner.start(SlowDeviceSource(str(folder), num_blocks=24), RunnerLimits(hang_s=20))
    try:
        found = await served(runner, requests_for(schemas), folder, depth=1, after=kill)
        assert runner.statistics().num_restarts == 1
    finally:
        await runner.close()
    assert [tokens_of(events) for events in found] == [tokens_of(events) for events in calm]


@pytest.mark.asyncio
async def test_every_kind_of_grammar(big_pool, folder):
    regex = GrammarSpec(GrammarKind.REGEX, "[a-c]{2,4}(-[0-9]{2})?")
    ebnf = GrammarSpec(GrammarKind.EBNF, 'root ::= "(" root ")" | "x" | "yé"')
    choice = GrammarSpec(GrammarKind.CHOICE, choices=("yes", "no", 'he said "\\n"', "né 😀"))
    requests = [
        request(f"{spec.field}{seed}", spec, seed=seed, max_tokens=60, **more)
        for spec, more in ((regex, {}), (ebnf, {"logit_bias": ((10, -5.0),)}), (choice, {"top_k": 3}))
        for seed in range(6)
    ]
    found = await served_by(big_pool, requests, folder)
    texts = [text_of(events) for events in found]
    ends = {events[-1].reason for events in found}
    assert ends <= {FinishReason.STOP, FinishReason.LENGTH}
    assert all(re.fullmatch(regex.text, text) for text in texts[:6])
    assert all(
        re.fullmatch(r"\(*(x|yé)\)*", text) and text.count("(") == text.count(")")
        for text, events in zip(texts[6:12], found[6:12], strict=True)
        if events[-1].reason is FinishReason.STOP
    )
    assert set(texts[12:]) <= set(choice.choices)
    assert len(set(texts[12:])) > 1


@pytest.mark.asyncio
async def test_it_goes_with_other_parameters(big_pool, folder):
    letters = GrammarSpec(GrammarKind.REGEX, "[a-h]{0,12}")
    tokenizer = HfTokenizer(folder)
    a, b, c = (tokenizer.encode_plain(letter)[0] for letter in "abc")
    requests = [
        request("shortest", letters, min_tokens=5, seed=1),
        request("greedy", letters, temperature=0.0),
        request("allowed", letters, allowed_token_ids=(a, b, END), seed=2),
        request("banned", letters, banned_token_ids=(a, b), seed=3, logprobs=3),
        request("no eos", letters, ignore_eos=True, seed=4),
        request("penalised", letters, frequency_penalty=2.0, seed=5, top_p=0.9),
        request("stopped", letters, stop_token_ids=(c,), allowed_token_ids=(c,), seed=6),
        request("biased", letters, logit_bias=((END, 100.0),), seed=7),
    ]
    found = dict(zip([str(each.request_id) for each in requests],
                     await served_by(big_pool, requests, folder), strict=True))  # fmt: skip
    texts = {name: text_of(events) for name, events in found.items()}
    assert all(re.fullmatch("[a-h]{0,12}", text) for text in texts.values())
    assert len(tokens_of(found["shortest"])) >= 5
    assert set(texts["allowed"]) <= {"a", "b"}
    assert not set(texts["banned"]) & {"a", "b"}
    assert len(texts["no eos"]) == 12, "without an end token it ends where nothing may follow"
    assert found["no eos"][-1].reason is FinishReason.STOP
    assert found["stopped"][-1].reason is FinishReason.STOP_TOKEN
    assert texts["biased"] == ""
    assert found["biased"][-1].reason is FinishReason.STOP


@pytest.mark.asyncio
async def test_who_may_say_nothing_fails_alone(big_pool, folder):
    a = HfTokenizer(folder).encode_plain("a")[0]
    only = GrammarSpec(GrammarKind.CHOICE, choices=("ba",))
    dead = request("dead", only, banned_token_ids=(a,))
    found = await served_by(big_pool, [dead, request("other", only)], folder)
    assert isinstance(found[0][-1], Failed)
    assert isinstance(found[0][-1].error, GrammarRefused)
    assert found[0][-1].error.field == "grammar.choice"
    assert found[0][-1].error.value == 1, "after its first token"
    assert text_of(found[1]) == "ba"


BAD = [
    (GrammarKind.JSON_SCHEMA, "{", "must be JSON"),
    (GrammarKind.JSON_SCHEMA, '{"type": "color"}', "Unsupported type"),
    (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems at #"),
    (GrammarKind.JSON_SCHEMA, '{"properties": {"a": {"not": {}}}}', "not at #/properties/a"),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "color"}', "format 'color'"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "https://example.org/x"}', "leads out"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#/x"}', "Cannot find field"),
    (GrammarKind.JSON_SCHEMA, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "may overlap"),
    (GrammarKind.JSON_SCHEMA, r'{"type": "string", "pattern": "a\\\\b"}', "backslash"),
    (GrammarKind.JSON_SCHEMA, "[1]", "must hold a schema at #"),
    (GrammarKind.JSON_SCHEMA, "[" * 30_000, "must be JSON"),
    (GrammarKind.REGEX, "(a", "not closed"),
    (GrammarKind.REGEX, "(?=a)b", "Lookahead"),
    (GrammarKind.REGEX, "(" * 3000 + "a" + ")" * 3000, "must compile"),
    (GrammarKind.EBNF, "root ::= x", "not defined"),
    (GrammarKind.EBNF, 'a ::= "b"', "root"),
]


@pytest.mark.asyncio
async def test_what_cant_be_compiled_is_refused_with_field_and_reason(big_pool):
    """vLLM 16."""
    runner = InlineRunner(big_pool)
    for kind, text, reason in BAD:
        with pytest.raises(GrammarRefused, match=re.escape(reason)) as refused:
            await runner.prepare(GrammarSpec(kind, text))
        assert refused.value.field == f"grammar.{kind.value}"
        assert len(str(refused.value)) < 600
    await runner.close()


@pytest.mark.parametrize("vocab", [31, 32, 33, 259])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_mask_leaves_its_bits_alone(name, vocab):
    registry.use(name)
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab)
    allowed = torch.rand(4, vocab) < 0.3
    allowed[3] = False
    padded = torch.nn.functional.pad(allowed, (0, -vocab % 32), value=True).view(4, -1, 32).long()
    words = (padded << torch.arange(32)).sum(-1)
    bits = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    rows = torch.tensor([5, 0, 2, 3])
    zeros, ones = torch.zeros(6, dtype=torch.int64), torch.ones(6, dtype=torch.float64)
    empty = torch.zeros(0, dtype=torch.int64)
    inputs = SamplingInputs(
        ones * torch.tensor([0, 0, 1, 1, 0, 1]), zeros, ones, ones * 0, zeros + 5, zeros, empty, empty,
        mask=TokenMask(rows, bits),
    )  # fmt: skip
    wanted = logits.clone()
    wanted[rows] = wanted[rows].masked_fill(~allowed, float("-inf"))

    found = ops.sample(logits.clone(), inputs)

    assert found.failed.tolist() == [False, False, False, True, False, False]
    assert all(allowed[place, found.token_ids[row]] for place, row in enumerate(rows.tolist()[:3]))
    for row in (0, 1, 4):
        assert found.token_ids[row] == wanted[row].argmax()
