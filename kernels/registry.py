"""Which implementation of the operations runs, by name.

Implementations are modules, imported when first used, so that naming one costs
nothing. The choice is one per process: a model, its packed weights and its KV
layout belong to the implementation they were made with.
"""

import importlib
from collections.abc import Callable
from typing import cast

import torch

from kernels.cpu_build import CpuKernelsUnavailable
from kernels.gpu import available
from kernels.interface import Implementation

#: The quickest implementation that can be had here.
AUTO = "auto"

_MODULES: dict[str, str] = {
    "triton": "kernels.gpu.implementation",
    "cpu": "kernels.cpu",
    "reference": "kernels.reference",
}
#: What must hold before a module is imported, because its import could not say it as well; else raises.
_REQUIREMENTS: dict[str, Callable[[], object]] = {"triton": available.device}
_active: tuple[str, Implementation] | None = None
_reason = ""


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
    """Make ``name`` the implementation of this process; ``auto`` chooses the quickest there is.

    Raises:
        UnknownImplementation: there is none of this name.
        CpuKernelsUnavailable: ``cpu`` was asked for by name and cannot be had here.
        TritonKernelsUnavailable: ``triton`` likewise.
    """
    global _active, _reason
    if name == AUTO:
        _reason = _use_the_quickest()
        return
    if name not in _MODULES:
        raise UnknownImplementation(name, (AUTO, *names()))
    if name in _REQUIREMENTS:
        _REQUIREMENTS[name]()
    _active = (name, cast("Implementation", importlib.import_module(_MODULES[name])))
    _reason = "asked for by name"


def _use_the_quickest() -> str:
    """What ``auto`` means here. Returns why."""
    no_card = "torch finds no GPU"
    if torch.cuda.is_available():
        try:
            use("triton")
        except available.TritonKernelsUnavailable as error:
            no_card = str(error)
        else:
            return f"there is {available.description()}"
    try:
        use("cpu")
    except CpuKernelsUnavailable as error:
        use("reference")
        return f"cpu is not available: {error}"
    return f"the quickest on a CPU, and {no_card}"


def active() -> Implementation:
    """The implementation in use; ``auto`` when none was chosen."""
    if _active is None:
        use(AUTO)
    assert _active is not None
    return _active[1]


def active_name() -> str:
    """Name of the implementation in use."""
    active()
    assert _active is not None
    return _active[0]


def active_reason() -> str:
    """Why this implementation is in use, in words."""
    active()
    return _reason
