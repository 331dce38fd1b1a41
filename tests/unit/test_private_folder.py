"""Code and weights come from folders that nobody else may write."""

import os
import stat

import pytest

from engine.models import gguf
from engine.models.errors import CacheUnusable
from kernels import cpu_build, private_folder
from kernels.cpu_build import CpuKernelsUnavailable
from kernels.private_folder import UntrustedPath

STRANGER = 4321
ROOTS_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("VORRANG_CACHE_DIR", str(folder))
    monkeypatch.setattr(cpu_build, "_source", lambda: 'extern "C" int vorrang_abi() { return 1; }\n')
    return folder


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """A file that converts at once."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(gguf, "convert", lambda source, folder: (folder / "config.json").write_text("{}"))
    return path


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
@pytest.mark.parametrize("which", [".", "kernels"])
def test_a_library_below_a_folder_that_others_may_write_is_refused(mode, which, cache):
    cpu_build.library()
    if mode == 0o1777 and which == ".":
        pytest.skip("a sticky parent is in order")
    (cache / which).chmod(mode)

    with pytest.raises(CpuKernelsUnavailable, match=r"cannot be used: .* writable by its owner alone"):
        cpu_build.library()


def test_a_library_that_others_may_write_is_refused_though_its_digest_is_right(cache):
    cpu_build.library().chmod(0o666)

    with pytest.raises(CpuKernelsUnavailable, match=r"\.so must be writable by its owner alone"):
        cpu_build.library()


@ROOTS_ALONE
@pytest.mark.parametrize("which", ["parent", "folder", "file"])
@pytest.mark.parametrize("compiler", ["g++", ""])
def test_a_library_of_another_user_is_refused(which, compiler, cache, monkeypatch):
    path = cpu_build.library()
    os.chown({"parent": cache, "folder": path.parent, "file": path}[which], STRANGER, STRANGER)
    if not compiler:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)

    with pytest.raises(CpuKernelsUnavailable, match=f"not by user {STRANGER}") as refused:
        cpu_build.library()
    assert "\n" not in str(refused.value)


def test_a_library_is_no_link(cache, tmp_path):
    path = cpu_build.library()
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")

    with pytest.raises(CpuKernelsUnavailable, match="no link"):
        cpu_build.library()


def test_a_link_to_the_cache_is_followed_first(cache, tmp_path):
    other = tmp_path / "open"
    other.mkdir()
    other.chmod(0o777)
    cache.symlink_to(other)

    with pytest.raises(CpuKernelsUnavailable, match=f"{other} must be writable"):
        cpu_build.library()
    other.chmod(0o700)
    assert cpu_build.library().parent == other / "kernels"


def test_what_is_made_is_this_users_alone_whatever_the_umask(cache, converted):
    before = os.umask(0)
    try:
        library = cpu_build.library()
        folder = gguf.converted_folder(converted, cache)
    finally:
        os.umask(before)

    for path in (cache, library.parent, folder.parent, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert cpu_build.library() == library
    assert gguf.converted_folder(converted, cache) == folder


@pytest.mark.parametrize("which", ["cache", "models", "folder", "file"])
def test_converted_weights_that_others_may_write_are_refused(which, cache, converted):
    folder = gguf.converted_folder(converted, cache)
    path = {"cache": cache, "models": folder.parent, "folder": folder, "file": folder / "config.json"}[which]
    path.chmod(0o777)

    with pytest.raises(CacheUnusable, match="must be writable by its owner alone"):
        gguf.converted_folder(converted, cache)


@ROOTS_ALONE
@pytest.mark.parametrize("which", ["cache", "models", "folder", "file"])
def test_converted_weights_of_another_user_are_refused(which, cache, converted):
    folder = gguf.converted_folder(converted, cache)
    path = {"cache": cache, "models": folder.parent, "folder": folder, "file": folder / "config.json"}[which]
    os.chown(path, STRANGER, STRANGER)

    with pytest.raises(CacheUnusable, match=f"not by user {STRANGER}"):
        gguf.converted_folder(converted, cache)


def test_an_operator_may_trust_whoever_may_write(cache, monkeypatch):
    path = cpu_build.library()
    cache.chmod(0o777)
    monkeypatch.setenv(private_folder.TRUSTED, "1")

    assert cpu_build.library() == path


def test_triton_is_refused_a_cache_that_others_may_write(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from kernels.gpu import available

    folder = tmp_path / "triton"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(available, "interpreting", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    with pytest.raises(available.TritonKernelsUnavailable, match="must be writable by its owner alone"):
        available.device()
    folder.chmod(0o700)
    assert available.device().type == "cuda"


def test_a_sticky_parent_is_in_order_and_a_missing_folder_too(tmp_path):
    tmp_path.chmod(0o1777)

    assert private_folder.made(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    with pytest.raises(UntrustedPath):
        private_folder.checked(tmp_path)
