"""Levels of urgency and the classes that name ranges of them.

A level is an integer, **lower is more urgent** (as in vLLM, Triton Inference
Server and Temporal). A class is a named range of levels. This module knows
neither requests nor the wire.
"""

import re
from dataclasses import dataclass

from engine.errors import InvalidRequest

LEVEL_MIN = -100
LEVEL_MAX = 100
DEFAULT_LEVEL = 0
#: A level as it is written: no other digits or spaces, which ``int`` would take.
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """A named range of levels.

    Attributes:
        name: what clients write instead of a number.
        level: the level the name stands for; also the most urgent ordinary one of the range.
        most_urgent_level: first level of the range.
        least_urgent_level: last level of the range, included.
    """

    name: str
    level: int
    most_urgent_level: int
    least_urgent_level: int


#: Most urgent first; together they cover every level exactly once.
CLASSES: tuple[PriorityClass, ...] = (
    PriorityClass("interactive", -10, LEVEL_MIN, -1),
    PriorityClass("standard", 0, 0, 9),
    PriorityClass("batch", 10, 10, LEVEL_MAX),
)

_CLASS_OF = {level: c for c in CLASSES for level in range(c.most_urgent_level, c.least_urgent_level + 1)}
_CLASS_RANK_OF = {level: CLASSES.index(c) for level, c in _CLASS_OF.items()}


def class_of(level: int) -> PriorityClass:
    """The class whose range holds ``level``.

    Raises:
        InvalidRequest: ``level`` is outside ``LEVEL_MIN..LEVEL_MAX``.
    """
    return _CLASS_OF[check_level(level)]


def class_rank(level: int) -> int:
    """Place of the class of a level among ``CLASSES``; 0 is the most urgent.

    Raises:
        InvalidRequest: ``level`` is outside ``LEVEL_MIN..LEVEL_MAX``.
    """
    return _CLASS_RANK_OF[check_level(level)]


def check_level(level: int, *, field: str = "priority.level") -> int:
    """Return ``level``, or raise ``InvalidRequest`` naming ``field`` when it is out of range."""
    if not LEVEL_MIN <= level <= LEVEL_MAX:
        raise InvalidRequest(field, f"must be between {LEVEL_MIN} and {LEVEL_MAX}", level)
    return level


def level_named(name: str, *, field: str = "priority.class_name") -> int:
    """The level a class name stands for.

    Raises:
        InvalidRequest: no class has that name.
    """
    for priority_class in CLASSES:
        if priority_class.name == name:
            return priority_class.level
    known = ", ".join(c.name for c in CLASSES)
    raise InvalidRequest(field, f"must be one of {known}", name)


def parse_level(text: str, *, field: str) -> int:
    """Read an integer level or a class name, as metadata and command lines write it.

    Raises:
        InvalidRequest: neither an integer in range nor a known class name.
    """
    if not _NUMBER.fullmatch(text):
        return level_named(text, field=field)
    return check_level(int(text), field=field)
