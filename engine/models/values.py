"""Values of a checkpoint's JSON files, each with its type checked."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.models.errors import InvalidCheckpoint

#: Of a JSON file; the index of the largest checkpoints has 10 MB.
JSON_BYTES_MAX = 64 * 2**20
#: Of an integer: no size of a model is above it, and what is computed of a few of them stays finite.
INTEGER_MAX = 2**31 - 1

#: What code raises that meets a value of another kind than it was made for.
_MISFITS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError)


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Whatever a value of the wrong kind breaks inside becomes InvalidCheckpoint, which names ``what``."""
    try:
        yield
    except _MISFITS as error:
        raise InvalidCheckpoint(f"{what} can't be understood: {type(error).__name__}: {error}") from error


def check_size(path: Path, most: int) -> None:
    """Raise InvalidCheckpoint where a file has more bytes than ``most``."""
    size = path.stat().st_size
    if size > most:
        raise InvalidCheckpoint(f"{path} must have at most {most} bytes, got {size}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InvalidCheckpoint: the file is missing, too large, no JSON, nested too deep, or no object.
    """
    try:
        check_size(path, JSON_BYTES_MAX)
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"{path.name} is missing in {path.parent}") from error
    except RecursionError:
        raise InvalidCheckpoint(f"{path} is nested too deep") from None
    except (OSError, ValueError, MemoryError) as error:
        raise InvalidCheckpoint(f"{path} cannot be read as JSON") from error
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def integer(source: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """An integer; ``default`` where there is none, or null.

    Raises:
        InvalidCheckpoint: it is something else.
    """
    value = source.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidCheckpoint(f"config {field} must be an integer, got {value!r}")
    if abs(value) > INTEGER_MAX:
        raise InvalidCheckpoint(f"config {field} must be at most {INTEGER_MAX}, got {value!r}")
    return value


def number(source: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """A finite number above zero; ``default`` where there is none, or null.

    Raises:
        InvalidCheckpoint: it is something else.
    """
    value = source.get(field)
    if value is None:
        value = default
    if not _is_positive(value):
        raise InvalidCheckpoint(f"config {field} must be a positive number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def optional_number(source: Mapping[str, Any], field: str) -> float | None:
    """A finite number above zero, or None where there is none, or null.

    Raises:
        InvalidCheckpoint: it is something else.
    """
    return None if source.get(field) is None else number(source, field)


def numbers(source: Mapping[str, Any], field: str) -> tuple[float, ...]:
    """A list of finite numbers above zero.

    Raises:
        InvalidCheckpoint: it is something else.
    """
    value = source.get(field)
    if not isinstance(value, list) or not all(map(_is_positive, value)):
        raise InvalidCheckpoint(f"config {field} must be a list of positive numbers, got {value!r}")
    return tuple(map(float, value))


def token_ids(value: object) -> frozenset[int]:
    """Ids of ``eos_token_id``: one, several, or none.

    Raises:
        InvalidCheckpoint: it is something else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise InvalidCheckpoint(f"config eos_token_id must be an id or a list of ids, got {value!r}")
    return frozenset(ids)


def _is_positive(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # an integer above all floats
        return False
