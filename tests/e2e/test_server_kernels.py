"""Which kernels serve: chosen by settings, named by the ready line and by the doctor, refused in one line."""

import sys
from pathlib import Path

import pytest
import torch

from kernels import cpu_build
from tests.support.models import tiny, tiny_llama
from tests.support.process import run_cli, server_process

CAN_BUILD = cpu_build.capability() in cpu_build.TARGETS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kernels", "reference"), "reference kernels with fp32 weights, threads 1"),
        pytest.param(
            ("--weights", "int8"),
            "cpu kernels with int8 weights, threads 1",
            marks=pytest.mark.skipif(not CAN_BUILD, reason="needs AVX2"),
        ),
    ],
)
def test_the_ready_line_says_what_computes(model: Path, options: tuple[str, ...], said: str) -> None:
    with server_process("--kv-blocks", "8", "--threads", "1", *options, model=str(model)) as server:
        assert f", {said}, runner process " in server.ready_line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "said"),
    [
        ("Gemma2", "own decoder, reference kernels"),
        pytest.param("GPTNeoX", "transformers' modules, reference kernels", marks=pytest.mark.deep),
    ],
)
def test_the_ready_line_says_whose_modules_compute(stem: str, said: str, tmp_path: Path) -> None:
    tiny(stem, tmp_path)
    options = ("--kv-blocks", "8", "--threads", "1", "--kernels", "reference")
    with server_process(*options, model=str(tmp_path)) as server:
        assert f", {said} with fp32 weights, " in server.ready_line


@pytest.mark.slow
def test_a_model_that_cannot_be_had_ends_the_start_in_one_line() -> None:
    result = run_cli("serve", "--listen", "127.0.0.1:0", "--model", "nobody/nothing", "--offline")

    assert result.returncode == 2, result.stderr
    assert "hub model nobody/nothing was not downloaded whole before, and model.offline is true" in (
        " ".join(result.stderr.split())
    )


@pytest.mark.slow
def test_kernels_that_cannot_be_had_end_the_start_in_one_line(model: Path, tmp_path: Path) -> None:
    no_compiler = {"PATH": "", "CXX": "", "VORRANG_CACHE_DIR": str(tmp_path)}
    result = run_cli(
        *("serve", "--listen", "127.0.0.1:0", "--model", str(model), "--kernels", "cpu"), extra=no_compiler
    )

    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("vorrang: ")
    assert ("no C++ compiler" in line) is CAN_BUILD


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize("runner", ["process", pytest.param("inline", marks=pytest.mark.deep)])
def test_triton_without_a_card_ends_the_start_in_one_line(model: Path, runner: str) -> None:
    options = ("--model", str(model), "--kernels", "triton", "--runner", runner)
    result = run_cli("serve", "--listen", "127.0.0.1:0", *options)

    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line == "vorrang: kernels triton needs a GPU, and torch finds none"


@pytest.mark.deep
@pytest.mark.skipif(not CAN_BUILD, reason="needs AVX2")
def test_weights_that_the_kernels_do_not_keep_end_the_start_in_one_line(model: Path) -> None:
    result = run_cli(
        *("serve", "--listen", "127.0.0.1:0", "--model", str(model), "--kernels", "cpu", "--weights", "fp8")
    )

    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line == "vorrang: weights must be one of fp32, bf16, fp16, int8 with cpu kernels, got 'fp8'"


@pytest.mark.deep
def test_the_doctor_says_which_kernels_auto_chooses_and_why(tmp_path: Path) -> None:
    found = run_cli("doctor", extra={"PATH": "", "CXX": "", "VORRANG_CACHE_DIR": str(tmp_path)}).stdout
    (line,) = [line for line in found.splitlines() if line.startswith("kernels ")]

    assert "reference: cpu is not available: " in line
    if CAN_BUILD and sys.platform == "linux":
        found = run_cli("doctor").stdout
        (line,) = [line for line in found.splitlines() if line.startswith("kernels ")]
        assert f"cpu for {cpu_build.capability()}" in line
