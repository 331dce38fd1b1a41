"""A server whose every answer is written in the test, for the tests of clients.

A script plays the server's side of one call: it reads frames with
``FakeSession.receive`` and answers with ``FakeSession.send``. A script that
fails (an unexpected frame, a failed assertion) fails the test when the fake is
left; one that is cancelled (the client went away) sets ``FakeServer.cancelled``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from vorrang.v1 import generation_pb2, generation_pb2_grpc, types_pb2

SessionScript = Callable[["FakeSession"], Awaitable[None]]
CallScript = Callable[[Any, Any], Awaitable[Any]]


def status(code: grpc.StatusCode, reason: str = "", message: str = "no", *details: Any) -> status_pb2.Status:
    """A status with ErrorInfo, as Vorrang sends it."""
    packed = []
    if reason:
        details = (error_details_pb2.ErrorInfo(reason=reason, domain="vorrang"), *details)
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code.value[0], message=message, details=packed)


async def abort(context: Any, code: grpc.StatusCode, *arguments: Any) -> None:
    """End the call with ``status(code, *arguments)``."""
    attached = status(code, *arguments)
    await context.abort(code, attached.message, (("grpc-status-details-bin", attached.SerializeToString()),))


def delta(first: int, *token_ids: int) -> generation_pb2.DeltaEvent:
    """A delta whose text is its token ids, each followed by a blank."""
    return generation_pb2.DeltaEvent(
        first_token_index=first, token_ids=token_ids, text="".join(f"{i} " for i in token_ids)
    )


def finished(reason: str = "LENGTH", **usage: int) -> generation_pb2.FinishedEvent:
    """A finish with the given reason and usage."""
    return generation_pb2.FinishedEvent(
        reason=types_pb2.FinishReason.Value(f"FINISH_REASON_{reason}"), usage=types_pb2.Usage(**usage)
    )


class FakeSession:
    """The server's side of one session."""

    def __init__(self, context: Any, server: "FakeServer") -> None:
        self.context = context
        self.server = server

    async def receive(self, command: str) -> Any:
        """The next frame, which must hold ``command``."""
        frame = await self.context.read()
        assert frame is not grpc.aio.EOF, f"half-close instead of {command}"
        assert frame.WhichOneof("command") == command, frame
        return getattr(frame, command)

    async def receive_end(self) -> None:
        """The client's half-close."""
        frame = await self.context.read()
        assert frame is grpc.aio.EOF, frame

    async def send(self, request_id: str = "", **event: Any) -> None:
        """Send one event, given by its field name."""
        await self.context.write(generation_pb2.SessionResponse(request_id=request_id, **event))

    async def open(self, **fields: Any) -> Any:
        """Receive ``open`` and answer it."""
        command = await self.receive("open")
        await self.send(opened=generation_pb2.OpenedEvent(**fields))
        return command

    async def accept(self, **fields: Any) -> str:
        """Receive ``start``, accept it, and return its id."""
        start = await self.receive("start")
        await self.send(start.request_id, accepted=generation_pb2.AcceptedEvent(**fields))
        return start.request_id

    async def vanish(self) -> None:
        """Let the server cut every call at once and stop listening."""
        await self.server.vanish()

    async def hold(self) -> None:
        """Do nothing until the call is cancelled."""
        await asyncio.Event().wait()


class FakeServer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves on a free loopback port; an async context manager.

    Args:
        session: plays every session.
        calls: script by name of a unary or server-stream method; it gets (request, context).
        health: answers of Health/Check in turn, as raw bytes; the last one is repeated.
    """

    def __init__(
        self,
        session: SessionScript | None = None,
        *,
        calls: dict[str, CallScript] | None = None,
        health: list[bytes] | None = None,
    ) -> None:
        self._session = session
        self._calls = calls or {}
        self._health = health
        self._failures: list[BaseException] = []
        self._stop: asyncio.Future[None] | None = None
        self.cancelled = asyncio.Event()
        self.target = ""

    async def __aenter__(self) -> "FakeServer":
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        if self._health is not None:
            check = grpc.unary_unary_rpc_method_handler(self._check)
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),)
            )
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        await (self._stop or self._server.stop(0))
        if self._failures and (error is None or not isinstance(error, AssertionError)):
            raise self._failures[0]

    async def vanish(self) -> None:
        """Cut every call at once, the calling script included, and stop listening."""
        # A script is cancelled by the stop, so it must not be what waits for it.
        self._stop = asyncio.ensure_future(self._server.stop(0))
        await asyncio.Event().wait()

    async def Session(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        await self._play(self._session, FakeSession(context, self))

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._play(self._calls["Generate"], request, context)

    async def GenerateStream(self, request: Any, context: Any) -> None:  # noqa: N802
        await self._play(self._calls["GenerateStream"], request, context)

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._play(self._calls["Tokenize"], request, context)

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._play(self._calls["Detokenize"], request, context)

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._play(self._calls["GetModel"], request, context)

    async def _check(self, request: bytes, context: Any) -> bytes:
        assert self._health is not None
        return self._health.pop(0) if len(self._health) > 1 else self._health[0]

    async def _play(self, script: Any, *arguments: Any) -> Any:
        assert script is not None, "no script for this call"
        try:
            return await script(*arguments)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        except grpc.aio.AbortError:
            raise
        except BaseException as failure:
            self._failures.append(failure)
            raise
