"""A request of a session: commands that wait for its submission, frames in order, its sequence."""

from collections.abc import Callable

from server import convert
from server.backend import Ticket
from vorrang.v1 import generation_pb2 as gen


class LiveRequest:
    """From its start frame to its terminal event.

    Attributes:
        client_id: the id its client chose.
        level: level in force, for the writer's order.
        is_capped: whether the last change of priority asked for more than its tenant may have.
        ticket: set once it is submitted.
    """

    __slots__ = ("_deferred", "_first", "_sequence", "client_id", "is_capped", "level", "refusal", "ticket")

    def __init__(self, client_id: str, level: int) -> None:
        self.client_id = client_id
        self.level = level
        self.is_capped = False
        self.ticket: Ticket | None = None
        self.refusal: Exception | None = None
        self._first: gen.AcceptedEvent | None = None
        self._sequence = 0
        self._deferred: list[Callable[[Ticket], None]] = []

    def when_submitted(self, command: Callable[[Ticket], None]) -> None:
        """Obey a command now, or right after the submission that is still being prepared."""
        if self.ticket is None:
            self._deferred.append(command)
        else:
            command(self.ticket)

    def submitted(self, ticket: Ticket) -> None:
        """It is the engine's now."""
        self.ticket = ticket
        self._first = ticket.accepted
        for command in self._deferred:
            command(ticket)

    def take(self) -> tuple[list[gen.SessionResponse], bool]:
        """Frames of all events that wait, and whether the last of them is terminal."""
        frames: list[gen.SessionResponse] = []
        if self._first is not None:
            frames.append(self._frame())
            frames[-1].accepted.CopyFrom(self._first)
            self._first = None
        if self.refusal is not None:
            frames.append(self._frame())
            frames[-1].failed.CopyFrom(convert.failed(self.refusal))
            return frames, True
        if self.ticket is None:
            return frames, False
        ended = self.ticket.handle.finished
        self.level = self.ticket.handle.level
        for event in self.ticket.handle.take():
            frames.append(self._frame())
            convert.fill_event(frames[-1], event, priority_ignored=self.ticket.accepted.priority_ignored)
            if frames[-1].HasField("priority_changed"):
                frames[-1].priority_changed.capped = self.is_capped
        return frames, ended

    def _frame(self) -> gen.SessionResponse:
        self._sequence += 1
        return gen.SessionResponse(request_id=self.client_id, sequence=self._sequence)
