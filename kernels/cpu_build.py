"""Compiles ``cpu.cpp`` on first use and keeps the result in a cache folder.

A library is named by its source and flags and by the compiler's version, and ends
with a digest of itself: a damaged one is built again, not loaded. One process
builds, others wait for it; a library appears complete or not at all. Where there
is no compiler, one that another has built will do, so that an image need not
carry one. A library or a folder that another user may write is refused. Knows nothing of
what the library computes.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from kernels import private_folder

SOURCE = Path(__file__).with_name("cpu.cpp")
#: What the source includes, put into the place of the line that says so: what is compiled is one file.
HEADER = Path(__file__).with_name("cpu_threads.hpp")
#: No contraction: where a multiplication and an addition are one, the source says so, in every build.
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-pthread", "-fPIC", "-shared")
#: Compiler flags by what torch says the processor can do.
TARGETS = {
    "AVX2": ("-march=haswell",),
    "AVX512": ("-march=skylake-avx512", "-mprefer-vector-width=512"),
}
COMPILERS = ("g++", "c++", "clang++")

_DIGEST_BYTES = hashlib.sha256().digest_size
_MESSAGE_LINES = 5
_MODE = 0o755


class CpuKernelsUnavailable(RuntimeError):
    """The C++ file cannot be built or loaded here; the message says why."""


def cache_folder() -> Path:
    """Where libraries are kept: ``VORRANG_CACHE_DIR``, or the user's cache by the XDG convention."""
    chosen = os.environ.get("VORRANG_CACHE_DIR")
    if chosen:
        return Path(chosen) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vorrang" / "kernels"


def capability() -> str:
    """What the processor can do: ``AVX512``, ``AVX2``, or something else.

    Torch asks for all that compilers mean by these names, and lets ``ATEN_CPU_CAPABILITY`` choose less.
    """
    return torch.backends.cpu.get_cpu_capability()


def load() -> ctypes.CDLL:
    """The library, built first if the cache has none.

    Raises:
        CpuKernelsUnavailable: see ``library``; or the system refuses to load it.
    """
    path = library()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CpuKernelsUnavailable(f"{path} cannot be loaded: {error}") from error


def library(target_name: str | None = None) -> Path:
    """Path of the library, built first if the cache has none.

    Args:
        target_name: key of ``TARGETS``; None = what this processor can do.

    Raises:
        CpuKernelsUnavailable: the processor has no AVX2, there is no compiler, it
            fails, or the cache cannot be written, or others may write it.
    """
    target = TARGETS.get(target_name or capability())
    if target is None:
        raise CpuKernelsUnavailable("the processor has no AVX2")
    flags = (*FLAGS, *target)
    name = f"cpu-{_key(_source(), *flags)}"
    try:
        return _library(private_folder.checked(cache_folder()), name, flags)
    except OSError as error:
        raise CpuKernelsUnavailable(f"cache folder {cache_folder()} cannot be used: {error}") from error


def _library(folder: Path, name: str, flags: tuple[str, ...]) -> Path:
    compiler = _compiler()
    if compiler is None:
        for path in sorted(folder.glob(f"{name}-*.so")):
            if _is_sound(path):
                return path
        names = os.environ.get("CXX") or ", ".join(COMPILERS)
        raise CpuKernelsUnavailable(f"there is no C++ compiler ({names}); install g++ or name one in CXX")
    path = folder / f"{name}-{_key(_compiler_version(compiler))}.so"
    if _is_sound(path):
        return path
    private_folder.made(folder)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process at the latest
        if not _is_sound(path):  # nobody built it while we waited
            _build(compiler, flags, path)
    return path


def _build(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
        source, built = Path(folder, "cpu.cpp"), Path(folder, "cpu.so")
        source.write_text(_source())
        done = subprocess.run(  # noqa: S603
            [compiler, *flags, "-o", str(built), str(source)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = " | ".join(done.stderr.strip().splitlines()[-_MESSAGE_LINES:])
            raise CpuKernelsUnavailable(f"{compiler} failed with status {done.returncode}: {said}")
        _seal(built)
        built.chmod(_MODE)
        built.replace(path)


def _seal(path: Path) -> None:
    """Append the digest of the content, which the loader does not mind."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _is_sound(path: Path) -> bool:
    """Whether it is there and whole.

    Raises:
        UntrustedPath: others may have written it, so its digest says nothing.
    """
    try:
        private_folder.check_file(path)
        content = path.read_bytes()
    except private_folder.UntrustedPath:
        raise
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler() -> str | None:
    """Full path of the compiler: the one that ``CXX`` names, or the first known one there is."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


def _compiler_version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    return f"{compiler} {done.stdout}"


def _source() -> str:
    try:
        return SOURCE.read_text().replace(f'#include "{HEADER.name}"', HEADER.read_text())
    except OSError as error:
        raise CpuKernelsUnavailable(f"the source cannot be read: {error}") from error


if __name__ == "__main__":  # while an image is made: on whatever processor it will run, there is a library
    for name in TARGETS:
        print(library(name))  # noqa: T201
