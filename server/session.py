"""The bidirectional session: many requests and live control of them on one stream.

One reader task obeys frames (``session_commands``), one writer task sends events
(``session_writer``), and the handler's own coroutine waits for both: a peer that is gone
looks to ``read()`` like one that half-closed, and only ``CancelledError`` in the handler,
or a write that fails, says which. What its requests become is the register's business
(``registry``).
"""

import asyncio
import secrets
from typing import Any

import grpc
import grpc.aio

from engine import errors as e
from server.backend import Backend
from server.live_request import LiveRequest
from server.metadata import level_of, request_id_of
from server.session_commands import SessionCommands
from server.session_writer import PeerGone, SessionWriter

#: Updates of places in the queue that a session sends at once; the others' turn comes later.
MAX_QUEUE_UPDATES = 64


class Session:
    """One stream.

    Args:
        backend: engine, limits and register.
        context: of the call; its messages are bytes.
        tenant: whose stream it is.

    Raises:
        InvalidMetadata: the call's metadata is malformed.
    """

    def __init__(
        self, backend: Backend, context: "grpc.aio.ServicerContext[bytes, bytes]", tenant: str = ""
    ) -> None:
        metadata = context.invocation_metadata() or ()
        request_id_of(metadata)
        self._backend = backend
        self._context: Any = context
        self._id = secrets.token_hex(4)
        self._group = asyncio.TaskGroup()
        self._writer = SessionWriter(backend, context)
        self._commands = SessionCommands(
            backend,
            tenant,
            level_of(metadata),
            self._writer,
            lambda work: self._group.create_task(work, name=f"session-{self._id}-start"),
        )

    async def run(self) -> None:
        """Serve the stream until its end.

        Raises:
            VorrangError: the stream must end with this status.

        Cancellation: the peer is gone; its requests may be taken up for the grace, no task is left behind.
        """
        self._backend.sessions.add(self)
        try:
            async with self._group as group:
                others = [
                    group.create_task(work, name=f"session-{self._id}-{what}")
                    for what, work in (
                        ("read", self._read()),
                        ("queue", self._tell_places()),
                        ("lost", self._writer.until_lost()),
                    )
                ]
                writing = group.create_task(self._writer.run(), name=f"session-{self._id}-write")
                writing.add_done_callback(lambda _: [task.cancel() for task in others])
        except BaseExceptionGroup as failures:
            raise _gravest(failures) from None
        finally:
            self._backend.sessions.discard(self)
            self._commands.leave()

    # What the shutdown calls.

    def go_away(self, time_left_s: float) -> None:
        """Tell the client, before all other events, that the stream ends soon."""
        self._writer.go_away(time_left_s)

    def end(self) -> None:
        """Take no more starts to heart: end with UNAVAILABLE as soon as no request is left."""
        self._writer.end()

    # Its tasks.

    async def _read(self) -> None:
        while self._commands.too_bad is None:
            raw = await self._context.read()
            if self._writer.lost:
                return  # what it asks for now is for requests that are another stream's
            if raw is grpc.aio.EOF:
                self._writer.half_close()
                return
            await self._commands.obey(raw)
        self._writer.end_with(self._commands.too_bad)

    async def _tell_places(self) -> None:
        """Tell waiting requests their place in the queue now and then, in turn when they are many."""
        interval_s = self._backend.session_settings.queue_update_s
        first = 0
        while True:
            await self._writer.busy.wait()
            await asyncio.sleep(interval_s)
            waiting = [request for request in self._writer.requests.values() if request.waits]
            num_told = num_seen = 0
            first = first % len(waiting) if waiting else 0
            for request in waiting[first:] + waiting[:first]:
                num_seen += 1
                num_told += self._tell_place(request)
                if num_told == MAX_QUEUE_UPDATES:
                    break
            first += num_seen

    def _tell_place(self, request: LiveRequest) -> bool:
        """Whether its place is news."""
        if request.ticket is None:
            return False
        place = self._backend.engine.queue_position(request.ticket.handle.request_id)
        return place is not None and request.moved_to(place)


def _gravest(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """What the handler is to end with: ours first, then a vanished peer, then anything."""
    for kind in (e.VorrangError, PeerGone, BaseException):
        matching = failures.subgroup(kind)
        if matching is not None:
            first: BaseException = matching
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            return first
    raise AssertionError("an exception group holds no exception")
