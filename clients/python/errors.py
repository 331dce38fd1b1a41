"""Everything this client raises, and how it is read from what the server sent.

One root, ``VorrangError``. The class of an error follows the ``reason`` of the
``google.rpc.ErrorInfo`` (domain "vorrang") the server attaches to every error,
and only where there is none, the gRPC status code.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from clients.python.events import Usage

DOMAIN = "vorrang"
_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_RETRYABLE_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that broke a rule.

    Attributes:
        field: path of the field, such as ``sampling.temperature``.
        description: the rule, and what was given.
    """

    field: str
    description: str


class VorrangError(Exception):
    """Root of every error of this client.

    Attributes:
        message: for people.
        code: the gRPC status code it came with, or the one that fits it.
        reason: name of the ``ErrorReason`` without its prefix; empty when the server gave none.
        retryable: the same request may succeed later.
        usage: what the request has cost so far; None when unknown.
        violations: the fields that broke a rule.
        retry_after_s: how long the server asks to wait before trying again; None when it did not say.
    """

    default_code = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        retryable: bool = False,
        usage: Usage | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.reason = reason
        self.retryable = retryable
        self.usage = usage
        self.violations = violations
        self.retry_after_s = retry_after_s

    def again(self) -> Self:
        """An equal error: one instance raised in several tasks would mix up their tracebacks."""
        return type(self)(
            self.message,
            code=self.code,
            reason=self.reason,
            retryable=self.retryable,
            usage=self.usage,
            violations=self.violations,
            retry_after_s=self.retry_after_s,
        )

    def __str__(self) -> str:
        name = self.reason or self.code.name
        return f"{self.message} ({name})"


class ConnectionLost(VorrangError):
    """The server can't be reached, or the stream broke before the request had ended."""

    default_code = grpc.StatusCode.UNAVAILABLE


class SessionClosed(VorrangError):
    """The session takes no more commands: it was half-closed, or its block was left."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class NotReady(VorrangError):
    """The server did not become ready in time."""

    default_code = grpc.StatusCode.UNAVAILABLE


class CommandRejected(VorrangError):
    """The server did not obey a command; the requests of the session are untouched."""


class RequestFailed(VorrangError):
    """The server refused the request, or it failed on the way."""


class InvalidRequest(RequestFailed):
    """A field of the request breaks a rule; see ``violations``."""


class UnknownModel(RequestFailed):
    """No such model is served there."""


class DuplicateRequestId(RequestFailed):
    """The request id is in use, or was used a short while ago, for another request."""

    default_code = grpc.StatusCode.ALREADY_EXISTS


class Overloaded(RequestFailed):
    """A queue or quota is full; ``retry_after_s`` says when to try again."""


class Displaced(RequestFailed):
    """The request gave way to more urgent ones for good."""


class ServerUnavailable(RequestFailed):
    """The server shuts down or starts again."""


class SlowConsumer(RequestFailed):
    """The output was read too slowly for longer than the server allows."""


class ResumeOutOfRange(RequestFailed):
    """The events to resume from, or the session itself, are not held by the server any more."""

    default_code = grpc.StatusCode.OUT_OF_RANGE


class DeadlineExceeded(RequestFailed):
    """The time allowed ran out."""


class RequestCancelled(RequestFailed):
    """The request was cancelled."""


class AccessDenied(RequestFailed):
    """No or bad credentials, or the identity may not do this."""


class Unimplemented(RequestFailed):
    """This version of the server does not have the feature."""


#: Reasons with a class of their own; any other is a plain ``RequestFailed``.
CLASS_BY_REASON: dict[str, type[VorrangError]] = {
    "INVALID_REQUEST": InvalidRequest,
    "EMPTY_PROMPT": InvalidRequest,
    "CONTEXT_EXCEEDED": InvalidRequest,
    "POOL_EXCEEDED": InvalidRequest,
    "INVALID_METADATA": InvalidRequest,
    "MALFORMED_FRAME": InvalidRequest,
    "UNKNOWN_MODEL": UnknownModel,
    "DUPLICATE_REQUEST_ID": DuplicateRequestId,
    "QUEUE_FULL": Overloaded,
    "TENANT_QUOTA_EXCEEDED": Overloaded,
    "SLO_UNATTAINABLE": Overloaded,
    "SESSION_LIMIT": Overloaded,
    "CALL_LIMIT": Overloaded,
    "SLOW_CONSUMER": SlowConsumer,
    "RESUME_OUT_OF_RANGE": ResumeOutOfRange,
    "DRAINING": ServerUnavailable,
    "ENGINE_RESTARTING": ServerUnavailable,
    "DISPLACED": Displaced,
    "PREEMPTION_LIMIT": Displaced,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": RequestCancelled,
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": AccessDenied,
    "UNIMPLEMENTED": Unimplemented,
}

_CLASS_BY_CODE: dict[grpc.StatusCode, type[VorrangError]] = {
    grpc.StatusCode.UNAVAILABLE: ConnectionLost,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
}


def error_from_status(
    status: status_pb2.Status,
    *,
    retryable: bool | None = None,
    usage: Usage | None = None,
    rejected: bool = False,
) -> VorrangError:
    """Turn a ``google.rpc.Status`` into a typed error.

    Args:
        status: code, message and details as the server sent them.
        retryable: what the server said of it; None = judge by the code.
        usage: what the request has cost so far.
        rejected: it answers a command, so it becomes ``CommandRejected`` whatever its reason.
    """
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    reason = ""
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(info):
                reason = info.reason if info.domain == DOMAIN else reason
            elif detail.Unpack(bad):
                violations = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations)
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        except DecodeError:  # A detail that can't be read must not hide the error it belongs to.
            continue
    kind = (
        CommandRejected if rejected else CLASS_BY_REASON.get(reason, _CLASS_BY_CODE.get(code, RequestFailed))
    )
    return kind(
        status.message or code.name,
        code=code,
        reason=reason,
        retryable=code in _RETRYABLE_CODES if retryable is None else retryable,
        usage=usage,
        violations=violations,
        retry_after_s=retry_after_s,
    )


def error_from_call(error: grpc.aio.AioRpcError) -> VorrangError:
    """Turn the failure of a call into a typed error, reading the details in its trailing metadata."""
    status = _attached_status(error.trailing_metadata() or ())
    if status is None:
        status = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
    return error_from_status(status)


def _attached_status(metadata: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
