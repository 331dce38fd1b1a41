"""The bidirectional session: many requests and live control of them on one stream.

One reader task obeys frames, one writer task sends events, and the handler's own
coroutine waits for both: end-of-file looks like a cancel to ``read()``, so only
``CancelledError`` in the handler says that the peer is gone. The writer keeps no
queue of events; it takes from a request's buffer when it is able to write, the
most urgent request's first.
"""

import asyncio
import secrets
from collections import OrderedDict
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from engine import errors as e
from server import convert
from server.backend import Backend, server_version, token_ids_of
from server.convert import Draft
from server.errors import public, status_of
from server.live_request import LiveRequest
from server.metadata import MAX_REQUEST_ID_BYTES, check_request_id, level_of, request_id_of
from vorrang.v1 import generation_pb2 as gen

#: Ids of ended requests that a session remembers.
MAX_REMEMBERED_IDS = 4096
#: Events of the session itself that may wait to be written; then the reader stops reading.
MAX_WAITING_FRAMES = 64
_MAX_CLIENT_NAME_BYTES = 128
_REVISION = 1

log = structlog.get_logger("vorrang.server")


class PeerGone(Exception):
    """A write found that the client has left."""


class Session:
    """One stream.

    Args:
        backend: engine, limits and register.
        context: of the call; its messages are bytes.

    Raises:
        InvalidMetadata: the call's metadata is malformed.
    """

    def __init__(self, backend: Backend, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        metadata = context.invocation_metadata() or ()
        request_id_of(metadata)
        self._metadata_level = level_of(metadata)
        self._default_level: int | None = None
        self._backend = backend
        self._context: Any = context
        self._id = secrets.token_hex(4)
        self._opened = False
        self._half_closed = False
        self._ending = False
        self._too_bad: e.VorrangError | None = None
        self._num_bad_frames = 0
        self._go_away_s: float | None = None
        self._requests: dict[str, LiveRequest] = {}
        self._remembered: OrderedDict[str, None] = OrderedDict()
        self._ready: dict[str, LiveRequest] = {}
        self._own_frames: asyncio.Queue[gen.SessionResponse] = asyncio.Queue(MAX_WAITING_FRAMES)
        self._wake = asyncio.Event()
        self._turns: dict[int, asyncio.Event] = {}
        self._group = asyncio.TaskGroup()

    async def run(self) -> None:
        """Serve the stream until its end.

        Raises:
            VorrangError: the stream must end with this status.

        Cancellation: the peer is gone; every request is cancelled, nothing is left behind.
        """
        self._backend.sessions.add(self)
        try:
            async with self._group as group:
                reader = group.create_task(self._read(), name=f"session-{self._id}-read")
                group.create_task(self._write(), name=f"session-{self._id}-write").add_done_callback(
                    lambda _: reader.cancel()
                )
        except BaseExceptionGroup as failures:
            raise _gravest(failures) from None
        finally:
            self._backend.sessions.discard(self)
            for request in self._requests.values():
                if request.ticket is not None:
                    self._backend.settle(request.ticket)

    # What the shutdown calls.

    def go_away(self, time_left_s: float) -> None:
        """Tell the client, before all other events, that the stream ends soon."""
        self._go_away_s = time_left_s
        self._wake.set()

    def end(self) -> None:
        """Take no more starts to heart: end with UNAVAILABLE as soon as no request is left."""
        self._ending = True
        self._wake.set()

    # The reader.

    async def _read(self) -> None:
        while True:
            raw = await self._context.read()
            if raw is grpc.aio.EOF:
                self._half_closed = True
                self._wake.set()
                return
            await self._obey(raw)
            if self._too_bad is not None:
                self._wake.set()
                return

    async def _obey(self, raw: bytes) -> None:
        command, client_id = "", ""
        try:
            frame = self._decode(raw)
            command = frame.WhichOneof("command") or ""
            if not command:
                raise e.MalformedFrame("frame", "must carry a command this server knows", None)
            body = getattr(frame, command)
            client_id = getattr(body, "request_id", "")
            if command != "open" and not self._opened:
                raise e.SessionState(f"{command} came before open")
            match command:
                case "open":
                    await self._put(self._open(body))
                case "start":
                    await self._start(body)
                case "cancel":
                    self._cancel(client_id)
                case "reprioritize":
                    self._reprioritize(body)
                case _:
                    raise e.Unimplemented(command)
        except Exception as error:
            await self._put(_rejected(error, command, client_id))

    def _decode(self, raw: bytes) -> gen.SessionRequest:
        try:
            return gen.SessionRequest.FromString(raw)
        except DecodeError:
            self._num_bad_frames += 1
            error = e.MalformedFrame("frame", "must be a SessionRequest", f"{len(raw)} bytes")
            limit = self._backend.settings.max_bad_frames
            if self._num_bad_frames >= limit:
                self._too_bad = e.MalformedFrame("frame", f"must not be undecodable {limit} times", limit)
            raise error from None

    def _open(self, command: gen.OpenCommand) -> gen.SessionResponse:
        if self._opened:
            raise e.SessionState("open came twice")
        size = len(command.client_name.encode())
        if size > _MAX_CLIENT_NAME_BYTES:
            raise e.InvalidRequest("client_name", f"must be at most {_MAX_CLIENT_NAME_BYTES} bytes", size)
        if command.revision > _REVISION:
            raise e.Unimplemented("open.revision")
        if command.HasField("default_credit_tokens"):
            raise e.Unimplemented("open.default_credit_tokens")
        if command.resume_session_token:
            raise e.Unimplemented("open.resume_session_token")
        if command.HasField("default_priority"):
            self._default_level = convert.level_of(command.default_priority, field="default_priority")
        engine = self._backend.engine
        opened = gen.OpenedEvent(
            limits=self._backend.limits(),
            default_level=self._level(None),
            policy=engine.config.policy,
            server_version=server_version(),
        )
        self._opened = True
        log.debug("session.opened", session_id=self._id, client=command.client_name)
        return gen.SessionResponse(opened=opened)

    def _level(self, own: int | None) -> int:
        """Priority by precedence: start field > session default > metadata > tenant's or server's default."""
        for level in (own, self._default_level, self._metadata_level):
            if level is not None:
                return level
        return self._backend.default_level

    async def _start(self, command: gen.StartCommand) -> None:
        client_id = check_request_id(command.request_id)
        if client_id in self._requests or client_id in self._remembered:
            raise e.DuplicateRequestId(client_id)
        try:
            draft = self._draft(command)
        except Exception as error:
            self._remember(client_id)
            refusal = convert.failed(public(error))
            await self._put(gen.SessionResponse(request_id=client_id, sequence=1, failed=refusal))
            return
        request = self._requests[client_id] = LiveRequest(client_id, self._level(draft.level))
        before = self._turns.get(request.level)
        mine = self._turns[request.level] = asyncio.Event()
        self._group.create_task(self._submit(request, draft, before, mine))

    def _draft(self, command: gen.StartCommand) -> Draft:
        limit = self._backend.settings.max_session_requests
        if len(self._requests) >= limit:
            raise e.SessionLimit(f"{limit} requests are alive in this session, as many as may")
        if not command.HasField("spec"):
            raise e.InvalidRequest("spec", "must be given", None)
        return self._backend.draft(command.spec)

    async def _submit(
        self, request: LiveRequest, draft: Draft, before: asyncio.Event | None, mine: asyncio.Event
    ) -> None:
        """Tokenise and submit; within a level in the order of the frames."""
        try:
            token_ids = await token_ids_of(draft)
            if before is not None:
                await before.wait()
            ticket = self._backend.submit(
                draft, token_ids, request.level, request.client_id, lambda _: self._mark(request)
            )
            request.submitted(ticket)
        except Exception as error:
            request.refusal = public(error)
        finally:
            mine.set()
        self._mark(request)

    def _cancel(self, client_id: str) -> None:
        request = self._requests.get(client_id)
        if request is not None:
            request.when_submitted(lambda ticket: ticket.handle.cancel())
        elif client_id not in self._remembered:
            raise e.UnknownRequest(_shown(client_id))

    def _reprioritize(self, command: gen.ReprioritizeCommand) -> None:
        request = self._requests.get(command.request_id)
        if request is None:
            raise e.UnknownRequest(_shown(command.request_id))
        asked = convert.level_of(command.priority)
        level = self._backend.allowed_level(asked)
        request.is_capped = level != asked
        request.when_submitted(lambda ticket: ticket.handle.set_level(level))

    async def _put(self, frame: gen.SessionResponse) -> None:
        await self._own_frames.put(frame)
        self._wake.set()

    # The writer.

    def _mark(self, request: LiveRequest) -> None:
        self._ready[request.client_id] = request
        self._wake.set()

    async def _write(self) -> None:
        while not self._over():
            if self._go_away_s is not None:
                away = gen.GoAwayEvent(
                    time_left=convert.duration(self._go_away_s), message="the server is shutting down"
                )
                self._go_away_s = None
                await self._send(gen.SessionResponse(go_away=away))
            elif not self._own_frames.empty():
                await self._send(self._own_frames.get_nowait())
            elif self._too_bad is not None:
                raise self._too_bad
            elif self._ready:
                await self._send_events(min(self._ready.values(), key=self._urgency))
            else:
                self._wake.clear()
                await self._wake.wait()
        if self._ending and not self._half_closed:
            raise e.Draining

    def _urgency(self, request: LiveRequest) -> int:
        """What orders the writer; the earliest ready comes first among equals."""
        return request.level if self._backend.engine.uses_level else 0

    def _over(self) -> bool:
        """Whether nothing is left to send and nothing more can come."""
        quiet = self._own_frames.empty() and self._go_away_s is None and self._too_bad is None
        return quiet and not self._requests and (self._half_closed or self._ending)

    async def _send_events(self, request: LiveRequest) -> None:
        del self._ready[request.client_id]
        frames, ended = request.take()
        if ended:  # before the write: the client may use the free place as soon as it reads the end
            self._retire(request)
        for frame in frames:
            await self._send(frame)

    def _retire(self, request: LiveRequest) -> None:
        del self._requests[request.client_id]
        self._remember(request.client_id)
        if request.ticket is not None:
            self._backend.settle(request.ticket)

    def _remember(self, client_id: str) -> None:
        self._remembered[client_id] = None
        if len(self._remembered) > MAX_REMEMBERED_IDS:
            self._remembered.popitem(last=False)

    async def _send(self, frame: gen.SessionResponse) -> None:
        try:
            await self._context.write(frame.SerializeToString())
        except grpc.aio.BaseError as error:
            raise PeerGone from error


def _rejected(error: Exception, command: str, client_id: str) -> gen.SessionResponse:
    rejected = gen.CommandRejectedEvent(status=status_of(error), command=command)
    return gen.SessionResponse(
        request_id=client_id if len(client_id.encode()) <= MAX_REQUEST_ID_BYTES else "",
        command_rejected=rejected,
    )


def _shown(client_id: str) -> str:
    return client_id if len(client_id) <= MAX_REQUEST_ID_BYTES else client_id[:MAX_REQUEST_ID_BYTES] + "..."


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
