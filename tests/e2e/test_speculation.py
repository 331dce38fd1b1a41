"""Guessed tokens and the real model: the same output in fewer steps."""

import asyncio

import pytest

from engine.events import Delta, Finished
from engine.loop import Engine
from engine.request import RequestId, RequestSpec
from engine.runner.inline import InlineRunner
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.text import ChatMessage
from tests.support.models import default_model

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

#: The default model goes on with "The boat is a boat. The boat is a boat. ..."
REPETITIVE = "Row, row, row your boat. " * 8
TOPICS = [
    "the sea",
    "a cat",
    "Vienna",
    "prime numbers",
    "bread",
    "rain",
    "a lighthouse",
    "music",
    "tea",
    "ice",
]
ASKED = [
    "List three facts about {}.",
    "Repeat this five times: {}.",
    "Say something about {}.",
    "Write {} in capital letters, then again.",
    "What is {}?",
]


def run(prompts: list[list[int]], num_tokens: int, *, guesses: int, seats: int = 8, **more):
    """Outputs by prompt, and the steps it took."""

    async def main():
        config = SchedulerConfig(speculation_tokens=guesses, max_running_requests=seats)
        engine = Engine(InlineRunner(default_model().model), default_model().tokenizer, config)
        serving = asyncio.ensure_future(engine.run())

        async def one(index: int) -> tuple[list[int], str, Finished]:
            sampling = SamplingParams(max_tokens=num_tokens, **({"temperature": 0.0} | more))
            eos = default_model().info.eos_token_ids
            spec = RequestSpec(RequestId(f"r{index}"), tuple(prompts[index]), sampling, eos_token_ids=eos)
            tokens, text = [], ""
            async for event in engine.submit(spec).events():
                if isinstance(event, Delta):
                    tokens += event.token_ids
                    text += event.text
            assert isinstance(event, Finished)
            assert event.usage.output_tokens == len(tokens)
            return tokens, text, event

        outputs = await asyncio.gather(*(one(index) for index in range(len(prompts))))
        steps = engine.statistics().num_steps
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return outputs, steps

    return asyncio.run(main())


def prompts(number: int) -> list[list[int]]:
    encode = default_model().tokenizer.encode_chat
    asked = [ask.format(topic) for topic in TOPICS for ask in ASKED]
    return [encode([ChatMessage("user", question)]) for question in asked[:number]]


@pytest.mark.parametrize("number", [4, pytest.param(50, marks=pytest.mark.deep)])
def test_outputs_are_those_of_a_run_without_guesses(number):
    asked = prompts(number)
    plain, _ = run(asked, 24, guesses=0)
    guessed, _ = run(asked, 24, guesses=4)
    assert [output[0] for output in guessed] == [output[0] for output in plain]
    assert [output[1] for output in guessed] == [output[1] for output in plain]
    assert sum(output[2].usage.accepted_tokens for output in guessed) > 0


@pytest.mark.slow
def test_a_repetitive_text_takes_two_thirds_of_the_steps_at_most():
    prompt = [default_model().tokenizer.encode(REPETITIVE)]
    plain, num_plain = run(prompt, 48, guesses=0)
    guessed, num_guessed = run(prompt, 48, guesses=4)
    assert guessed[0][0] == plain[0][0]
    assert num_guessed * 1.5 <= num_plain


@pytest.mark.deep
def test_sampled_outputs_are_the_same_too():
    prompt = [default_model().tokenizer.encode(REPETITIVE)]
    plain, _ = run(prompt, 32, guesses=0, temperature=0.8, seed=7)
    guessed, _ = run(prompt, 32, guesses=4, temperature=0.8, seed=7)
    assert guessed[0][0] == plain[0][0]


def test_a_stop_string_among_guesses_ends_the_output_there():
    prompt = [default_model().tokenizer.encode(REPETITIVE)]
    stop = {"stop_strings": ("boat. The boat",)}
    (plain,), _ = run(prompt, 48, guesses=0, **stop)
    (guessed,), _ = run(prompt, 48, guesses=4, **stop)
    assert guessed[:2] == plain[:2]
    assert guessed[2].stop_string == plain[2].stop_string == "boat. The boat"
    assert guessed[2].usage.output_tokens == plain[2].usage.output_tokens
