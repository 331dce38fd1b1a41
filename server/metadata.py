"""What a call's metadata says: priority and request id. Knows neither engine nor messages."""

import re
from collections.abc import Iterable

from engine.errors import InvalidMetadata, InvalidRequest
from engine.priority import parse_level

PRIORITY_KEY = "x-priority"
REQUEST_ID_KEY = "x-request-id"
MAX_REQUEST_ID_BYTES = 128

_LEVEL = re.compile(r"[+-]?[0-9]{1,4}|[a-z]+", re.ASCII)
_REQUEST_ID = re.compile(rf"[ -~]{{1,{MAX_REQUEST_ID_BYTES}}}", re.ASCII)
_REQUEST_ID_RULE = f"must be 1 to {MAX_REQUEST_ID_BYTES} bytes of printable ASCII"

Metadata = Iterable[tuple[str, str | bytes]]


def level_of(metadata: Metadata) -> int | None:
    """The level that ``x-priority`` asks for; None when the key is absent.

    Raises:
        InvalidMetadata: malformed, repeated or out of range.
    """
    text = _single(metadata, PRIORITY_KEY)
    if text is None:
        return None
    field = f"metadata.{PRIORITY_KEY}"
    if not _LEVEL.fullmatch(text):
        raise InvalidMetadata(field, "must be an integer or the name of a class", text)
    try:
        return parse_level(text, field=field)
    except InvalidRequest as error:
        raise InvalidMetadata(error.field, error.rule, error.value) from None


def request_id_of(metadata: Metadata) -> str | None:
    """The client's ``x-request-id``; None when the key is absent.

    Raises:
        InvalidMetadata: malformed or repeated.
    """
    text = _single(metadata, REQUEST_ID_KEY)
    if text is not None and not _REQUEST_ID.fullmatch(text):
        raise InvalidMetadata(f"metadata.{REQUEST_ID_KEY}", _REQUEST_ID_RULE, text)
    return text


def check_request_id(request_id: str) -> str:
    """Return a request id that came in a message.

    Raises:
        InvalidRequest: it is empty, too long or not printable ASCII.
    """
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request_id", _REQUEST_ID_RULE, request_id)
    return request_id


def _single(metadata: Metadata, key: str) -> str | None:
    values = [value for name, value in metadata if name == key]
    if not values:
        return None
    if len(values) > 1:
        raise InvalidMetadata(f"metadata.{key}", "must be given once", f"{len(values)} times")
    value = values[0]
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value
