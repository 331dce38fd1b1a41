"""Random JSON schemas whose values are short, whatever a model says."""

import random
from typing import Any

_LETTERS = "abcdefgh"


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema of any kind that the server supports; some refer to others inside them."""
    inner = _schema(rng, 2)
    if rng.random() < 0.8:
        return inner
    reference = {"$ref": "#/$defs/inner"}
    return {
        "type": "object", "properties": {"x": reference, "y": _schema(rng, 0)}, "required": ["x"],
        "$defs": {"inner": inner},
    }  # fmt: skip


def _schema(rng, depth):
    makers = [_string, _pattern, _enum, _integer, _boolean, _const, _any_of]
    if depth:
        makers += [_object, _object, _object, _array, _tuple]
    schema: dict[str, Any] = rng.choice(makers)(rng, depth)
    return schema


def _string(rng, depth):
    low = rng.randrange(3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(4)}


def _pattern(rng, depth):
    return {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^x(y|z)$", "^[0-9]{2}-[A-F]$"])}


def _enum(rng, depth):
    return {"enum": rng.sample([1, "one", None, True, 2.5, "zwölf", -3, 'a "quote"'], rng.randrange(1, 5))}


def _integer(rng, depth):
    low = rng.randrange(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)}


def _boolean(rng, depth):
    return {"type": rng.choice(["boolean", "null"])}


def _const(rng, depth):
    return {"const": rng.choice([7, "yes", False, None])}


def _any_of(rng, depth):
    return {"anyOf": [_integer(rng, 0), _string(rng, 0)]}


def _object(rng, depth):
    names = rng.sample(_LETTERS, rng.randrange(1, 4))
    schema = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
    }
    return schema | ({"additionalProperties": False} if rng.random() < 0.5 else {})


def _array(rng, depth):
    low = rng.randrange(2)
    items = _schema(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(1, 3)}


def _tuple(rng, depth):
    return {
        "type": "array", "prefixItems": [_schema(rng, 0), _schema(rng, 0)], "items": False,
        "minItems": 2,
    }  # fmt: skip
