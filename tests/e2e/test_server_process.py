"""A real process: signals, exit statuses, the command line."""

import asyncio
import json
import subprocess
import sys
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.process import ROOT, environment, run_cli, run_python, server_process
from tests.support.wire import open_session, reason_in, refused, spec, status_in, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types


@pytest.mark.asyncio
async def test_sigterm_lets_running_requests_finish_refuses_new_ones_and_exits_zero() -> None:
    settings = ("--scripted-step-ms", "20", "--max-running-requests", "2", "--grace-s", "20")
    with server_process(*settings) as server:
        async with (
            grpc.aio.insecure_channel(server.address) as channel,
            open_session(channel) as session,
            open_session(channel) as idle,
        ):
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            for request_id in ("a", "b"):
                await session.start(request_id, spec([1], max_tokens=40))
                await session.event("started", request_id)
            await session.start("queued", spec([2]))
            await session.event("accepted", "queued")
            server.terminate()
            away = await session.event("go_away")
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await session.start("late")
            unary = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec())))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.to_the_end()
            with pytest.raises(grpc.aio.AioRpcError) as idle_caught:
                await idle.to_the_end()
            health.cancel()
        assert server.wait() == 0
    assert away.time_left.ToSeconds() == 20
    for request_id in ("a", "b"):
        session.check(request_id)
        assert len(session.tokens(request_id)) == 40
        assert session.of(request_id)[-1].finished.reason == types.FINISH_REASON_LENGTH
    for request_id in ("queued", "late"):
        failed = session.of(request_id)[-1].failed
        assert failed.retryable
        assert reason_in(failed.status) == "DRAINING"
    assert reason_in(unary) == "DRAINING"
    for error in (caught, idle_caught):
        assert reason_in(status_in(error.value)) == "DRAINING"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_sigterm_during_64_running_and_64_queued_requests_ends_all_of_them() -> None:
    settings = ("--scripted-step-ms", "20", "--max-running-requests", "64", "--grace-s", "3")
    with server_process(*settings) as server:
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            for number in range(64):  # half of them end within the grace
                await session.start(f"run-{number}", spec([1], max_tokens=50 if number % 2 else 2000))
            await session.event("started", "run-63")
            for number in range(64):
                await session.start(f"wait-{number}", spec([2], max_tokens=2000))
            await session.event("accepted", "wait-63")
            server.terminate()
            async with asyncio.timeout(15):
                with pytest.raises(grpc.aio.AioRpcError):
                    await session.to_the_end()
        assert server.wait() == 0
    for number in range(64):
        session.check(f"run-{number}")
        finished = session.of(f"run-{number}")[-1].finished
        whole = number % 2
        reason = types.FINISH_REASON_LENGTH if whole else types.FINISH_REASON_TIME_LIMIT
        assert finished.reason == reason, number
        assert (len(session.tokens(f"run-{number}")) == 50) if whole else session.tokens(f"run-{number}")
        failed = session.of(f"wait-{number}")[-1].failed
        assert failed.retryable
        assert reason_in(failed.status) == "DRAINING"


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["grace", "second signal"])
async def test_what_outlasts_the_grace_is_cut_with_its_output(how: str) -> None:
    grace_s = "0.1" if how == "grace" else "600"
    with server_process("--scripted-step-ms", "20", "--grace-s", grace_s) as server:
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            await session.start("a", spec([1], max_tokens=2000))
            await session.event("delta", "a")
            await session.half_close()
            server.terminate()
            await session.event("go_away")
            if how == "second signal":
                server.terminate()
            await session.to_the_end()  # half-closed and complete, so the stream ends well
        assert server.wait() == 0
    session.check("a")
    finished = session.of("a")[-1].finished
    assert finished.reason == types.FINISH_REASON_TIME_LIMIT
    assert 0 < finished.usage.output_tokens == len(session.tokens("a")) < 2000


def test_the_ready_line_says_what_is_served() -> None:
    with server_process("--kv-blocks", "8", "--max-running-requests", "3", "--policy", "fcfs") as server:
        server.terminate()
        server.wait()
        rest = server.process.stderr.read() if server.process.stderr else ""
    lines = [json.loads(line) for line in rest.splitlines()]  # JSON off a terminal
    assert server.ready_line == (
        f"ready on {server.address}: model scripted, policy fcfs, 3 seats, "
        "8 blocks of 16 tokens, largest request 128 tokens, "
        f"runner process {lines[0]['pid']}, uvloop, plaintext\n"
    )
    assert [line["event"] for line in lines] == ["runner.started", "server.draining", "server.stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--listen", "0.0.0.0:0"), "not loopback"),
        (("serve", "--kv-blocks", "0"), "kv.num_blocks"),
        (("serve", "--model", "/no/such/model"), "/no/such/model"),
        pytest.param(
            ("serve", "--runner", "inline", "--model", "/no/such/model"),
            "/no/such/model",
            marks=pytest.mark.deep,
        ),
        (("serve", "--adapter", "/folder"), "--adapter must be NAME=FOLDER, got '/folder'"),
        (("serve", "--adapter", "a=/x", "--adapter", "a=/y"), "got 'a' twice"),
        pytest.param(
            ("serve", "--runner", "inline", "--adapter", "a=/no/such"),
            "model.adapters.a can't be used, from /no/such",
            marks=pytest.mark.deep,
        ),
        (("config", "show", "--config", "/nothing.toml"), "/nothing.toml"),
    ],
)
def test_known_failures_are_one_line_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = run_cli(*arguments, extra={"VORRANG_SERVER__LISTEN": "127.0.0.1:0"})
    assert result.returncode == 2, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("vorrang: ")
    assert message in lines[0]


_ENGINE_DIES = """
import sys
from engine.loop import Engine
from server.serve import serve
from server.settings import load

async def die(self):
    raise AssertionError("a bug")

Engine.run = die
serve(load(None, {"model.path": "scripted", "server.listen": "127.0.0.1:0"}).settings, sys.exit)
"""


def test_when_the_engine_dies_the_process_ends_with_status_1() -> None:
    result = run_python(_ENGINE_DIES, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "vorrang: the engine died; the log says why"
    assert "engine.died" in result.stderr


def test_config_show_prints_values_and_origins() -> None:
    result = run_cli("config", "show", extra={"VORRANG_KV__NUM_BLOCKS": "77"})
    assert result.returncode == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert rows["kv.num_blocks"] == ["77", "env"]
    assert rows["scheduler.policy"] == ["priority", "default"]


@pytest.mark.slow
def test_doctor_runs() -> None:
    result = run_cli("doctor")
    assert result.returncode == 0, result.stderr
    found = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in result.stdout.splitlines()}
    assert {"cpu", "cores", "memory", "torch", "gpu", "default model", "cache folder", "compiler"} <= set(
        found
    )
    assert all(found.values())


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    code = "import sys, server.cli; print(sorted({'torch', 'grpc', 'pydantic', 'numpy'} & set(sys.modules)))"
    started = time.monotonic()
    result = run_cli("--help")
    assert time.monotonic() - started < 10
    assert {"serve", "doctor", "config"} <= set(result.stdout.split())
    assert run_python(code).stdout.strip() == "[]"


@pytest.mark.slow
def test_healthcheck_tells_a_serving_server_from_none() -> None:
    with server_process() as server:
        healthy = run_cli("healthcheck", "--target", server.address)
        stranger = run_cli("healthcheck", "--target", server.address, "--service", "nobody")
    gone = run_cli("healthcheck", "--target", server.address, "--timeout-s", "1")

    assert (healthy.returncode, healthy.stdout) == (0, "SERVING\n")
    assert (stranger.returncode, stranger.stdout) == (1, "NOT_FOUND\n")
    assert (gone.returncode, gone.stdout) == (1, "UNAVAILABLE\n")


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_the_steps_of_the_dockerfile_lead_to_a_server() -> None:
    done = subprocess.run(
        [sys.executable, "tools/image.py", "--borrow"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not checked here" in done.stdout


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_log_that_nobody_reads_stops_nobody() -> None:
    """A pipe takes 64 KiB; a request logs about 400 bytes, a session more."""
    with server_process("--log-level", "debug") as server:
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            for number in range(400):
                await session.start(f"r{number}", spec([1], max_tokens=1))
            await session.half_close()
            async with asyncio.timeout(60):
                await session.to_the_end()
        server.terminate()
        assert server.wait() == 0
    ended = [frame for frame in session.frames if frame.HasField("finished") or frame.HasField("failed")]
    assert len(ended) == 400
