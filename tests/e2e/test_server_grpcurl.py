"""The lines of docs/GRPCURL.md and README.md, run as they stand by the real grpcurl."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.process import ROOT, ServerProcess, server_process
from vorrang.v1 import control_pb2, generation_pb2

GRPCURL = Path(sys.executable).parent / "grpcurl"
DOCUMENTED_ADDRESS = "127.0.0.1:50051"


def lines(document: str = "docs/GRPCURL.md") -> list[str]:
    text = (ROOT / document).read_text()
    return [line for line in text.splitlines() if line.startswith("grpcurl ")]


def line_for(method: str) -> str:
    (line,) = [line for line in lines() if line.endswith(method)]
    return line


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        run(line_for("GenerationService/Generate"), process.address)  # or there are no decisions to watch
        yield process


#: Lines that need a request that runs, or end the server.
STEERING = ("/UpdateRequestPriority", "/CancelRequest", "/ExplainRequest", "/Drain")


def run(line: str, address: str) -> str:
    """Run one documented line against ``address``; one with ``-max-time`` may run into it."""
    assert line.count(DOCUMENTED_ADDRESS) == 1
    command = shlex.split(line.replace(DOCUMENTED_ADDRESS, address))
    assert command[0] == "grpcurl"
    result = subprocess.run(
        [str(GRPCURL), *command[1:]], capture_output=True, text=True, timeout=20, check=False
    )
    ran_out = "-max-time" in command and "DeadlineExceeded" in result.stderr
    assert result.returncode == 0 or ran_out, result.stderr
    return result.stdout


def objects(text: str) -> list[dict[str, Any]]:
    """JSON objects one after the other."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


@pytest.mark.parametrize(
    "line",
    [line for line in lines() + lines("README.md") if not line.endswith(STEERING)],
    ids=lambda line: line.split()[-1],
)
def test_every_line_works(server: ServerProcess, line: str) -> None:
    # One with a second's time may have nothing to say in it on a slow machine.
    assert any(run(line, server.address).strip() for _ in range(5))


@pytest.mark.slow
def test_a_request_is_moved_and_cancelled_and_the_server_drained_from_the_shell() -> None:
    with server_process("--scripted-step-ms", "20") as server:
        started = line_for("/GenerateStream").replace('"max_tokens": 16', '"max_tokens": 1500')
        words = shlex.split(started.replace(DOCUMENTED_ADDRESS, server.address))[1:]
        with subprocess.Popen([str(GRPCURL), *words], stdout=subprocess.PIPE, text=True) as stream:
            assert stream.stdout is not None
            assert stream.stdout.readline().strip() == "{"  # accepted
            (moved,) = objects(run(line_for("/UpdateRequestPriority"), server.address))
            assert moved == {"level": -5}
            (load,) = objects(run(line_for("/GetLoad"), server.address))
            assert load["classes"][0] == {"class_name": "interactive", "num_running": 1}
            steps = objects(run(line_for("/WatchDecisions"), server.address))
            assert len(steps) > 5
            numbers = [int(step["step"]) for step in steps]
            assert numbers == sorted(set(numbers))
            (cancelled,) = objects(run(line_for("/CancelRequest"), server.address))
            assert cancelled == {"found": True}
            *_, last = objects("{" + stream.stdout.read())
        assert last["finished"]["reason"] == "FINISH_REASON_CANCELLED"
        (account,) = objects(run(line_for("/ExplainRequest"), server.address))
        assert (account["server_request_id"], account["end"], account["delivered"]) == (
            "r1",
            "cancelled",
            True,
        )
        assert objects(run(line_for("/Drain"), server.address)) == [{}]
        assert server.wait() == 0


def test_every_rpc_has_a_line() -> None:
    services = (control_pb2.DESCRIPTOR, generation_pb2.DESCRIPTOR)
    methods = {
        f"{service.full_name}/{method.name}"
        for file in services
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods <= {line.split()[-1] for line in lines()}


def test_reflection_lists_the_services(server: ServerProcess) -> None:
    services = run(line_for(" list"), server.address).split()
    assert {"vorrang.v1.GenerationService", "vorrang.v1.ControlService", "grpc.health.v1.Health"} <= set(
        services
    )


@pytest.mark.parametrize(
    ("symbol", "shown"),
    [
        ("vorrang.v1.GenerationService.Generate", "rpc Generate ("),
        ("vorrang.v1.ControlService.GetLoad", "rpc GetLoad ("),
        ("vorrang.v1.GenerationSpec", "message GenerationSpec {"),
        ("vorrang.v1.GenerationSpec.prompt", ".vorrang.v1.Prompt prompt ="),
        ("grpc.health.v1.Health.Check", "rpc Check ("),
        ("grpc.reflection.v1.ServerReflection", "rpc ServerReflectionInfo ("),
        ("grpc.reflection.v1alpha.ServerReflection", "rpc ServerReflectionInfo ("),
    ],
)
def test_reflection_describes_services_methods_and_messages(
    server: ServerProcess, symbol: str, shown: str
) -> None:
    described = run(f"grpcurl -plaintext {DOCUMENTED_ADDRESS} describe {symbol}", server.address)
    assert shown in described


def test_reflection_does_not_make_methods_up(server: ServerProcess) -> None:
    command = [str(GRPCURL), "-plaintext", server.address, "describe", "vorrang.v1.GenerationService.No"]
    described = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert described.returncode != 0
    assert "not found" in described.stderr.lower()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.asyncio
async def test_both_versions_of_reflection_find_the_file_of_a_method(
    server: ServerProcess, version: str
) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        call = channel.stream_stream(
            method,
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )()
        symbol = "vorrang.v1.GenerationService.Session"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        answer = await call.read()
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(raw).name
            for raw in answer.file_descriptor_response.file_descriptor_proto
        ]
        assert "vorrang/v1/generation.proto" in files
        call.cancel()


def test_health_is_serving(server: ServerProcess) -> None:
    assert objects(run(line_for("Health/Check"), server.address)) == [{"status": "SERVING"}]


def test_generate_gives_text_at_the_priority_of_its_header(server: ServerProcess) -> None:
    (answer,) = objects(run(line_for("/Generate"), server.address))
    assert answer["accepted"]["level"] == -10
    assert answer["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert len(answer["text"]) == len(answer["token_ids"]) == 16


def test_a_bidirectional_session_runs_from_the_shell(server: ServerProcess) -> None:
    frames = objects(run(line_for("/Session"), server.address))
    assert "opened" in frames[0]
    by_request: dict[str, list[dict[str, Any]]] = {}
    for frame in frames[1:]:
        by_request.setdefault(frame["request_id"], []).append(frame)
    assert set(by_request) == {"report", "question"}
    assert by_request["report"][-1]["finished"]["reason"] == "FINISH_REASON_CANCELLED"
    assert by_request["question"][-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"
    for events in by_request.values():
        assert [int(frame["sequence"]) for frame in events] == list(range(1, len(events) + 1))
    assert len("".join(f.get("delta", {}).get("text", "") for f in by_request["question"])) == 8
