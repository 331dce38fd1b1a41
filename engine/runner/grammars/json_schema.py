"""Which JSON schemas the compiler holds to the letter; others are refused instead of half obeyed.

The compiler passes over what it does not know, and an output that its schema forbids would be called valid.
Pure: it knows no library.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine.grammar import GrammarRefused, GrammarSpec

#: Keywords that would be passed over.
_UNKNOWN = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
#: Keywords that only mean something beside their type, and what that is.
_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("minItems", "maxItems", "items", "prefixItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties",
    ),
}  # fmt: skip
_FORMATS = frozenset({
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
})  # fmt: skip
#: In a pattern: what a string must write with a backslash, which the compiler does not see to.
_UNQUOTABLE = re.compile(r'["\x00-\x1f]|\\[\\xucnrtfvb0]')
#: What replaces the constraints beside it.
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$defs", "definitions", "discriminator", "contentEncoding", "contentMediaType", "$anchor",
})  # fmt: skip
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip


def check_schema(spec: GrammarSpec) -> None:
    """Refuse a schema that is none, or that the compiler would not hold to.

    Raises:
        GrammarRefused: names the place and the keyword.
    """
    try:
        root = json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(spec, f"must be JSON ({error})", spec.text) from error
    try:
        _check(spec, root)
    except (TypeError, AttributeError, RecursionError) as error:  # a keyword holds what no schema has there
        raise GrammarRefused(spec, "must be a JSON schema", spec.text) from error


def _check(spec: GrammarSpec, root: Any) -> None:
    for place, schema in _schemas(root):
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise GrammarRefused(spec, f"must hold a schema at {place}", schema)
        problem = _problem(schema)
        if problem is not None:
            raise GrammarRefused(spec, f"must not {problem} at {place}, which is not supported", schema)


def _schemas(root: Any) -> Iterator[tuple[str, Any]]:
    """Every schema in ``root`` with its place; what is data (an enum, a default) is none."""
    waiting: list[tuple[str, Any]] = [("#", root)]
    while waiting:
        place, schema = waiting.pop()
        yield place, schema
        if not isinstance(schema, dict):
            continue
        for name in ("properties", "patternProperties", "$defs", "definitions"):
            inner = schema.get(name)
            if isinstance(inner, dict):
                waiting.extend((f"{place}/{name}/{key}", value) for key, value in inner.items())
        for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            inner = schema.get(name)
            if isinstance(inner, list):
                waiting.extend((f"{place}/{name}/{index}", value) for index, value in enumerate(inner))
        for name in ("items", "additionalProperties", "propertyNames"):
            inner = schema.get(name, True)
            if name == "propertyNames" and isinstance(inner, dict):
                inner = {"type": "string"} | inner  # names are strings, said or not
            waiting.append((f"{place}/{name}", inner))


def _problem(schema: dict[str, Any]) -> str | None:
    """What of a schema the compiler would pass over, in words; None = nothing."""
    for name in _UNKNOWN:
        if name in schema and schema[name] is not False:
            return f"have {name}"
    whole = [name for name in _WHOLE if name in schema]
    if len(whole) > 1:
        return f"have {whole[0]} beside {whole[1]}"
    if whole:
        return _problem_of_whole(schema, whole[0])
    return _problem_of_type(schema)


def _problem_of_whole(schema: dict[str, Any], name: str) -> str | None:
    allowed = {name} if name in ("$ref", "allOf") else {name, "type"}
    beside = sorted(schema.keys() - _ANNOTATIONS - allowed)
    if beside:
        return f"have {beside[0]} beside {name}"
    value = schema[name]
    if name == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
        return "have a $ref that leads out of it"
    if name == "allOf" and isinstance(value, list) and len(value) > 1:
        return "have an allOf of several schemas"
    if name == "oneOf" and isinstance(value, list) and not _are_disjoint(value):
        return "have a oneOf whose schemas may overlap (anyOf is supported)"
    if "type" in schema:
        if name in ("anyOf", "oneOf"):
            return f"have type beside {name}"
        values = value if name == "enum" and isinstance(value, list) else [value]
        if not all(_has_type(each, schema["type"]) for each in values):
            return f"have values of another type in {name}"
    return None


def _problem_of_type(schema: dict[str, Any]) -> str | None:
    kind = schema.get("type", _implied_type(schema))
    kinds = kind if isinstance(kind, list) else [kind]
    for owner, names in _OF_TYPE.items():
        for name in names:
            if name in schema and owner not in kinds and not (owner == "number" and "integer" in kinds):
                return f"have {name} without the type {owner}"
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema or "format" in schema):
        return "have a pattern beside minLength, maxLength or format"
    patterns = [schema["pattern"]] if "pattern" in schema else []
    if isinstance(schema.get("patternProperties"), dict):
        patterns += schema["patternProperties"]
    for pattern in patterns:
        if isinstance(pattern, str) and _UNQUOTABLE.search(pattern):
            return f"have the pattern {pattern!r} with a quote, backslash or control character in it"
    if "format" in schema and ("minLength" in schema or "maxLength" in schema):
        return "have a format beside minLength or maxLength"
    if "format" in schema and schema["format"] not in _FORMATS:
        return f"have the format {schema['format']!r}"
    required, properties = schema.get("required", []), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        lacking = [name for name in required if name not in properties]
        if lacking:
            return f"require the property {lacking[0]!r} without describing it"
    return None


def _implied_type(schema: dict[str, Any]) -> str | None:
    """What the compiler takes a schema without a type for."""
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else None


def _are_disjoint(schemas: list[Any]) -> bool:
    """Whether no value can fit two of them, as far as their types, or one constant property, tell."""
    if not all(isinstance(schema, dict) for schema in schemas):
        return False
    kinds = [schema.get("type") for schema in schemas]
    if all(isinstance(kind, str) for kind in kinds):
        named = ["number" if kind == "integer" else kind for kind in kinds]
        if len(set(named)) == len(named):
            return True
    tags: list[dict[str, str]] = []
    for schema in schemas:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return False
        tags.append(
            {
                name: json.dumps(value["const"])
                for name, value in properties.items()
                if name in required and isinstance(value, dict) and "const" in value
            }
        )
    common = set.intersection(*map(set, tags)) if tags else set()
    return any(len({tag[name] for tag in tags}) == len(tags) for name in common)


def _has_type(value: Any, kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    for each in kinds:
        if isinstance(value, bool):
            if each == "boolean":
                return True
        elif isinstance(value, _PYTHON_TYPES.get(each, ())) or (
            each == "integer" and isinstance(value, float) and value.is_integer()
        ):
            return True
    return False
