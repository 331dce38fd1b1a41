"""The check that kernels compile without spills: that it passes what is good and finds what is bad.

Compiles, so it runs without the interpreter, in the ordinary test process.
"""

import dataclasses
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.gpu import aot, paged_decode, paged_prefill
from kernels.gpu.device import INTERPRETING

if INTERPRETING:
    pytest.skip("the interpreter turns the compiler off", allow_module_level=True)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check_kernels():
    """``tools/check_kernels.py`` as a module."""
    specification = importlib.util.spec_from_file_location("check_kernels", ROOT / "tools/check_kernels.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["check_kernels"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["check_kernels"]


@pytest.fixture(autouse=True)
def _own_compiler_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def prefill(target, head_dim=128, **constants):
    """The entry of a prefill kernel in half precision, some of its constants changed."""
    entry = next(
        entry
        for entry in paged_prefill.aot_entries()
        if entry.targets == (target,) and entry.case == f"fp16, head {head_dim}"
    )
    return dataclasses.replace(entry, constants=tuple((dict(entry.constants) | constants).items()))


@pytest.mark.slow
def test_a_prefill_kernel_for_sm_90_uses_warp_group_matrix_instructions_and_does_not_spill():
    entry = prefill("sm_90", 64)
    result = aot.compile_entry(entry, "sm_90")
    assert result.wgmma
    assert result.registers > 0
    assert aot.problems(entry, "sm_90", result) == []


@pytest.mark.slow
def test_a_configuration_that_spills_fails_the_check(check_kernels, tmp_path, monkeypatch, capsys):
    bad = dataclasses.replace(prefill("sm_80", 64, ROWS=32), num_warps=1)
    monkeypatch.setattr(aot, "entries", lambda: (bad,))
    monkeypatch.setattr(check_kernels, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sys, "argv", ["check_kernels.py", "--only", "prefill", "--workers", "1"])

    assert check_kernels.main() == 1
    assert "(fp16, head 64) on sm_80: spills" in capsys.readouterr().out

    # The finding is kept, and found again without compiling.
    monkeypatch.setattr(aot, "compile_entry", None)
    assert check_kernels.main() == 1
    assert "spills" in capsys.readouterr().out


@pytest.mark.deep
def test_spills_are_found_on_amd_cards_too():
    entry = dataclasses.replace(prefill("gfx942", 64), num_warps=1)
    assert any("spills" in line for line in aot.problems(entry, "gfx942", aot.compile_entry(entry, "gfx942")))


def test_what_does_not_compile_is_a_finding():
    entry = prefill("sm_80", 64, KEYS=48)  # no power of two
    found = aot.problems(entry, "sm_80", aot.compile_entry(entry, "sm_80"))
    assert len(found) == 1
    assert found[0].startswith("does not compile: ")


def test_too_much_shared_memory_and_missing_instructions_are_findings():
    entry = prefill("sm_90")
    result = aot.AotResult(registers=100, spill_bytes=0, shared_bytes=232_449, wgmma=False)
    assert aot.problems(entry, "sm_90", result) == [
        "needs 232449 bytes of shared memory, of 232448",
        "holds no wgmma instruction",
    ]
    assert aot.problems(entry, "sm_100", dataclasses.replace(result, shared_bytes=1)) == []


def test_an_entry_must_name_every_argument_of_its_kernel():
    entry = prefill("sm_80")
    with pytest.raises(ValueError, match="arguments must be named once each"):
        aot.compile_entry(dataclasses.replace(entry, arguments=entry.arguments[1:]), "sm_80")
    with pytest.raises(ValueError, match="divisible must name arguments"):
        aot.compile_entry(dataclasses.replace(entry, divisible=("nobody",)), "sm_80")


def test_a_fingerprint_knows_source_constants_and_target():
    entry = prefill("sm_80")
    same = {aot.fingerprint(entry, "sm_80"), aot.fingerprint(prefill("sm_80"), "sm_80")}
    assert len(same) == 1
    others = {
        aot.fingerprint(entry, "sm_90"),
        aot.fingerprint(prefill("sm_80", ROWS=64), "sm_80"),
        aot.fingerprint(dataclasses.replace(entry, num_warps=2), "sm_80"),
        aot.fingerprint(paged_decode.aot_entries()[0], "sm_80"),
    }
    assert len(others | same) == 5


def test_the_table_is_stale_when_a_row_changes_and_not_when_the_compiler_does(check_kernels):
    entry = prefill("sm_90")
    result = aot.AotResult(registers=100, spill_bytes=0, shared_bytes=2048, wgmma=True)

    def rows(entry, result):
        return check_kernels.rows(check_kernels.table({(entry, "sm_90"): result}))

    before = rows(entry, result)
    assert before == rows(entry, dataclasses.replace(result, registers=90, shared_bytes=4096))
    assert before != rows(dataclasses.replace(entry, num_stages=9), result)
    assert before != rows(dataclasses.replace(entry, case="another"), result)


def test_the_committed_table_has_the_rows_of_the_code(check_kernels):
    result = aot.AotResult(registers=0, spill_bytes=0, shared_bytes=0, wgmma=True)
    wanted = check_kernels.table(dict.fromkeys(check_kernels.jobs_of(aot.entries()), result))
    committed = (ROOT / "docs/kernels.md").read_text()
    assert check_kernels.rows(committed) == check_kernels.rows(wanted), "run `make check-kernels WRITE=1`"
