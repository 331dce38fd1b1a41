"""Tables of a workload file, read key by key: every complaint names field, rule and value."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from workloads.errors import InvalidWorkload


class Table:
    """A table of a file. What is taken is known; whatever is left in the end is a mistake.

    Args:
        values: as the file has them.
        path: where it stands, such as ``stream[0].arrivals``; empty at the top.
    """

    def __init__(self, values: object, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise InvalidWorkload(path or "file", "must be a table", values)
        self._left: dict[str, Any] = dict(values)
        self.path = path

    def __contains__(self, key: str) -> bool:
        """Whether a key is there that was not taken yet."""
        return key in self._left

    def field(self, key: str) -> str:
        """How its author finds a key."""
        return f"{self.path}.{key}" if self.path else key

    def take_a_look(self, key: str) -> Any:
        """Whatever stands there, without taking it."""
        return self._left.get(key)

    def take(self, key: str, default: Any = None) -> Any:
        """Whatever stands there."""
        return self._left.pop(key, default)

    def text(self, key: str, default: str | None = None, *, one_of: Collection[str] = ()) -> str:
        """A text; required without a default."""
        value = self.take(key, default)
        if not isinstance(value, str):
            raise InvalidWorkload(self.field(key), "must be a text", value)
        if one_of and value not in one_of:
            raise InvalidWorkload(self.field(key), f"must be one of {', '.join(one_of)}", value)
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = -math.inf, least: float = -math.inf
    ) -> float:
        """A finite number; required without a default."""
        value = self.take(key, default)
        rule = "must be a number"
        rule += f" greater than {above:g}" if above > -math.inf else ""
        rule += f" of at least {least:g}" if least > -math.inf else ""
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value <= above or value < least:
            raise InvalidWorkload(self.field(key), rule, value)
        return float(value)

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        """A whole number; required without a default."""
        value = self.take(key, default)
        rule = f"must be a whole number of at least {least}" + (
            "" if most is None else f" and at most {most}"
        )
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < least or (most is not None and value > most):
            raise InvalidWorkload(self.field(key), rule, value)
        return int(value)

    def table(self, key: str) -> "Table":
        """A table inside it; required."""
        return Table(self.take(key), self.field(key))

    def end(self) -> None:
        """Everything has been taken.

        Raises:
            InvalidWorkload: it has not; names what is left.
        """
        for key, value in self._left.items():
            raise InvalidWorkload(self.field(key), "is not known here", value)
