"""Messages with odd values in every field, drawn from their descriptors."""

import json
from random import Random
from typing import Any

_TEXTS = (
    "",
    "x",
    "0",
    "-1",
    "hello",
    "[",
    "[" * 2000,
    "{" * 2000,
    '[{"a":' * 500,
    "(" * 300,
    "a{99999}",
    "\x00",
    "a\x1b[31m\n",
    "\u2028",
    "😀" * 100,
    "1" * 5000,
    "1e999999",
    "../../etc/passwd",
    "r1",
    "scripted",
    "batch",
    "interactive",
    "100:0",
    "\uff11:\uff12",
    "9" * 400 + ":1",
    '{"type": []}',
    '{"type": {"a": 1}}',
    '{"format": [1]}',
    '{"required": [[]], "properties": {}}',
    '{"enum": 3}',
    '{"$ref": 7}',
    '{"oneOf": [1, []]}',
    "null",
    "true",
    json.dumps({"anyOf": [{"type": "object", "properties": {"a": {"const": []}}, "required": ["a"]}] * 2}),
    "[/red]",
    "{0.__class__}",
    "%s%n",
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
_INTS = (0, 1, 2, 7, 255, 256, 2**31 - 1)
_WIDE = (*_INTS, 2**32 - 1, 2**63 - 1)
_MAX_DEPTH = 6


def odd(message_class: Any, draw: Random, depth: int = 0) -> Any:
    """A message of which some fields hold something odd."""
    message = message_class()
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.55 or (depth > _MAX_DEPTH):
            continue
        if field.message_type is not None:
            _fill_message(message, field, draw, depth)
        elif field.is_repeated:
            getattr(message, field.name).extend(
                _value(field, draw) for _ in range(draw.choice((0, 1, 3, 70)))
            )
        else:
            setattr(message, field.name, _value(field, draw))
    return message


def _fill_message(message: Any, field: Any, draw: Random, depth: int) -> None:
    inner = getattr(message, field.name)
    if field.message_type.GetOptions().map_entry:
        return
    if field.is_repeated:
        for _ in range(draw.choice((0, 1, 2))):
            inner.add().CopyFrom(odd(type(inner.add()), draw, depth + 1))
        return
    inner.CopyFrom(odd(type(inner), draw, depth + 1))
    inner.SetInParent()


def _value(field: Any, draw: Random) -> Any:
    kind = field.type
    if kind == field.TYPE_STRING:
        return draw.choice(_TEXTS)
    if kind == field.TYPE_BYTES:
        return bytes(draw.randrange(256) for _ in range(draw.choice((0, 1, 50))))
    if kind in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        value = draw.choice(_FLOATS)
        return value if kind == field.TYPE_DOUBLE or abs(value) < 1e38 or value != value else 3e38
    if kind == field.TYPE_BOOL:
        return draw.random() < 0.5
    if kind == field.TYPE_ENUM:
        return draw.choice((0, 1, 99))
    if kind in (field.TYPE_INT64, field.TYPE_SINT64, field.TYPE_SFIXED64):
        return draw.choice((*_WIDE, -1, -(2**63)))
    if kind in (field.TYPE_UINT64, field.TYPE_FIXED64):
        return draw.choice((*_WIDE, 2**64 - 1))
    if kind in (field.TYPE_UINT32, field.TYPE_FIXED32):
        return draw.choice((*_INTS, 2**32 - 1))
    return draw.choice((*_INTS, -1, -(2**31)))
