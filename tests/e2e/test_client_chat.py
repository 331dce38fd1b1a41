"""``vorrangctl chat``, without a terminal and in one, against a scripted server."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.e2e.test_client_cli import AS_A_USER, ctl
from tests.support.fake_server import FakeServer, FakeSession, abort, delta, finished, status
from vorrang.v1 import generation_pb2 as pb
from vorrang.v1 import types_pb2

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


async def get_model(request: Any, context: Any) -> Any:
    return pb.GetModelResponse(name="m")


async def test_without_a_terminal_it_answers_line_by_line_and_remembers():
    asked = []

    async def script(session: FakeSession) -> None:
        await session.open(session_token="t")
        for number in (1, 2, 3, 4):
            start = await session.receive("start")
            asked.append([(m.role, m.content) for m in start.spec.prompt.chat.messages])
            assert start.spec.adapter == "polite"
            request_id = start.request_id
            if asked[-1][-1][1] == "bad":
                refusal = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue is full")
                await session.send(request_id, failed=pb.FailedEvent(status=refusal))
                continue
            await session.send(request_id, accepted=pb.AcceptedEvent(level=-10, queue_position=2))
            await session.send(request_id, queue_update=pb.QueueUpdateEvent(queue_position=1))
            await session.send(request_id, started=pb.StartedEvent())
            await session.send(request_id, delta=delta(0, number))
            await session.send(request_id, preempted=pb.PreemptedEvent(count=1))
            await session.send(request_id, resumed=pb.ResumedEvent())
            await session.send(request_id, finished=finished("STOP"))
        await session.receive_end()

    async with FakeServer(script, calls={"GetModel": get_model}) as server:
        stdin = "one\nbad\n/priority nonsense\n/priority 5\ntwo\n/reset\n\n/nonsense\nthree\n/quit\nnever\n"
        code, out, err = await ctl("chat", "--adapter", "polite", target=server.target, stdin=stdin)
    assert code == 0, err
    assert [line for line in out.splitlines() if line] == ["1 ", "3 ", "4 "]
    assert asked == [
        [("user", "one")],
        [("user", "one"), ("assistant", "1 "), ("user", "bad")],
        [("user", "one"), ("assistant", "1 "), ("user", "two")],
        [("user", "three")],
    ]
    for line in ("queued, 2 ahead", "queued, 1 ahead", "PREEMPTED", "the queue is full", "/priority"):
        assert line in err
    assert "priority must be interactive, standard, batch or a level from -100 to 100" in err


async def test_a_session_that_is_lost_for_good_is_followed_by_another():
    async def script(session: FakeSession) -> None:
        await session.open()  # no token: nothing can be resumed
        request_id = await session.accept()
        if not lost:
            lost.append(True)
            await session.send(request_id, delta=delta(0, 1))
            await abort(session.context, grpc.StatusCode.UNAVAILABLE)
        await session.send(request_id, delta=delta(0, 2))
        await session.send(request_id, finished=finished("STOP"))
        await session.receive_end()

    lost: list[bool] = []
    async with FakeServer(script, calls={"GetModel": get_model}) as server:
        code, out, err = await ctl("chat", target=server.target, stdin="one\ntwo\n")
    assert code == 0, err
    assert [line for line in out.splitlines() if line] == ["1 ", "2 "]


class Terminal:
    """A terminal of 100 columns in which the chat runs."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self._master = master
        self._shown = ""
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the chat has ended
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self._shown += data.decode(errors="replace")
        self._news.set()

    async def shows(self, text: str) -> None:
        """Wait until ``text`` is shown, after what was waited for before."""
        try:
            async with asyncio.timeout(20):
                while text not in (plain := _ESCAPE.sub("", self._shown)):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{text!r} is not in {self._shown!r}") from None
        self._shown = plain.partition(text)[2]

    def type(self, text: str) -> None:
        """Type ``text``."""
        os.write(self._master, text.encode())


@asynccontextmanager
async def chatting(target: str) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AS_A_USER, "chat", "--target", target),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)


async def test_in_a_terminal_one_sees_the_queue_changes_the_priority_and_stops_an_answer():
    steps = [asyncio.Event() for _ in range(4)]

    async def first(session: FakeSession) -> None:
        await session.open(session_token="t", default_credit_tokens=100)
        start = await session.receive("start")
        assert start.spec.priority.class_name == "interactive"
        await session.send(
            start.request_id, sequence=1, accepted=pb.AcceptedEvent(level=-10, queue_position=3)
        )
        command = await session.receive("reprioritize")
        assert command.priority.class_name == "batch"
        await session.send(start.request_id, sequence=2, priority_changed=pb.PriorityChangedEvent(level=10))
        await session.send(start.request_id, sequence=3, queue_update=pb.QueueUpdateEvent(queue_position=7))
        await steps[0].wait()
        await session.send(start.request_id, sequence=4, started=pb.StartedEvent())
        await session.send(start.request_id, sequence=5, delta=delta(0, 11, 22))
        reason = types_pb2.PREEMPT_REASON_SEATS
        await session.send(start.request_id, sequence=6, preempted=pb.PreemptedEvent(reason=reason, count=1))
        await steps[1].wait()
        await abort(session.context, grpc.StatusCode.UNAVAILABLE)

    async def second(session: FakeSession) -> None:
        await steps[2].wait()
        await session.open(session_token="t", default_credit_tokens=100)
        resume = await session.receive("resume")
        assert resume.after_sequence == 6
        await session.send(resume.request_id, sequence=7, resumed=pb.ResumedEvent())
        await session.send(resume.request_id, sequence=8, delta=delta(2, 33))
        assert (await session.receive("cancel")).request_id == resume.request_id
        await session.send(resume.request_id, sequence=9, finished=finished("CANCELLED"))
        start = await session.receive("start")
        assert start.spec.priority.class_name == "batch"
        said = [m.content for m in start.spec.prompt.chat.messages]
        assert said == ["one", "11 22 33 ", "typed ahead"]
        await session.send(start.request_id, sequence=1, delta=delta(0, 44))
        await session.send(start.request_id, sequence=2, finished=finished("STOP"))
        await session.receive_end()

    scripts = [first, second]

    async def script(session: FakeSession) -> None:
        await scripts.pop(0)(session)

    async with (
        FakeServer(script, calls={"GetModel": get_model}) as server,
        chatting(server.target) as terminal,
    ):
        await terminal.shows("[interactive] > ")
        terminal.type("one\n")
        await terminal.shows("queued, 3 ahead | level -10")
        terminal.type("/priority batc")
        await terminal.shows("> /priority batc")
        terminal.type("h\n")
        await terminal.shows("queued, 7 ahead | level 10")
        steps[0].set()
        await terminal.shows("11 22 ‖")
        await terminal.shows("PREEMPTED")
        steps[1].set()
        await terminal.shows("connection lost, looking for the server | PREEMPTED")
        steps[2].set()
        await terminal.shows("11 22 ‖33")
        terminal.type("typed ahead\n")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.shows("stopped | level 10 | 3 tokens | preempted 1x")
        await terminal.shows("[batch] > typed ahead")
        await terminal.shows("44")
        await terminal.shows("done | STOP")
        terminal.type("/quit\n")
        async with asyncio.timeout(20):
            assert await terminal.process.wait() == 0
    assert not scripts
