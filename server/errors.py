"""The one table from errors to gRPC statuses.

Every error that may reach a caller is a ``VorrangError`` and has a row here; a
class without a row uses its nearest ancestor's. Anything else becomes INTERNAL
with an opaque incident id, and its text goes to the log alone.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from engine import errors as e
from engine.failure import trace_of
from vorrang.v1 import errors_pb2

DOMAIN = "vorrang"
_PREFIX = "ERROR_REASON_"
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"

log = structlog.get_logger("vorrang.server")


class EngineStarting(e.VorrangError):
    """The server listens, its model is still being loaded."""

    retryable = True

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("the model is being loaded")
        self.retry_after_s = retry_after_s


class ProcessStarting(EngineStarting):
    """A process that a request needs could not be started, for want of descriptors, memory or processes."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(retry_after_s)
        self.args = ("a process of the server is to be started, and the machine has no room for it now",)


class Unauthenticated(e.VorrangError):
    """No or bad credentials; the message never holds them."""


class PermissionDenied(e.VorrangError):
    """The identity may not do this."""


class TooManyCalls(e.VorrangError):
    """As many calls are open as may, or a peer begins them too quickly.

    Args:
        subject: what there is too much of, such as ``open sessions``.
        limit: the limit, in words.
        retry_after_s: seconds after which trying again makes sense.
    """

    retryable = True

    def __init__(self, subject: str, limit: str, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{subject}: as many as may be, {limit}")
        self.subject = subject
        self.retry_after_s = retry_after_s


class TokenRateExceeded(e.TenantQuotaExceeded):
    """A tenant has used more tokens than it gets by the second.

    Args:
        tenant: which.
        tokens_per_s: what it gets.
        retry_after_s: seconds until its debt is paid.
    """

    def __init__(self, tenant: str, tokens_per_s: float, retry_after_s: float) -> None:
        super().__init__(f"token rate of tenant {tenant!r}", "tokens", round(tokens_per_s), retry_after_s)
        self.args = (f"tenant {tenant!r} has used its {tokens_per_s:g} tokens a second",)


class EndedCall(Exception):
    """The request of a call failed after it had been accepted.

    Args:
        error: with what.
        usage: what it had cost.
    """

    def __init__(self, error: e.VorrangError, usage: Message) -> None:
        super().__init__(str(error))
        self.error = error
        self.usage = usage


@dataclass(frozen=True, slots=True)
class Row:
    """How a class of errors looks on the wire.

    Attributes:
        code: gRPC status code.
        reason: name of the ``ErrorReason`` without its prefix.
        details: makes the details that follow ``ErrorInfo``.
    """

    code: grpc.StatusCode
    reason: str
    details: Callable[[Any], list[Message]] = lambda error: []


def _bad_request(error: e.InvalidRequest) -> list[Message]:
    description = str(error).removeprefix(f"{error.field} ")
    violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=description)
    return [error_details_pb2.BadRequest(field_violations=[violation])]


def _retry(error: Any) -> list[Message]:
    if error.retry_after_s is None:
        return []
    delay = Duration()
    delay.FromMilliseconds(round(error.retry_after_s * 1000))
    return [error_details_pb2.RetryInfo(retry_delay=delay)]


def _quota(error: Any) -> list[Message]:
    violation = error_details_pb2.QuotaFailure.Violation(subject=error.subject, description=str(error))
    return [*_retry(error), error_details_pb2.QuotaFailure(violations=[violation])]


_Code = grpc.StatusCode
TABLE: dict[type[e.VorrangError], Row] = {
    e.InvalidRequest: Row(_Code.INVALID_ARGUMENT, "INVALID_REQUEST", _bad_request),
    e.EmptyPrompt: Row(_Code.INVALID_ARGUMENT, "EMPTY_PROMPT", _bad_request),
    e.ContextExceeded: Row(_Code.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", _bad_request),
    e.PoolExceeded: Row(_Code.INVALID_ARGUMENT, "POOL_EXCEEDED", _bad_request),
    e.InvalidMetadata: Row(_Code.INVALID_ARGUMENT, "INVALID_METADATA", _bad_request),
    e.MalformedFrame: Row(_Code.INVALID_ARGUMENT, "MALFORMED_FRAME", _bad_request),
    e.UnknownModel: Row(_Code.NOT_FOUND, "UNKNOWN_MODEL"),
    e.UnknownRequest: Row(_Code.NOT_FOUND, "UNKNOWN_REQUEST"),
    e.DuplicateRequestId: Row(_Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    e.SessionState: Row(_Code.FAILED_PRECONDITION, "SESSION_STATE"),
    e.QueueFull: Row(_Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", _quota),
    e.TenantQuotaExceeded: Row(_Code.RESOURCE_EXHAUSTED, "TENANT_QUOTA_EXCEEDED", _quota),
    TooManyCalls: Row(_Code.RESOURCE_EXHAUSTED, "CALL_LIMIT", _quota),
    Unauthenticated: Row(_Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    PermissionDenied: Row(_Code.PERMISSION_DENIED, "PERMISSION_DENIED"),
    e.Displaced: Row(_Code.ABORTED, "DISPLACED"),
    e.SessionLimit: Row(_Code.RESOURCE_EXHAUSTED, "SESSION_LIMIT", _retry),
    e.ResumeOutOfRange: Row(_Code.OUT_OF_RANGE, "RESUME_OUT_OF_RANGE"),
    e.SlowConsumer: Row(_Code.RESOURCE_EXHAUSTED, "SLOW_CONSUMER"),
    e.Draining: Row(_Code.UNAVAILABLE, "DRAINING", _retry),
    EngineStarting: Row(_Code.UNAVAILABLE, "ENGINE_RESTARTING", _retry),
    e.DeadlineExceeded: Row(_Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    e.Cancelled: Row(_Code.CANCELLED, "CANCELLED"),
    e.Unimplemented: Row(_Code.UNIMPLEMENTED, "UNIMPLEMENTED"),
    e.InternalError: Row(_Code.INTERNAL, "INTERNAL"),
}


def row_of(error: e.VorrangError) -> Row:
    """The row of the error's class or of its nearest ancestor; INTERNAL when there is none."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            return TABLE[cls]
    return TABLE[e.InternalError]


def public(error: BaseException) -> e.VorrangError:
    """The error as a caller may see it; one of ours stays, all others are logged and made opaque.

    Of those the log gets the place, not the words: they may hold what the caller sent.
    """
    if isinstance(error, e.VorrangError) and any(cls in TABLE for cls in type(error).__mro__):
        return error
    incident_id = secrets.token_hex(8)
    log.error("server.failed", incident_id=incident_id, exception=trace_of(error, with_text=False))
    return e.InternalError(incident_id)


def status_of(error: BaseException) -> status_pb2.Status:
    """The ``google.rpc.Status`` of any error: code, message, ``ErrorInfo``, details."""
    shown = public(error)
    row = row_of(shown)
    reason = errors_pb2.ErrorReason.Value(_PREFIX + row.reason)  # raises when the enum lacks it
    info = error_details_pb2.ErrorInfo(
        reason=errors_pb2.ErrorReason.Name(reason).removeprefix(_PREFIX), domain=DOMAIN
    )
    status = status_pb2.Status(code=row.code.value[0], message=str(shown))
    for detail in [info, *row.details(shown)]:
        status.details.add().Pack(detail)
    return status


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: BaseException) -> None:
    """End a call with the status of ``error``; that of an ``EndedCall`` also says what it had cost.

    Raises:
        grpc.aio.AbortError: always; it ends the handler.
    """
    shown = public(error.error if isinstance(error, EndedCall) else error)
    status = status_of(shown)
    if isinstance(error, EndedCall):
        status.details.add().Pack(error.usage)
    trailers: list[tuple[str, str | bytes]] = [(_DETAILS_KEY, status.SerializeToString())]
    retry_after_s = getattr(shown, "retry_after_s", None)
    if retry_after_s is not None:
        trailers.append((_PUSHBACK_KEY, str(round(retry_after_s * 1000))))
    await context.abort(row_of(shown).code, status.message, tuple(trailers))
