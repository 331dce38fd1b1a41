"""The reading side of a session: obeys frames, one after the other.

A frame that can't be obeyed is answered with ``command_rejected`` and changes nothing.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine

import structlog
from google.protobuf.message import DecodeError

from engine import errors as e
from engine.request import FinishReason
from server import convert
from server.backend import Backend, server_version
from server.convert import Draft
from server.errors import public, row_of, status_of
from server.flow import Flow
from server.live_request import LiveRequest
from server.metadata import MAX_REQUEST_ID_BYTES, check_request_id
from server.registry import SessionRecord
from server.session_writer import SessionWriter
from server.ticket import Ticket
from vorrang.v1 import generation_pb2 as gen

_MAX_CLIENT_NAME_BYTES = 128
_REVISION = 1

log = structlog.get_logger("vorrang.server")


class SessionCommands:
    """What one stream's client asks for.

    Args:
        backend: engine, limits and register.
        tenant: whose stream it is.
        metadata_level: priority from the call's metadata.
        writer: of the same stream.
        spawn: runs a task as long as the stream lives.

    Attributes:
        too_bad: set when the stream has to end for what its client sent.
    """

    def __init__(
        self,
        backend: Backend,
        tenant: str,
        metadata_level: int | None,
        writer: SessionWriter,
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._backend = backend
        self._registry = backend.registry
        self._tenant = tenant
        self._metadata_level = metadata_level
        self._writer = writer
        self._spawn = spawn
        self._record: SessionRecord | None = None
        self._default_level: int | None = None
        self._default_credit_tokens = backend.session_settings.credit_tokens
        self._num_bad_frames = 0
        self._preparing: set[LiveRequest] = set()
        self._turns: dict[int, asyncio.Event] = {}
        self.too_bad: e.VorrangError | None = None

    async def obey(self, raw: bytes) -> None:
        """Obey a frame, or reject it.

        Cancellation: the frame is obeyed; its answer may be lost.
        """
        command, client_id = "", ""
        try:
            frame = self._decode(raw)
            command = frame.WhichOneof("command") or ""
            if not command:
                raise e.MalformedFrame("frame", "must carry a command this server knows", None)
            body = getattr(frame, command)
            client_id = getattr(body, "request_id", "")
            if command == "open":
                await self._writer.put(self._open(body))
            elif self._record is None:
                raise e.SessionState(f"{command} came before open")
            elif command == "start":
                await self._start(self._record, body)
            else:
                self._command(self._record, command, client_id, body)
        except Exception as error:
            await self._reject(error, command, client_id)

    async def _reject(self, error: Exception, command: str, client_id: str) -> None:
        self._backend.metrics.refused(self._tenant, row_of(public(error)).reason)
        await self._writer.put(_rejected(error, command, client_id))

    def leave(self) -> None:
        """The stream has ended: what was being prepared never was, the rest may be taken up."""
        for request in self._preparing:
            self._registry.forget(self._tenant, request)
        if self._record is not None:
            self._registry.leave(self._record, self._writer, for_good=self.too_bad is not None)

    def _decode(self, raw: bytes) -> gen.SessionRequest:
        self._backend.check_shape(raw, gen.SessionRequest)
        try:
            return gen.SessionRequest.FromString(raw)
        except DecodeError:
            self._num_bad_frames += 1
            error = e.MalformedFrame("frame", "must be a SessionRequest", f"{len(raw)} bytes")
            limit = self._backend.settings.max_bad_frames
            if self._num_bad_frames >= limit:
                self.too_bad = e.MalformedFrame("frame", f"must not be undecodable {limit} times", limit)
            raise error from None

    def _command(self, record: SessionRecord, command: str, client_id: str, body: object) -> None:
        request = record.requests.get(client_id)
        if request is None:
            raise e.UnknownRequest(_shown(client_id))
        match body:
            case gen.CancelCommand():
                request.when_submitted(lambda ticket, _: ticket.handle.cancel())
                request.leave()
            case gen.ReprioritizeCommand():
                self._reprioritize(request, body)
            case gen.CreditCommand():
                _credit(request, body)
            case gen.PauseCommand():
                request.when_submitted(lambda _, flow: flow.pause())
            case gen.UnpauseCommand():
                request.when_submitted(lambda _, flow: flow.unpause())
            case gen.ResumeCommand():
                self._resume(request, body.after_sequence)
            case _:
                raise e.Unimplemented(command)

    # Opening.

    def _open(self, command: gen.OpenCommand) -> gen.SessionResponse:
        if self._record is not None:
            raise e.SessionState("open came twice")
        size = len(command.client_name.encode())
        if size > _MAX_CLIENT_NAME_BYTES:
            raise e.InvalidRequest("client_name", f"must be at most {_MAX_CLIENT_NAME_BYTES} bytes", size)
        convert.check_plain("client_name", command.client_name)
        if command.revision > _REVISION:
            raise e.Unimplemented("open.revision")
        default_level = None
        if command.HasField("default_priority"):
            default_level = convert.level_of(command.default_priority, field="default_priority")
        limits, engine = self._backend.limits(), self._backend.engine
        if command.resume_session_token:
            token = command.resume_session_token
            self._record = self._registry.take_over(self._tenant, token, self._writer)
        else:
            self._record = self._registry.new_session(self._tenant, self._writer)
        self._default_level = default_level
        if command.HasField("default_credit_tokens"):
            self._default_credit_tokens = command.default_credit_tokens
        can_resume = self._backend.session_settings.resume_grace_s > 0
        opened = gen.OpenedEvent(
            session_token=self._record.token if can_resume else "",
            limits=limits,
            default_level=self._backend.allowed_level(self._level(None)),
            default_credit_tokens=self._default_credit_tokens,
            policy=engine.config.policy,
            server_version=server_version(),
        )
        log.debug("session.opened", client=command.client_name, resumed=bool(command.resume_session_token))
        return gen.SessionResponse(opened=opened)

    def _level(self, own: int | None) -> int:
        """Priority by precedence: start field > session default > metadata > tenant's or server's default."""
        for level in (own, self._default_level, self._metadata_level):
            if level is not None:
                return level
        return self._backend.default_level

    # Starting.

    async def _start(self, record: SessionRecord, command: gen.StartCommand) -> None:
        received_at = self._backend.engine.now()
        client_id = check_request_id(command.request_id)
        fingerprint = convert.fingerprint(command.spec)
        known = self._registry.find(self._tenant, client_id)
        if known is not None and self._is_taken(record, known, fingerprint):
            return
        try:
            draft = self._draft(command)
        except Exception as error:  # nothing was done for it, so its id stays free
            refusal = convert.failed(public(error))
            await self._writer.put(gen.SessionResponse(request_id=client_id, sequence=1, failed=refusal))
            return
        request = LiveRequest(
            client_id,
            fingerprint,
            self._level(draft.level),
            self._default_credit_tokens if draft.credit_tokens is None else draft.credit_tokens,
            settings=self._backend.session_settings,
            max_unsent_tokens=self._backend.engine.max_buffered_tokens,
            on_end=functools.partial(self._backend.ended, self._tenant),
            received_at=received_at,
            on_park=self._backend.parking,
            on_stall=self._backend.metrics.credit_stalled,
        )
        self._registry.add(record, request)
        self._writer.adopt(request)
        request.attach(self._writer)
        mine, before = asyncio.Event(), self._turns.get(request.level)
        if draft.sampling.grammar is None:
            self._turns[request.level] = mine
        else:  # nobody waits for its grammar to be compiled
            before = None
        self._preparing.add(request)
        self._spawn(self._submit(request, draft, before, mine))

    def _is_taken(self, record: SessionRecord, known: LiveRequest, fingerprint: bytes) -> bool:
        """Whether a start is for a request that is known already, which it then takes up.

        Raises:
            DuplicateRequestId: the known one was asked for otherwise.
            ResumeOutOfRange: its first events are not held any more.
            SessionLimit: the session has as many requests as it may.
        """
        is_here = known.stream is self._writer
        if not is_here and (known.retryable or not known.prepared):
            # It failed so that it may be tried again, or died with its stream before anything was done.
            if isinstance(known.stream, SessionWriter) and not known.prepared:
                known.stream.drop(known)
            self._registry.forget(self._tenant, known)
            return False
        if known.fingerprint != fingerprint:
            raise e.DuplicateRequestId(known.client_id)
        if not is_here:
            self._take_up(known, 0)
            self._registry.move(record, known)
        return True

    def _draft(self, command: gen.StartCommand) -> Draft:
        self._check_room()
        if not command.HasField("spec"):
            raise e.InvalidRequest("spec", "must be given", None)
        return self._backend.draft(command.spec)

    async def _submit(
        self, request: LiveRequest, draft: Draft, before: asyncio.Event | None, mine: asyncio.Event
    ) -> None:
        """Tokenise and submit; within a level in the order of the frames, but for those with grammars.

        Args:
            request: which.
            draft: what it asks for.
            before: set once all that came before it at its level are submitted, or never will be.
            mine: likewise for those that come after it.

        Cancellation: the request never was.
        """
        try:
            await self._prepare_and_submit(request, draft, before)
            if before is not None:
                await before.wait()
        finally:
            mine.set()

    async def _prepare_and_submit(
        self, request: LiveRequest, draft: Draft, before: asyncio.Event | None
    ) -> None:
        try:
            turn = request.turn = self._backend.turn(
                lambda: request.level if request.turn_level is None else request.turn_level
            )
            ready = await self._backend.ready(draft, request.level, turn, before)
            if self._registry.find(self._tenant, request.client_id) is not request:
                pass  # it was started anew elsewhere
            elif ready is None:
                request.ended_before(FinishReason.TIME_LIMIT)
            else:
                draft, token_ids = ready
                ticket = self._backend.submit(
                    draft,
                    token_ids,
                    request.level,
                    request.client_id,
                    request.on_event,
                    received_at=request.received_at,
                )
                request.submitted(ticket)
        except e.Cancelled:  # while it waited for its turn
            request.ended_before(FinishReason.CANCELLED)
        except Exception as error:
            request.refused(public(error))
        self._preparing.discard(request)

    # Steering.

    def _reprioritize(self, request: LiveRequest, command: gen.ReprioritizeCommand) -> None:
        asked = convert.level_of(command.priority)
        if request.ended:
            raise e.UnknownRequest(request.client_id)
        wait_s = request.reprioritizations.take(self._backend.engine.now())
        if wait_s > 0:
            per_s = self._backend.session_settings.reprioritize_per_s
            rule = f"reprioritize must come at most {per_s:g} times a second for one request"
            raise e.SessionLimit(rule, retry_after_s=wait_s)
        level = self._backend.allowed_level(asked)
        if not request.prepared:
            request.turn_level = asked  # it may still wait for its turn
        is_submitted = request.ticket is not None

        def change(ticket: Ticket, _: Flow) -> None:
            was_capped, request.is_capped = request.is_capped, level != asked
            try:
                ticket.handle.set_level(level)
            except e.VorrangError as error:
                request.is_capped = was_capped
                if is_submitted:
                    raise
                # It waits at the level it was started with; the command alone has failed.
                self._spawn(self._reject(error, "reprioritize", request.client_id))

        request.when_submitted(change)

    def _resume(self, request: LiveRequest, after_sequence: int) -> None:
        if request.stream is self._writer:
            raise e.SessionState(f"request {request.client_id!r} is on this stream already")
        if not request.prepared:
            raise e.UnknownRequest(request.client_id)
        self._take_up(request, after_sequence)

    def _check_room(self) -> None:
        limit = self._backend.settings.max_session_requests
        if len(self._writer.requests) >= limit:
            raise e.SessionLimit(f"{limit} requests are alive in this session, as many as may")

    def _take_up(self, request: LiveRequest, after_sequence: int) -> None:
        self._check_room()
        old = request.stream
        request.attach(self._writer, after_sequence)
        if isinstance(old, SessionWriter):
            old.drop(request)
        if not request.sent:
            self._writer.adopt(request)
        else:  # the client has it all
            request.stream = None


def _credit(request: LiveRequest, command: gen.CreditCommand) -> None:
    if command.HasField("acknowledged_sequence") and not request.acknowledge(command.acknowledged_sequence):
        rule = "must be one that was sent"
        raise e.InvalidRequest("acknowledged_sequence", rule, command.acknowledged_sequence)
    num_tokens = command.tokens
    request.when_submitted(lambda _, flow: flow.grant(num_tokens))


def _rejected(error: Exception, command: str, client_id: str) -> gen.SessionResponse:
    rejected = gen.CommandRejectedEvent(status=status_of(error), command=command)
    return gen.SessionResponse(
        request_id=client_id if len(client_id.encode()) <= MAX_REQUEST_ID_BYTES else "",
        command_rejected=rejected,
    )


def _shown(client_id: str) -> str:
    return client_id if len(client_id) <= MAX_REQUEST_ID_BYTES else client_id[:MAX_REQUEST_ID_BYTES] + "..."
