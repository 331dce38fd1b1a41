"""What every server promises of sampling parameters, log probabilities and several outputs."""

from typing import Any

import grpc
import pytest

from tests.support.wire import WireSession, fields_in, open_session, reason_in, refused, spec, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio


def outputs_spec(num_outputs: int, prompt: str = "once upon a time", **sampling: Any) -> types.GenerationSpec:
    message = spec(prompt, **({"temperature": 1.0, "seed": 3, "ignore_eos": True} | sampling))
    message.num_outputs = num_outputs
    return message


def output_of(frames: list[Any], index: int) -> tuple[list[int], str]:
    mine = [frame for frame in frames if frame.output_index == index]
    tokens = [token for frame in mine for token in frame.delta.token_ids]
    return tokens, "".join(frame.delta.text for frame in mine)


def check_position(position: types.PositionLogprobs, token_id: int, num_top: int) -> None:
    assert position.sampled.token_id == token_id
    assert position.sampled.logprob <= 0
    assert len(position.top) == num_top
    values = [entry.logprob for entry in position.top]
    assert values == sorted(values, reverse=True)
    if num_top:
        assert values[0] >= position.sampled.logprob


async def test_log_probabilities_come_with_the_tokens(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec("hello", logprobs=3, max_tokens=6))
        await session.end_of("a")
    deltas = [frame.delta for frame in session.of("a") if frame.HasField("delta")]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    positions = [position for delta in deltas for position in delta.logprobs]
    for position, token_id in zip(positions, session.tokens("a"), strict=True):
        check_position(position, token_id, 3)
        assert position.top[0].token_id == token_id, "greedy takes the likeliest"
    session.check("a")


async def test_log_probabilities_of_the_prompt_come_before_the_output(channel: Any) -> None:
    prompt = list(range(5, 45))
    message = spec(prompt, prompt_logprobs=2, max_tokens=3)
    async with open_session(channel) as session:
        for request_id in ("a", "b"):  # the second finds the prompt in the cache, and is told all the same
            await session.start(request_id, message)
            await session.end_of(request_id)
            kinds = session.kinds(request_id)
            assert kinds.index("prompt_logprobs") < kinds.index("delta")
            found = [f.prompt_logprobs for f in session.of(request_id) if f.HasField("prompt_logprobs")]
            assert found[0].first_token_index == 1
            positions = [position for event in found for position in event.positions]
            for position, token_id in zip(positions, prompt[1:], strict=True):
                check_position(position, token_id, 2)
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=message))
    assert [p.sampled.token_id for p in answer.prompt_logprobs] == prompt[1:]
    assert not answer.logprobs


async def test_several_outputs_of_a_session_each_end_and_then_the_request(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", outputs_spec(3))
        end = (await session.end_of("a")).finished
    frames = session.of("a")
    assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
    ends = [frame for frame in frames if frame.HasField("output_finished")]
    assert sorted(frame.output_index for frame in ends) == [0, 1, 2]
    assert all(frame.output_finished.reason == types.FINISH_REASON_LENGTH for frame in ends)
    outputs = [output_of(frames, index) for index in range(3)]
    assert len({tuple(tokens) for tokens, _ in outputs}) == 3
    assert [len(tokens) for tokens, _ in outputs] == [8, 8, 8]
    assert end.usage.output_tokens == 24
    assert end.usage.prompt_tokens == frames[0].accepted.prompt_tokens

    answer = await stub(channel).Generate(gen.GenerateRequest(spec=outputs_spec(3)))
    assert [(list(output.token_ids), output.text) for output in answer.outputs] == outputs
    assert (list(answer.token_ids), answer.text) == outputs[0]
    assert answer.finished.usage.output_tokens == 24
    call = stub(channel).GenerateStream(gen.GenerateStreamRequest(spec=outputs_spec(3)))
    events = [event async for event in call]
    assert [output_of(events, index) for index in range(3)] == outputs
    alone = await stub(channel).Generate(gen.GenerateRequest(spec=outputs_spec(1)))
    assert list(alone.token_ids) == outputs[0][0]
    assert not alone.outputs


async def test_several_outputs_are_cancelled_together(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", outputs_spec(4, max_tokens=900))
        await session.event("delta", "a")
        await session.cancel("a")
        end = (await session.end_of("a")).finished
    assert end.reason == types.FINISH_REASON_CANCELLED
    ends = [frame.output_finished for frame in session.of("a") if frame.HasField("output_finished")]
    assert [each.reason for each in ends] == [types.FINISH_REASON_CANCELLED] * 4


async def test_several_outputs_of_a_lost_stream_are_resumed_by_sequence(channel: Any) -> None:
    message = outputs_spec(3, max_tokens=60, logprobs=1, prompt_logprobs=0)
    async with WireSession(channel) as lost:
        token = (await lost.open()).session_token
        await lost.start("a", message)
        await lost.event("delta", "a")
        await lost.event("delta", "a")
        last = lost.frames[-1].sequence
    async with WireSession(channel, scope=lost.scope) as session:
        await session.open(resume_session_token=token)
        await session.resume("a", after=last)
        end = (await session.end_of("a")).finished
    frames = [*lost.of("a"), *session.of("a")]
    assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=message))
    assert [output_of(frames, index) for index in range(3)] == [
        (list(output.token_ids), output.text) for output in answer.outputs
    ]
    assert end.usage.output_tokens == 180


async def test_credit_is_for_all_outputs_together(channel: Any) -> None:
    message = outputs_spec(4, max_tokens=40)
    message.credit_tokens = 10
    async with open_session(channel) as session:
        await session.start("a", message)
        while len(session.tokens("a")) < 10:
            await session.next()
        assert len(session.tokens("a")) < 10 + 4
        await session.credit("a", tokens=500)
        end = (await session.end_of("a")).finished
    assert end.usage.output_tokens == 160


async def test_a_change_of_priority_is_acknowledged_once(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", outputs_spec(3, max_tokens=300))
        await session.event("delta", "a")
        await session.reprioritize("a", 5)
        await session.end_of("a")
    assert session.kinds("a").count("priority_changed") == 1


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.typical_p", {"typical_p": 0.0}),
        ("sampling.repetition_penalty", {"repetition_penalty": 0.0}),
        ("sampling.repetition_penalty", {"repetition_penalty": float("nan")}),
        ("sampling.presence_penalty", {"presence_penalty": 2.5}),
        ("sampling.frequency_penalty", {"frequency_penalty": -2.5}),
        ("sampling.logit_bias[0].bias", {"logit_bias": [types.LogitBias(token_id=1, bias=101)]}),
        ("sampling.logit_bias[0].token_id", {"logit_bias": [types.LogitBias(token_id=2**31, bias=1)]}),
        ("sampling.logit_bias", {"logit_bias": [types.LogitBias(token_id=1, bias=1)] * 2}),
        ("sampling.allowed_token_ids[1]", {"allowed_token_ids": [1, 2**31]}),
        ("sampling.allowed_token_ids", {"allowed_token_ids": [1], "banned_token_ids": [1]}),
        ("sampling.banned_token_ids[0]", {"banned_token_ids": [2**31]}),
        ("sampling.banned_sequences[0]", {"banned_sequences": [types.TokenIds()]}),
        ("sampling.banned_sequences[0].ids[1]", {"banned_sequences": [types.TokenIds(ids=[1, 2**31])]}),
        ("sampling.bad_words[1]", {"bad_words": ["a", " "]}),
        ("sampling.bad_words[0]", {"bad_words": ["a" * 257]}),
        ("sampling.logprobs", {"logprobs": 21}),
        ("sampling.prompt_logprobs", {"prompt_logprobs": 21}),
        ("sampling.min_tokens", {"min_tokens": 1, "allowed_token_ids": [7], "stop_token_ids": [7]}),
    ],
)
async def test_bad_values_are_refused_by_name(channel: Any, field: str, sampling: dict[str, Any]) -> None:
    status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec(**sampling))))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert fields_in(status) == [field]


async def test_bad_words_are_taken_in_sessions_and_calls(channel: Any) -> None:
    message = spec(bad_words=["never", "no such thing"], max_tokens=4)
    async with open_session(channel) as session:
        await session.start("a", message)
        await session.end_of("a")
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=message))
    assert list(answer.token_ids) == session.tokens("a")


async def test_limits_are_announced_and_enforced(channel: Any) -> None:
    limits = (await stub(channel).GetModel(gen.GetModelRequest())).limits
    assert (limits.max_logprobs, limits.max_prompt_logprobs) == (20, 20)
    many = [
        spec(logit_bias=[types.LogitBias(token_id=1, bias=0)] * (limits.max_logit_biases + 1)),
        spec(allowed_token_ids=[1] * (limits.max_listed_token_ids + 1)),
        spec(banned_token_ids=[1] * (limits.max_listed_token_ids + 1)),
        spec(banned_sequences=[types.TokenIds(ids=[1])] * (limits.max_banned_sequences + 1)),
        spec(banned_sequences=[types.TokenIds(ids=[1] * (limits.max_sequence_tokens + 1))]),
        outputs_spec(limits.max_outputs + 1),
        outputs_spec(0),
        outputs_spec(2, temperature=0.0),
    ]
    for message in many:
        status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=message)))
        assert reason_in(status) == "INVALID_REQUEST", status.message
