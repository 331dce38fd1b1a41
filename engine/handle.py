"""A request as its submitter sees it: events out, commands in."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from engine.errors import VorrangError
from engine.events import TERMINAL, Delta, Failed, LevelChanged, PromptLogProbs, RequestEvent, Started
from engine.request import FinishReason, RequestId, RequestSpec
from engine.scheduler.commands import Allow, Command, Fail, Finish, Park, SetLevel, Unpark

#: Log probabilities of so many places at most wait as one event: it becomes one message.
MAX_POSITIONS = 1024


class Handle(Protocol):
    """A request, or several outputs of one (``engine.siblings``), as the server sees them."""

    spec: RequestSpec

    @property
    def request_id(self) -> RequestId:
        """The id, unique in the process."""
        ...

    @property
    def queue_position(self) -> int:
        """Requests that would be served before it when it arrived."""
        ...

    @property
    def level(self) -> int:
        """Level in force."""
        ...

    @property
    def num_buffered_tokens(self) -> int:
        """Output tokens that wait to be taken."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        ...

    @property
    def started(self) -> bool:
        """Whether it was ever admitted."""
        ...

    @property
    def finished(self) -> bool:
        """Whether its terminal event is there to be taken."""
        ...

    @property
    def has_events(self) -> bool:
        """Whether events wait to be taken."""
        ...

    def output_index(self, event: RequestEvent) -> int:
        """Which output an event is about, from 0."""
        ...

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """See ``RequestHandle``."""
        ...

    def fail(self, error: VorrangError) -> None:
        """See ``RequestHandle``."""
        ...

    def set_level(self, level: int) -> None:
        """See ``RequestHandle``."""
        ...

    def park(self) -> None:
        """See ``RequestHandle``."""
        ...

    def unpark(self) -> None:
        """See ``RequestHandle``."""
        ...

    def allow(self, num_output_tokens: int | None) -> None:
        """See ``RequestHandle``."""
        ...

    def take(self) -> list[RequestEvent]:
        """See ``RequestHandle``."""
        ...

    def events(self) -> AsyncIterator[RequestEvent]:
        """See ``RequestHandle``."""
        ...


class RequestHandle:
    """What ``Engine.submit`` returns.

    Events wait in a buffer until they are taken; deltas that wait are merged, so
    the buffer holds few events and at most ``max_tokens`` token ids however slow
    the reader is. The engine, not this class, bounds how many tokens may wait.

    Attributes:
        spec: what was asked for.
        queue_position: requests that would be served before it when it arrived.
        level: level in force.
        num_buffered_tokens: output tokens that wait to be taken.
        num_output_tokens: output tokens so far.
        started: whether it was ever admitted.
        finished: whether the terminal event has been put into the buffer.
        allows: whether ``allow`` is needed, because a step may bring more than one token.
        error: what it failed with; None = it has not failed.
    """

    def __init__(
        self,
        spec: RequestSpec,
        queue_position: int,
        send: Callable[[Command], None],
        on_ready: "Callable[[RequestHandle], None] | None" = None,
        *,
        allows: bool = False,
    ) -> None:
        self.spec = spec
        self.queue_position = queue_position
        self.level = spec.level
        self.num_buffered_tokens = 0
        self.num_output_tokens = 0
        self.started = False
        self.finished = False
        self.allows = allows
        self.error: VorrangError | None = None
        self._send = send
        self._on_ready = on_ready
        self._buffer: list[RequestEvent] = []
        self._filled = asyncio.Event()

    @property
    def request_id(self) -> RequestId:
        """The id, unique in the process."""
        return self.spec.request_id

    def output_index(self, event: RequestEvent) -> int:
        """Which output an event is about: there is one."""
        return 0

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End it before the next step, with the output so far. Harmless when it has ended."""
        if not self.finished:
            self._send(Finish(self.request_id, reason))

    def fail(self, error: VorrangError) -> None:
        """End it before the next step, with an error. Harmless when it has ended."""
        if not self.finished:
            self._send(Fail(self.request_id, error))

    def set_level(self, level: int) -> None:
        """Give it another level; ``LevelChanged`` acknowledges. Harmless when it has ended.

        Raises:
            InvalidRequest, QueueFull: one that never had a seat would wait in another class then, which has
                no room for it; it keeps its level.
        """
        if not self.finished:
            self._send(SetLevel(self.request_id, level))

    def park(self) -> None:
        """Compute it no more, from the next step on, until ``unpark``. Harmless when it has ended."""
        if not self.finished:
            self._send(Park(self.request_id))

    def unpark(self) -> None:
        """Let it go on before the next step. Harmless when it has ended or was not parked."""
        if not self.finished:
            self._send(Unpark(self.request_id))

    def allow(self, num_output_tokens: int | None) -> None:
        """Let no step bring its output beyond that length; None = any. A step brings one token at least."""
        if self.allows and not self.finished:
            self._send(Allow(self.request_id, num_output_tokens))

    @property
    def has_events(self) -> bool:
        """Whether events wait to be taken."""
        return bool(self._buffer)

    def take(self) -> list[RequestEvent]:
        """All events that wait, oldest first; never blocks."""
        events, self._buffer = self._buffer, []
        self.num_buffered_tokens = 0
        self._filled.clear()
        return events

    async def events(self) -> AsyncIterator[RequestEvent]:
        """Events until the terminal one, which is included. One reader at a time.

        Cancellation: leaves the request running and no event lost; call ``cancel`` to end it.
        """
        while True:
            await self._filled.wait()
            for event in self.take():
                yield event
                if isinstance(event, TERMINAL):
                    return

    def _put_positions(self, event: PromptLogProbs, last: RequestEvent | None) -> None:
        """As few events as hold no more positions each than may be."""
        first, positions = event.first_index, event.positions
        if isinstance(last, PromptLogProbs):
            self._buffer.pop()
            first, positions = last.first_index, last.positions + positions
        for begin in range(0, len(positions), MAX_POSITIONS):
            part = positions[begin : begin + MAX_POSITIONS]
            self._buffer.append(PromptLogProbs(event.request_id, first + begin, part))

    def put(self, event: RequestEvent) -> None:
        """For the engine alone: add an event."""
        assert not self.finished, "an event after the terminal one"
        last = self._buffer[-1] if self._buffer else None
        if isinstance(event, Delta) and isinstance(last, Delta) and len(last.logprobs) < MAX_POSITIONS:
            self._buffer[-1] = Delta(
                event.request_id,
                last.first_index,
                last.token_ids + event.token_ids,
                last.text + event.text,
                last.logprobs + event.logprobs,
            )
        elif isinstance(event, PromptLogProbs):
            self._put_positions(event, last)
        else:
            self._buffer.append(event)
        if isinstance(event, Delta):
            self.num_buffered_tokens += len(event.token_ids)
            self.num_output_tokens += len(event.token_ids)
        elif isinstance(event, Started):
            self.started = True
        elif isinstance(event, LevelChanged):
            self.level = event.level
        elif isinstance(event, TERMINAL):
            self.finished = True
            self.error = event.error if isinstance(event, Failed) else None
        self._filled.set()
        if self._on_ready is not None:
            self._on_ready(self)
