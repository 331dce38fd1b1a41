"""The plain calls of the Python client against a scripted server."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from clients.python import (
    Accepted,
    ConnectionLost,
    DeadlineExceeded,
    Delta,
    Finished,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestCancelled,
    RequestFailed,
    ServerUnavailable,
    Started,
    VorrangClient,
)
from tests.support.cutting_proxy import CuttingProxy
from tests.support.fake_server import FakeServer, FakeSession, abort, delta, finished
from vorrang.v1 import generation_pb2, types_pb2

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def frame(**event: Any) -> generation_pb2.GenerateStreamResponse:
    return generation_pb2.GenerateStreamResponse(**event)


async def hold(request: Any, context: Any) -> None:
    await asyncio.Event().wait()


async def test_generate_returns_the_whole_output():
    async def generate(request: Any, context: Any) -> Any:
        assert (request.request_id, request.spec.prompt.text) == ("id", "x")
        top = types_pb2.TokenLogprob(token_id=4, logprob=-0.5)
        usage = types_pb2.Usage(output_tokens=2, queued=Duration(seconds=1, nanos=500_000_000))
        return generation_pb2.GenerateResponse(
            text="ab",
            token_ids=[4, 5],
            logprobs=[types_pb2.PositionLogprobs(sampled=top, top=[top])],
            finished=generation_pb2.FinishedEvent(
                reason=types_pb2.FINISH_REASON_STOP_TOKEN, usage=usage, stop_token_id=0
            ),
            accepted=generation_pb2.AcceptedEvent(level=-10, seed=3),
        )

    async with FakeServer(calls={"Generate": generate}) as server, VorrangClient(server.target) as client:
        result = await client.generate("x", request_id="id", priority=-10)
    assert (result.text, result.token_ids, result.finish_reason) == ("ab", (4, 5), "STOP_TOKEN")
    assert (result.usage.output_tokens, result.usage.queued_s) == (2, 1.5)
    assert (result.logprobs[0].top[0].token_id, result.logprobs[0].sampled.logprob) == (4, -0.5)
    assert result.accepted == Accepted(level=-10, seed=3)
    assert result.ttft_s is None


async def test_a_refused_field_is_named_in_the_error():
    async def generate(request: Any, context: Any) -> Any:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field="sampling.temperature", description="must be at least 0, got -1.0"
        )
        bad = error_details_pb2.BadRequest(field_violations=[violation])
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "bad field", bad)

    async with FakeServer(calls={"Generate": generate}) as server, VorrangClient(server.target) as client:
        with pytest.raises(InvalidRequest, match=r"bad field \(INVALID_REQUEST\)") as caught:
            await client.generate("x")
    assert caught.value.violations[0].field == "sampling.temperature"
    assert not caught.value.retryable


async def test_a_full_queue_says_when_to_come_back():
    async def generate(request: Any, context: Any) -> Any:
        retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=250_000_000))
        await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry)

    async with FakeServer(calls={"Generate": generate}) as server, VorrangClient(server.target) as client:
        with pytest.raises(Overloaded) as caught:
            await client.generate("x")
    assert (caught.value.retry_after_s, caught.value.retryable) == (2.25, True)


@pytest.mark.parametrize("name", ["Generate", "GenerateStream"])
async def test_unavailable_is_retried(name: str):
    attempts = 0

    async def call(request: Any, context: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTARTING")
        if name == "Generate":
            return generation_pb2.GenerateResponse(text="ok", finished=finished("STOP"))
        await context.write(frame(delta=delta(0, 1)))
        await context.write(frame(finished=finished("STOP")))
        return None

    async with FakeServer(calls={name: call}) as server, VorrangClient(server.target) as client:
        ask = client.generate("x") if name == "Generate" else client.generate_stream("x").result()
        assert (await ask).finish_reason == "STOP"
    assert attempts == 3


@pytest.mark.parametrize("attempts_max", [1, 2])
async def test_a_call_is_tried_as_often_as_was_said(attempts_max: int):
    attempts = 0

    async def call(request: Any, context: Any) -> None:
        nonlocal attempts
        attempts += 1
        await abort(context, grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTARTING")

    async with (
        FakeServer(calls={"Generate": call}) as server,
        VorrangClient(server.target, attempts_max=attempts_max) as client,
    ):
        with pytest.raises(ServerUnavailable):
            await client.generate("x")
    assert attempts == attempts_max
    for wrong in (0, 6):
        with pytest.raises(ValueError, match="attempts_max must be between 1 and 5"):
            VorrangClient("x", attempts_max=wrong)


async def test_a_request_that_the_server_has_taken_is_not_tried_again():
    attempts = 0

    async def call(request: Any, context: Any) -> None:
        nonlocal attempts
        attempts += 1
        await context.write(frame(delta=delta(0, 1)))
        await abort(context, grpc.StatusCode.UNAVAILABLE, "ENGINE_RESTARTING")

    async with FakeServer(calls={"GenerateStream": call}) as server, VorrangClient(server.target) as client:
        with pytest.raises(ServerUnavailable):
            await client.generate_stream("x").result()
    assert attempts == 1


async def test_a_server_that_refuses_connections_at_first_is_waited_for_if_asked():
    async def script(session: FakeSession) -> None:
        await session.open()
        await session.receive_end()

    async def call(request: Any, context: Any) -> Any:
        return generation_pb2.GenerateResponse(text="ok", finished=finished("STOP"))

    # The proxy resets every connection until the server is there.
    async with (
        CuttingProxy("127.0.0.1:1") as proxy,
        VorrangClient(proxy.address, wait_for_ready=True) as client,
    ):
        proxy.refuse()
        asking = asyncio.ensure_future(client.generate("x"))
        opening = asyncio.ensure_future(client.session().__aenter__())
        with pytest.raises(DeadlineExceeded):
            await client.generate("x", timeout_s=0.1)
        assert not asking.done()
        async with VorrangClient(proxy.address) as hasty:
            with pytest.raises(ConnectionLost):
                await hasty.generate("x")
        async with FakeServer(script, calls={"Generate": call}) as server:
            proxy.lead_to(server.target)
            proxy.refuse(False)
            assert (await asking).text == "ok"
            await (await opening).__aexit__(None, None, None)


async def test_other_failures_are_not_retried():
    attempts = 0

    async def call(request: Any, context: Any) -> Any:
        nonlocal attempts
        attempts += 1
        await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")

    async with FakeServer(calls={"Generate": call}) as server, VorrangClient(server.target) as client:
        with pytest.raises(Overloaded):
            await client.generate("x")
    assert attempts == 1


async def test_no_server_is_a_connection_loss():
    async with FakeServer() as server:
        target = server.target
    async with VorrangClient(target) as client:
        with pytest.raises(ConnectionLost):
            await client.get_model()


async def test_a_deadline_that_passes_is_typed_and_cancels_on_the_server():
    async with FakeServer(calls={"Generate": hold}) as server, VorrangClient(server.target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("x", timeout_s=0.05)
        await server.cancelled.wait()


async def test_cancelling_the_task_cancels_the_unary_request():
    async with FakeServer(calls={"Generate": hold}) as server, VorrangClient(server.target) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.generate("x")
        await server.cancelled.wait()


async def test_generate_stream_yields_typed_events_and_ignores_unknown_ones():
    async def call(request: Any, context: Any) -> None:
        await context.write(frame(accepted=generation_pb2.AcceptedEvent(level=10)))
        await context.write(generation_pb2.GenerateStreamResponse(sequence=2))
        await context.write(frame(started=generation_pb2.StartedEvent(prompt_tokens=1)))
        await context.write(frame(delta=delta(0, 1, 2)))
        await context.write(frame(finished=finished("LENGTH", output_tokens=2)))

    async with FakeServer(calls={"GenerateStream": call}) as server, VorrangClient(server.target) as client:
        stream = client.generate_stream("x", priority="batch")
        events = [event async for event in stream]
        result = await stream.result()
    assert events[:3] == [Accepted(level=10), Started(1), Delta("1 2 ", (1, 2))]
    assert isinstance(events[3], Finished)
    assert len(events) == 4
    assert (result.text, result.usage.output_tokens) == ("1 2 ", 2)
    assert result.ttft_s is not None


async def test_generate_stream_fails_typed_and_says_so_again():
    async def call(request: Any, context: Any) -> None:
        await context.write(frame(delta=delta(0, 1)))
        await abort(context, grpc.StatusCode.ABORTED, "PREEMPTION_LIMIT", "too often")

    async with FakeServer(calls={"GenerateStream": call}) as server, VorrangClient(server.target) as client:
        stream = client.generate_stream("x")
        assert isinstance(await anext(stream), Delta)
        for _ in range(2):
            with pytest.raises(Exception, match="too often") as caught:
                await anext(stream)
            assert caught.value.reason == "PREEMPTION_LIMIT"


async def test_a_call_that_ends_without_a_finish_is_a_loss():
    async def call(request: Any, context: Any) -> None:
        await context.write(frame(delta=delta(0, 1)))

    async with FakeServer(calls={"GenerateStream": call}) as server, VorrangClient(server.target) as client:
        with pytest.raises(ConnectionLost, match="before the request had ended"):
            await client.generate_stream("x").result()


@pytest.mark.parametrize("way", ["cancel", "leave the block", "cancel the reading task"])
async def test_generate_stream_is_cancelled_on_the_server(way: str):
    async def call(request: Any, context: Any) -> None:
        await context.write(frame(delta=delta(0, 1)))
        await hold(request, context)

    async with FakeServer(calls={"GenerateStream": call}) as server, VorrangClient(server.target) as client:
        stream = client.generate_stream("x")
        await anext(stream)
        if way == "cancel":
            await stream.cancel()
            with pytest.raises(RequestCancelled):
                await anext(stream)
        elif way == "leave the block":
            async with stream:
                pass
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(stream)
        await server.cancelled.wait()


async def test_tokenize_detokenize_and_model():
    async def tokenize(request: Any, context: Any) -> Any:
        given = request.prompt
        return generation_pb2.TokenizeResponse(
            token_ids=[1] if given.WhichOneof("value") == "text" else [len(given.chat.messages)]
        )

    async def detokenize(request: Any, context: Any) -> Any:
        assert not request.skip_special_tokens
        return generation_pb2.DetokenizeResponse(text=str(list(request.token_ids)))

    async def get_model(request: Any, context: Any) -> Any:
        limits = types_pb2.Limits(max_output_tokens=7)
        return generation_pb2.GetModelResponse(name="m", eos_token_ids=[0, 2], limits=limits)

    calls = {"Tokenize": tokenize, "Detokenize": detokenize, "GetModel": get_model}
    async with FakeServer(calls=calls) as server, VorrangClient(server.target) as client:
        assert await client.tokenize("x") == [1]
        assert await client.tokenize(messages=[{"role": "user", "content": "x"}] * 2) == [2]
        assert await client.detokenize([1, 2], skip_special_tokens=False) == "[1, 2]"
        model = await client.get_model()
    assert (model.name, model.eos_token_ids, model.limits.max_output_tokens) == ("m", (0, 2), 7)


async def test_wait_ready_waits_until_serving():
    health = [NOT_SERVING, b"", SERVING]
    async with FakeServer(health=health) as server, VorrangClient(server.target) as client:
        await client.wait_ready(10)
    assert health == [SERVING]


async def test_wait_ready_gives_up():
    async with FakeServer(health=[NOT_SERVING]) as server, VorrangClient(server.target) as client:
        with pytest.raises(NotReady, match="not serving"):
            await client.wait_ready(0.05)
        target = server.target
    async with VorrangClient(target) as client:
        with pytest.raises(NotReady, match="no answer"):
            await client.wait_ready(0.05)


async def test_a_message_over_the_limit_is_refused():
    async def detokenize(request: Any, context: Any) -> Any:
        return generation_pb2.DetokenizeResponse(text="x" * len(request.token_ids))

    async with (
        FakeServer(calls={"Detokenize": detokenize}) as server,
        VorrangClient(server.target, max_message_bytes=100) as client,
    ):
        assert len(await client.detokenize([1] * 50)) == 50
        with pytest.raises(RequestFailed, match="larger than max"):
            await client.detokenize([1] * 150)


async def test_metadata_goes_with_every_call():
    seen = []

    async def get_model(request: Any, context: Any) -> Any:
        seen.append(dict(context.invocation_metadata()))
        return generation_pb2.GetModelResponse()

    metadata = [("authorization", "Bearer t")]
    async with (
        FakeServer(calls={"GetModel": get_model}) as server,
        VorrangClient(server.target, metadata=metadata) as client,
    ):
        await client.get_model()
    assert seen[0]["authorization"] == "Bearer t"


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        (None, {}, ValueError),
        ("x", {"token_ids": [1]}, ValueError),
        (None, {"messages": [{"role": "user"}]}, ValueError),
        ("x", {"temprature": 1.0}, TypeError),
        ("x", {"max_tokens": -1}, ValueError),
    ],
)
async def test_misuse_is_found_before_anything_is_sent(prompt: Any, options: Any, error: Any):
    async with VorrangClient("127.0.0.1:1") as client:
        with pytest.raises(error):
            client.generate_stream(prompt, **options)


async def test_use_outside_the_block_is_a_plain_error():
    with pytest.raises(RuntimeError, match="async with"):
        await VorrangClient("127.0.0.1:1").get_model()
