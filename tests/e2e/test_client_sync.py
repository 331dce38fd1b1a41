"""The Python client for programs without an event loop, against a real server."""

import asyncio
import inspect
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from clients.python import (
    Accepted,
    ConnectionLost,
    Delta,
    Finished,
    InvalidRequest,
    SessionClosed,
    SyncClient,
    SyncStream,
    VorrangClient,
    VorrangError,
)
from clients.python.options import ClientOptions, SessionOptions
from engine.runner.scripted import expected_output
from tests.support.process import ROOT, ServerProcess, environment, server_process
from tests.support.server import running_server
from tests.support.wire import settled

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as process:
        yield process


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("vorrang")]


def output(stream: SyncStream) -> list[int]:
    return list(stream.result().token_ids)


def test_calls_and_sessions_block_and_leave_no_thread_behind(server: ServerProcess) -> None:
    with SyncClient(server.address) as client:
        client.wait_ready(10)
        assert client.get_model().vocabulary_size > 0
        assert client.detokenize(client.tokenize("abc")) == "abc"
        assert list(client.generate(token_ids=[1], temperature=0.0, max_tokens=5).token_ids) == (
            expected_output([1], 5)
        )
        with client.generate_stream(token_ids=[2], temperature=0.0, max_tokens=5) as stream:
            events = list(stream)
        assert [type(event) for event in (events[0], events[-1])] == [Accepted, Finished]
        assert sum(len(e.token_ids) for e in events if isinstance(e, Delta)) == 5
        with client.session(default_priority="batch") as session:
            assert session.connected
            one = session.start(token_ids=[3], temperature=0.0, max_tokens=200, credit_tokens=1)
            assert isinstance(next(one), Accepted)
            assert one.reprioritize("interactive").level == -10
            one.pause()
            one.unpause()
            two = session.start(token_ids=[4], max_tokens=500, credit_tokens=1)
            two.cancel()
            assert two.result().finish_reason == "CANCELLED"
            assert output(one) == expected_output([3], 200)
            assert one.last_sequence > 0
            assert session.alive == 0
            with pytest.raises(InvalidRequest):
                session.start("x", temperature=-1.0).text()
        with pytest.raises(VorrangError):
            session.start("x")
    assert client_threads() == []
    with pytest.raises(SessionClosed, match="outside its `with` block"):
        client.generate("x")


def test_many_threads_may_use_one_session(server: ServerProcess) -> None:
    with SyncClient(server.address) as client, client.session() as session:

        def work(number: int) -> None:
            for _ in range(5):
                stream = session.start(token_ids=[number + 1], temperature=0.0, max_tokens=20)
                assert output(stream) == expected_output([number + 1], 20)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))


def test_clients_share_a_thread_that_ends_with_the_last(server: ServerProcess) -> None:
    with SyncClient(server.address) as one:
        (thread,) = client_threads()
        with SyncClient(server.address) as two:
            assert client_threads() == [thread]
            two.get_model()
        one.get_model()
        assert client_threads() == [thread]
    assert client_threads() == []
    assert not thread.is_alive()


def test_leaving_the_client_ends_the_waiting_of_other_threads(server: ServerProcess) -> None:
    with ThreadPoolExecutor(2) as pool:
        with SyncClient(server.address) as client:
            session = client.session(keep_credit=False)
            session.__enter__()
            stream = session.start(token_ids=[1], max_tokens=50, credit_tokens=1)
            reading = pool.submit(stream.result)
            call = pool.submit(client.wait_ready, 30)
            assert call.result(10) is None
            assert not reading.done()
        with pytest.raises((SessionClosed, ConnectionLost)):
            reading.result(10)
        with pytest.raises(SessionClosed):
            session.cancel(stream.request_id)
    assert client_threads() == []


def test_an_error_on_entering_leaves_no_thread_behind() -> None:
    with pytest.raises(ConnectionLost), SyncClient("127.0.0.1:1") as client, client.session():
        pytest.fail("the session must not open")
    assert client_threads() == []
    with pytest.raises(ValueError, match="attempts_max"):
        SyncClient("127.0.0.1:1", attempts_max=9)


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from clients.python import SyncClient
with SyncClient(sys.argv[1]) as client:
    if sys.argv[2] == "call":
        print("ready", flush=True)
        client.generate("x", max_tokens=400)
    elif sys.argv[2] == "stream":
        for event in client.generate_stream("x", max_tokens=400):
            print("ready", flush=True)
    elif sys.argv[2] == "session":
        with client.session() as session:
            stream = session.start("x", max_tokens=400, credit_tokens=1)
            next(stream)
            print("ready", flush=True)
            stream.result()
    elif sys.argv[2] == "leaving":
        with client.session() as session:
            stream = session.start("x", max_tokens=400)
            next(stream)
            print("ready", flush=True)
"""


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["call", "stream", "session", "leaving"])
async def test_ctrl_c_ends_at_once_and_cancels_on_the_server(where: str) -> None:
    settings = {"engine.scripted_step_s": 0.05, "session.resume_grace_s": 0.5}
    async with running_server(settings) as app:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", INTERRUPTED, app.address, where),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        await settled(lambda: app.backend.engine.statistics().num_alive == 1)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            _, errors = await process.communicate()
            assert errors.decode().rstrip().endswith("KeyboardInterrupt"), errors.decode()
            await settled(lambda: app.backend.engine.statistics().num_alive == 0)
        assert process.returncode == -signal.SIGINT


def test_options_are_those_of_the_async_client() -> None:
    for options, taker in ((ClientOptions, VorrangClient.__init__), (SessionOptions, VorrangClient.session)):
        parameters = inspect.signature(taker).parameters
        assert options.__annotations__.keys() == {
            name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY
        }


def test_everything_the_async_client_can_do_is_there() -> None:
    from clients.python import RequestStream, Session, SyncRequestStream, SyncSession

    hidden = {"end", "try_credit"}  # for other parts of the client
    streams = {"feed", "fail", "take_up", "mark_cancelled", "mark_paused", "mark_granted", "is_known"}
    hidden |= streams | {"has_begun"}
    for one, other in (
        (VorrangClient, SyncClient),
        (Session, SyncSession),
        (RequestStream, SyncRequestStream),
    ):
        names = {name for name in dir(one) if not name.startswith("_")} - hidden
        assert names <= {name for name in dir(other) if not name.startswith("_")}
