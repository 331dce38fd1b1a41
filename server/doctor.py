"""What ``vorrang doctor`` finds on this machine. Imports torch, so it takes seconds.

Changes nothing but the cache of built kernels.
"""

import importlib.metadata
import importlib.util
import platform
import shutil
from pathlib import Path

import psutil

#: CPU features that decide which kernels are quick, most useful first.
_FEATURES = (
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx2",
    "fma",
    "f16c",
)
_COMPILERS = ("g++", "c++", "clang++")
_GIB = 1024**3


def findings() -> list[tuple[str, str]]:
    """Pairs of what was looked for and what was found."""
    memory = psutil.virtual_memory()
    cores = f"{psutil.cpu_count(logical=False) or '?'} physical, {psutil.cpu_count()} logical"
    return [
        ("vorrang", importlib.metadata.version("vorrang")),
        ("python", f"{platform.python_version()} on {platform.platform(terse=True)}"),
        ("cpu", _cpu_model()),
        ("cpu features", " ".join(_cpu_features()) or "none of " + " ".join(_FEATURES)),
        ("cores", cores),
        ("memory", f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB available"),
        ("torch", _version("torch")),
        ("triton", _version("triton")),
        ("gpu", _gpu()),
        ("default model", _default_model()),
        ("runner", _runner()),
        ("cache folder", _cache_folder()),
        ("compiler", next((path for name in _COMPILERS if (path := shutil.which(name))), "none")),
        ("kernels", _kernels()),
    ]


def _cpu_info() -> dict[str, str]:
    """Lines of /proc/cpuinfo by key; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _cpu_model() -> str:
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    flags = set(_cpu_info().get("flags", "").split())
    return [feature for feature in _FEATURES if feature in flags]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpu() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return "none"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB, {torch.cuda.device_count()} in all"


def _runner() -> str:
    from server.settings import SettingsError, load

    try:
        runner = load().settings.engine.runner
    except SettingsError as error:
        return f"unknown: {error}"
    where = {"process": "its own, started again when it dies", "inline": "a thread of the server"}
    return f"{runner} ({where[runner]})"


def _default_model() -> str:
    try:
        from engine.models import registry

        return f"{registry.DEFAULT_MODEL_NAME}, {registry._default_model_file()}"
    except Exception as error:  # a doctor reports what ails; it does not fall ill
        return f"not found: {error}"


def _kernels() -> str:
    """What ``auto`` chooses here, and why; builds the library where the cache has none."""
    if importlib.util.find_spec("torch") is None:
        return "unknown without torch"
    from kernels import cpu_build, registry

    registry.use(registry.AUTO)
    name, reason = registry.active_name(), registry.active_reason()
    return f"{name} for {cpu_build.capability()}: {reason}" if name == "cpu" else f"{name}: {reason}"


def _cache_folder() -> str:
    from engine.models.registry import default_cache_dir
    from kernels import private_folder

    folder = default_cache_dir()
    try:
        private_folder.checked(folder)
    except OSError as error:
        return f"{folder} cannot be used: {error}"
    return f"{folder}{'' if folder.is_dir() else ' (not there yet)'}"
