"""The shape of a message before it is parsed: how many things it is made of.

Four megabytes may be one text, which is read in a millisecond, or two million empty messages,
which take the parser 0.3 s and 200 MB in the event loop's thread, and whoever makes values of
them seconds more. So the fields of a large message are counted first, no further than the limits.
Knows the wire format and descriptors, and nothing of what they mean.
"""

import functools
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from engine.errors import InvalidRequest, MalformedFrame

#: A smaller message can't hold so much that it takes long.
SMALL_BYTES = 16 * 1024
#: Entries of one field wherever it repeats, and fields of a whole message.
MAX_ENTRIES = 8192
MAX_FIELDS = 32 * 1024
#: Where paths begin for callers; see ``server.convert``.
_PREFIXES = ("start.spec.", "spec.")
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
#: Bytes of varints that are not their last.
_CONTINUED = bytes(range(128, 256))


class _Field(NamedTuple):
    """What is known of a field by its number.

    Attributes:
        name: as in the protos.
        repeated: whether it may come more than once.
        message: of which its values are; None = they are scalars.
        packable: whether its values may come as one run of varints.
    """

    name: str
    repeated: bool
    message: Descriptor | None
    packable: bool


def check_shape(raw: bytes, message_class: Any, *, max_token_ids: int) -> None:
    """Refuse a message that is made of too many things; one that is no message is left to the parser.

    Args:
        raw: the message.
        message_class: what it is to be.
        max_token_ids: entries of a field of token ids, of which a prompt may have many.

    Raises:
        InvalidRequest: names the field that has too many entries.
        MalformedFrame: there are too many fields in all.
    """
    if len(raw) > SMALL_BYTES:
        try:
            _count(raw, message_class.DESCRIPTOR, max_token_ids)
        except IndexError:  # it ends in the midst of something
            return


def _count(raw: bytes, descriptor: Descriptor, max_token_ids: int) -> None:
    counts: dict[str, int] = {}
    num_fields, at, end = 0, 0, len(raw)
    fields, path = _fields(descriptor), ""
    outer: list[tuple[int, dict[int, _Field], str]] = []
    while True:
        while at >= end:
            if not outer:
                return
            end, fields, path = outer.pop()
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise MalformedFrame("frame", f"must hold at most {MAX_FIELDS} fields", f"{len(raw)} bytes")
        tag, at = _varint(raw, at)
        field, wire_type = fields.get(tag >> 3), tag & 7
        size = 0
        if wire_type == _DELIMITED:
            size, at = _varint(raw, at)
        elif wire_type == _VARINT:
            _, at = _varint(raw, at)
        elif wire_type in (_FIXED32, _FIXED64):
            at += 4 if wire_type == _FIXED32 else 8
        else:
            return  # groups are not ours
        if field is not None and field.repeated:
            name = path + field.name
            limit = max_token_ids if name.endswith(("prompt.tokens.ids", "token_ids")) else MAX_ENTRIES
            is_run = field.packable and wire_type == _DELIMITED
            added = _num_varints(raw, at, size, limit) if is_run else 1
            counts[name] = count = counts.get(name, 0) + added
            if count > limit:
                raise InvalidRequest(_shown(name), f"must hold at most {limit} entries", f"{len(raw)} bytes")
        if field is not None and field.message is not None and size:
            outer.append((end, fields, path))
            end, fields, path = min(end, at + size), _fields(field.message), f"{path}{field.name}."
        else:
            at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next one begins. Raises IndexError at the end."""
    byte = raw[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    while byte > 127 and shift < 70:
        at += 1
        byte = raw[at]
        value |= (byte & 127) << shift
        shift += 7
    return value, at + 1


def _num_varints(raw: bytes, at: int, size: int, limit: int) -> int:
    """How many numbers a run has; not looked at where its bytes are fewer than the limit."""
    if size <= limit:
        return size
    return len(raw[at : at + size].translate(None, _CONTINUED))


@functools.cache
def _fields(descriptor: Descriptor) -> dict[int, _Field]:
    return {field.number: _known(field) for field in descriptor.fields}


def _known(field: FieldDescriptor) -> _Field:
    numbers = (FieldDescriptor.CPPTYPE_MESSAGE, FieldDescriptor.CPPTYPE_STRING)
    return _Field(field.name, field.is_repeated, field.message_type, field.cpp_type not in numbers)


def _shown(path: str) -> str:
    for prefix in _PREFIXES:
        if path.startswith(prefix):
            return path.removeprefix(prefix)
    return path
