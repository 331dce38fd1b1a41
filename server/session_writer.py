"""The writing side of a session's stream: the only place that writes to it.

It keeps no queue of events; when it is able to write it takes from the request whose
turn it is, so what waits is merged meanwhile. Decides nothing about requests.
"""

import asyncio
from typing import Any

import grpc.aio

from engine import errors as e
from server import convert
from server.backend import Backend
from server.live_request import LiveRequest
from server.outbox import Outbox
from vorrang.v1 import generation_pb2 as gen

#: Events of the session itself that may wait to be written; then the reader stops reading.
MAX_WAITING_FRAMES = 64
#: Frames of one request that are written before the others get a turn.
MAX_FRAMES_PER_TURN = 16
#: A frame without an event. At end-of-file, a write fails if the peer is gone and not if it half-closed.
NOTHING = b""


class PeerGone(Exception):
    """A write found that the client has left."""


class SessionWriter:
    """One stream's writer.

    Args:
        backend: the engine, for whether levels count.
        context: of the call; its messages are bytes.

    Attributes:
        requests: by client id, those whose frames this stream has still to send.
        busy: set while there are any.
        half_closed: whether the client seems to have half-closed: it may as well be gone.
    """

    def __init__(self, backend: Backend, context: Any) -> None:
        self._backend = backend
        self._context = context
        self.requests: dict[str, LiveRequest] = {}
        self.busy = asyncio.Event()
        self.half_closed = False
        self._listens = False
        self._ending = False
        self._go_away_s: float | None = None
        self._last_words: e.VorrangError | None = None
        self._own_frames: asyncio.Queue[gen.SessionResponse] = asyncio.Queue(MAX_WAITING_FRAMES)
        self._outbox = Outbox[LiveRequest](self._urgency)
        self._wake = asyncio.Event()
        self._lost = asyncio.Event()

    # What others tell it.

    async def put(self, frame: gen.SessionResponse) -> None:
        """Send an event of the session itself, before those of requests; waits while many wait already.

        Cancellation: the event may be lost.
        """
        await self._own_frames.put(frame)
        self._wake.set()

    def adopt(self, request: LiveRequest) -> None:
        """Send this request's frames from now on."""
        self.requests[request.client_id] = request
        self.busy.set()

    def mark(self, request: LiveRequest) -> None:
        """A request has news."""
        self._outbox.put(request)
        self._wake.set()

    def drop(self, request: LiveRequest) -> None:
        """Somebody else sends this request's frames; harmless when it is not here."""
        if self.requests.get(request.client_id) is request:
            del self.requests[request.client_id]
        self._outbox.discard(request)
        if not self.requests:
            self.busy.clear()
        self._wake.set()

    def lose(self) -> None:
        """Another stream has taken up the session: this one ends, in the middle of a write if need be."""
        for request in list(self.requests.values()):
            self.drop(request)
        self._lost.set()

    @property
    def lost(self) -> bool:
        """Whether another stream has taken up the session."""
        return self._lost.is_set()

    def half_close(self) -> None:
        """The client sends no more frames: end when all requests have.

        A write from now on tells whether it reads, and then nothing holds its requests any more.
        """
        self.half_closed = True
        self._wake.set()

    def go_away(self, time_left_s: float) -> None:
        """Tell the client, before all other events, that the stream ends soon."""
        self._go_away_s = time_left_s
        self._wake.set()

    def end(self) -> None:
        """End with UNAVAILABLE as soon as no request is left."""
        self._ending = True
        self._wake.set()

    def end_with(self, error: e.VorrangError) -> None:
        """End with a status once the session's own events are written."""
        self._last_words = error
        self._wake.set()

    # Its tasks.

    async def until_lost(self) -> None:
        """Wait for ``lose``.

        Raises:
            SessionState: the session was taken up by another stream.
        """
        await self._lost.wait()
        raise e.SessionState("another stream has taken up this session")

    async def run(self) -> None:
        """Write until nothing is left to write and nothing more can come.

        Raises:
            Draining: the server ended the stream.
            PeerGone: nobody reads it.
            VorrangError: what ``end_with`` was told.

        Cancellation: frames that were taken from a request and not written can be had again by resuming.
        """
        while not self._over():
            if self._go_away_s is not None:
                away = gen.GoAwayEvent(
                    time_left=convert.duration(self._go_away_s), message="the server is shutting down"
                )
                self._go_away_s = None
                await self._write(gen.SessionResponse(go_away=away).SerializeToString())
            elif not self._own_frames.empty():
                await self._write(self._own_frames.get_nowait().SerializeToString())
            elif self._last_words is not None:
                raise self._last_words
            elif len(self._outbox):
                await self._write_events(self._outbox.take())
            elif self.half_closed and not self._listens and any(r.held for r in self.requests.values()):
                await self._write(NOTHING)
            else:
                self._wake.clear()
                await self._wake.wait()
        if self._ending and not self.half_closed:
            raise e.Draining

    def _urgency(self, request: LiveRequest) -> int:
        return request.level if self._backend.engine.uses_level else 0

    def _over(self) -> bool:
        quiet = self._own_frames.empty() and self._go_away_s is None and self._last_words is None
        return quiet and not self.requests and (self.half_closed or self._ending)

    async def _write_events(self, request: LiveRequest) -> None:
        frames, has_more = request.take(MAX_FRAMES_PER_TURN)
        if has_more:
            self._outbox.put(request)
        is_last = request.sent
        if is_last:  # before the write: the client may use the free place as soon as it reads the end
            request.stream = None
            self.drop(request)
        for frame in frames:
            await self._write(frame)
        if is_last and request.server_id is not None:
            self._backend.delivered(request.server_id)

    async def _write(self, frame: bytes) -> None:
        after_half_close = self.half_closed
        try:
            await self._context.write(frame)
        except grpc.aio.BaseError as error:
            raise PeerGone from error
        if after_half_close and not self._listens:
            self._listens = True
            for request in self.requests.values():
                request.unbind()
