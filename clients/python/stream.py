"""The events of one request as an async iterator; here of one that is a call of its own."""

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

import grpc.aio

from clients.python.collector import Collector
from clients.python.errors import ConnectionLost, RequestCancelled, VorrangError, error_from_call
from clients.python.events import Event, Result, decode


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
