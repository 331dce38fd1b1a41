"""The events of one request as an async iterator, whichever call they come by."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from types import TracebackType
from typing import Any, Protocol, Self

import grpc.aio

from clients.python.errors import ConnectionLost, RequestCancelled, VorrangError, error_from_call
from clients.python.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    Output,
    OutputFinished,
    PositionLogprobs,
    PriorityChanged,
    PromptLogprobs,
    QueueUpdate,
    Result,
    decode,
)
from clients.python.request import PriorityLike


class Collector:
    """Adds up the events of one request; knows when each arrived.

    Args:
        sent_at_s: when the request was sent, on the clock that ``add`` is given.
    """

    def __init__(self, sent_at_s: float) -> None:
        self._sent_at_s = sent_at_s
        self._first_token_at_s: float | None = None
        self._last_token_at_s = sent_at_s
        self._ended_at_s = sent_at_s
        self._outputs: dict[int, _OutputSoFar] = {}
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._accepted: Accepted | None = None
        self.finished: Finished | None = None

    def add(self, event: Event, now_s: float) -> None:
        """Take in one event that arrived at ``now_s``."""
        match event:
            case Delta():
                output = self._output(event.output_index)
                output.text.append(event.text)
                output.token_ids.extend(event.token_ids)
                output.logprobs.extend(event.logprobs)
                if event.token_ids:
                    self._last_token_at_s = now_s
                    if self._first_token_at_s is None:
                        self._first_token_at_s = now_s
            case Accepted():
                self._accepted = event
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.positions)
            case OutputFinished():
                self._output(event.output_index).finished = event.finished
            case Finished():
                self.finished = event
                self._ended_at_s = now_s
            case _:
                pass

    def result(self) -> Result:
        """Everything so far as a result; only to be asked for once ``finished`` is set."""
        assert self.finished is not None
        first = self._first_token_at_s
        gaps = max((len(output.token_ids) for output in self._outputs.values()), default=0) - 1
        only = self._output(0)
        if len(self._outputs) == 1 and only.finished is None:
            only.finished = self.finished
        outputs = tuple(self._outputs[index].output() for index in sorted(self._outputs))
        return Result(
            text=outputs[0].text,
            token_ids=outputs[0].token_ids,
            finish_reason=self.finished.reason,
            usage=self.finished.usage,
            logprobs=outputs[0].logprobs,
            accepted=self._accepted,
            ttft_s=None if first is None else first - self._sent_at_s,
            tpot_s=None if first is None or gaps < 1 else (self._last_token_at_s - first) / gaps,
            duration_s=self._ended_at_s - self._sent_at_s,
            prompt_logprobs=tuple(self._prompt_logprobs),
            outputs=outputs,
        )

    def _output(self, index: int) -> "_OutputSoFar":
        return self._outputs.setdefault(index, _OutputSoFar())


class _OutputSoFar:
    """One output in the making."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.finished: Finished | None = None

    def output(self) -> Output:
        return Output("".join(self.text), tuple(self.token_ids), self.finished, tuple(self.logprobs))


class EventStream(ABC):
    """The events of one request, oldest first; ends after ``Finished``.

    For one consumer at a time. As an async context manager it cancels the
    request when the block is left before the request has ended. Leaving a bare
    ``async for`` early does not: the request goes on until it is cancelled.

    Attributes:
        request_id: id of the request.
    """

    def __init__(self, request_id: str, sent_at_s: float) -> None:
        self.request_id = request_id
        self._collector = Collector(sent_at_s)

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Event:
        """The next event.

        Raises:
            RequestFailed: the server refused the request or it failed; raised again by later calls.
            ConnectionLost: the stream broke before the request had ended.
        """

    @abstractmethod
    async def cancel(self) -> None:
        """Cancel the request; does nothing when it has ended. The iterator then ends by itself."""

    @property
    def ended(self) -> bool:
        """True once nothing more will arrive."""
        return self._collector.finished is not None

    async def result(self) -> Result:
        """Read to the end and return the whole output, events read before included.

        Raises:
            RequestFailed, ConnectionLost: as the iterator does.

        Cancellation: leaves the request running; cancel it, or use the stream as a context manager.
        """
        async for _ in self:
            pass
        return self._collector.result()

    async def text(self) -> str:
        """Read to the end and return the whole text; raises as ``result`` does."""
        return (await self.result()).text

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.ended:
            await self.cancel()


class _PendingDelta:
    """Deltas of one output that arrived one after the other and were not yet read, as one."""

    def __init__(self, first: Delta) -> None:
        self.output_index = first.output_index
        self._first_token_index = first.first_token_index
        self._text = [first.text]
        self._token_ids = list(first.token_ids)
        self._logprobs = list(first.logprobs)

    def merge(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)

    def delta(self) -> Delta:
        return Delta(
            "".join(self._text),
            tuple(self._token_ids),
            self._first_token_index,
            tuple(self._logprobs),
            self.output_index,
        )


class EventBuffer:
    """Events that arrived and were not yet read.

    Bounded by what the request can cause, not by a count: neighbouring deltas of one
    output become one (of several outputs there are at most as many as credit allows tokens),
    of neighbouring queue positions only the latest is kept, and every other event happens a
    bounded number of times.

    Attributes:
        last_sequence: sequence up to which events were taken; 0 = none were.
    """

    def __init__(self) -> None:
        self._events: deque[Event | _PendingDelta] = deque()
        self._sequences: deque[int] = deque()
        self.last_sequence = 0

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: Event, sequence: int = 0) -> None:
        """Add ``event`` as the newest."""
        newest = self._events[-1] if self._events else None
        if (
            isinstance(event, Delta)
            and isinstance(newest, _PendingDelta)
            and event.output_index == newest.output_index
        ):
            newest.merge(event)
            self._sequences[-1] = sequence
            return
        if isinstance(event, QueueUpdate) and isinstance(newest, QueueUpdate):
            self._events.pop()
            self._sequences.pop()
        self._events.append(_PendingDelta(event) if isinstance(event, Delta) else event)
        self._sequences.append(sequence)

    def pop(self) -> Event:
        """Take the oldest event."""
        event = self._events.popleft()
        self.last_sequence = self._sequences.popleft()
        return event.delta() if isinstance(event, _PendingDelta) else event


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
        """Grant tokens if that can be said without waiting; False when it can't."""
        ...


class RequestStream(EventStream):
    """A request started in a session. Made by ``Session.start``.

    Times in its result are those at which events arrived, however late they are read.
    What is read is granted to the request again, so that it is never further ahead of its
    reader than its credit; one that nobody reads stands still.
    """

    def __init__(
        self,
        request_id: str,
        sent_at_s: float,
        commands: "Commands",
        window_tokens: int,
    ) -> None:
        super().__init__(request_id, sent_at_s)
        self._commands = commands
        self.window_tokens = window_tokens
        self._num_read_tokens = 0
        self._buffer = EventBuffer()
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
            self._grant(len(event.token_ids))
        return event

    def _grant(self, num_tokens: int) -> None:
        """Grant again what was read, once it is half the window: a frame a token would cost too much."""
        self._num_read_tokens += num_tokens
        if (
            self.window_tokens
            and not self.ended
            and self._num_read_tokens * 2 >= self.window_tokens
            and self._commands.try_credit(self.request_id, self._num_read_tokens, self.last_sequence)
        ):
            self._num_read_tokens = 0

    async def cancel(self) -> None:
        """Cancel the request; does nothing when it has ended.

        The iterator goes on to ``Finished`` with reason "CANCELLED", or
        whatever the request came to first.

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

    def feed(self, event: Event, now_s: float, sequence: int = 0) -> None:
        """Take in an event that arrived at ``now_s``. For the session alone."""
        self._collector.add(event, now_s)
        self._buffer.push(event, sequence)
        self.accepted = self.accepted or isinstance(event, Accepted)
        self._news.set()

    def fail(self, error: VorrangError) -> None:
        """End with ``error`` once what has arrived is read. For the session alone."""
        self._error = error
        self._news.set()


class CallStream(EventStream):
    """A request that is a server-stream call of its own. Made by ``VorrangClient.generate_stream``.

    Cancellation: cancelling the task that reads cancels the call, and with it the request.
    """

    def __init__(self, request_id: str, sent_at_s: float, call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
        super().__init__(request_id, sent_at_s)
        self._call = call
        self._error: VorrangError | None = None

    @property
    def ended(self) -> bool:
        """True once nothing more will arrive."""
        return self._error is not None or super().ended

    async def __anext__(self) -> Event:
        if self._error is not None:
            raise self._error
        if self.ended:
            await self._finish_call()
            raise StopAsyncIteration
        event: Event | None = None
        while event is None:
            event = decode(await self._read())
        self._collector.add(event, asyncio.get_running_loop().time())
        return event

    async def _finish_call(self) -> None:
        """Let the server end the call, but do not depend on it."""
        try:
            await asyncio.wait_for(self._call.read(), timeout=1.0)
        except (grpc.aio.AioRpcError, TimeoutError):
            pass
        finally:
            self._call.cancel()

    async def _read(self) -> Any:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._error = error_from_call(error)
            raise self._error from error
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            self._error = RequestCancelled("the request was cancelled")
            raise self._error from None
        if response is grpc.aio.EOF:
            self._error = ConnectionLost("the server ended the call before the request had ended")
            raise self._error
        return response

    async def cancel(self) -> None:
        """Cancel the call; the iterator then raises ``RequestCancelled``."""
        self._call.cancel()


def _being_cancelled() -> bool:
    """Whether the running task itself is being cancelled, and not only the call it reads."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
