"""The client for programs without an event loop: the same calls, blocking, from any thread.

with SyncClient("127.0.0.1:50051") as client, client.session() as session:
    for event in session.start("Once upon a time", priority="interactive", max_tokens=32):
        ...
"""

from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from clients.python.client import VorrangClient
from clients.python.errors import SessionClosed
from clients.python.events import Event, Model, PriorityChanged, Result, SessionInfo
from clients.python.loop_thread import Portal, PortalClosed
from clients.python.options import ClientOptions, SessionOptions
from clients.python.request import Messages, PriorityLike, RequestOptions
from clients.python.request_stream import RequestStream
from clients.python.session import Session
from clients.python.stream import EventStream

T = TypeVar("T")


class SyncClient:
    """A client of the server at ``target``; a context manager. See ``VorrangClient``, also for the options.

    Its calls run on one thread, which ends with the block of the last client. Any number of threads may use
    it and what it makes at the same time; a stream is for one reader at a time. Ctrl-C ends whatever is
    waited for, and cancels it on the server when it is a request of its own. Every method raises what its
    async counterpart raises, and ``SessionClosed`` outside the block.
    """

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        self._begin(VorrangClient(target, **options))

    @classmethod
    def from_environment(cls, target: str) -> Self:
        """A client with the credentials that the environment names; see ``VorrangClient``."""
        client = cls.__new__(cls)
        client._begin(VorrangClient.from_environment(target))
        return client

    def _begin(self, client: VorrangClient) -> None:
        self._client = client
        self._portal = Portal(client)
        self.target = client.target

    def __enter__(self) -> Self:
        self._portal.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.close()

    def session(self, **options: Unpack[SessionOptions]) -> "SyncSession":
        """A session, to be entered with ``with``; see ``VorrangClient.session``."""
        return SyncSession(self._portal, _wait(self._portal, _made(self._client, options)))

    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> "SyncStream":
        """One request as a call of its own; its events. See ``VorrangClient.generate_stream``."""

        async def begin() -> EventStream:
            return self._client.generate_stream(prompt, request_id=request_id, timeout_s=timeout_s, **options)

        return SyncStream(self._portal, _wait(self._portal, begin()))

    def generate(
        self,
        prompt: str | None = None,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """One request, one answer. See ``VorrangClient.generate``."""
        call = self._client.generate(prompt, request_id=request_id, timeout_s=timeout_s, **options)
        return _wait(self._portal, call)

    def tokenize(
        self, prompt: str | None = None, *, messages: Messages | None = None, timeout_s: float | None = 30.0
    ) -> list[int]:
        """Token ids of a text or conversation."""
        return _wait(self._portal, self._client.tokenize(prompt, messages=messages, timeout_s=timeout_s))

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout_s: float | None = 30.0
    ) -> str:
        """Text of token ids."""
        call = self._client.detokenize(
            token_ids, skip_special_tokens=skip_special_tokens, timeout_s=timeout_s
        )
        return _wait(self._portal, call)

    def get_model(self, *, timeout_s: float | None = 30.0) -> Model:
        """The model that is served, and the limits of the server."""
        return _wait(self._portal, self._client.get_model(timeout_s=timeout_s))

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the server's health is SERVING; raises ``NotReady`` when it was not in time."""
        _wait(self._portal, self._client.wait_ready(timeout_s))


class SyncStream:
    """The events of one request, oldest first; ends after ``Finished``. See ``EventStream``.

    As a context manager it cancels the request when the block is left before the request has ended.

    Attributes:
        request_id: id of the request.
    """

    def __init__(self, portal: Portal, stream: EventStream) -> None:
        self._portal = portal
        self._stream = stream
        self.request_id = stream.request_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = _wait(self._portal, _next(self._stream))
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _wait(self._portal, self._stream.__aexit__(kind, error, trace))

    @property
    def ended(self) -> bool:
        """True once nothing more will arrive; events that did may still wait to be read."""
        return self._stream.ended

    def result(self) -> Result:
        """Read to the end and return the whole output, events read before included."""
        return _wait(self._portal, self._stream.result())

    def text(self) -> str:
        """Read to the end and return the whole text."""
        return _wait(self._portal, self._stream.text())

    def cancel(self) -> None:
        """Cancel the request; does nothing when it has ended."""
        _wait(self._portal, self._stream.cancel())


class SyncRequestStream(SyncStream):
    """A request of a session. Made by ``SyncSession``; see ``RequestStream``."""

    def __init__(self, portal: Portal, stream: RequestStream) -> None:
        super().__init__(portal, stream)
        self._request = stream

    @property
    def last_sequence(self) -> int:
        """Sequence of the last event that was read: where to resume after a loss."""
        return self._request.last_sequence

    def reprioritize(self, priority: PriorityLike, *, timeout_s: float = 10.0) -> PriorityChanged:
        """Change the priority and wait for the acknowledgement."""
        return _wait(self._portal, self._request.reprioritize(priority, timeout_s=timeout_s))

    def pause(self) -> None:
        """Stop its computation for as long as you like; does nothing when it has ended."""
        _wait(self._portal, self._request.pause())

    def unpause(self) -> None:
        """Let it go on after a pause; does nothing when it has ended."""
        _wait(self._portal, self._request.unpause())


class SyncSession:
    """A session with a server. Made by ``SyncClient.session``; a context manager. See ``Session``.

    Leaving normally waits until the requests still running have ended; leaving with an exception, Ctrl-C
    included, cancels every request.
    """

    def __init__(self, portal: Portal, session: Session) -> None:
        self._portal = portal
        self._session = session

    def __enter__(self) -> Self:
        _wait(self._portal, self._session.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _wait(self._portal, self._session.__aexit__(kind, error, trace))

    @property
    def info(self) -> SessionInfo:
        """What the server said when the stream in use was opened."""
        return self._session.info

    @property
    def connected(self) -> bool:
        """Whether there is a stream; False while a lost one is looked for, and once it is given up."""
        return self._session.connected

    @property
    def going_away_s(self) -> float | None:
        """The seconds the server gave when it announced its end; None before."""
        return self._session.going_away_s

    @property
    def alive(self) -> int:
        """Number of requests that have not ended."""
        return self._session.alive

    def start(
        self,
        prompt: str | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> SyncRequestStream:
        """Start a request and return its events; see ``Session.start``."""
        start = self._session.start(prompt, request_id=request_id, **options)
        return SyncRequestStream(self._portal, _wait(self._portal, start))

    def resume(
        self, request_id: str, after_sequence: int = 0, *, credit_tokens: int | None = None
    ) -> SyncRequestStream:
        """Take up a request of the lost session whose token this one was opened with."""
        resume = self._session.resume(request_id, after_sequence, credit_tokens=credit_tokens)
        return SyncRequestStream(self._portal, _wait(self._portal, resume))

    def credit(self, request_id: str, num_tokens: int, acknowledged_sequence: int | None = None) -> None:
        """Grant output tokens to a request; a session that keeps credit does it by itself."""
        _wait(self._portal, self._session.credit(request_id, num_tokens, acknowledged_sequence))

    def pause(self, request_id: str) -> None:
        """Stop a request's computation, keeping its place; harmless when it has ended."""
        _wait(self._portal, self._session.pause(request_id))

    def unpause(self, request_id: str) -> None:
        """Let a paused request go on."""
        _wait(self._portal, self._session.unpause(request_id))

    def cancel(self, request_id: str) -> None:
        """Cancel a request; harmless when it has ended or never was."""
        _wait(self._portal, self._session.cancel(request_id))

    def reprioritize(
        self, request_id: str, priority: PriorityLike, *, timeout_s: float = 10.0
    ) -> PriorityChanged:
        """Change the priority of a queued or running request and wait for the acknowledgement."""
        return _wait(self._portal, self._session.reprioritize(request_id, priority, timeout_s=timeout_s))

    def close(self) -> None:
        """Half-close: no more commands; the requests already started run to their end."""
        _wait(self._portal, self._session.close())


def _wait(portal: Portal, work: Coroutine[Any, Any, T]) -> T:
    try:
        return portal.run(work)
    except PortalClosed:
        raise SessionClosed("the client is used outside its `with` block") from None


async def _next(stream: EventStream) -> Event | None:
    return await anext(stream, None)


async def _made(client: VorrangClient, options: SessionOptions) -> Session:
    return client.session(**options)
