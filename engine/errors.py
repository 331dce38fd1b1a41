"""Everything the engine may refuse or fail a request with.

One root, ``VorrangError``; each subclass is one row of the server's error
table. Messages are written for the caller: they name field, rule and value and
never hold internal text. This module knows nothing of gRPC.
"""

import reprlib

_SHOWN_CHARACTERS = 80
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _SHOWN_CHARACTERS


def shown_value(value: object) -> str:
    """A value as a message may quote it: one short line, whatever it is and however large or deep."""
    if isinstance(value, str):
        value = value[: 2 * _SHOWN_CHARACTERS]
    try:
        shown = repr(value) if isinstance(value, str | float | bool) else _SHORT.repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; nested beyond all measure
        shown = f"a {type(value).__name__} that is too large to be shown"
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."


class VorrangError(Exception):
    """Root of every error that is meant for a caller.

    Attributes:
        retryable: the same request may succeed later.
    """

    retryable: bool = False

    @property
    def log_text(self) -> str:
        """Its message for the log: without what the caller sent."""
        return str(self)


class InvalidRequest(VorrangError):
    """A field breaks a rule.

    Args:
        field: path of the field as the caller wrote it, such as ``sampling.temperature``.
        rule: what it must be, such as ``must be at least 0``.
        value: what it was; shortened in the message. None = nothing was given, and nothing is said of it.
    """

    def __init__(self, field: str, rule: str, value: object) -> None:
        got = "" if value is None else f", got {shown_value(value)}"
        super().__init__(f"{field} {rule}{got}")
        self.field = field
        self.rule = rule
        self.value = value

    @property
    def log_text(self) -> str:
        """Which rule of which field; the value is the caller's own."""
        return f"{self.field} {self.rule}"


class EmptyPrompt(InvalidRequest):
    """The prompt holds no token."""

    def __init__(self) -> None:
        super().__init__("prompt", "must hold at least one token", 0)


class ContextExceeded(InvalidRequest):
    """Prompt, or prompt + max_tokens, is longer than the model's context."""


class PoolExceeded(InvalidRequest):
    """Prompt + 1 token can never fit the KV pool, however empty."""


class InvalidMetadata(InvalidRequest):
    """Request metadata is malformed, repeated or out of range."""


class MalformedFrame(InvalidRequest):
    """A session frame could not be decoded or carries no known command."""


class UnknownModel(VorrangError):
    """No such model, or adapter of it, is served here."""


class UnknownRequest(VorrangError):
    """No request of that id is alive for this caller."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"no request {request_id!r} is alive")
        self.request_id = request_id


class DuplicateRequestId(VorrangError):
    """The id is in use, or was used recently."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request id {request_id!r} is in use or was used recently")
        self.request_id = request_id


class SessionState(VorrangError):
    """A session frame came at a time when it has no meaning."""


class QueueFull(VorrangError):
    """As many requests, or prompt tokens, wait as may.

    Args:
        subject: whose limit was hit: ``queue`` or ``class batch``.
        unit: ``requests`` or ``tokens``.
        limit: the limit.
        retry_after_s: seconds after which trying again makes sense.
    """

    retryable = True

    def __init__(self, subject: str, unit: str, limit: int, retry_after_s: float = 1.0) -> None:
        super().__init__(f"the {subject} holds as many waiting {unit} as it may, {limit}")
        self.subject = subject
        self.unit = unit
        self.limit = limit
        self.retry_after_s = retry_after_s


class TenantQuotaExceeded(QueueFull):
    """As many requests, or prompt tokens, of this tenant wait as may."""


class Displaced(VorrangError):
    """A more urgent newcomer took this queued request's place in a full queue."""

    retryable = True

    def __init__(self) -> None:
        super().__init__("a more urgent request took its place in the full queue")


class SessionLimit(VorrangError):
    """The session holds as many requests as it may, or sends commands faster than it may.

    Args:
        message: which limit it is.
        retry_after_s: seconds after which trying again makes sense; None when nobody knows.
    """

    retryable = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowConsumer(VorrangError):
    """The client did not read, and as many tokens wait for it as may."""


class ResumeOutOfRange(VorrangError):
    """The point to resume from is not held, or not any more."""


class Draining(VorrangError):
    """The server is shutting down."""

    retryable = True

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("the server is shutting down and takes no new requests")
        self.retry_after_s = retry_after_s


class DeadlineExceeded(VorrangError):
    """The caller's time ran out."""


class Cancelled(VorrangError):
    """The caller cancelled or went away."""


class Unimplemented(VorrangError):
    """The protocol has it, this version of the server does not yet.

    Args:
        feature: what is missing, as the caller named it (a field path or a command).
    """

    def __init__(self, feature: str) -> None:
        super().__init__(f"{feature} is not implemented by this version of the server")
        self.feature = feature


class InternalError(VorrangError):
    """A fault of ours. The message holds an opaque incident id alone; the log has the rest.

    Args:
        incident_id: what links the caller's report to our log.
    """

    def __init__(self, incident_id: str) -> None:
        super().__init__(f"internal error, incident {incident_id}")
        self.incident_id = incident_id
