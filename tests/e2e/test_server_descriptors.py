"""A server that is short of file descriptors refuses connections, and goes on with all else."""

import asyncio
import contextlib
import json
import random
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from engine import descriptors
from engine.runner.scripted import expected_output
from tests.support.process import ServerProcess, server_process
from tests.support.wire import WireSession, open_session, spec

pytestmark = pytest.mark.asyncio

OPEN_FILES, NUM_IDLE, NUM_REQUESTS, NUM_KILLS = 1024, 1100, 64, 5
#: What a client says first, with settings that are empty.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    """This process has an end of every connection, too."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors.raise_limit() < NUM_IDLE + 400:
        pytest.skip("this process may not have so many descriptors")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def idle_connections(address: str, number: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Connections that say hello and nothing else."""
    host, _, port = address.rpartition(":")
    found = []
    for _ in range(number):
        connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        with contextlib.suppress(ConnectionError):
            connection.sendall(PREFACE)
        connection.setblocking(False)
        found.append(connection)
    return found


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed it."""
    try:
        while said := connection.recv(65536):
            assert said
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


def logged(log: Path, event: str) -> list[dict[str, object]]:
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    return [line for line in lines if line.get("event") == event]


async def read(session: WireSession) -> None:
    """Everything, to the end."""
    with contextlib.suppress(EOFError):
        while True:
            await session.next()


def num_of(session: WireSession, kind: str) -> int:
    return sum(frame.WhichOneof("event") == kind for frame in session.frames)


async def sooner_or_later(holds: Callable[[], bool]) -> None:
    """As ``settled``, for what takes a while to look at."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def kill_runner(server: ServerProcess, session: WireSession, log: Path, number: int) -> None:
    """Kill it in the midst of tokens, and wait for another one and for tokens again."""
    at = num_of(session, "delta")
    await sooner_or_later(lambda: num_of(session, "delta") > at)
    runner = server.runner
    assert runner is not None
    assert num_of(session, "finished") < NUM_REQUESTS, "the requests were to outlast this"
    runner.kill()
    await sooner_or_later(lambda: len(logged(log, "runner.respawned")) == number)


@pytest.mark.slow
async def test_five_deaths_of_the_runner_beside_more_idle_connections_than_descriptors_lose_nothing(
    tmp_path: Path,
) -> None:
    dice = random.Random(15)
    prompts = {f"r{i}": dice.choices(range(200), k=dice.randint(1, 40)) for i in range(NUM_REQUESTS)}
    num_tokens = 150
    settings = ("--scripted-step-ms", "4", "--max-running-requests", "16", "--kv-blocks", "300")
    log = tmp_path / "log"
    with server_process(*settings, log=log, open_files=OPEN_FILES) as server, contextlib.ExitStack() as stack:
        (limited,) = logged(log, "server.connections_limited")
        most = limited["of_clients"]
        assert isinstance(most, int)
        assert OPEN_FILES // 2 < most < OPEN_FILES - descriptors.NUM_KEPT
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            for request_id, prompt in prompts.items():
                await session.start(request_id, spec(prompt, max_tokens=num_tokens))
            await session.event("delta")
            idle = await asyncio.to_thread(idle_connections, server.address, NUM_IDLE, stack)
            await sooner_or_later(lambda: sum(map(is_open, idle)) == most - 1)  # one is the session's
            async with asyncio.TaskGroup() as group:
                group.create_task(read(session))
                for number in range(1, NUM_KILLS + 1):
                    await kill_runner(server, session, log, number)
                assert sum(map(is_open, idle)) == most - 1
                await session.half_close()
        for request_id, prompt in prompts.items():
            session.check(request_id)
            assert session.of(request_id)[-1].HasField("finished"), session.of(request_id)[-1]
            assert session.tokens(request_id) == expected_output(prompt, num_tokens)
        stack.close()  # those that were idle go away
        async with grpc.aio.insecure_channel(server.address) as channel, open_session(channel) as session:
            await session.start("later", spec([1, 2, 3]))
            assert (await session.end_of("later")).HasField("finished")
        server.terminate()
        assert server.wait() == 0
    assert len(logged(log, "runner.respawned")) == NUM_KILLS
    assert not logged(log, "runner.start_failed")
