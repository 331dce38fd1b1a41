"""A request of a session: it lives on when its stream is lost, and can be sent again.

From its start frame until nobody can ask for it any more. Events stay merged in the
engine's handle until the writer's turn; then they become frames with a sequence, and
are kept for who lost them. Knows no stream but for telling it that there is news.
"""

import functools
from collections.abc import Callable
from typing import Protocol

from engine.errors import ResumeOutOfRange
from engine.events import Delta, Failed, Finished, LevelChanged
from engine.handle import Handle
from engine.request import FinishReason, RequestId, RequestSpec, Usage
from server import convert
from server.bucket import Bucket
from server.flow import Flow
from server.replay import ReplayBuffer
from server.sections import SessionSection
from server.slots import Turn
from server.ticket import Ticket
from vorrang.v1 import generation_pb2 as gen


class Stream(Protocol):
    """Who sends a request's frames."""

    def mark(self, request: "LiveRequest") -> None:
        """It has news."""
        ...


class LiveRequest:
    """See the module.

    Args:
        client_id: the id its client chose.
        fingerprint: of what was asked for; equal for equal specs alone.
        level: priority that was asked for.
        credit_tokens: output tokens its client is ready for at first.
        settings: of sessions.
        max_unsent_tokens: output tokens that may wait for the transport.
        on_end: called when its last frame is there to be taken.
        received_at: when its start frame came, on the engine's clock.
        on_stall: called whenever want of credit parks it.
        on_park: called whenever it is parked, with the reason.

    Attributes:
        server_id: made by the server; None before it is submitted.
        level: in force, for the writer's order.
        is_capped: whether the last change of priority asked for more than its tenant may have.
        ticket: set once it is submitted, until it ends.
        stream: who sends its frames; None while nobody does.
        ended: whether the engine is done with it, or never took it.
        retryable: whether it failed in a way that leaves its id free for another attempt.
        reprioritizations: how often its priority may be changed.
        turn_level: level of its turn; None = that which was asked for at first.
        left: whether it ended while it waited for that.
        turn: its turn at work on its text, before it is submitted.
    """

    def __init__(
        self,
        client_id: str,
        fingerprint: bytes,
        level: int,
        credit_tokens: int,
        *,
        settings: SessionSection,
        max_unsent_tokens: int,
        on_end: "Callable[[LiveRequest], None]",
        received_at: float = 0.0,
        on_stall: Callable[[RequestSpec], None] = lambda _: None,
        on_park: Callable[[RequestId, str], None] = lambda _, why: None,
    ) -> None:
        self.client_id = client_id
        self.fingerprint = fingerprint
        self.level = level
        self.is_capped = False
        self.received_at = received_at
        self.server_id: RequestId | None = None
        self.ticket: Ticket | None = None
        self.stream: Stream | None = None
        self.ended = False
        self.retryable = False
        self.left = False
        self.turn_level: int | None = None
        self.turn: Turn | None = None
        self.reprioritizations = Bucket(settings.reprioritize_per_s, settings.reprioritize_burst)
        self._credit_tokens = credit_tokens
        self._settings = settings
        self._max_unsent_tokens = max_unsent_tokens
        self._on_end = on_end
        self._on_stall = on_stall
        self._on_park = on_park
        self._flow: Flow | None = None
        self._unbound = False
        self._kept = ReplayBuffer(settings.max_replay_bytes)
        self._sent_sequence = 0
        self._num_sent_tokens = 0
        self._deferred: list[Callable[[Ticket, Flow], None]] = []
        self._told_position: int | None = None
        self._priority_ignored = False
        self._new_position: int | None = None

    @property
    def prepared(self) -> bool:
        """Whether it was submitted or refused; before, its prompt is being tokenised."""
        return self.ended or self.ticket is not None

    @property
    def sent(self) -> bool:
        """Whether all its frames, the terminal one included, were handed to a stream."""
        return self.ended and self._sent_sequence == self._kept.last_sequence

    @property
    def held(self) -> bool:
        """Whether it waits for a frame of its client's: for credit, or the end of a pause."""
        return self._flow is not None and self._flow.held

    @property
    def num_kept_bytes(self) -> int:
        """Memory of the frames that are held."""
        return self._kept.num_bytes

    # What the reader obeys.

    def when_submitted(self, command: Callable[[Ticket, Flow], None]) -> None:
        """Obey a command now, or right after the submission under way; never when it has ended."""
        if self.ended:
            return
        if self.ticket is None or self._flow is None:
            self._deferred.append(command)
        else:
            command(self.ticket, self._flow)

    def acknowledge(self, sequence: int) -> bool:
        """Let go of frames the client has kept; False when it can't have got that far."""
        if sequence > self._sent_sequence:
            return False
        self._kept.acknowledge(sequence)
        return True

    def submitted(self, ticket: Ticket) -> None:
        """It is the engine's now."""
        self.ticket = ticket
        self.server_id = ticket.handle.request_id
        self._told_position = ticket.accepted.queue_position
        self._priority_ignored = ticket.accepted.priority_ignored
        frame = self._frame()
        frame.accepted.CopyFrom(ticket.accepted)
        self._keep(frame, 0)
        self._flow = Flow(
            ticket.handle,
            granted_tokens=self._credit_tokens,
            max_unsent_tokens=self._max_unsent_tokens,
            slow_client_timeout_s=self._settings.slow_client_timeout_s,
            on_stall=functools.partial(self._on_stall, ticket.handle.spec),
            on_park=functools.partial(self._on_park, ticket.handle.request_id),
        )
        self._flow.watch(self.stream is not None)
        self._flow.unbind(self._unbound)
        for command in self._deferred:
            command(ticket, self._flow)
        self._deferred.clear()
        self._tell()

    def leave(self) -> None:
        """It was cancelled: if it waits for a turn at work on its text, it waits no more."""
        if self.turn is not None:
            self.turn.leave()

    def refused(self, error: Exception) -> None:
        """It never was the engine's."""
        frame = self._frame()
        frame.failed.CopyFrom(convert.failed(error))
        self._ended_early(frame)

    def ended_before(self, reason: FinishReason) -> None:
        """It never was the engine's: it was cancelled, or its time ran out, while its text waited."""
        self.left = True
        frame = self._frame()
        frame.accepted.level = frame.accepted.requested_level = self.level
        self._keep(frame, 0)
        frame = self._frame()
        frame.finished.CopyFrom(convert.finished(Finished(RequestId(""), reason, Usage())))
        self._ended_early(frame)

    def _ended_early(self, frame: gen.SessionResponse) -> None:
        self._keep(frame, 0)
        self.ended = True
        self._on_end(self)
        self._tell()

    # Streams come and go.

    def attach(self, stream: Stream, after_sequence: int | None = None) -> None:
        """Send its frames to a stream from now on.

        Args:
            stream: which.
            after_sequence: frames after this one are sent again, and credit counts from there;
                None = it is new.

        Raises:
            ResumeOutOfRange: they are not all held; nothing has changed.
        """
        if after_sequence is not None:
            if not self._kept.holds_after(after_sequence):
                raise ResumeOutOfRange(
                    f"the events of request {self.client_id!r} after {after_sequence} are not held"
                )
            self._sent_sequence = after_sequence
            self._num_sent_tokens = self._kept.num_tokens_at(after_sequence)
        self.stream = stream
        self._unbound = False
        if self._flow is not None:
            self._flow.watch(True)
            self._flow.unbind(False)
            if after_sequence is not None:
                self._flow.renew(self._num_sent_tokens + self._credit_tokens)
        self._update_flow()
        self._tell()

    def detach(self) -> None:
        """Nobody reads it for now: pauses and credit count as they stood, and it is nobody's fault."""
        self.stream = None
        self._unbound = False
        if self._flow is not None:
            self._flow.unbind(False)
            self._flow.watch(False)

    def unbind(self) -> None:
        """Its client can send no more frames, so pauses and credit count for nothing."""
        self._unbound = True
        if self._flow is not None:
            self._flow.unbind(True)

    def close(self) -> None:
        """Leave no timer behind."""
        if self._flow is not None:
            self._flow.close()

    # What the writer sends.

    def on_event(self, handle: Handle) -> None:
        """The engine has put an event into the handle."""
        self.level = handle.level
        self._update_flow()
        if handle.finished:
            self._collect()
            self.ended = True
            self._on_end(self)
            self.ticket = self._flow = None  # they hold the prompt
        self._tell()

    def moved_to(self, queue_position: int) -> bool:
        """Its place in the queue; True when that is news."""
        if queue_position == self._told_position:
            return False
        self._new_position = queue_position
        self._tell()
        return True

    @property
    def waits(self) -> bool:
        """Whether it is in the queue for the first time."""
        return self.ticket is not None and not self.ticket.handle.started

    def take(self, max_frames: int) -> tuple[list[bytes], bool]:
        """The next frames to send, and whether there are more."""
        self._collect()
        kept = self._kept.after(self._sent_sequence, max_frames)
        if kept:
            self._sent_sequence += len(kept)
            self._num_sent_tokens = kept[-1].num_tokens
        self._kept.trim(self._sent_sequence)
        self._update_flow()
        return [frame.raw for frame in kept], self._sent_sequence < self._kept.last_sequence

    def _collect(self) -> None:
        """Make frames of all events that wait."""
        if self.ticket is None:
            return
        handle = self.ticket.handle
        if self._new_position is not None:
            if not handle.started and not handle.finished:
                frame = self._frame()
                frame.queue_update.queue_position = self._new_position
                frame.queue_update.SetInParent()
                self._keep(frame, 0)
                self._told_position = self._new_position
            self._new_position = None
        if not handle.has_events:
            return
        num_tokens = handle.num_output_tokens - handle.num_buffered_tokens
        for event in handle.take():
            frame = self._frame()
            frame.output_index = handle.output_index(event)
            convert.fill_event(frame, event, priority_ignored=self._priority_ignored)
            if isinstance(event, Delta):
                num_tokens += len(event.token_ids)
            elif isinstance(event, LevelChanged):
                frame.priority_changed.capped = self.is_capped
            elif isinstance(event, Failed):
                self.retryable = event.error.retryable
            self._keep(frame, num_tokens)

    def _frame(self) -> gen.SessionResponse:
        return gen.SessionResponse(request_id=self.client_id, sequence=self._kept.last_sequence + 1)

    def _keep(self, frame: gen.SessionResponse, num_tokens: int) -> None:
        self._kept.append(frame.SerializeToString(), num_tokens)

    def _update_flow(self) -> None:
        if self._flow is not None and self.ticket is not None:
            self._flow.update(self.ticket.handle.num_output_tokens - self._num_sent_tokens)

    def _tell(self) -> None:
        if self.stream is not None:
            self.stream.mark(self)
