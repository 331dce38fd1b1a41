"""Which implementation of the operations runs, by name.

Implementations are modules, imported when first used, so that naming one costs
nothing. The choice is one per process: a model, its packed weights and its KV
layout belong to the implementation they were made with.
"""

import importlib
from typing import cast

from kernels.interface import Implementation

DEFAULT = "reference"

_MODULES: dict[str, str] = {"reference": "kernels.reference"}
_active: tuple[str, Implementation] | None = None


class UnknownImplementation(ValueError):
    """No implementation of the operations has this name.

    Args:
        name: what was asked for.
        known: the names there are.
    """

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"kernels must be one of {', '.join(known)}, got {name!r}")
        self.name = name
        self.known = known


def names() -> tuple[str, ...]:
    """The registered names, in order of registration."""
    return tuple(_MODULES)


def register(name: str, module: str) -> None:
    """Make the module at import path ``module`` available as ``name``; it is imported on first use."""
    _MODULES[name] = module


def use(name: str) -> None:
    """Make ``name`` the implementation of this process.

    Raises:
        UnknownImplementation: there is none of this name.
    """
    global _active
    if name not in _MODULES:
        raise UnknownImplementation(name, names())
    _active = (name, cast("Implementation", importlib.import_module(_MODULES[name])))


def active() -> Implementation:
    """The implementation in use; the default one when none was chosen."""
    if _active is None:
        use(DEFAULT)
    assert _active is not None
    return _active[1]


def active_name() -> str:
    """Name of the implementation in use."""
    active()
    assert _active is not None
    return _active[0]
