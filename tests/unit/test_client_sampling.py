"""Sampling options, log probabilities and several outputs, from the Python client to a scripted server."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from clients.python import Delta, InvalidRequest, OutputFinished, PromptLogprobs, Result, VorrangClient
from clients.python.generate import logprob_lines
from clients.python.request import encode_spec
from engine.runner.scripted import expected_output
from engine.sampling import sibling_seed
from tests.support.server import running_server

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

PROMPT = "a prompt that is longer than a block of the pool"


@pytest_asyncio.fixture
async def client() -> AsyncIterator[VorrangClient]:
    async with running_server() as app, VorrangClient(app.address) as client:
        yield client


def check(result: Result, num_outputs: int = 3) -> None:
    ids = list(PROMPT.encode())
    wanted = [expected_output(ids, 6, sibling_seed(9, index)) for index in range(num_outputs)]
    assert [list(output.token_ids) for output in result.outputs] == wanted
    assert [output.text for output in result.outputs] == [bytes(tokens).decode() for tokens in wanted]
    assert (list(result.token_ids), result.text) == (wanted[0], bytes(wanted[0]).decode())
    for output in result.outputs:
        assert [each.sampled.token_id for each in output.logprobs] == list(output.token_ids)
        assert {len(each.top) for each in output.logprobs} == {2}
        assert output.finished is not None
        assert (output.finished.reason, output.finished.usage.output_tokens) == ("LENGTH", 6)
    assert [each.sampled.token_id for each in result.prompt_logprobs] == ids[1:]
    assert result.usage.output_tokens == 6 * num_outputs


@pytest.mark.parametrize("n", [1, 3])
async def test_every_call_gives_the_same_outputs_with_their_log_probabilities(
    client: VorrangClient, n: int
) -> None:
    async with client.session() as session:
        stream = await session.start(
            PROMPT, temperature=1.0, seed=9, max_tokens=6, n=n, logprobs=2, prompt_logprobs=0
        )
        events = [event async for event in stream]
        check(await stream.result(), n)
    assert sum(len(e.positions) for e in events if isinstance(e, PromptLogprobs)) == len(PROMPT) - 1
    assert {e.output_index for e in events if isinstance(e, Delta)} == set(range(n))
    assert len([e for e in events if isinstance(e, OutputFinished)]) == (n if n > 1 else 0)
    for e in events:
        assert not isinstance(e, Delta) or len(e.logprobs) == len(e.token_ids)
    check(
        await client.generate(
            PROMPT, temperature=1.0, seed=9, max_tokens=6, n=n, logprobs=2, prompt_logprobs=0
        ),
        n,
    )
    async with client.generate_stream(
        PROMPT, temperature=1.0, seed=9, max_tokens=6, n=n, logprobs=2, prompt_logprobs=0
    ) as call:
        check(await call.result(), n)


async def test_what_is_wrong_is_named(client: VorrangClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.generate(PROMPT, n=2, temperature=0.0)
    assert caught.value.violations[0].field == "num_outputs"
    with pytest.raises(InvalidRequest) as caught:
        await client.generate(PROMPT, bad_words=["a"], allowed_token_ids=[97])
    assert caught.value.violations[0].field == "sampling.allowed_token_ids"


async def test_limits_are_told(client: VorrangClient) -> None:
    limits = (await client.get_model()).limits
    assert (limits.max_logprobs, limits.max_outputs, limits.max_banned_sequences) == (20, 16, 256)


async def test_every_option_is_on_the_wire() -> None:
    spec = encode_spec(
        "x",
        {
            "typical_p": 0.5, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
            "logit_bias": {3: 2.0}, "allowed_token_ids": [1, 2], "banned_token_ids": [4],
            "banned_sequences": [[5, 6]], "bad_words": ["no"], "logprobs": 0, "prompt_logprobs": 2, "n": 3,
        },
    )  # fmt: skip
    sampling = spec.sampling
    assert (sampling.typical_p, sampling.repetition_penalty) == (0.5, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(3, 2.0)]
    assert (list(sampling.allowed_token_ids), list(sampling.banned_token_ids)) == ([1, 2], [4])
    assert [list(each.ids) for each in sampling.banned_sequences] == [[5, 6]]
    assert list(sampling.bad_words) == ["no"]
    assert (sampling.HasField("logprobs"), sampling.logprobs, sampling.prompt_logprobs) == (True, 0, 2)
    assert spec.num_outputs == 3


async def test_log_probabilities_are_shown_a_line_a_token(client: VorrangClient) -> None:
    result = await client.generate("ab", temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=0)
    lines = [json.loads(line) for line in logprob_lines(result)]
    assert [line["of"] for line in lines] == ["prompt", "output 0", "output 0"]
    assert lines[0] == {"of": "prompt", "token": ord("b"), "logprob": -0.5, "top": {}}
    assert lines[1]["top"] == {str(result.token_ids[0]): -0.5}
