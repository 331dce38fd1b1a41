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

from tests.support.fake_server import FakeServer, abort, delta, finished
from vorrang.v1 import generation_pb2, types_pb2

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


def frame(**event: Any) -> generation_pb2.GenerateStreamResponse:
    return generation_pb2.GenerateStreamResponse(**event)


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

    async def call(request: Any, context: Any) -> None:
        seen.append(request.spec)
        await context.write(frame(accepted=generation_pb2.AcceptedEvent(level=-10)))
        await context.write(frame(delta=delta(0, 1)))
        await context.write(frame(preempted=generation_pb2.PreemptedEvent(count=1)))
        await context.write(frame(delta=delta(1, 2)))
        usage = {"output_tokens": 2, "prompt_tokens": 5, "preemptions": 1, "recomputed_tokens": 6}
        await context.write(frame(finished=finished("STOP_STRING", **usage)))

    async with FakeServer(calls={"GenerateStream": call}) as server:
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
    async def call(request: Any, context: Any) -> None:
        await context.write(frame(accepted=generation_pb2.AcceptedEvent(level=10, queue_position=4)))
        await context.write(frame(queue_update=generation_pb2.QueueUpdateEvent(queue_position=2)))
        await context.write(frame(started=generation_pb2.StartedEvent()))
        await context.write(frame(delta=delta(0, 1)))
        await context.write(frame(preempted=generation_pb2.PreemptedEvent(count=1)))
        await context.write(frame(resumed=generation_pb2.ResumedEvent()))
        await context.write(frame(finished=finished("STOP", output_tokens=1)))

    async with FakeServer(calls={"GenerateStream": call}) as server:
        code, out, err = await ctl("generate", "x", "-v", "--json", target=server.target)
    assert code == 0, err
    result = json.loads(out)
    assert (result["text"], result["finish_reason"], result["accepted"]["level"]) == ("1 ", "STOP", 10)
    assert result["usage"]["output_tokens"] == 1
    states = [line.partition(" |")[0] for line in err.splitlines()[:-1]]
    assert states == ["[queued, 4 ahead", "[queued, 2 ahead", "[running", "[PREEMPTED", "[resumed", "[done"]


async def test_generate_reads_the_prompt_from_standard_input():
    async def call(request: Any, context: Any) -> None:
        await context.write(frame(delta=generation_pb2.DeltaEvent(text=request.spec.prompt.text.upper())))
        await context.write(frame(finished=finished()))

    async with FakeServer(calls={"GenerateStream": call}) as server:
        code, out, _ = await ctl("generate", "-", target=server.target, stdin="from a pipe")
    assert (code, out) == (0, "FROM A PIPE\n")


async def test_a_refused_field_is_one_line_and_exit_code_2():
    async def call(request: Any, context: Any) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="too big")
        bad = error_details_pb2.BadRequest(field_violations=[violation])
        await abort(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "no", bad)

    async with FakeServer(calls={"GenerateStream": call}) as server:
        code, out, err = await ctl("generate", "x", "--top-p", "2", target=server.target)
    assert (code, out, err) == (2, "", "vorrangctl: sampling.top_p: too big\n")


async def test_a_failure_is_one_line_and_exit_code_1():
    async def call(request: Any, context: Any) -> None:
        await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue is full")

    async with FakeServer(calls={"GenerateStream": call}) as server:
        code, _, err = await ctl("generate", "x", target=server.target)
        assert (code, err) == (1, "vorrangctl: the queue is full (QUEUE_FULL)\n")


async def test_interrupting_generate_cancels_the_request_on_the_server():
    async def call(request: Any, context: Any) -> None:
        await context.write(frame(delta=delta(0, 1)))
        await asyncio.Event().wait()

    async with FakeServer(calls={"GenerateStream": call}) as server:
        process = await start("generate", "x", target=server.target)
        assert process.stdout is not None
        assert await process.stdout.readexactly(2) == b"1 "
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            await server.cancelled.wait()
            _, err = await process.communicate()
    assert (process.returncode, err.decode()) == (130, "vorrangctl: interrupted\n")
