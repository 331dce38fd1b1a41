"""Which sessions and requests the server knows, those included whose stream is lost.

A session is named by a token that nobody can guess; a request by its tenant and the
id its client chose. Requests of a lost session go on for the grace; ended requests
are kept for the retention, as far as memory allows. Knows no frame and no stream.
"""

import asyncio
import secrets
from collections import OrderedDict
from typing import Protocol

import structlog

from engine.errors import ResumeOutOfRange
from server.live_request import LiveRequest, Stream
from server.sections import SessionSection
from timeline.secrecy import SESSION_TOKEN_PREFIX

_TOKEN_BYTES = 32

log = structlog.get_logger("vorrang.server")


class SessionStream(Stream, Protocol):
    """The stream of a session, as the register sees it."""

    def lose(self) -> None:
        """Another stream has taken up the session: end."""
        ...


class SessionRecord:
    """A session, whichever stream it has.

    Attributes:
        token: names it.
        tenant: whose it is.
        stream: its stream; None while that is lost.
        requests: its requests by client id, ended ones included while they are kept.
    """

    __slots__ = ("requests", "stream", "tenant", "timer", "token")

    def __init__(self, token: str, tenant: str, stream: SessionStream) -> None:
        self.token = token
        self.tenant = tenant
        self.stream: SessionStream | None = stream
        self.requests: dict[str, LiveRequest] = {}
        self.timer: asyncio.TimerHandle | None = None


class Registry:
    """All sessions and their requests. For the event loop's thread alone.

    Invariant: an ended request is kept at most ``retention_s``, at most
    ``max_retained_requests`` of them and their frames in at most ``max_retained_bytes``.

    Args:
        settings: of sessions.
    """

    def __init__(self, settings: SessionSection) -> None:
        self._settings = settings
        self._sessions: dict[str, SessionRecord] = {}
        self._requests: dict[tuple[str, str], tuple[LiveRequest, SessionRecord]] = {}
        self._ended: OrderedDict[LiveRequest, tuple[float, tuple[str, str], int]] = OrderedDict()
        self._num_ended_bytes = 0
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def num_sessions(self) -> int:
        """Sessions known, those without a stream included."""
        return len(self._sessions)

    @property
    def num_requests(self) -> int:
        """Requests known, ended ones included while they are kept."""
        return len(self._requests)

    @property
    def num_ended_bytes(self) -> int:
        """Memory of the frames of ended requests."""
        return self._num_ended_bytes

    def new_session(self, tenant: str, stream: SessionStream) -> SessionRecord:
        """A session of its own."""
        record = SessionRecord(SESSION_TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES), tenant, stream)
        self._sessions[record.token] = record
        return record

    def take_over(self, tenant: str, token: str, stream: SessionStream) -> SessionRecord:
        """A session that lost its stream, or whose stream is to lose it; it keeps its token.

        Its requests wait to be resumed for the grace; those that are not are cancelled then.

        Raises:
            ResumeOutOfRange: no session of this tenant has the token, or not any more.
        """
        record = self._sessions.get(token)
        if record is None or record.tenant != tenant:
            raise ResumeOutOfRange("resume_session_token names no session that is held")
        old = record.stream
        self._release(record)
        if old is not None:
            old.lose()
        record.stream = stream
        self._start_grace(record)
        return record

    def find(self, tenant: str, client_id: str) -> LiveRequest | None:
        """A request that is known."""
        known = self._requests.get((tenant, client_id))
        return known[0] if known else None

    def add(self, record: SessionRecord, request: LiveRequest) -> None:
        """Know a request, under an id that is free, as one of this session."""
        key = (record.tenant, request.client_id)
        assert key not in self._requests
        self._requests[key] = (request, record)
        record.requests[request.client_id] = request

    def move(self, record: SessionRecord, request: LiveRequest) -> None:
        """A request that is known belongs to this session from now on."""
        key = (record.tenant, request.client_id)
        _, old = self._requests[key]
        del old.requests[request.client_id]
        self._requests[key] = (request, record)
        record.requests[request.client_id] = request

    def forget(self, tenant: str, request: LiveRequest) -> None:
        """Free a request's id; harmless when it is free or somebody else's already."""
        key = (tenant, request.client_id)
        known = self._requests.get(key)
        if known is not None and known[0] is request:
            del self._requests[key]
            del known[1].requests[request.client_id]
        if request in self._ended:
            _, _, num_bytes = self._ended.pop(request)
            self._num_ended_bytes -= num_bytes

    def retain(self, tenant: str, request: LiveRequest) -> None:
        """A request has ended: keep it for a while, others less long if memory is short."""
        if self.find(tenant, request.client_id) is not request:
            return
        settings = self._settings
        if settings.retention_s == 0:
            self.forget(tenant, request)
            return
        due = asyncio.get_running_loop().time() + settings.retention_s
        self._ended[request] = (due, (tenant, request.client_id), request.num_kept_bytes)
        self._num_ended_bytes += request.num_kept_bytes
        while self._ended and (
            len(self._ended) > settings.max_retained_requests
            or self._num_ended_bytes > settings.max_retained_bytes
        ):
            self._forget_oldest()
        self._plan_sweep()

    def leave(self, record: SessionRecord, stream: SessionStream, *, for_good: bool) -> None:
        """A stream has ended. Its session may be taken up for the grace, unless it ended for good."""
        if record.stream is not stream:
            return  # it was taken over
        self._release(record)
        if for_good or self._settings.resume_grace_s == 0 or not record.requests:
            self._end(record)
        else:
            num_alive = sum(not request.ended for request in record.requests.values())
            log.debug("session.lost", num_alive=num_alive)
            self._start_grace(record)

    def close(self) -> None:
        """The server ends: forget everything."""
        for record in list(self._sessions.values()):
            self._release(record)
            self._end(record)
        for request, _ in list(self._requests.values()):
            request.close()
        self._requests.clear()
        self._ended.clear()
        self._num_ended_bytes = 0
        if self._sweep is not None:
            self._sweep.cancel()

    def check_integrity(self) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        assert self._num_ended_bytes == sum(num_bytes for _, _, num_bytes in self._ended.values())
        for (tenant, client_id), (request, record) in self._requests.items():
            assert record.requests[client_id] is request
            assert record.tenant == tenant
            assert not request.retryable or not request.ended or request in self._ended
        for token, record in self._sessions.items():
            assert record.token == token
            for client_id, request in record.requests.items():
                assert self.find(record.tenant, client_id) is request

    def _release(self, record: SessionRecord) -> None:
        """Take a session's requests off its stream."""
        record.stream = None
        for request in record.requests.values():
            request.detach()

    def _start_grace(self, record: SessionRecord) -> None:
        if record.timer is not None:
            record.timer.cancel()
        loop = asyncio.get_running_loop()
        record.timer = loop.call_later(self._settings.resume_grace_s, self._grace_is_over, record)

    def _grace_is_over(self, record: SessionRecord) -> None:
        record.timer = None
        if record.stream is None:
            self._end(record)
        else:
            _cancel(record)

    def _end(self, record: SessionRecord) -> None:
        if record.timer is not None:
            record.timer.cancel()
            record.timer = None
        self._sessions.pop(record.token, None)
        _cancel(record)

    def _forget_oldest(self) -> None:
        request, (_, (tenant, _), _) = next(iter(self._ended.items()))
        self.forget(tenant, request)

    def _plan_sweep(self) -> None:
        if self._sweep is None and self._ended:
            due, _, _ = next(iter(self._ended.values()))
            self._sweep = asyncio.get_running_loop().call_at(due, self._forget_due)

    def _forget_due(self) -> None:
        self._sweep = None
        now = asyncio.get_running_loop().time()
        while self._ended and next(iter(self._ended.values()))[0] <= now:
            self._forget_oldest()
        self._plan_sweep()


def _cancel(record: SessionRecord) -> None:
    """Cancel the requests that no stream has taken up."""
    for request in list(record.requests.values()):
        if request.stream is None and not request.ended:
            request.when_submitted(lambda ticket, _: ticket.handle.cancel())
