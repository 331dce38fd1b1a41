"""Many requests over one bidirectional stream.

Exactly one task writes the stream and one reads it. Everything a caller does
becomes a frame in a bounded outbox; everything that arrives is handed to the
request it belongs to. When the stream ends, however it ends, every request
still alive is told so.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack
from uuid import uuid4

import grpc.aio
from google.protobuf.message import Message

from clients.python import frames
from clients.python.errors import (
    ConnectionLost,
    DuplicateRequestId,
    SessionClosed,
    VorrangError,
    error_from_call,
    error_from_status,
)
from clients.python.events import (
    Finished,
    PriorityChanged,
    SessionInfo,
    decode,
    decode_opened,
    decode_usage,
    seconds,
)
from clients.python.request import PriorityLike, RequestOptions, encode_spec
from clients.python.stream import RequestStream
from vorrang.v1 import generation_pb2

_OUTBOX_FRAMES_MAX = 64
#: How long a server may take to end the stream once nothing runs on it any more.
_EOF_WAIT_S_MAX = 5.0
#: How long a server may take to hear of the end of a session that is left with an exception.
_CANCEL_S_MAX = 1.0

Call = grpc.aio.StreamStreamCall[Message, generation_pb2.SessionResponse]


class Session:
    """A session with a server. Made by ``VorrangClient.session``; an async context manager.

    Entering opens the stream and waits for the server's answer. Leaving
    normally half-closes it and waits until the requests still running have
    ended; leaving with an exception cancels every request and then the call.

    When the stream is lost its requests go on for a while. ``info.session_token``, given
    to a new session as ``resume_token``, and ``resume`` with the stream's ``last_sequence``
    take them up again.

    Attributes:
        info: what the server said when the session was opened.
        going_away_s: set when the server announced its end: the seconds it gave; None before.
    """

    info: SessionInfo

    def __init__(
        self,
        make_call: Callable[[], Call],
        *,
        client_name: str,
        default_priority: PriorityLike | None,
        open_timeout_s: float,
        default_credit_tokens: int | None = None,
        keep_credit: bool = True,
        resume_token: str = "",
    ) -> None:
        self.going_away_s: float | None = None
        self._make_call = make_call
        self._open = frames.open_frame(client_name, default_priority, default_credit_tokens, resume_token)
        self._keep_credit = keep_credit
        self._open_timeout_s = open_timeout_s
        self._streams: dict[str, RequestStream] = {}
        self._acknowledgements: dict[str, deque[asyncio.Future[PriorityChanged]]] = {}
        self._outbox: asyncio.Queue[generation_pb2.SessionRequest | None] = asyncio.Queue(_OUTBOX_FRAMES_MAX)
        self._half_closed = False
        self._loss: VorrangError | None = None
        self._lost = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        """Open the session.

        Raises:
            ConnectionLost: the server can't be reached, or did not answer within ``open_timeout_s``.
            VorrangError: the server refused the session.
        """
        loop = asyncio.get_running_loop()
        self._now_s = loop.time
        self._opened: asyncio.Future[SessionInfo] = loop.create_future()
        self._call = self._make_call()
        # The two tasks outlive this method and are ended, in every case, by `_end`.
        self._tasks = [loop.create_task(self._write_frames()), loop.create_task(self._read_frames())]
        self._outbox.put_nowait(self._open)
        try:
            async with asyncio.timeout(self._open_timeout_s):
                self.info = await self._opened
        except TimeoutError:
            await self._end()
            raise ConnectionLost(f"no answer to open within {self._open_timeout_s:g} s") from None
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                await self._cancel_all()
            elif self._loss is None:
                await self.close()
                await self._idle.wait()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), _EOF_WAIT_S_MAX)
        finally:
            await self._end()

    async def start(
        self,
        prompt: str | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Start a request and return its events.

        Returns at once; whether the server takes the request shows in the
        events. A refusal is raised by the iterator.

        Args:
            prompt: plain text; or give ``messages`` or ``token_ids``.
            request_id: unique in the tenant, 1..128 bytes of printable ASCII; None = made here.
            **options: see ``RequestOptions``.

        Raises:
            ValueError: not exactly one form of prompt, or a value the wire can't carry.
            DuplicateRequestId: a request of that id is alive in this session.
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the stream is broken.
        """
        spec = encode_spec(prompt, options)
        request_id = uuid4().hex if request_id is None else request_id
        self._check_open()
        if request_id in self._streams:
            raise DuplicateRequestId(f"request {request_id!r} is alive in this session")
        stream = self._new_stream(request_id, options.get("credit_tokens"))
        try:
            await self._send(frames.start_frame(request_id, spec))
        except BaseException:
            self._remove(request_id)
            raise
        return stream

    async def resume(
        self, request_id: str, after_sequence: int = 0, *, credit_tokens: int | None = None
    ) -> RequestStream:
        """Take up a request of the lost session whose token this one was opened with.

        Args:
            request_id: as it was started.
            after_sequence: ``last_sequence`` of its lost stream; what came later is sent again.
            credit_tokens: output tokens it may be ahead of its reader; None = the session's.

        Returns:
            Its events from there on; the result holds what they hold. The iterator raises
            ``ResumeOutOfRange`` when they are not held any more.

        Raises:
            DuplicateRequestId: a request of that id is alive in this session.
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the stream is broken.
        """
        self._check_open()
        if request_id in self._streams:
            raise DuplicateRequestId(f"request {request_id!r} is alive in this session")
        stream = self._new_stream(request_id, credit_tokens)
        try:
            await self._send(frames.resume_frame(request_id, after_sequence))
            if stream.window_tokens:  # whatever its start said, it has the window from here on
                await self.credit(request_id, stream.window_tokens)
        except BaseException:
            self._remove(request_id)
            raise
        return stream

    async def credit(
        self, request_id: str, num_tokens: int, acknowledged_sequence: int | None = None
    ) -> None:
        """Grant output tokens to a request; a session that keeps credit does it by itself.

        Args:
            request_id: whose.
            num_tokens: on top of what is left.
            acknowledged_sequence: up to where events need not be held for a resume; None = not said.

        Raises:
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the stream is broken.
        """
        await self._send(frames.credit_frame(request_id, num_tokens, acknowledged_sequence))

    def try_credit(self, request_id: str, num_tokens: int, acknowledged_sequence: int) -> bool:
        """Grant tokens if that can be said without waiting; False when it can't."""
        if self._half_closed or self._loss is not None or self._outbox.full():
            return False
        self._outbox.put_nowait(frames.credit_frame(request_id, num_tokens, acknowledged_sequence))
        return True

    async def pause(self, request_id: str) -> None:
        """Stop a request's computation, keeping its place; harmless when it has ended.

        Raises:
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the stream is broken.
        """
        await self._send(frames.pause_frame(request_id))

    async def unpause(self, request_id: str) -> None:
        """Let a paused request go on; raises as ``pause`` does."""
        await self._send(frames.unpause_frame(request_id))

    def _new_stream(self, request_id: str, credit_tokens: int | None) -> RequestStream:
        window_tokens = self.info.default_credit_tokens if credit_tokens is None else credit_tokens
        stream = RequestStream(request_id, self._now_s(), self, window_tokens * self._keep_credit)
        self._streams[request_id] = stream
        self._idle.clear()
        return stream

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; harmless when it has ended or never was.

        Raises:
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the stream is broken.
        """
        await self._send(frames.cancel_frame(request_id))

    async def reprioritize(
        self, request_id: str, priority: PriorityLike, *, timeout_s: float = 10.0
    ) -> PriorityChanged:
        """Change the priority of a queued or running request and wait for the acknowledgement.

        Raises:
            CommandRejected: the server did not obey: the request has ended, or the priority is not valid.
            TimeoutError: no acknowledgement within ``timeout_s``.
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the stream is broken, or broke before the acknowledgement.

        Cancellation: the command may have been sent; the request goes on either way.
        """
        frame = frames.reprioritize_frame(request_id, priority)
        answer: asyncio.Future[PriorityChanged] = asyncio.get_running_loop().create_future()
        # Answers of one request come in the order of its commands.
        self._acknowledgements.setdefault(request_id, deque()).append(answer)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(frame)
                return await answer
        finally:
            answer.cancel()

    async def close(self) -> None:
        """Half-close: no more commands; the requests already started run to their end.

        Raises:
            ConnectionLost: the stream is broken.
        """
        if not self._half_closed:
            self._check_open()
            self._half_closed = True
            await self._put(None)

    @property
    def alive(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    async def _cancel_all(self) -> None:
        """Tell the server that nobody waits; without being told it would go on for a while."""
        if self._half_closed or self._loss is not None:
            return
        with suppress(TimeoutError, VorrangError):
            async with asyncio.timeout(_CANCEL_S_MAX):
                for request_id in list(self._streams):
                    await self.cancel(request_id)
                await self.close()
                await self._lost.wait()

    def _check_open(self) -> None:
        if self._loss is not None:
            raise _copy(self._loss)
        if self._half_closed:
            raise SessionClosed("the session is closed")

    async def _send(self, frame: generation_pb2.SessionRequest) -> None:
        self._check_open()
        await self._put(frame)

    async def _put(self, frame: generation_pb2.SessionRequest | None) -> None:
        """Put ``frame`` in the outbox; waits while it is full, but never beyond the end of the stream."""
        if not self._outbox.full():
            self._outbox.put_nowait(frame)
            return
        put = asyncio.ensure_future(self._outbox.put(frame))
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({put, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            put.cancel()
            lost.cancel()
        if self._loss is not None:
            raise _copy(self._loss)

    async def _write_frames(self) -> None:
        """The one writer of the stream."""
        try:
            while (frame := await self._outbox.get()) is not None:
                await self._call.write(frame)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # The stream is broken; the reader learns why.

    async def _read_frames(self) -> None:
        """The one reader of the stream."""
        loss: VorrangError = ConnectionLost("the session was left")
        try:
            while True:
                response = await self._call.read()
                if not isinstance(response, generation_pb2.SessionResponse):
                    loss = ConnectionLost("the server ended the session")
                    break
                self._dispatch(response)
        except grpc.aio.AioRpcError as error:
            loss = error_from_call(error)
        except Exception as error:
            loss = ConnectionLost(f"the stream could not be read: {error!r}")
            raise
        finally:
            self._lose(loss)

    def _dispatch(self, response: generation_pb2.SessionResponse) -> None:
        case = response.WhichOneof("event")
        if case == "opened":
            if not self._opened.done():
                self._opened.set_result(decode_opened(response.opened))
        elif case == "go_away":
            self.going_away_s = seconds(response.go_away.time_left)
        elif case == "command_rejected":
            self._on_rejected(response.request_id, response.command_rejected)
        elif case == "failed":
            failed = response.failed
            stream = self._remove(response.request_id)
            if stream is not None:
                stream.fail(
                    error_from_status(
                        failed.status, retryable=failed.retryable, usage=decode_usage(failed.usage)
                    )
                )
        else:
            self._on_event(response)

    def _on_event(self, response: generation_pb2.SessionResponse) -> None:
        event = decode(response)
        stream = self._streams.get(response.request_id)
        if isinstance(event, PriorityChanged):
            answer = self._next_acknowledgement(response.request_id)
            if answer is not None:
                answer.set_result(event)
        if event is None or stream is None:
            return
        stream.feed(event, self._now_s(), response.sequence)
        if isinstance(event, Finished):
            self._remove(response.request_id)

    def _on_rejected(self, request_id: str, rejected: generation_pb2.CommandRejectedEvent) -> None:
        if rejected.command == "open":
            if not self._opened.done():
                self._opened.set_exception(error_from_status(rejected.status))
        elif rejected.command == "start":
            stream = self._streams.get(request_id)
            if stream is not None and not stream.accepted:
                self._remove(request_id)
                stream.fail(error_from_status(rejected.status))
        elif rejected.command == "resume":
            stream = self._remove(request_id)
            if stream is not None:
                stream.fail(error_from_status(rejected.status))
        elif rejected.command == "reprioritize":
            answer = self._next_acknowledgement(request_id)
            if answer is not None:
                answer.set_exception(error_from_status(rejected.status, rejected=True))

    def _remove(self, request_id: str) -> RequestStream | None:
        stream = self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()
        return stream

    def _next_acknowledgement(self, request_id: str) -> asyncio.Future[PriorityChanged] | None:
        """The oldest command of the request that waits for its answer, if any."""
        waiting = self._acknowledgements.get(request_id)
        if not waiting:
            return None
        answer = waiting.popleft()
        if not waiting:
            del self._acknowledgements[request_id]
        # One whose caller gave up still takes the answer that belongs to it.
        return None if answer.done() else answer

    def _lose(self, loss: VorrangError) -> None:
        """The stream is over: tell everyone who waits for something from it."""
        self._loss = (
            loss
            if isinstance(loss, ConnectionLost)
            else ConnectionLost(
                f"the server ended the session: {loss.message}", code=loss.code, reason=loss.reason
            )
        )
        self._lost.set()
        if not self._opened.done():
            self._opened.set_exception(loss)
        streams, self._streams = self._streams, {}
        self._idle.set()
        for stream in streams.values():
            stream.fail(_copy(self._loss))
        waiting, self._acknowledgements = self._acknowledgements, {}
        for answers in waiting.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(_copy(self._loss))
        self._call.cancel()

    async def _end(self) -> None:
        """End call and tasks; safe to be called in any state."""
        self._half_closed = True
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _copy(loss: VorrangError) -> VorrangError:
    """An equal error: one instance raised in several tasks would mix up their tracebacks."""
    return type(loss)(loss.message, code=loss.code, reason=loss.reason, retryable=loss.retryable)
