"""The events of one request of a session, and what a new stream has to be told of it."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

import grpc

from clients.python import frames
from clients.python.collector import EventBuffer
from clients.python.credit import Credit
from clients.python.errors import RequestFailed, VorrangError
from clients.python.events import Accepted, Delta, Event, PriorityChanged
from clients.python.request import PriorityLike
from clients.python.stream import EventStream
from vorrang.v1 import generation_pb2 as pb


class Commands(Protocol):
    """What a request's stream asks of its session."""

    async def cancel(self, request_id: str) -> None:
        """See ``Session.cancel``."""

    async def pause(self, request_id: str) -> None:
        """See ``Session.pause``."""

    async def unpause(self, request_id: str) -> None:
        """See ``Session.unpause``."""

    async def reprioritize(
        self, request_id: str, priority: PriorityLike, *, timeout_s: float = 10.0
    ) -> PriorityChanged:
        """See ``Session.reprioritize``."""
        ...

    def try_credit(self, request_id: str, num_tokens: int, acknowledged_sequence: int) -> bool:
        """See ``Session.try_credit``."""
        ...


class RequestStream(EventStream):
    """A request of a session. Made by ``Session.start`` and ``Session.resume``.

    Times in its result are those at which events arrived, however late they are read.
    What is read is granted to the request again, so that it is never further ahead of its
    reader than its credit; one that nobody reads stands still. When the connection is lost
    and found again it goes on where it was.
    """

    def __init__(
        self,
        request_id: str,
        sent_at_s: float,
        commands: Commands,
        credit: Credit,
        *,
        start_frame: pb.SessionRequest | None = None,
        after_sequence: int = 0,
    ) -> None:
        """For the session alone; without a start frame it was started elsewhere."""
        super().__init__(request_id, sent_at_s)
        self._commands = commands
        self._credit = credit
        self._start_frame = start_frame
        self._buffer = EventBuffer(after_sequence)
        self._num_events = after_sequence
        self._is_paused: bool | None = None
        self._is_cancelled = False
        self._error: VorrangError | None = None
        self._news = asyncio.Event()
        self.accepted = False

    @property
    def last_sequence(self) -> int:
        """Sequence of the last event that was read: where to resume after a loss."""
        return self._buffer.last_sequence

    @property
    def ended(self) -> bool:
        """True once nothing more will arrive; events that did may still wait to be read."""
        return self._error is not None or super().ended

    async def __anext__(self) -> Event:
        while not self._buffer:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        event = self._buffer.pop()
        if isinstance(event, Delta):
            num_due_tokens = self._credit.read(len(event.token_ids))
            if num_due_tokens and not self.ended:
                # While the connection is lost nothing is granted: a resumption does so.
                self._commands.try_credit(self.request_id, num_due_tokens, self.last_sequence)
        return event

    async def cancel(self) -> None:
        """Cancel the request; does nothing when it has ended.

        The iterator goes on to ``Finished`` with reason "CANCELLED", or
        whatever the request came to first. While the connection is lost this returns at once, and
        the server is told as soon as it is found again.

        Raises:
            SessionClosed: the session was half-closed before the request had ended.
        """
        if not self.ended:
            await self._commands.cancel(self.request_id)

    async def pause(self) -> None:
        """Stop its computation for as long as you like; does nothing when it has ended."""
        if not self.ended:
            await self._commands.pause(self.request_id)

    async def unpause(self) -> None:
        """Let it go on after a pause; does nothing when it has ended."""
        if not self.ended:
            await self._commands.unpause(self.request_id)

    async def reprioritize(self, priority: PriorityLike, *, timeout_s: float = 10.0) -> PriorityChanged:
        """Change the priority and wait for the acknowledgement; see ``Session.reprioritize``."""
        return await self._commands.reprioritize(self.request_id, priority, timeout_s=timeout_s)

    # For the session alone.

    @property
    def has_begun(self) -> bool:
        """Whether the server has answered it; if not it can be started again, anywhere."""
        return self._start_frame is None

    def is_known(self, sequence: int) -> bool:
        """Whether the event of that sequence has arrived already; 0 = it has none."""
        return 0 < sequence <= self._num_events

    def feed(self, event: Event | None, now_s: float, sequence: int = 0) -> None:
        """Take in an event that arrived at ``now_s``; None = one that this version does not know.

        Raises:
            RequestFailed: events before it are missing.
        """
        self._start_frame = None
        self._follow(sequence)
        if event is None:
            return
        if isinstance(event, Delta):
            self._credit.receive(len(event.token_ids))
        self._collector.add(event, now_s)
        self._buffer.push(event, sequence)
        self.accepted = self.accepted or isinstance(event, Accepted)
        self._news.set()

    def _follow(self, sequence: int) -> None:
        if sequence:
            if sequence != self._num_events + 1:
                raise RequestFailed(
                    f"events {self._num_events + 1} to {sequence - 1} of request {self.request_id!r} "
                    "have not arrived",
                    code=grpc.StatusCode.DATA_LOSS,
                )
            self._num_events = sequence

    def fail(self, error: VorrangError) -> None:
        """End with ``error`` once what has arrived is read."""
        self._error = error
        self._news.set()

    def mark_cancelled(self) -> None:
        """It is to be cancelled, on whichever stream can say so."""
        self._is_cancelled = True

    def mark_paused(self, is_paused: bool) -> None:
        """It is to be paused, or not, on whichever stream can say so."""
        self._is_paused = is_paused

    def mark_granted(self, num_tokens: int) -> None:
        """Tokens are to be granted by hand, on whichever stream can say so."""
        self._credit.grant(num_tokens)

    def take_up(self) -> Iterator[pb.SessionRequest]:
        """What makes the server go on with it on a new stream."""
        if self._start_frame is not None:
            # Whether the server has heard of it is not known; the same start again means the same request.
            yield self._start_frame
        else:
            yield frames.resume_frame(self.request_id, self._num_events)
        num_missing_tokens = self._credit.renew()
        if num_missing_tokens:
            yield frames.credit_frame(self.request_id, num_missing_tokens, None)
        if self._is_paused is not None:
            make = frames.pause_frame if self._is_paused else frames.unpause_frame
            yield make(self.request_id)
        if self._is_cancelled:
            yield frames.cancel_frame(self.request_id)
