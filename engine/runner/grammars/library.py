"""The grammar library without torch and transformers, for a process that needs nothing of them.

xgrammar imports both for functions that are not used here, and with them it takes seconds and half a
gigabyte to load; without, half a second and 60 MB, and a process that can be forked in milliseconds.
Where it can't be had so, since it has changed, it is loaded with them.
"""

import importlib
import os
import sys
import types
from typing import Any

from engine.errors import Unimplemented

_NOT_NEEDED = ("torch", "transformers")


class _Absent(types.ModuleType):
    """Stands in for a module of whose names nothing is used but that they are there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {"__init__": lambda self, *_, **__: None})
        setattr(self, name, found)
        return found


def load_alone() -> Any:
    """xgrammar, in a process that uses neither torch nor transformers, now or later.

    Raises:
        Unimplemented: it is not installed.
    """
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    try:
        for name in _NOT_NEEDED:
            sys.modules[name] = None  # type: ignore[assignment]
        importlib.import_module("tvm_ffi")  # which copes without
        for name in _NOT_NEEDED:
            sys.modules[name] = _Absent(name)
        return importlib.import_module("xgrammar")
    except Exception:
        for name in [*_NOT_NEEDED, *(n for n in sys.modules if n.split(".")[0] in ("tvm_ffi", "xgrammar"))]:
            sys.modules.pop(name, None)
        return load()


def load() -> Any:
    """Xgrammar as it comes.

    Raises:
        Unimplemented: it is not installed.
    """
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise Unimplemented("grammar (the server lacks the package xgrammar)") from error
