"""Building the C++ file: into the cache once, again when damaged, and a clear refusal where it cannot be."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels import cpu_build, registry
from kernels.cpu_build import CpuKernelsUnavailable

ROOT = Path(__file__).parents[2]


def _libraries(cache):
    return sorted((cache / "kernels").glob("*.so"))


def _other_process(cache, **environment):
    code = (
        "from kernels import registry; registry.use('auto');"
        "print(registry.active_name(), '|', registry.active_reason())"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "VORRANG_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
        | environment,
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VORRANG_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """A source that compiles at once."""
    monkeypatch.setattr(cpu_build, "_source", lambda: 'extern "C" int vorrang_abi() { return 1; }\n')


def test_a_library_is_built_once_and_found_again(cache, quick):
    first = cpu_build.library()
    built = first.stat().st_mtime_ns

    assert cpu_build.library() == first
    assert first.stat().st_mtime_ns == built
    assert _libraries(cache) == [first]
    assert [p.name for p in (cache / "kernels").iterdir() if p.suffix not in (".so", ".lock")] == []


@pytest.mark.parametrize("change", ["source", "compiler", "flags"])
def test_another_source_compiler_or_flag_is_another_library(change, cache, quick, monkeypatch):
    first = cpu_build.library()
    if change == "source":
        monkeypatch.setattr(cpu_build, "_source", lambda: 'extern "C" int vorrang_abi() { return 2; }\n')
    elif change == "compiler":
        monkeypatch.setattr(cpu_build, "_compiler_version", lambda compiler: "another")
    else:
        monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-O1"))

    assert cpu_build.library() != first
    assert len(_libraries(cache)) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "one bit"])
def test_a_damaged_library_is_built_again(damage, cache, quick):
    path = cpu_build.library()
    content = path.read_bytes()
    middle = len(content) // 2
    path.unlink()
    path.write_bytes(
        {
            "truncated": content[:middle],
            "empty": b"",
            "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        }[damage]
    )

    assert cpu_build.library() == path
    assert len(path.read_bytes()) == len(content)


def test_no_compiler_is_said(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)

    with pytest.raises(CpuKernelsUnavailable, match=r"no C\+\+ compiler.*CXX"):
        cpu_build.library()


def test_without_a_compiler_a_library_that_another_built_will_do(cache, quick, monkeypatch):
    built = cpu_build.library()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)

    assert cpu_build.library() == built
    monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-O1"))
    with pytest.raises(CpuKernelsUnavailable, match="no C"):
        cpu_build.library()


def test_a_source_that_does_not_compile_shows_what_the_compiler_said(cache, monkeypatch):
    monkeypatch.setattr(cpu_build, "_source", lambda: "int broken = nonsense;\n")

    with pytest.raises(CpuKernelsUnavailable, match="nonsense"):
        cpu_build.library()
    assert _libraries(cache) == []


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch, quick):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VORRANG_CACHE_DIR", str(tmp_path / "file" / "below"))

    with pytest.raises(CpuKernelsUnavailable, match=r"cache folder .* cannot be used"):
        cpu_build.library()


def test_no_space_in_the_cache_is_said(cache, quick, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpu_build, "_seal", full)

    with pytest.raises(CpuKernelsUnavailable, match="No space left"):
        cpu_build.library()
    assert _libraries(cache) == []


def test_a_processor_without_avx2_is_said(cache, monkeypatch):
    monkeypatch.setattr(cpu_build, "capability", lambda: "DEFAULT")

    with pytest.raises(CpuKernelsUnavailable, match="AVX2"):
        cpu_build.library()


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("VORRANG_CACHE_DIR", "/somewhere")
    assert cpu_build.cache_folder() == Path("/somewhere/kernels")
    monkeypatch.delenv("VORRANG_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert cpu_build.cache_folder() == Path("/else/vorrang/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cpu_build.cache_folder() == Path.home() / ".cache/vorrang/kernels"


@pytest.mark.deep
def test_two_processes_that_build_at_once_share_one_library(tmp_path):
    with ThreadPoolExecutor(2) as executor:
        done = list(executor.map(lambda _: _other_process(tmp_path), range(2)))

    assert [process.returncode for process in done] == [0, 0], done[0].stderr
    assert [process.stdout.split()[0] for process in done] == ["cpu", "cpu"]
    assert len(_libraries(tmp_path)) == 1
    assert [p.suffix for p in sorted((tmp_path / "kernels").iterdir())] == [".lock", ".so"]


@pytest.mark.slow
def test_without_a_compiler_auto_falls_back_to_the_reference_and_says_why(tmp_path):
    done = _other_process(tmp_path, PATH="", CXX="")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reference | ")
    assert "no C++ compiler" in done.stdout


def test_cpu_by_name_does_not_fall_back(cache, monkeypatch):
    before = registry.active_name()
    monkeypatch.setattr(cpu_build, "load", lambda: (_ for _ in ()).throw(CpuKernelsUnavailable("no way")))
    for module in ("cpu", "cpu_layers", "cpu_library"):
        monkeypatch.delitem(sys.modules, f"kernels.{module}", raising=False)

    with pytest.raises(CpuKernelsUnavailable, match="no way"):
        registry.use("cpu")
    assert registry.active_name() == before
