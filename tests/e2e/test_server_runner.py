"""The server lives when its runner dies, and every stream carries on with the tokens it would have had."""

import asyncio
import contextlib
import random
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from engine.runner.process import ProcessRunner
from engine.runner.scripted import ScriptedTokenizer, expected_output
from server.app import App, Loaded
from server.settings import load as load_settings
from tests.support.process import ServerProcess, children, run_cli, server_process
from tests.support.runners import ABORTS, LIMITS, FailingSource, FatalSource
from tests.support.server import running_server
from tests.support.wire import WireSession, open_session, reason_in, settled, spec
from vorrang.v1 import types_pb2 as types

NUM_STREAMS, NUM_SESSIONS = 64, 8


class Streams:
    """Many streams in several sessions; notes what came when."""

    def __init__(self, requests: dict[str, dict[str, object]]) -> None:
        self.requests = requests
        self.seen: list[tuple[str, float]] = []
        self.sessions: list[WireSession] = []
        self.num_ended = 0

    @contextlib.asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """All of them are started; on the way out they have ended."""
        async with contextlib.AsyncExitStack() as stack:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            for _ in range(NUM_SESSIONS):
                self.sessions.append(await stack.enter_async_context(open_session(channel)))
            for number, (request_id, fields) in enumerate(self.requests.items()):
                await self.session_of(number).start(request_id, **fields)
            async with asyncio.TaskGroup() as group:
                for session in self.sessions:
                    await session.half_close()
                    group.create_task(self._read(session))
                yield

    def session_of(self, number: int) -> WireSession:
        return self.sessions[number % NUM_SESSIONS]

    async def _read(self, session: WireSession) -> None:
        with contextlib.suppress(EOFError):
            while True:
                frame = await session.next()
                kind = frame.WhichOneof("event")
                self.seen.append((kind or "", time.monotonic()))
                self.num_ended += kind in ("finished", "failed")

    async def next_time(self, kind: str, at: int) -> tuple[float, int]:
        """When the first event of a kind came, from place ``at`` on; and the place after it."""
        while True:
            await settled(lambda at=at: len(self.seen) > at)
            at += 1
            if self.seen[at - 1][0] == kind:
                return self.seen[at - 1][1], at

    @property
    def num_preempted(self) -> int:
        return sum(kind == "preempted" for kind, _ in self.seen)

    def outputs(self) -> dict[str, list[int]]:
        """Tokens by request; each stream is whole, without gap or repeat, and well ended."""
        found = {}
        for number, request_id in enumerate(self.requests):
            session = self.session_of(number)
            session.check(request_id)
            assert session.of(request_id)[-1].HasField("finished"), session.of(request_id)[-1]
            found[request_id] = session.tokens(request_id)
        return found


async def disturb(
    server: ServerProcess, streams: Streams, number: signal.Signals, times: int, dice: random.Random
) -> list[float]:
    """Send a signal to the runner again and again while the streams run; seconds until tokens came again."""
    resumed = []
    for _ in range(times):
        await asyncio.sleep(dice.uniform(0.05, 0.3))
        await streams.next_time("delta", len(streams.seen))
        runner = server.runner
        assert runner is not None
        assert streams.num_ended < len(streams.requests), "the streams were to outlast this"
        sent_at, at = time.monotonic(), len(streams.seen)
        runner.send_signal(number)
        _, at = await streams.next_time("resumed", at)
        token_at, _ = await streams.next_time("delta", at)
        resumed.append(token_at - sent_at)
    print(
        f"{times} times {number.name}: tokens again after {statistics.median(resumed):.2f} s (median), "
        f"{max(resumed):.2f} s (longest)"
    )
    return resumed


def requests(dice: random.Random, num_tokens: int) -> dict[str, dict[str, object]]:
    return {
        f"r{i}": {
            "prompt": dice.choices(range(200), k=dice.randint(1, 60)),
            "level": dice.choice((-10, 0, 0, 10)),
            "max_tokens": num_tokens + i % 7,
        }
        for i in range(NUM_STREAMS)
    }


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGKILL, 4),
        pytest.param(signal.SIGKILL, 10, marks=pytest.mark.deep),
        pytest.param(signal.SIGSTOP, 3, marks=pytest.mark.deep),
    ],
)
async def test_ten_deaths_during_sixty_four_streams_change_no_token(
    number: signal.Signals, times: int, tmp_path: Path
) -> None:
    config = tmp_path / "vorrang.toml"
    config.write_text(f"[engine]\nrunner_hang_s = {10 if number is signal.SIGKILL else 0.5}\n")
    dice = random.Random(4)
    streams = Streams(requests(dice, 150))
    settings = ("--scripted-step-ms", "4", "--max-running-requests", "16", "--kv-blocks", "300")
    log_file = tmp_path / "log"
    with server_process(*settings, "--config", str(config), log=log_file) as server:
        async with streams.running(server.address):
            await disturb(server, streams, number, times, dice)
        assert server.process.poll() is None
        server.terminate()
        assert server.wait() == 0
    log = log_file.read_text()
    for request_id, tokens in streams.outputs().items():
        fields = streams.requests[request_id]
        assert tokens == expected_output(fields["prompt"], fields["max_tokens"])
    assert log.count('"runner.died"') == log.count('"runner.respawned"') == times
    assert log.count('"runner.resumed"') == times
    causes = set(re.findall(r'"cause": "([^"]+)"', log))
    assert causes == {"killed by SIGKILL" if number is signal.SIGKILL else "no sign of life for 0.5 s"}
    assert streams.num_preempted >= times


@pytest.mark.deep
@pytest.mark.asyncio
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_deaths_change_no_token_of_the_real_model(tmp_path: Path) -> None:
    dice = random.Random(5)
    words = ("sea", "mountain", "train", "winter", "letter", "music", "garden", "clock", "river", "bread")
    asked = {
        f"r{i}": {"prompt": " ".join(dice.choices(words, k=12)), "max_tokens": 24, "seed": i,
                  "temperature": 0.0 if i % 4 else 0.8}
        for i in range(6)
    }  # fmt: skip
    undisturbed, disturbed = Streams(asked), Streams(asked)
    settings = ("--threads", "1", "--kv-blocks", "256", "--max-running-requests", "4")
    with server_process(*settings, model=None, log=tmp_path / "log") as server:
        async with undisturbed.running(server.address):
            pass
        async with disturbed.running(server.address):
            await disturb(server, disturbed, signal.SIGKILL, 2, dice)
    assert disturbed.outputs() == undisturbed.outputs()
    assert disturbed.num_preempted >= 2


@pytest.mark.asyncio
async def test_a_request_that_kills_the_runner_twice_fails_alone() -> None:
    runner = await ProcessRunner.start(FatalSource(128, 16), LIMITS)
    good = {f"r{i}": {"prompt": [i, i + 1, i + 2], "max_tokens": 30} for i in range(20)}
    async with running_server(runner=runner) as app:
        streams = Streams(good)
        async with (
            grpc.aio.insecure_channel(app.address) as channel,
            open_session(channel) as session,
            streams.running(app.address),
        ):
            await session.start("bad", spec([1, ABORTS]))
            failed = (await session.end_of("bad")).failed
        assert app.backend.engine.statistics().num_runner_losses == 2
    assert reason_in(failed.status) == "INTERNAL"
    for request_id, tokens in streams.outputs().items():
        assert tokens == expected_output(good[request_id]["prompt"], 30)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_server_whose_runner_hangs_ends_in_time() -> None:
    with server_process("--scripted-step-ms", "5", "--grace-s", "0.2") as server:
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            await session.start("a", spec([1], max_tokens=2000))
            await session.event("delta", "a")
            runner = server.runner
            assert runner is not None
            runner.suspend()
            server.terminate()
            await session.end_of("a")
        assert server.wait() == 0
    assert not runner.is_running()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_server_that_drains_while_its_runner_is_respawned_finishes_what_it_accepted() -> None:
    with server_process("--scripted-step-ms", "2", "--grace-s", "20") as server:
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            await session.start("a", spec([1], max_tokens=300))
            await session.event("delta", "a")
            runner = server.runner
            assert runner is not None
            runner.kill()
            server.terminate()
            assert (await session.end_of("a")).HasField("finished")
        assert server.wait() == 0
    session.check("a")
    assert session.tokens("a") == expected_output([1], 300)
    reasons = [frame.preempted.reason for frame in session.of("a") if frame.HasField("preempted")]
    assert reasons == [types.PREEMPT_REASON_RUNNER]


@pytest.mark.asyncio
async def test_a_stop_while_the_runner_loads_ends_both() -> None:
    async def load_forever() -> Loaded:
        return Loaded(await ProcessRunner.start(FailingSource("sleep"), LIMITS), ScriptedTokenizer())

    app = App(load_settings(None, {"server.listen": "127.0.0.1:0"}).settings, load_forever)
    before = children()
    async with asyncio.TaskGroup() as group:
        group.create_task(app.run(lambda _: pytest.fail("it is ready")))
        await settled(lambda: bool(children() - before))
        app.stop()
    assert children() <= before


@pytest.mark.asyncio
async def test_nothing_that_computes_outlives_a_killed_server() -> None:
    with server_process("--scripted-step-ms", "5") as server:
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            await session.start("a", spec([1], max_tokens=2000))
            await session.event("delta", "a")
            runner = server.runner
            assert runner is not None
            server.process.kill()
            await settled(lambda: not runner.is_running() or runner.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_runner_that_never_comes_back_ends_the_server_with_status_1(tmp_path: Path) -> None:
    config = tmp_path / "vorrang.toml"
    config.write_text("[engine]\nrunner_max_restarts = 0\n")
    with server_process("--scripted-step-ms", "5", "--config", str(config)) as server:
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            await session.start("a", spec([1], max_tokens=2000))
            await session.event("delta", "a")
            runner = server.runner
            assert runner is not None
            runner.kill()
            failed = (await session.end_of("a")).failed
        assert failed.retryable
        assert server.wait() == 1
        log = server.process.stderr.read() if server.process.stderr else ""
    assert '"runner.given_up"' in log


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["process", pytest.param("inline", marks=pytest.mark.deep)])
@pytest.mark.parametrize("what", ["missing", "truncated", pytest.param("pool", marks=pytest.mark.deep)])
@pytest.mark.model
def test_what_keeps_a_model_from_being_loaded_is_said_alike(runner: str, what: str, tmp_path: Path) -> None:
    from tests.support.models import tiny_llama

    folder, more = tmp_path / "model", ()
    if what != "missing":
        folder.mkdir()
        tiny_llama(folder)
    if what == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    if what == "pool":
        more = ("--kv-blocks", str(2**34))
    result = run_cli(
        "serve", "--listen", "127.0.0.1:0", "--runner", runner, "--model", str(folder), *more, timeout_s=60
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    expected = {
        "missing": f"there is no model at {folder}",
        "truncated": "model.safetensors",
        "pool": f"kv pool of {2**34} blocks needs",
    }
    assert line.startswith("vorrang: ")
    assert expected[what] in line
