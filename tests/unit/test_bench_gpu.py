"""``make gpu`` on the CPU, with tiny shapes: its arithmetic, its checks, its tables, and its refusal."""

import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench import gpu
from bench.gpu_kernels import (
    EIGHT_BILLION,
    Case,
    Ceilings,
    HostTimer,
    Measured,
    Shape,
    attention_cost,
    ceilings,
    decode_cases,
    median_seconds,
    prefill_cases,
)
from bench.gpu_model import RandomModel, StepTimes, decode_times, exactness
from kernels import ops, registry
from tests.support.device_models import Remembered

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = Shape(32, 48, 4, 2, 8, 64, 2)
SIZES = gpu.Sizes(
    shape=TINY,
    batches=(1, 3),
    context=20,
    prefill_tokens=18,
    exact_layers=2,
    copy_bytes=4096,
    matmul_size=16,
    repeats=2,
)


@pytest.fixture(autouse=True)
def _kernels():
    before = registry.active_name()
    registry.use("auto")
    ops.set_num_threads(1)
    yield
    registry.use(before)


class Ticks:
    """A timer for which everything takes one second."""

    def __init__(self):
        self.num_runs = 0

    def seconds(self, work):
        work()
        self.num_runs += 1
        return 1.0


def test_time_is_the_median_after_a_run_that_warms():
    readings = iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0])  # three runs: 5, 1 and 3 seconds
    runs = itertools.count()

    found = median_seconds(lambda: next(runs), HostTimer(lambda: next(readings)), 3)

    assert found == 3.0
    assert next(runs) == 4


def test_ceilings_count_a_copy_twice_and_a_product_by_its_multiplications_and_additions():
    found = ceilings(CPU, torch.float32, Ticks(), 3, copy_bytes=800, matmul_size=10)

    assert found == Ceilings(copy_bytes_per_s=1600.0, matmul_flops=2000.0)


def test_shares_are_of_the_limits_of_the_same_run():
    case = Case("x", lambda: None, num_bytes=300, num_flops=50, per_step=1)
    measured = Measured(case, 2.0, Ceilings(copy_bytes_per_s=200.0, matmul_flops=100.0))

    assert measured.bandwidth_share == 0.75
    assert measured.flops_share == 0.25
    assert measured.roofline_share == 0.75


def test_attention_reads_kv_once_for_each_request_and_computes_nothing_masked():
    shape = Shape(32, 48, 4, 2, 8, 64, 2)  # 32 query elements a token, 16 of keys and of values

    assert attention_cost(shape, [1, 1], [10, 4], 2) == (2 * 2 * 32 * 2 + 2 * 14 * 16 * 2, 4 * 14 * 32)
    # Three queries of a context of five see 3, 4 and 5 tokens.
    assert attention_cost(shape, [3], [5], 2) == (2 * 3 * 32 * 2 + 2 * 5 * 16 * 2, 4 * 12 * 32)


def test_the_cases_of_a_decode_step_are_those_of_its_layers():
    cases = {case.name: case for case in decode_cases(TINY, 3, 20, CPU, "fp32")}

    for case in cases.values():
        case.work()
        assert case.num_bytes > 0
    assert cases["linear down 3"].num_flops == 2 * 3 * 48 * 32
    assert cases["linear down 3"].num_bytes == 4 * (32 * 48 + 3 * (48 + 32))
    assert cases["add_rms_norm 3"].per_step == 2 * TINY.num_layers
    assert cases["paged_attention decode 3x20"].per_step == TINY.num_layers
    assert cases["logits 3"].per_step == 1
    assert cases["sample drawn 3"].per_step == 0, "a step samples one way"
    assert {name.split()[0] for name in cases} == {
        "add_rms_norm", "silu_mul", "linear", "rotary_write_kv", "paged_attention", "logits", "sample",
    }  # fmt: skip


def test_the_cases_of_a_prefill_compute():
    for case in prefill_cases(TINY, 18, 30, CPU, "fp32"):
        case.work()


def test_the_eight_billion_have_as_many_parameters_as_the_checkpoint():
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    assert EIGHT_BILLION.num_layers * layer + 2 * 128256 * 4096 == pytest.approx(8.03e9, rel=0.001)
    assert RandomModel(TINY, 2, 20, CPU, "fp32").num_parameters == 2 * 32 * (64 + 32 + 144) + 2 * 64 * 32


def test_the_bits_are_the_same_with_kernels_that_promise_it_and_the_check_can_fail():
    if registry.active_name() != "cpu":
        pytest.skip("the reference promises nothing")
    random = RandomModel(TINY, 4, 64, CPU, "fp32")

    assert exactness(random, Remembered()) == dict.fromkeys(("batched", "chunked", "decoded", "graph"), True)

    compute = random.executor._decoder.forward

    def depends_on_its_neighbours(token_ids, *rest):
        return compute(token_ids, *rest) + 1e-6 * token_ids.shape[0]

    random.executor._decoder.forward = depends_on_its_neighbours
    found = exactness(random, None)
    assert not any(found.values())


def test_steps_are_timed_eagerly_and_as_graphs():
    timer, backend = Ticks(), Remembered()

    found = decode_times(RandomModel(TINY, 3, 20, CPU, "fp32"), (1, 3), timer, 2, backend)

    assert found == [StepTimes(1, 1.0, 1.0), StepTimes(3, 1.0, 1.0)]
    assert (timer.num_runs, backend.num_captured, backend.num_replayed) == (8, 2, 6)
    assert StepTimes(32, 2.0, 1.0).tokens_per_s == 32
    assert StepTimes(32, 2.0, None).tokens_per_s == 16


def test_the_command_line_says_how_large_everything_is():
    options, sizes = gpu.parsed(["--layers", "3", "--repeats", "7"])

    assert (sizes.shape.num_layers, sizes.repeats, options.kernels) == (3, 7, "triton")
    assert gpu.parsed([])[1] == gpu.Sizes()


def test_a_breakdown_adds_up_to_the_step():
    limits = Ceilings(1.0, 1.0)
    parts = [
        Measured(Case("a", lambda: None, 1, 1, 10), 0.01, limits),
        Measured(Case("never", lambda: None, 1, 1, 0), 9.0, limits),
    ]

    found = gpu.breakdown(parts, 0.25)

    assert found == pytest.approx({"a": 0.1, "rest": 0.15})


@pytest.mark.parametrize("passed", [True, False])
def test_the_whole_run_is_written_shown_and_judged(passed, tmp_path):
    if registry.active_name() != "cpu":
        pytest.skip("the reference is not batch-invariant")
    bench = gpu.Bench(CPU, Ticks(), Ticks(), Remembered, "fp32")

    result = gpu.run(bench, SIZES, tests=lambda: {"passed": passed, "last_line": "7 passed"})
    result["device"] = "a CPU"
    out = io.StringIO()
    status = gpu.finish(result, tmp_path / "build" / "gpu.json", Console(file=out, width=160))

    assert status == (0 if passed else 1)
    assert json.loads((tmp_path / "build" / "gpu.json").read_text())["parameters"] == result["parameters"]
    assert [step["num_requests"] for step in result["steps"]] == [1, 3]
    for step in result["steps"]:
        assert sum(step["breakdown_s"].values()) == pytest.approx(1.0)
    for words in ("a CPU: copy", "paged_attention decode 3x20", "prefill 18 of 18", "7 passed", "tokens/s"):
        assert words in out.getvalue()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize(
    ("options", "status"), [pytest.param((), 0, marks=pytest.mark.deep), (("--require",), 3)]
)
def test_without_a_card_it_says_so_in_one_line(options, status, tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "bench/gpu.py", "--out", str(out), *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout == "make gpu: nothing was run, torch sees no card here\n"
    assert not out.exists()
