"""``vorrangctl`` as a process of its own, against a scripted server."""

import asyncio
import json
import os
import signal
import sys
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from engine.runner.scripted import expected_output
from tests.support.cutting_proxy import CuttingProxy
from tests.support.fake_server import FakeServer, FakeSession, SessionScript, delta, finished, status
from tests.support.server import HeldRunner, running_server
from vorrang.v1 import generation_pb2 as pb
from vorrang.v1 import types_pb2

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


#: Whoever runs the tests in the background may have told their children to ignore SIGINT.
AS_A_USER = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "runpy.run_module('clients.python.cli', run_name='__main__', alter_sys=True)"
)


async def start(*arguments: str, target: str = "") -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        AS_A_USER,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "VORRANG_TARGET": target, "COLUMNS": "200"},
    )


async def ctl(*arguments: str, target: str = "", stdin: str = "") -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of one run."""
    process = await start(*arguments, target=target)
    out, err = await process.communicate(stdin.encode())
    return process.returncode, out.decode(), err.decode()


async def test_generate_streams_text_and_says_what_it_cost():
    seen = []

    async def script(session: FakeSession) -> None:
        assert (await session.open()).client_name == "vorrangctl generate"
        start = await session.receive("start")
        seen.append(start.spec)
        await session.send(start.request_id, accepted=pb.AcceptedEvent(level=-10))
        await session.send(start.request_id, delta=delta(0, 1))
        await session.send(start.request_id, preempted=pb.PreemptedEvent(count=1))
        await session.send(start.request_id, delta=delta(1, 2))
        usage = {"output_tokens": 2, "prompt_tokens": 5, "preemptions": 1, "recomputed_tokens": 6}
        await session.send(start.request_id, finished=finished("STOP_STRING", **usage))
        await session.receive_end()

    async with FakeServer(script) as server:
        code, out, err = await ctl(
            *("generate", "hello", "--chat", "--priority", "interactive", "--max-tokens", "7"),
            *("--temperature", "0", "--seed", "3", "--stop", "X", "--stop", "Y"),
            target=server.target,
        )
    assert (code, out) == (0, "1 2 \n")
    assert len(err.splitlines()) == 1
    for part in ("2 tokens, STOP_STRING", "prompt 5", "level -10", "preempted 1x, 6 tokens recomputed"):
        assert part in err
    spec = seen[0]
    assert spec.prompt.chat.messages[0] == types_pb2.ChatMessage(role="user", content="hello")
    assert spec.priority.class_name == "interactive"
    assert (spec.sampling.max_tokens, spec.sampling.seed, spec.sampling.temperature) == (7, 3, 0.0)
    assert spec.sampling.HasField("temperature")
    assert list(spec.sampling.stop_strings) == ["X", "Y"]
    assert not spec.sampling.HasField("top_p")


async def test_generate_says_when_it_waits_and_writes_json_if_asked():
    async def script(session: FakeSession) -> None:
        await session.open()
        request_id = await session.accept(level=10, queue_position=4)
        await session.send(request_id, queue_update=pb.QueueUpdateEvent(queue_position=2))
        await session.send(request_id, started=pb.StartedEvent())
        await session.send(request_id, delta=delta(0, 1))
        await session.send(request_id, preempted=pb.PreemptedEvent(count=1))
        await session.send(request_id, resumed=pb.ResumedEvent())
        await session.send(request_id, finished=finished("STOP", output_tokens=1))
        await session.receive_end()

    async with FakeServer(script) as server:
        code, out, err = await ctl("generate", "x", "-v", "--json", target=server.target)
    assert code == 0, err
    result = json.loads(out)
    assert (result["text"], result["finish_reason"], result["accepted"]["level"]) == ("1 ", "STOP", 10)
    assert result["usage"]["output_tokens"] == 1
    states = [line.partition(" |")[0] for line in err.splitlines()[:-1]]
    assert states == ["[queued, 4 ahead", "[queued, 2 ahead", "[running", "[PREEMPTED", "[resumed", "[done"]


async def test_generate_reads_the_prompt_from_standard_input():
    async def script(session: FakeSession) -> None:
        await session.open()
        start = await session.receive("start")
        await session.send(start.request_id, delta=pb.DeltaEvent(text=start.spec.prompt.text.upper()))
        await session.send(start.request_id, finished=finished())
        await session.receive_end()

    async with FakeServer(script) as server:
        code, out, _ = await ctl("generate", "-", target=server.target, stdin="from a pipe")
    assert (code, out) == (0, "FROM A PIPE\n")


def refusing(code: grpc.StatusCode, *arguments: Any) -> SessionScript:
    """Refuse the request with that status."""

    async def script(session: FakeSession) -> None:
        await session.open()
        start = await session.receive("start")
        await session.send(start.request_id, failed=pb.FailedEvent(status=status(code, *arguments)))
        await session.receive_end()

    return script


async def test_a_refused_field_is_one_line_and_exit_code_2():
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="too big")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    script = refusing(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "no", bad)
    async with FakeServer(script) as server:
        code, out, err = await ctl("generate", "x", "--top-p", "2", target=server.target)
    assert (code, out, err) == (2, "", "vorrangctl: sampling.top_p: too big\n")


async def test_a_failure_is_one_line_and_exit_code_1():
    script = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue is full")
    async with FakeServer(script) as server:
        code, _, err = await ctl("generate", "x", target=server.target)
        assert (code, err) == (1, "vorrangctl: the queue is full (QUEUE_FULL)\n")


@pytest.mark.slow
async def test_generate_names_its_adapter_and_an_unknown_one_is_one_line():
    settings: dict[str, object] = {"model.adapters": {"a": "", "b": ""}}
    async with running_server(settings) as app:
        for adapter, code in (("", 0), ("a", 0), ("b", 0), ("c", 1)):
            found, out, err = await ctl(
                *("generate", "hello", "--adapter", adapter, "--temperature", "0", "--max-tokens", "5"),
                target=app.address,
            )
            assert found == code
            if code == 0:
                assert out.encode() == bytes(expected_output(list(b"hello"), 5, adapter=adapter)) + b"\n"
    assert err == "vorrangctl: adapter 'c' is not served, only 'a', 'b' (UNKNOWN_MODEL)\n"


async def one_token_until_cancelled(session: FakeSession) -> None:
    """Answer with a token, and expect a cancel after that."""
    await session.open()
    request_id = await session.accept()
    await session.send(request_id, delta=delta(0, 1))
    assert (await session.receive("cancel")).request_id == request_id
    await session.send(request_id, finished=finished("CANCELLED"))
    session.server.cancelled.set()


async def test_interrupting_generate_cancels_the_request_on_the_server():
    async with FakeServer(one_token_until_cancelled) as server:
        process = await start("generate", "x", target=server.target)
        assert process.stdout is not None
        assert await process.stdout.readexactly(2) == b"1 "
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            await server.cancelled.wait()
            _, err = await process.communicate()
    assert (process.returncode, err.decode()) == (130, "vorrangctl: interrupted\n")


@pytest.mark.slow
async def test_generate_takes_no_longer_than_it_may():
    async with FakeServer(one_token_until_cancelled) as server:
        outcome = await ctl("generate", "x", "--timeout", "2.5", target=server.target)
        async with asyncio.timeout(20):
            await server.cancelled.wait()
    assert outcome == (1, "1 ", "vorrangctl: took too long\n")


@pytest.mark.slow
async def test_cuts_in_the_middle_cost_generate_time_and_nothing_else():
    runner = HeldRunner(step_s=0.01)
    async with running_server(runner=runner) as app, CuttingProxy(app.address) as proxy:
        arguments = ("generate", "hello", "--max-tokens", "200", "--temperature", "0", "--verbose")
        process = await start(*arguments, target=proxy.address)
        assert process.stdout is not None
        assert process.stderr is not None
        out = b""
        for num_bytes in (10, 60):
            while len(out) < num_bytes:
                out += await process.stdout.read(16)
            runner.hold()
            proxy.refuse()
            while b"connection lost" not in (said := await process.stderr.readline()):
                assert said
            runner.release()
            proxy.refuse(False)
        rest, err = await process.communicate()
    assert process.returncode == 0, err
    assert out + rest == bytes(expected_output(list(b"hello"), 200)) + b"\n"
    assert b"200 tokens, LENGTH" in err
    assert proxy.num_connections == 3
