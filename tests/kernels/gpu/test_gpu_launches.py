"""What launchers launch is what was compiled ahead of time: no more and no less."""

import pytest
import torch

from kernels.gpu import kv_layout, paged_decode, paged_prefill, rotary_write_kv
from kernels.gpu.aot import entries
from kernels.gpu.device import INTERPRETING, TYPE_NAMES
from kernels.gpu.paged_attention import paged_attention
from tests.support.paged import step

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="what a card launches is not recorded")

MODULES = (paged_decode, paged_prefill, rotary_write_kv)


@pytest.fixture
def launched(monkeypatch):
    """Every launch as (kernel, pointer types, constants, warps, stages), instead of being run."""
    from triton.runtime import interpreter

    found = set()

    def record(self, *arguments, **named):
        names = dict(zip(self.fn.__code__.co_varnames, arguments, strict=False)) | named
        warps, stages = names.pop("num_warps"), names.pop("num_stages", 3)  # three is triton's default
        pointers = tuple(
            sorted((name, value.dtype) for name, value in names.items() if isinstance(value, torch.Tensor))
        )
        constants = tuple(sorted((name, names[name]) for name in self.constexprs if name != "UPCAST"))
        found.add((f"{self.fn.__module__}:{self.fn.__name__}", pointers, constants, warps, stages))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", record)
    return found


def listed(module):
    """A module's entries for the target that the interpreter stands for, in the same form."""
    types = {f"*{name}": dtype for dtype, name in TYPE_NAMES.items()} | {"*i64": torch.int64}
    return {
        (
            entry.kernel,
            tuple(sorted((name, types[kind]) for name, kind in entry.arguments if kind in types)),
            tuple(sorted((name, value) for name, value in entry.constants if name != "UPCAST")),
            entry.num_warps,
            entry.num_stages,
        )
        for entry in module.aot_entries()
        if "sm_80" in entry.targets
    }


def test_launchers_pick_what_is_listed_and_nothing_else(launched):
    for head_dim in kv_layout.HEAD_DIMS:
        for dtype in kv_layout.CACHE_DTYPES:
            for block_size in kv_layout.BLOCK_SIZES:
                wanted = step([(1, 3), (5, 5)], 2, 1, head_dim, block_size, dtype)
                for softcap in (None, 30.0):
                    for window in (None, 7):
                        paged_attention(*wanted.arguments(), 0.1, window, softcap)
                qkv = torch.zeros(6, 4, head_dim, dtype=dtype)
                ints = torch.zeros(6, dtype=torch.int64)
                rotary_write_kv.rotary_write_kv(
                    qkv, torch.zeros(9, head_dim), ints, ints, wanted.k_cache, wanted.v_cache
                )

    assert launched == set().union(*(listed(module) for module in MODULES))


def test_every_module_with_kernels_lists_them():
    import importlib
    import pkgutil

    import kernels.gpu

    covered = {entry.kernel for entry in entries()}
    for module in pkgutil.iter_modules(kernels.gpu.__path__, "kernels.gpu."):
        for name, value in vars(importlib.import_module(module.name)).items():
            kernel = f"{module.name}:{name}"
            if type(value).__name__ == "InterpretedFunction" and name.endswith("kernel"):
                assert kernel in covered or getattr(value.fn, "__module__", "") != module.name, kernel
