"""A session over a fake stream: what depends on exact timing of reads and writes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
import pytest

from engine.errors import MalformedFrame
from engine.loop import Engine
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.scheduler.config import SchedulerConfig
from server.backend import Backend
from server.sections import ServerSection, SessionSection
from server.session import Session
from server.session_writer import MAX_WAITING_FRAMES
from tests.support.wire import reason_in, settled, spec
from vorrang.v1 import generation_pb2 as gen

pytestmark = pytest.mark.asyncio


class FakeStream:
    """The context of a session call: a list of frames to read, a list of frames written."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = list(frames)
        self.num_read = 0
        self.written: list[gen.SessionResponse] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.gone = False
        self.may_end = asyncio.Event()
        self.may_end.set()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> Any:
        if self.num_read == len(self._frames):
            await self.may_end.wait()
            return grpc.aio.EOF
        self.num_read += 1
        return self._frames[self.num_read - 1]

    async def write(self, raw: bytes) -> None:
        await self.may_write.wait()
        if self.gone:
            raise grpc.aio.UsageError("RPC already finished.")
        self.written.append(gen.SessionResponse.FromString(raw))


def frame(**command: Any) -> bytes:
    return gen.SessionRequest(**command).SerializeToString()


def start(request_id: str, **fields: Any) -> bytes:
    return frame(start=gen.StartCommand(request_id=request_id, spec=spec([1], **fields)))


OPEN = frame(open=gen.OpenCommand())


def make_backend(**settings: Any) -> Backend:
    of_sessions = {name: settings.pop(name) for name in list(settings) if name in SessionSection.model_fields}
    backend = Backend(
        ServerSection(**settings), sessions=SessionSection(**({"resume_grace_s": 0} | of_sessions))
    )
    engine = Engine(ScriptedRunner(64, 16), ScriptedTokenizer(), SchedulerConfig(), check_integrity=True)
    backend.set_engine(engine)
    return backend


async def serve(backend: Backend, stream: FakeStream) -> None:
    """Run a session to its end beside a running engine."""
    async with asyncio.TaskGroup() as group:
        engine = group.create_task(backend.engine.run())
        try:
            await Session(backend, stream).run()  # type: ignore[arg-type]
        finally:
            await settled(lambda: backend.engine.statistics().num_alive == 0)
            engine.cancel()
    assert backend.statistics().num_requests == backend.statistics().num_sessions == 0


async def test_nothing_is_read_after_the_last_bad_frame() -> None:
    stream = FakeStream([OPEN, *[b"\xff"] * 9, start("late")])
    with pytest.raises(BaseExceptionGroup) as caught:
        await serve(make_backend(max_bad_frames=3), stream)
    assert caught.group_contains(MalformedFrame)
    assert stream.num_read == 4
    assert [f.WhichOneof("event") for f in stream.written] == ["opened", *["command_rejected"] * 3]


async def test_a_client_that_does_not_read_its_rejections_is_not_read_from() -> None:
    num_frames = 4 * MAX_WAITING_FRAMES
    stream = FakeStream([OPEN, *[b""] * num_frames])
    stream.may_write.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(make_backend(), stream))
        await settled(lambda: stream.num_read >= MAX_WAITING_FRAMES)
        for _ in range(100):
            await asyncio.sleep(0)
        assert stream.num_read <= MAX_WAITING_FRAMES + 2
        stream.may_write.set()
    assert len(stream.written) == 1 + num_frames


async def test_refused_starts_wait_for_the_reader_like_rejections() -> None:
    num_frames = 4 * MAX_WAITING_FRAMES
    stream = FakeStream([OPEN, *[start(f"r{number}", temperature=-1) for number in range(num_frames)]])
    stream.may_write.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(make_backend(), stream))
        await settled(lambda: stream.num_read >= MAX_WAITING_FRAMES)
        for _ in range(100):
            await asyncio.sleep(0)
        assert stream.num_read <= MAX_WAITING_FRAMES + 2
        stream.may_write.set()
    assert [(f.request_id, f.sequence) for f in stream.written[1:]] == [
        (f"r{n}", 1) for n in range(num_frames)
    ]


async def test_a_write_to_a_client_that_left_ends_the_session_and_its_requests() -> None:
    stream = FakeStream([OPEN, start("a", max_tokens=500), start("b", max_tokens=500)])
    stream.gone = True
    with pytest.raises(BaseExceptionGroup) as caught:
        await serve(make_backend(), stream)
    assert "PeerGone" in repr(caught.value)
    assert stream.written == []


@pytest.mark.parametrize("hold", ["credit", "pause"])
@pytest.mark.parametrize("gone", [False, True], ids=["half-closed", "gone"])
async def test_a_peer_that_is_gone_is_not_taken_for_one_that_half_closed(hold: str, gone: bool) -> None:
    """To the reader both are the end of the file; what holds a request is lifted only by a half-close."""
    opened = frame(open=gen.OpenCommand(default_credit_tokens=0 if hold == "credit" else 100))
    pause = [frame(pause=gen.PauseCommand(request_id="a"))] if hold == "pause" else []
    stream, backend = FakeStream([opened, start("a"), *pause]), make_backend()
    stream.may_end.clear()
    serving = asyncio.ensure_future(serve(backend, stream))
    await settled(lambda: len(stream.written) == 2)  # opened and accepted
    stream.gone = gone
    stream.may_end.set()
    await asyncio.wait([serving])
    assert ("PeerGone" in repr(serving.exception())) is gone
    assert backend.engine.statistics().num_output_tokens == (0 if gone else 8)


async def test_a_cancelled_handler_leaves_nothing() -> None:
    backend = make_backend()
    stream = FakeStream([OPEN, start("a", max_tokens=500)])
    stream.may_write.clear()
    async with asyncio.TaskGroup() as group:
        engine = group.create_task(backend.engine.run())
        handler = group.create_task(Session(backend, stream).run())  # type: ignore[arg-type]
        await settled(lambda: backend.statistics().num_requests == 1)
        handler.cancel()
        await asyncio.wait([handler])
        assert handler.cancelled()
        await settled(lambda: backend.engine.statistics().num_alive == 0)
        engine.cancel()
    assert backend.statistics().num_requests == backend.statistics().num_sessions == 0


async def test_ids_of_ended_requests_are_remembered_for_a_while_and_then_free_again() -> None:
    backend = make_backend(max_retained_requests=2)
    runs = [start(name, max_tokens=1) for name in ("a", "b", "c")]
    stream = FakeStream([OPEN, start("c", max_tokens=2), start("a", max_tokens=2)])
    async with asyncio.TaskGroup() as group:
        engine = group.create_task(backend.engine.run())
        await Session(backend, FakeStream([OPEN, *runs])).run()  # type: ignore[arg-type]
        await Session(backend, stream).run()  # type: ignore[arg-type]
        engine.cancel()
    rejected = [f for f in stream.written if f.HasField("command_rejected")]
    assert [f.request_id for f in rejected] == ["c"]
    assert reason_in(rejected[0].command_rejected.status) == "DUPLICATE_REQUEST_ID"
    assert [f.request_id for f in stream.written if f.HasField("finished")] == ["a"]


async def test_the_id_of_a_refused_start_is_free_at_once() -> None:
    stream = FakeStream([OPEN, start("a", temperature=-1), start("a", max_tokens=1)])
    await serve(make_backend(), stream)
    kinds = [f.WhichOneof("event") for f in stream.written if f.request_id == "a"]
    assert kinds[:2] == ["failed", "accepted"]
    assert kinds[-1] == "finished"


class OpenStream(FakeStream):
    """Frames can be added while it is read; the end comes with ``close``."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        super().__init__([])
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        for raw in frames:
            self.frames.put_nowait(raw)

    async def read(self) -> Any:
        self.num_read += 1
        return await self.frames.get()


def resume(request_id: str, after: int = 0) -> bytes:
    return frame(resume=gen.ResumeCommand(request_id=request_id, after_sequence=after))


async def test_a_stream_that_lost_its_session_is_not_obeyed_any_more() -> None:
    """Its frames may still arrive; they would take the requests back to a stream that is ending."""
    backend = make_backend(resume_grace_s=10)
    message = spec([1], max_tokens=9)
    message.credit_tokens = 2
    begin = frame(start=gen.StartCommand(request_id="a", spec=message))
    old = OpenStream([OPEN, begin])
    async with asyncio.TaskGroup() as group:
        engine = group.create_task(backend.engine.run())
        first = asyncio.ensure_future(Session(backend, old).run())  # type: ignore[arg-type]
        await settled(lambda: any(f.HasField("delta") for f in old.written))
        token = old.written[0].opened.session_token
        taking = frame(open=gen.OpenCommand(resume_session_token=token))
        new = OpenStream([taking, resume("a")])
        second = asyncio.ensure_future(Session(backend, new).run())  # type: ignore[arg-type]
        for _ in range(3):  # between the take-over and the end of the first stream's tasks
            old.frames.put_nowait(begin)
            await asyncio.sleep(0)
        await asyncio.wait([first])
        new.frames.put_nowait(frame(credit=gen.CreditCommand(request_id="a", tokens=9)))
        await settled(lambda: any(f.HasField("finished") for f in new.written))
        new.frames.put_nowait(grpc.aio.EOF)
        await second
        engine.cancel()
    assert "another stream" in str(first.exception())
    assert [f.sequence for f in new.written[1:]] == list(range(1, len(new.written)))
    backend.registry.check_integrity()
    backend.registry.close()


async def test_a_start_whose_prompt_was_being_tokenised_is_started_anew() -> None:
    backend = make_backend(resume_grace_s=10)
    begin = start("a", max_tokens=3)
    old = OpenStream([OPEN, begin])
    async with asyncio.TaskGroup() as group:
        engine = group.create_task(backend.engine.run())
        submit = backend.submit
        backend.submit = lambda *args, **kwargs: pytest.fail("the first stream submits")  # type: ignore[method-assign]
        turn = asyncio.Event()

        async def slow(draft: Any, _: Any) -> list[int]:
            await turn.wait()
            return [1]

        backend.token_ids_of, quick = slow, backend.token_ids_of  # type: ignore[method-assign]
        try:
            first = asyncio.ensure_future(Session(backend, old).run())  # type: ignore[arg-type]
            await settled(lambda: backend.registry.num_requests == 1)
            other = OpenStream([OPEN, begin])
            backend.token_ids_of = quick  # type: ignore[method-assign]
            backend.submit = submit  # type: ignore[method-assign]
            second = asyncio.ensure_future(Session(backend, other).run())  # type: ignore[arg-type]
            await settled(lambda: any(f.HasField("finished") for f in other.written))
            backend.submit = lambda *args, **kwargs: pytest.fail("submitted twice")  # type: ignore[method-assign]
            turn.set()
        finally:
            backend.token_ids_of = quick  # type: ignore[method-assign]
        for stream in (old, other):
            stream.frames.put_nowait(grpc.aio.EOF)
        await asyncio.gather(first, second)
        engine.cancel()
    assert [f.WhichOneof("event") for f in old.written] == ["opened"]
    assert [f.sequence for f in other.written[1:]] == list(range(1, len(other.written)))
    backend.registry.close()
