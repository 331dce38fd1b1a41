"""What stands before every handler: it counts, authenticates, and turns failures into statuses.

Health is not guarded: a load balancer has no token, and must be answered when
everything else is full.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from engine.errors import MalformedFrame, VorrangError
from server.door import Door
from server.errors import PermissionDenied, abort, row_of
from server.identity import CALLER, Authenticator, Caller
from server.session_writer import PeerGone
from server.tracing import TRACEPARENT, traceparent_of

Handler = Callable[[Any, Any], Awaitable[Any]]


class CallRegister(Protocol):
    """Who must know of every open call."""

    def enter(self) -> None:
        """A call has begun; ``leave`` must follow."""
        ...

    def leave(self) -> None:
        """A call has ended."""
        ...

    def check_shape(self, raw: bytes, message_class: Any) -> None:
        """Refuse a message that is made of too many things, before it is parsed."""
        ...


class Guard:
    """Wraps handlers.

    Args:
        calls: is told of every call that is let in.
        authenticator: says who calls.
        door: says whether another call may be open.
        on_refusal: is told of what is refused here, with the tenant where it is known.
    """

    def __init__(
        self,
        calls: CallRegister,
        authenticator: Authenticator,
        door: Door,
        on_refusal: Callable[[str, str], None],
    ) -> None:
        self._calls = calls
        self._authenticator = authenticator
        self._door = door
        self._on_refusal = on_refusal

    def wrap(
        self,
        call: Handler,
        request_class: Any = None,
        *,
        is_session: bool = False,
        operators_only: bool = False,
    ) -> Handler:
        """A handler, for raw bytes, that lets ``call`` end with nothing but an answer or a status of ours.

        Args:
            call: a handler of grpc's.
            request_class: message that the bytes are to be; None = ``call`` reads for itself. grpc's own
                deserialisers answer bytes that are none with UNKNOWN and the name of a class.
            is_session: counts against the limit of sessions, too.
            operators_only: refuse everybody else.
        """

        async def guarded(request: Any, context: Any) -> Any:
            peer = context.peer()
            try:
                self._door.enter(peer, is_session=is_session)
            except VorrangError as error:
                self._on_refusal("", row_of(error).reason)
                await abort(context, error)
            self._calls.enter()
            try:
                CALLER.set(self._identify(context, operators_only=operators_only))
                if request_class is not None:
                    request = self._decoded(request, request_class)
                return await call(request, context)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # the peer is gone, or the server stops
                await abort(context, error)  # a bug of ours; without a status the peer would wait for ever
            except PeerGone:
                return None  # nobody is left to be told
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await abort(context, error)
            finally:
                self._calls.leave()
                self._door.leave(peer, is_session=is_session)

        return guarded

    def _decoded(self, raw: bytes, request_class: Any) -> Any:
        try:
            self._calls.check_shape(raw, request_class)
            return request_class.FromString(raw)
        except DecodeError:
            error = MalformedFrame("request", f"must be a {request_class.__name__}", f"{len(raw)} bytes")
            self._on_refusal(CALLER.get().tenant, row_of(error).reason)
            raise error from None

    def _identify(self, context: Any, *, operators_only: bool) -> Caller:
        metadata = context.invocation_metadata() or ()
        tenant = ""
        try:
            caller = self._authenticator.identify(metadata, context.auth_context)
            tenant = caller.tenant
            if operators_only and not caller.operator:
                raise PermissionDenied("ControlService is for operators")
        except VorrangError as error:
            self._on_refusal(tenant, row_of(error).reason)
            raise
        if traceparent := traceparent_of(metadata):
            TRACEPARENT.set(traceparent)
        return caller
