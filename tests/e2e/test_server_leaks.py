"""Nothing secret comes out, whatever fails: in every handler, in both forms of the log, in every status."""

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import server.tracing
from server.identity import hash_of
from server.log import MAX_LINE_BYTES
from tests.support import canaries
from tests.support.process import server_process
from tests.support.raising_server import SERVICES
from tests.support.server import running_server
from tests.support.wire import WireSession, reason_in, spec, status_in, stub
from vorrang.v1 import control_pb2, control_pb2_grpc
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

METADATA = (("authorization", f"Bearer {canaries.TOKEN}"), ("x-request-id", "canary-request"))
FRAMES = gen.SessionRequest.DESCRIPTOR.oneofs_by_name["command"].fields


@contextlib.contextmanager
def raising_server(where: str, form: str, log: Path) -> Iterator[str]:
    """A server whose handlers raise all that they were sent; afterwards its log is searched."""
    with server_process(
        "--log-level",
        "debug",
        log=log,
        module=("tests.support.raising_server", where),
        extra={"VORRANG_LOG__FORMAT": form, "VORRANG_MODEL__ADAPTERS": "{}"},
    ) as server:
        yield server.address
        server.terminate()
        server.wait()
    text = log.read_text()
    assert "server.failed" in text  # or nothing was tried
    assert "ValueError" in text
    assert "raising_server.py" in text
    canaries.check(text, "the log")
    assert max(map(len, text.encode().splitlines())) <= MAX_LINE_BYTES


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


def filled(message: Any) -> Any:
    """A message whose texts are all the prompt, wherever it has any."""
    for field in message.DESCRIPTOR.fields:
        if field.type == field.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(canaries.PROMPT)
            else:
                setattr(message, field.name, canaries.PROMPT)
        elif field.name == "spec":
            message.spec.CopyFrom(spec(canaries.PROMPT))
        elif field.name == "prompt":
            message.prompt.text = canaries.PROMPT
    return message


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["json", "console"])
async def test_a_failure_in_any_call_shows_neither_token_nor_prompt(form: str, tmp_path: Path) -> None:
    num_calls = 0
    with raising_server("handlers", form, tmp_path / "log") as address:
        async with connected(address) as channel:
            for module in SERVICES.values():
                (service,) = module.DESCRIPTOR.services_by_name.values()
                for method in service.methods:
                    request = filled(getattr(module, method.input_type.name)()).SerializeToString()
                    kind = "stream" if method.client_streaming else "unary"
                    kind += "_stream" if method.server_streaming else "_unary"
                    call = getattr(channel, kind)(f"/{service.full_name}/{method.name}")
                    # What is sent to a call that has ended may fail by itself; frames have their own test.
                    running = call(None if method.client_streaming else request, metadata=METADATA)
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await (running.read() if method.server_streaming else running)
                    status = status_in(caught.value)  # looks for secrets in it
                    assert reason_in(status) == "INTERNAL", method.name
                    num_calls += 1
    assert num_calls == 14
    events = (tmp_path / "log").read_text().count("server.failed")
    assert events == num_calls


@pytest.mark.asyncio
@pytest.mark.parametrize("form", ["json", "console"])
async def test_a_failure_in_any_frame_shows_neither_token_nor_prompt(form: str, tmp_path: Path) -> None:
    with raising_server("frames", form, tmp_path / "log") as address:
        async with connected(address) as channel, WireSession(channel, METADATA) as session:
            await session.send(open=gen.OpenCommand(client_name="raise"))
            await session.event("command_rejected")
            opened = await session.open()
            for field in FRAMES:
                if field.name == "open":
                    continue
                body = filled(getattr(gen, field.message_type.name)())
                await session.send(**{field.name: body})
                rejected = await session.event("command_rejected")
                assert reason_in(rejected.status) == "INTERNAL", field.name
                canaries.check(str(rejected), "a frame")
    assert opened.session_token not in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_failure_on_the_way_to_the_engine_shows_no_prompt(tmp_path: Path) -> None:
    with raising_server("submit", "json", tmp_path / "log") as address:
        async with connected(address) as channel, WireSession(channel, METADATA) as session:
            await session.open()
            await session.start("a", spec(canaries.PROMPT))
            failed = (await session.end_of("a")).failed
            assert reason_in(failed.status) == "INTERNAL"
            canaries.check(str(failed), "a frame")


@pytest.mark.slow
@pytest.mark.asyncio
async def test_lines_of_the_log_are_bounded_and_of_one_object_each(tmp_path: Path) -> None:
    with server_process("--log-level", "debug", log=tmp_path / "log") as server:
        async with connected(server.address) as channel:
            message = spec("hello")
            message.prompt.Clear()
            message.prompt.chat.messages.add(role="user", content=canaries.PROMPT)
            for tools in ("[" * 5_000, "[" * 3_000_000, '[{"a": ' + "[" * 5_000 + "]" * 5_000 + "}]"):
                message.prompt.chat.tools_json = tools
                call = channel.unary_unary(
                    "/vorrang.v1.GenerationService/Generate",
                    gen.GenerateRequest.SerializeToString,
                    gen.GenerateResponse.FromString,
                )
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(gen.GenerateRequest(spec=message), metadata=METADATA)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                status_in(caught.value)
    lines = (tmp_path / "log").read_bytes().splitlines()
    assert max(map(len, lines)) <= MAX_LINE_BYTES
    for line in lines:
        assert "event" in json.loads(line)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_bytes_that_are_no_message_are_refused_as_the_table_says(tmp_path: Path) -> None:
    with server_process(log=tmp_path / "log") as server:
        async with connected(server.address) as channel:
            for module in SERVICES.values():
                (service,) = module.DESCRIPTOR.services_by_name.values()
                for method in service.methods:
                    if method.client_streaming:
                        continue  # a session rejects the frame alone
                    kind = "unary_stream" if method.server_streaming else "unary_unary"
                    call = getattr(channel, kind)(f"/{service.full_name}/{method.name}")(b"\xff\xff canary")
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await (call.read() if method.server_streaming else call)
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method.name
                    status = status_in(caught.value)
                    assert reason_in(status) == "MALFORMED_FRAME"
                    bad = error_details_pb2.BadRequest()
                    assert status.details[1].Unpack(bad)
                    assert method.input_type.name in bad.field_violations[0].description


def test_the_search_finds_what_was_planted() -> None:
    assert canaries.leaks(f"x {canaries.PASSWORD[:8]} y")
    assert types.Prompt(text=canaries.PROMPT).text in canaries.leaks(canaries.PROMPT)[0]
    with pytest.raises(AssertionError, match="holds a secret"):
        canaries.check(canaries.TOKEN, "x")


@pytest.mark.asyncio
async def test_what_operators_are_given_shows_neither_token_nor_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, original = InMemorySpanExporter(), server.tracing.RequestSpans
    monkeypatch.setattr("server.app.RequestSpans", lambda section: original(section, exporter))
    settings = {
        "metrics.listen": "127.0.0.1:0",
        "tracing.otlp_endpoint": canaries.URL,
        "engine.record_decisions": tmp_path / "decisions",
        "tenants.acme.token_hashes": [hash_of(canaries.TOKEN)],
        "tenants.ops.token_hashes": [hash_of(canaries.OPERATOR_TOKEN)],
        "tenants.ops.operator": True,
    }
    operator = (("authorization", f"Bearer {canaries.OPERATOR_TOKEN}"),)
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        served = stub(channel)
        asked = gen.GenerateRequest(spec=spec(canaries.PROMPT, max_tokens=4))
        await served.Generate(asked, metadata=(METADATA[0], ("x-request-id", "seen")))
        with pytest.raises(grpc.aio.AioRpcError):
            await served.Generate(asked, metadata=(("authorization", f"Bearer {canaries.TOKEN}x"),))
        address = app.metrics_address
        metrics = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=20).read().decode()
        )
        assert "acme" in metrics
        canaries.check(metrics, "the metrics")
        control = control_pb2_grpc.ControlServiceStub(channel)
        explained = await control.ExplainRequest(
            control_pb2.ExplainRequestRequest(id="seen"), metadata=operator
        )
        canaries.check(str(explained), "an account of a request")
    spans = exporter.get_finished_spans()
    assert len(spans) == 1
    canaries.check("".join(span.to_json() for span in spans), "a span")
    decisions = (tmp_path / "decisions").read_bytes().decode(errors="replace")
    assert "acme" in decisions
    canaries.check(decisions, "the decision log")
