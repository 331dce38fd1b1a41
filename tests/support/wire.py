"""A session as bare frames: what a test sends and gets, without the client library."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from tests.support import canaries
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import generation_pb2_grpc as gen_grpc
from vorrang.v1 import types_pb2 as types

SESSION = "/vorrang.v1.GenerationService/Session"
TERMINAL = ("finished", "failed")


def spec(
    prompt: str | Sequence[int] = "hello", *, level: int | None = None, **sampling: Any
) -> types.GenerationSpec:
    """A greedy request for 8 tokens, end token or not, unless told otherwise."""
    sampling = {"temperature": 0.0, "max_tokens": 8} | sampling
    message = types.GenerationSpec(
        sampling=types.SamplingParams(**{k: v for k, v in sampling.items() if v is not None})
    )
    if isinstance(prompt, str):
        message.prompt.text = prompt
    else:
        message.prompt.tokens.ids.extend(prompt)
        message.prompt.tokens.SetInParent()
    if level is not None:
        message.priority.level = level
    return message


class WireSession:
    """One session stream; events are kept by request.

    Ids are unique in a tenant and remembered for a while, and tests like short ones: on the
    wire every id has the prefix ``scope``, which is a session's own unless another is given.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: Sequence[tuple[str, str]] = (),
        timeout_s: float | None = None,
        scope: str | None = None,
    ) -> None:
        self.scope = secrets.token_hex(6) + "/" if scope is None else scope
        method = channel.stream_stream(SESSION, None, gen.SessionResponse.FromString)
        self.call = method(metadata=tuple(metadata), timeout=timeout_s)
        self.frames: list[gen.SessionResponse] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()

    async def send(self, **command: Any) -> None:
        """Send a frame, such as ``cancel=gen.CancelCommand(...)``."""
        frame = gen.SessionRequest(**command)
        for body in command.values():
            if hasattr(body, "request_id"):
                getattr(frame, frame.WhichOneof("command")).request_id = self.scope + body.request_id
        await self.call.write(frame.SerializeToString())

    async def send_raw(self, raw: bytes) -> None:
        """Send bytes."""
        await self.call.write(raw)

    async def open(self, **fields: Any) -> gen.OpenedEvent:
        """Open, and wait for the answer."""
        await self.send(open=gen.OpenCommand(client_name="test", **fields))
        return (await self.until(lambda frame: frame.HasField("opened"))).opened

    async def start(
        self, request_id: str, message: types.GenerationSpec | None = None, **fields: Any
    ) -> None:
        """Start a request."""
        message = spec(**fields) if message is None else message
        await self.send(start=gen.StartCommand(request_id=request_id, spec=message))

    async def cancel(self, request_id: str) -> None:
        """Cancel a request."""
        await self.send(cancel=gen.CancelCommand(request_id=request_id))

    async def reprioritize(self, request_id: str, level: int) -> None:
        """Give a request another level."""
        command = gen.ReprioritizeCommand(request_id=request_id, priority=types.Priority(level=level))
        await self.send(reprioritize=command)

    async def credit(self, request_id: str, tokens: int = 0, acknowledged: int | None = None) -> None:
        """Grant tokens, and say what was kept."""
        command = gen.CreditCommand(request_id=request_id, tokens=tokens, acknowledged_sequence=acknowledged)
        await self.send(credit=command)

    async def pause(self, request_id: str) -> None:
        """Pause a request."""
        await self.send(pause=gen.PauseCommand(request_id=request_id))

    async def unpause(self, request_id: str) -> None:
        """Let it go on."""
        await self.send(unpause=gen.UnpauseCommand(request_id=request_id))

    async def resume(self, request_id: str, after: int) -> None:
        """Take up a request of a lost session."""
        await self.send(resume=gen.ResumeCommand(request_id=request_id, after_sequence=after))

    async def half_close(self) -> None:
        """No more frames."""
        await self.call.done_writing()

    async def next(self) -> gen.SessionResponse:
        """The next frame; it is kept in ``frames`` too.

        Raises:
            grpc.aio.AioRpcError: the stream ended with a bad status.
            EOFError: it ended well.
        """
        frame = await self.call.read()
        if frame is grpc.aio.EOF:
            if await self.call.code() is not grpc.StatusCode.OK:
                raise await rpc_error(self.call)
            raise EOFError
        frame.request_id = frame.request_id.removeprefix(self.scope)
        self.frames.append(frame)
        return frame

    async def until(self, holds: Callable[[gen.SessionResponse], bool]) -> gen.SessionResponse:
        """The first frame from now on for which ``holds``."""
        while True:
            frame = await self.next()
            if holds(frame):
                return frame

    async def event(self, kind: str, request_id: str = "") -> Any:
        """The next event of a kind; of one request when an id is given."""
        frame = await self.until(
            lambda frame: frame.WhichOneof("event") == kind and request_id in ("", frame.request_id)
        )
        return getattr(frame, kind)

    async def end_of(self, request_id: str) -> gen.SessionResponse:
        """The terminal frame of a request."""
        return await self.until(lambda f: f.request_id == request_id and f.WhichOneof("event") in TERMINAL)

    async def to_the_end(self) -> None:
        """Read until the stream ends well."""
        with contextlib.suppress(EOFError):
            while True:
                await self.next()

    def of(self, request_id: str) -> list[gen.SessionResponse]:
        """Frames of a request so far, without rejections."""
        return [f for f in self.frames if f.request_id == request_id and not f.HasField("command_rejected")]

    def kinds(self, request_id: str) -> list[str]:
        """Kinds of its events so far."""
        return [frame.WhichOneof("event") or "" for frame in self.of(request_id)]

    def tokens(self, request_id: str) -> list[int]:
        """Its output so far."""
        return [i for frame in self.of(request_id) for i in frame.delta.token_ids]

    def text(self, request_id: str) -> str:
        """Its text so far."""
        return "".join(frame.delta.text for frame in self.of(request_id))

    def check(self, request_id: str) -> None:
        """Assert what holds for every stream of events that has ended."""
        frames, kinds = self.of(request_id), self.kinds(request_id)
        assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
        assert [kind in TERMINAL for kind in kinds] == [False] * (len(kinds) - 1) + [True], kinds
        assert kinds[0] in ("accepted", "failed")
        deltas = [frame.delta for frame in frames if frame.delta.token_ids]
        starts, sizes = [d.first_token_index for d in deltas], [len(d.token_ids) for d in deltas]
        assert starts == [sum(sizes[:i]) for i in range(len(sizes))], "a gap or a repetition"


@contextlib.asynccontextmanager
async def open_session(channel: grpc.aio.Channel, **fields: Any) -> AsyncIterator[WireSession]:
    """A session that is open."""
    async with WireSession(channel) as session:
        await session.open(**fields)
        yield session


def stub(channel: grpc.aio.Channel) -> Any:
    """The generated stub."""
    return gen_grpc.GenerationServiceStub(channel)


async def rpc_error(call: Any) -> grpc.aio.AioRpcError:
    """The error a finished call ended with."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def status_in(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The rich status a call ended with; its code and message must agree with the call's own."""
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    canaries.check(f"{status} {error.trailing_metadata()}", "a status")
    return status


def reason_in(status: status_pb2.Status) -> str:
    """The reason of a status, whose domain must be ours."""
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info), "the first detail is ErrorInfo"
    assert info.domain == "vorrang"
    return info.reason


def fields_in(status: status_pb2.Status) -> list[str]:
    """The field paths of a status's BadRequest."""
    bad = error_details_pb2.BadRequest()
    return [v.field for detail in status.details if detail.Unpack(bad) for v in bad.field_violations]


async def refused(awaitable: Any) -> status_pb2.Status:
    """The rich status with which a call is refused."""
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        return status_in(error)
    raise AssertionError("the call succeeded")


async def settled(holds: Callable[[], bool]) -> None:
    """Let the event loop turn until ``holds``; the test's own timeout is the bound."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def let_pass(seconds: float) -> None:
    """All timers of the running event loop are nearer by so much."""
    loop = asyncio.get_running_loop()
    time_s = loop.time
    loop.time = lambda: time_s() + seconds  # type: ignore[method-assign]
