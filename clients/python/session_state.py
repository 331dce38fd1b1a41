"""What is alive in one session, whichever stream carries it.

Hands what arrives to the request it belongs to, and says what a new stream has to begin with.
"""

import asyncio
from collections.abc import Callable

from clients.python.changes import PriorityChanges
from clients.python.errors import (
    ConnectionLost,
    RequestFailed,
    ResumeOutOfRange,
    VorrangError,
    error_from_status,
)
from clients.python.events import Finished, PriorityChanged, decode, decode_usage, seconds
from clients.python.request_stream import RequestStream
from vorrang.v1 import generation_pb2 as pb


class SessionState:
    """The requests of a session and what waits for an answer. The ``Owner`` of its connection.

    Args:
        open_frame: makes the frame that opens the session of a token.

    Attributes:
        streams: the requests that have not ended, by id.
        changes: changes of priority under way.
        half_closed: no more commands; a new stream is half-closed after what it begins with.
        going_away_s: the seconds the server gave when it announced its end; None before.
        idle: set while no request is alive.
    """

    def __init__(self, open_frame: Callable[[str], pb.SessionRequest]) -> None:
        self.streams: dict[str, RequestStream] = {}
        self.changes = PriorityChanges()
        self.half_closed = False
        self.going_away_s: float | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.open_frame = open_frame

    def add(self, stream: RequestStream) -> None:
        """A request of the session from now on."""
        self.streams[stream.request_id] = stream
        self.idle.clear()

    def remove(self, request_id: str) -> RequestStream | None:
        """No more a request of the session."""
        stream = self.streams.pop(request_id, None)
        self.changes.ended(request_id)
        if not self.streams:
            self.idle.set()
        return stream

    # What the connection asks and tells.

    def is_needed(self) -> bool:
        """Whether there is anything that a new stream would be good for."""
        return bool(self.streams) or not self.half_closed

    def has_requests(self) -> bool:
        """Whether requests are alive."""
        return bool(self.streams)

    def take_up(self) -> list[pb.SessionRequest | None]:
        """What a new stream has to begin with: every request, and what is still to be obeyed."""
        again: list[pb.SessionRequest | None] = []
        for stream in self.streams.values():
            again.extend(stream.take_up())
        again.extend(self.changes.repeat(self.streams))
        if self.half_closed:
            again.append(None)
        return again

    def on_forgotten(self, error: VorrangError) -> None:
        """The server does not hold the session any more: what had begun there is gone."""
        for stream in list(self.streams.values()):
            if stream.has_begun:
                self._fail(
                    stream.request_id,
                    ResumeOutOfRange(
                        f"the request was lost: {error.message}; the server was started anew, or the "
                        "connection was lost for longer than it keeps requests",
                        reason=error.reason,
                        retryable=True,
                    ),
                )

    def on_lost(self, loss: ConnectionLost) -> None:
        """There will be no stream any more."""
        for request_id in list(self.streams):
            self._fail(request_id, loss.again())
        self.changes.fail_all(loss)

    def on_frame(self, response: pb.SessionResponse) -> None:
        """A frame that does not open the session."""
        match response.WhichOneof("event"):
            case "go_away":
                self.going_away_s = seconds(response.go_away.time_left)
            case "command_rejected":
                self._on_rejected(response.request_id, response.command_rejected)
            case _:
                self._on_event(response)

    def _on_event(self, response: pb.SessionResponse) -> None:
        request_id = response.request_id
        stream = self.streams.get(request_id)
        if stream is None or stream.is_known(response.sequence):
            return  # It has ended here, or this was seen before the connection was lost.
        if response.HasField("failed"):
            failed = response.failed
            usage = decode_usage(failed.usage)
            self._fail(request_id, error_from_status(failed.status, retryable=failed.retryable, usage=usage))
            return
        event = decode(response)
        try:
            stream.feed(event, asyncio.get_running_loop().time(), response.sequence)
        except RequestFailed as error:
            self._fail(request_id, error)
            return
        if isinstance(event, PriorityChanged):
            self.changes.answered(request_id, event)
        elif isinstance(event, Finished):
            self.remove(request_id)

    def _on_rejected(self, request_id: str, rejected: pb.CommandRejectedEvent) -> None:
        stream = self.streams.get(request_id)
        match rejected.command:
            case "start" if stream is not None and not stream.has_begun:
                self._fail(request_id, error_from_status(rejected.status))
            case "resume":
                self._fail(request_id, error_from_status(rejected.status))
            case "reprioritize":
                error = error_from_status(rejected.status, rejected=True)
                self.changes.rejected(request_id, error, is_alive=stream is not None)
            case _:
                pass  # Cancelling, pausing or granting what has just ended is no error.

    def _fail(self, request_id: str, error: VorrangError) -> None:
        stream = self.remove(request_id)
        if stream is not None:
            stream.fail(error)
