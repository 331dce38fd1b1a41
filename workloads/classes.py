"""Class names and the levels they stand for, as the server has them.

A copy of what ``engine.priority`` defines, for whoever may not import the engine;
a test holds the two together.
"""

from workloads.errors import InvalidWorkload

#: Level a class name stands for, most urgent class first.
LEVELS: dict[str, int] = {"interactive": -10, "standard": 0, "batch": 10}
LEVEL_MIN, LEVEL_MAX = -100, 100
DEFAULT_LEVEL = 0


def level_named(name: str, *, field: str = "class") -> int:
    """The level a class name stands for.

    Raises:
        InvalidWorkload: no class has that name.
    """
    if name not in LEVELS:
        raise InvalidWorkload(field, f"must be one of {', '.join(LEVELS)}", name)
    return LEVELS[name]


def class_of(level: int) -> str:
    """Name of the class whose range holds a level."""
    if level < LEVELS["standard"]:
        return "interactive"
    return "standard" if level < LEVELS["batch"] else "batch"
