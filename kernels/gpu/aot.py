"""Kernels compiled ahead of time, without a card: registers, spills, shared memory, tensor-core instructions.

A module of this package that launches kernels has a function ``aot_entries()``
which names everything its launcher can pick: one ``AotEntry`` for each kernel,
data type and configuration. ``entries`` collects them, ``compile_entry`` builds
one for one target, ``problems`` says what is wrong with what came out.

Says nothing about speed or about right results. Which entries are compiled
again, and by how many processes, is the business of ``tools/check_kernels.py``.
"""

import contextlib
import hashlib
import importlib
import io
import os
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels.gpu
from kernels.gpu.device import TARGETS, TargetName

#: Shared memory that one program may have.
SHARED_BYTES_MAX: dict[TargetName, int] = {
    "sm_80": 166_912,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "gfx942": 65_536,
}

_GPU_TARGETS: dict[TargetName, Any] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True, slots=True)
class AotEntry:
    """One thing a launcher can pick: a kernel with the types and constants it is launched with.

    Attributes:
        kernel: ``module:function``, such as ``kernels.gpu.paged_decode:split_kernel``.
        case: what tells this entry from the kernel's others, in words; data type, head size, options.
            Entries of one case for different targets may have different constants.
        arguments: name and type of each argument known at run time only, as Triton writes types:
            ``*bf16`` a pointer, ``i32`` and ``i64`` integers, ``fp32`` a number.
        constants: name and value of each ``tl.constexpr`` argument.
        divisible: arguments that the launcher guarantees to be multiples of 16 (addresses in bytes).
            An integer that the launcher cannot vouch for must be in the kernel's ``do_not_specialize``,
            or a launch compiles what was not checked here.
        num_warps: warps a program has (wavefronts on AMD).
        num_stages: depth of the software pipeline.
        targets: what to compile for.
        needs_wgmma: whether the machine code for sm_90 must hold warp-group matrix instructions.
    """

    kernel: str
    case: str
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    targets: tuple[TargetName, ...] = TARGETS
    needs_wgmma: bool = False


@dataclass(frozen=True, slots=True)
class AotResult:
    """What one entry became on one target.

    Attributes:
        registers: of one thread.
        spill_bytes: memory of one thread that stands in for registers, stack frames included.
        shared_bytes: shared memory of one program.
        wgmma: whether warp-group matrix instructions are in it.
        error: why it did not compile, in one line; the rest is then without meaning.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: bool
    error: str | None = None


def entries() -> tuple[AotEntry, ...]:
    """Everything that the launchers of this package can pick, by module and in its order.

    Raises:
        ValueError: two entries of one kernel, case and target.
    """
    found: list[AotEntry] = []
    for module in pkgutil.iter_modules(kernels.gpu.__path__, "kernels.gpu."):
        listing = getattr(importlib.import_module(module.name), "aot_entries", None)
        if listing is not None:
            found.extend(listing())
    seen: set[tuple[str, str, str]] = set()
    for entry in found:
        for target in entry.targets:
            key = (entry.kernel, entry.case, target)
            if key in seen:
                raise ValueError(f"kernel, case and target must be listed once, got {key} twice")
            seen.add(key)
    return tuple(found)


def fingerprint(entry: AotEntry, target: TargetName) -> str:
    """What the outcome depends on, as a hash: the kernel's source and all it calls, the entry, triton."""
    options = (
        entry.arguments,
        entry.constants,
        entry.divisible,
        entry.num_warps,
        entry.num_stages,
        target,
        triton.__version__,
    )
    return hashlib.sha256(f"{_function(entry).cache_key} {options!r}".encode()).hexdigest()


def keep_artifacts_in(folder: str) -> None:
    """Have this process's compilations leave their files in ``folder``, to be thrown away."""
    os.environ["TRITON_CACHE_DIR"] = folder


def compile_entry(entry: AotEntry, target: TargetName) -> AotResult:
    """Compile ``entry`` for ``target``, always anew. A second or more of one core.

    Raises:
        ValueError: the entry does not name every argument of its kernel exactly once.
    """
    source = _source(entry)
    options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages}
    log = io.StringIO()
    try:
        with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.compilation.always_compile = True
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(source, target=_GPU_TARGETS[target], options=options)
    except Exception as error:
        # Whatever the compiler raises is a finding about the entry, not a failure of the check.
        return AotResult(
            0, 0, 0, False, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        )
    shared_bytes = int(compiled.metadata.shared)
    if "amdgcn" in compiled.asm:
        return _of_amdgcn(compiled.asm["amdgcn"], shared_bytes)
    return _of_ptxas(log.getvalue(), compiled.asm["ptx"], shared_bytes)


def problems(entry: AotEntry, target: TargetName, result: AotResult) -> list[str]:
    """What is wrong with a result, in words; empty when nothing is."""
    if result.error is not None:
        return [f"does not compile: {result.error}"]
    found = []
    if result.spill_bytes:
        found.append(f"spills {result.spill_bytes} bytes a thread")
    limit = SHARED_BYTES_MAX[target]
    if result.shared_bytes > limit:
        found.append(f"needs {result.shared_bytes} bytes of shared memory, of {limit}")
    if entry.needs_wgmma and target == "sm_90" and not result.wgmma:
        found.append("holds no wgmma instruction")
    return found


def _function(entry: AotEntry) -> Any:
    module, _, name = entry.kernel.partition(":")
    return getattr(importlib.import_module(module), name)


def _source(entry: AotEntry) -> Any:
    function = _function(entry)
    types = dict(entry.arguments) | {name: "constexpr" for name, _ in entry.constants}
    named = [name for name, _ in (*entry.arguments, *entry.constants)]
    if sorted(named) != sorted(function.arg_names):
        wrong = set(named) ^ set(function.arg_names) or {name for name in named if named.count(name) > 1}
        raise ValueError(f"{entry.kernel} arguments must be named once each, got wrong {sorted(wrong)}")
    missing = set(entry.divisible) - {name for name, _ in entry.arguments}
    if missing:
        raise ValueError(f"{entry.kernel} divisible must name arguments, got {sorted(missing)}")
    hint = [["tt.divisibility", 16]]
    return ASTSource(
        function,
        signature={name: types[name] for name in function.arg_names},
        constexprs=dict(entry.constants),
        attrs={(function.arg_names.index(name),): hint for name in entry.divisible},
    )


def _of_ptxas(log: str, ptx: str, shared_bytes: int) -> AotResult:
    """From what ``ptxas -v`` prints; a stack frame counts as spilled, for it is local memory as well."""
    registers = re.findall(r"Used (\d+) registers", log)
    memory = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
    if not registers or not memory:
        return AotResult(0, 0, 0, False, f"ptxas printed something unknown: {log.strip()[:200]!r}")
    spill_bytes = max(int(number) for number in memory)
    return AotResult(max(map(int, registers)), spill_bytes, shared_bytes, "wgmma.mma_async" in ptx)


def _of_amdgcn(assembly: str, shared_bytes: int) -> AotResult:
    """From the metadata at the end of the assembly; vector and accumulator registers are one file.

    Scalar registers that spill go into lanes of vector registers; where those end as
    well, the rest shows as memory of the thread.
    """
    counts = {}
    for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size"):
        values = [int(value) for value in re.findall(rf"\.{name}:\s*(\d+)", assembly)]
        if not values:
            return AotResult(0, 0, 0, False, f"the assembly has no {name}")
        counts[name] = max(values)
    spill_bytes = max(counts["private_segment_fixed_size"], 4 * counts["vgpr_spill_count"])
    return AotResult(counts["vgpr_count"], spill_bytes, shared_bytes, False)


def select(chosen: Sequence[AotEntry], word: str) -> tuple[AotEntry, ...]:
    """The entries whose kernel or case holds ``word``."""
    return tuple(entry for entry in chosen if word in entry.kernel or word in entry.case)
