"""Many requests over one bidirectional stream, which is replaced when it is lost.

Everything a caller does becomes a frame; everything that arrives is handed to the request
it belongs to. What a caller wants of a request is also kept with the request, so that a new
stream can be told all of it. When no stream can be had any more, every request still alive
is told so.
"""

import asyncio
import functools
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack
from uuid import uuid4

from clients.python import frames
from clients.python.connection import Connection
from clients.python.credit import Credit
from clients.python.errors import DuplicateRequestId, SessionClosed, VorrangError
from clients.python.events import PriorityChanged, SessionInfo
from clients.python.link import Call
from clients.python.request import PriorityLike, RequestOptions, encode_spec
from clients.python.request_stream import RequestStream
from clients.python.session_state import SessionState
from vorrang.v1 import generation_pb2 as pb

#: How long a server may take to end the stream once nothing runs on it any more.
_EOF_WAIT_S_MAX = 5.0
#: How long a server may take to hear of the end of a session that is left with an exception.
_CANCEL_S_MAX = 1.0


class Session:
    """A session with a server. Made by ``VorrangClient.session``; an async context manager.

    Entering opens the stream and waits for the server's answer. Leaving
    normally half-closes it and waits until the requests still running have
    ended; leaving with an exception cancels every request and then the call.

    When the connection is lost the session opens a new stream and takes all requests up where they
    stopped: readers, starts and changes of priority notice nothing but the time it takes. Commands
    return at once meanwhile, and are obeyed as soon as the server is found again. After
    ``reconnect_s`` without it everybody gets ``ConnectionLost``; the server goes on for a while with
    the requests of a lost session. ``info.session_token``, given to a new session as
    ``resume_token``, and ``resume`` with the stream's ``last_sequence`` take them up again.
    """

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
        reconnect_s: float = 10.0,
    ) -> None:
        if not reconnect_s >= 0:
            raise ValueError(f"reconnect_s must not be negative, got {reconnect_s:g}")
        self._keep_credit = keep_credit
        self._resume_token = resume_token
        self._state = SessionState(
            functools.partial(frames.open_frame, client_name, default_priority, default_credit_tokens)
        )
        self._connection = Connection(
            make_call, self._state, open_timeout_s=open_timeout_s, reconnect_s=reconnect_s
        )

    async def __aenter__(self) -> Self:
        """Open the session.

        Raises:
            ConnectionLost: the server can't be reached, or did not answer within ``open_timeout_s``.
            VorrangError: the server refused the session.
        """
        try:
            await self._connection.open(self._resume_token)
        except BaseException:
            await self.end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                await self._cancel_all()
            elif self._connection.loss is None:
                await self.close()
                await self._state.idle.wait()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._connection.lost.wait(), _EOF_WAIT_S_MAX)
        finally:
            await self.end()

    @property
    def info(self) -> SessionInfo:
        """What the server said when the stream in use was opened."""
        return self._connection.info

    @property
    def connected(self) -> bool:
        """Whether there is a stream; False while a lost one is looked for, and once it is given up."""
        return self._connection.linked

    @property
    def alive(self) -> int:
        """Number of requests that have not ended."""
        return len(self._state.streams)

    @property
    def going_away_s(self) -> float | None:
        """The seconds the server gave when it announced its end; None before."""
        return self._state.going_away_s

    async def start(
        self,
        prompt: str | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Start a request and return its events.

        Returns at once, except while the transport takes nothing more or the connection is lost;
        whether the server takes the request shows in the events. A refusal is raised by the iterator.

        Args:
            prompt: plain text; or give ``messages`` or ``token_ids``.
            request_id: unique in the tenant, 1..128 bytes of printable ASCII; None = made here.
            **options: see ``RequestOptions``.

        Raises:
            ValueError: not exactly one form of prompt, or a value the wire can't carry.
            DuplicateRequestId: a request of that id is alive in this session.
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the connection is lost for good.

        Cancellation: the request is not started, or it is cancelled.
        """
        spec = encode_spec(prompt, options)
        request_id = uuid4().hex if request_id is None else request_id
        frame = frames.start_frame(request_id, spec)
        return await self._begin(request_id, options.get("credit_tokens"), start_frame=frame)

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
            DuplicateRequestId, SessionClosed, ConnectionLost: as ``start`` does.
        """
        return await self._begin(request_id, credit_tokens, after_sequence=after_sequence)

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
            ConnectionLost: the connection is lost for good.
        """
        frame = frames.credit_frame(request_id, num_tokens, acknowledged_sequence)
        await self._command(request_id, frame, lambda stream: stream.mark_granted(num_tokens))

    def try_credit(self, request_id: str, num_tokens: int, acknowledged_sequence: int) -> bool:
        """Grant tokens if that can be said now; False when it can't. For the streams of this session."""
        # Needs no room: the server sends nothing more that could be read and granted before it has this.
        frame = frames.credit_frame(request_id, num_tokens, acknowledged_sequence)
        return not self._state.half_closed and self._connection.put(frame)

    async def pause(self, request_id: str) -> None:
        """Stop a request's computation, keeping its place; harmless when it has ended.

        Raises:
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the connection is lost for good.
        """
        frame = frames.pause_frame(request_id)
        await self._command(request_id, frame, lambda stream: stream.mark_paused(True))

    async def unpause(self, request_id: str) -> None:
        """Let a paused request go on; raises as ``pause`` does."""
        frame = frames.unpause_frame(request_id)
        await self._command(request_id, frame, lambda stream: stream.mark_paused(False))

    async def cancel(self, request_id: str) -> None:
        """Cancel a request; harmless when it has ended or never was. Raises as ``pause`` does."""
        frame = frames.cancel_frame(request_id)
        await self._command(request_id, frame, RequestStream.mark_cancelled)

    async def reprioritize(
        self, request_id: str, priority: PriorityLike, *, timeout_s: float = 10.0
    ) -> PriorityChanged:
        """Change the priority of a queued or running request and wait for the acknowledgement.

        Raises:
            CommandRejected: the server did not obey: the request has ended, or the priority is not valid.
            TimeoutError: no acknowledgement within ``timeout_s``.
            SessionClosed: the session was half-closed or left.
            ConnectionLost: the connection is lost for good.

        Cancellation: the command may have been sent; the request goes on either way.
        """
        self._check_open()
        changes = self._state.changes
        frame, answer = changes.add(request_id, priority)
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    await self._connection.send(frame)  # What could not be sent is said by the next stream.
                except BaseException:
                    changes.withdraw(request_id, answer)
                    raise
                return await answer
        finally:
            answer.cancel()

    async def close(self) -> None:
        """Half-close: no more commands; the requests already started run to their end.

        Raises:
            ConnectionLost: the connection is lost for good.
        """
        if not self._state.half_closed:
            self._check_open()
            self._state.half_closed = True
            await self._connection.send(None)

    async def _begin(
        self,
        request_id: str,
        credit_tokens: int | None,
        *,
        start_frame: pb.SessionRequest | None = None,
        after_sequence: int = 0,
    ) -> RequestStream:
        await self._connection.settled()
        self._check_open()
        if request_id in self._state.streams:
            raise DuplicateRequestId(f"request {request_id!r} is alive in this session")
        window_tokens = self.info.default_credit_tokens if credit_tokens is None else credit_tokens
        stream = RequestStream(
            request_id,
            asyncio.get_running_loop().time(),
            self,
            # What another stream's start granted is not known here: as if it were nothing.
            Credit(window_tokens if start_frame else 0, window_tokens * self._keep_credit),
            start_frame=start_frame,
            after_sequence=after_sequence,
        )
        self._state.add(stream)
        try:
            first, *rest = stream.take_up()
            if await self._connection.send(first):
                for frame in rest:
                    self._connection.put(frame)
            else:
                await self._connection.settled()  # The next stream has taken it up with the others.
        except BaseException:
            self._state.remove(request_id)
            self._connection.put(frames.cancel_frame(request_id))  # A new stream may have taken it up.
            raise
        return stream

    async def _command(
        self, request_id: str, frame: pb.SessionRequest, mark: Callable[[RequestStream], None]
    ) -> None:
        """Send a command, or leave it to the next stream to say so for the request."""
        self._check_open()
        stream = self._state.streams.get(request_id)
        if stream is not None:
            mark(stream)
            await self._connection.send(frame)
            return
        while not await self._connection.send(frame):
            await self._connection.settled()
            self._check_open()

    async def _cancel_all(self) -> None:
        """Tell the server that nobody waits; without being told it would go on for a while."""
        if self._state.half_closed or self._connection.loss is not None:
            return
        with suppress(TimeoutError, VorrangError):
            async with asyncio.timeout(_CANCEL_S_MAX):
                for request_id in list(self._state.streams):
                    await self.cancel(request_id)
                await self.close()
                await self._connection.lost.wait()

    def _check_open(self) -> None:
        if self._connection.loss is not None:
            raise self._connection.loss.again()
        if self._state.half_closed:
            raise SessionClosed("the session is closed")

    async def end(self) -> None:
        """Leave at once; the server goes on for a while with requests that are alive. Harmless when left."""
        self._state.half_closed = True
        await self._connection.end()
