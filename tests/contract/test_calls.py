"""What every server promises on its single-request calls, health, control and reflection."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.wire import fields_in, reason_in, refused, spec, status_in, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio


async def test_generate_and_generate_stream_give_the_same_output(channel: Any) -> None:
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=spec(max_tokens=12), request_id="r"))
    events = [
        event
        async for event in stub(channel).GenerateStream(gen.GenerateStreamRequest(spec=spec(max_tokens=12)))
    ]
    kinds = [event.WhichOneof("event") for event in events]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert kinds[:2] == ["accepted", "started"]
    assert kinds.count("finished") == 1
    assert kinds[-1] == "finished"
    assert [i for event in events for i in event.delta.token_ids] == list(answer.token_ids)
    assert "".join(event.delta.text for event in events) == answer.text
    assert len(answer.token_ids) == answer.finished.usage.output_tokens == 12
    assert answer.accepted.prompt_tokens == answer.finished.usage.prompt_tokens


async def test_max_tokens_defaults_to_256_or_what_the_context_leaves(channel: Any) -> None:
    model = await stub(channel).GetModel(gen.GetModelRequest())
    answer = await stub(channel).Generate(
        gen.GenerateRequest(spec=spec([1, 2], max_tokens=None, ignore_eos=True))
    )
    assert len(answer.token_ids) == min(256, model.limits.max_output_tokens - 1)


async def test_chat_goes_through_the_template(channel: Any) -> None:
    message = types.GenerationSpec(sampling=types.SamplingParams(max_tokens=3, temperature=0))
    message.prompt.chat.messages.add(role="user", content="hi")
    tokens = (await stub(channel).Tokenize(gen.TokenizeRequest(prompt=message.prompt))).token_ids
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=message))
    assert answer.finished.usage.prompt_tokens == len(tokens) > 2
    message.prompt.chat.add_generation_prompt = False
    shorter = (await stub(channel).Tokenize(gen.TokenizeRequest(prompt=message.prompt))).token_ids
    assert len(shorter) < len(tokens)


async def test_tokenize_and_detokenize_are_inverse(channel: Any) -> None:
    text = "Grüße, Welt!"
    ids = (await stub(channel).Tokenize(gen.TokenizeRequest(prompt=types.Prompt(text=text)))).token_ids
    assert (await stub(channel).Detokenize(gen.DetokenizeRequest(token_ids=ids))).text == text


async def test_special_tokens_are_left_out_of_text_unless_asked_for(channel: Any) -> None:
    model = await stub(channel).GetModel(gen.GetModelRequest())
    ids = list(model.eos_token_ids)[:1]
    assert ids
    for skip, empty in ((None, True), (True, True), (False, False)):
        request = gen.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip)
        assert ((await stub(channel).Detokenize(request)).text == "") is empty


@pytest.mark.parametrize("call", ["Generate", "GenerateStream"])
async def test_a_refusal_is_a_rich_status_without_initial_metadata(channel: Any, call: str) -> None:
    request_class = gen.GenerateRequest if call == "Generate" else gen.GenerateStreamRequest
    rpc = getattr(stub(channel), call)(request_class(spec=spec(temperature=-1)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (rpc if call == "Generate" else rpc.read())
    status = status_in(caught.value)
    assert (reason_in(status), fields_in(status)) == ("INVALID_REQUEST", ["sampling.temperature"])
    assert not tuple(await rpc.initial_metadata() or ())


async def test_bad_calls_get_their_status(channel: Any) -> None:
    service = stub(channel)
    huge = types.Prompt(tokens=types.TokenIds(ids=[2**32 - 1]))
    cases = [
        (service.Generate(gen.GenerateRequest()), "INVALID_REQUEST", ["spec"]),
        (
            service.Generate(gen.GenerateRequest(spec=spec(), request_id="x" * 129)),
            "INVALID_REQUEST",
            ["request_id"],
        ),
        (service.Tokenize(gen.TokenizeRequest()), "INVALID_REQUEST", ["prompt"]),
        (service.Tokenize(gen.TokenizeRequest(prompt=huge)), "INVALID_REQUEST", ["prompt.tokens.ids[0]"]),
        (
            service.Detokenize(gen.DetokenizeRequest(token_ids=[2**32 - 1])),
            "INVALID_REQUEST",
            ["token_ids[0]"],
        ),
    ]
    for call, reason, fields in cases:
        status = await refused(call)
        assert (reason_in(status), fields_in(status)) == (reason, fields)


@pytest.mark.parametrize(
    "metadata",
    [
        [("x-priority", "1e3")],
        [("x-priority", "1000")],
        [("x-priority", "1"), ("x-priority", "2")],
        [("x-request-id", "")],
    ],
)
async def test_bad_metadata_is_refused(channel: Any, metadata: Any) -> None:
    status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec()), metadata=tuple(metadata)))
    assert reason_in(status) == "INVALID_METADATA"


async def test_metadata_gives_the_priority_of_a_call(channel: Any) -> None:
    metadata = (("x-priority", "interactive"), ("x-request-id", "mine"))
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=spec()), metadata=metadata)
    own = await stub(channel).Generate(gen.GenerateRequest(spec=spec(level=7)), metadata=metadata)
    assert (answer.accepted.level, own.accepted.level) == (-10, 7)


async def test_health_serves_and_does_not_know_others(channel: Any) -> None:
    service = health_pb2_grpc.HealthStub(channel)
    for name in ("", "vorrang.v1.GenerationService", "vorrang.v1.ControlService"):
        answer = await service.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(channel: Any) -> None:
    service = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = service.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await call.read()
    names = {entry.name for entry in answer.list_services_response.service}
    assert {"vorrang.v1.GenerationService", "vorrang.v1.ControlService", "grpc.health.v1.Health"} <= names
    call.cancel()
