"""What can be known of a card only on one: ``make gpu``.

Runs the kernels' tests without the interpreter, checks that logits are the same
bits however a request is batched, that graphs give what single operations give, and
measures each kernel against the card's own limits and a decode step of a random
model of 8 billion parameters. Prints tables and writes ``build/gpu.json``.

Where torch sees no card it says so in one line and ends with 0, for there was
nothing to fail; ``--require`` makes that an error (3). A check that does not hold is
one as well (1). docs/gpu.md says what was run where.
"""

# ruff: noqa: T201

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu_kernels import (
    EIGHT_BILLION,
    Case,
    Ceilings,
    CudaTimer,
    HostTimer,
    Measured,
    Shape,
    Timer,
    ceilings,
    decode_cases,
    median_seconds,
    prefill_cases,
)
from bench.gpu_model import RandomModel, StepTimes, decode_times, exactness
from engine.runner.graphs import CudaGraphs, GraphBackend
from kernels import ops, registry

ROOT = Path(__file__).parents[1]
EXIT_FAILED, EXIT_NO_CARD = 1, 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large everything is.

    Attributes:
        shape: of the model.
        batches: requests of the decode steps.
        context: tokens of each of them.
        prefill_tokens: of the chunk that is measured.
        exact_layers: layers of the model whose bits are compared.
        copy_bytes: of the copy that shows the memory's limit.
        matmul_size: of the product that shows the arithmetic's limit.
        repeats: timed runs of each thing.
    """

    shape: Shape = EIGHT_BILLION
    batches: tuple[int, ...] = (1, 32, 256)
    context: int = 512
    prefill_tokens: int = 2048
    exact_layers: int = 2
    copy_bytes: int = 2**30
    matmul_size: int = 8192
    repeats: int = 20


@dataclass(frozen=True, slots=True)
class Bench:
    """Where to measure, and with what.

    Attributes:
        device: a card, or the CPU in tests.
        kernel_timer: for single operations.
        step_timer: for whole steps, host included.
        graphs: makes a backend; None = there are none.
        weights: how matrices are kept.
    """

    device: torch.device
    kernel_timer: Timer
    step_timer: Timer
    graphs: Callable[[], GraphBackend] | None
    weights: Any = "bf16"

    def backend(self) -> GraphBackend | None:
        """A fresh one."""
        return None if self.graphs is None else self.graphs()


def measure_kernels(bench: Bench, sizes: Sizes, limits: Ceilings) -> dict[str, list[Measured]]:
    """Every operation of a decode step at each batch, and of a prefill."""
    groups: dict[str, Iterable[Case]] = {
        f"decode {batch}": decode_cases(sizes.shape, batch, sizes.context, bench.device, bench.weights)
        for batch in sizes.batches
    }
    tokens = sizes.prefill_tokens
    groups[f"prefill {tokens}"] = prefill_cases(sizes.shape, tokens, tokens, bench.device, bench.weights)
    with torch.inference_mode():
        return {
            name: [_measured(case, bench.kernel_timer, sizes.repeats, limits) for case in cases]
            for name, cases in groups.items()
        }


def _measured(case: Case, timer: Timer, repeats: int, limits: Ceilings) -> Measured:
    seconds = median_seconds(case.work, timer, repeats)
    return Measured(dataclasses.replace(case, work=lambda: None), seconds, limits)  # its operands may go


def breakdown(measured: Iterable[Measured], step_s: float) -> dict[str, float]:
    """Seconds of a decode step by operation; ``rest`` is what no kernel accounts for."""
    parts = {each.case.name: each.seconds * each.case.per_step for each in measured if each.case.per_step}
    return parts | {"rest": step_s - sum(parts.values())}


def check_exactness(bench: Bench, sizes: Sizes) -> dict[str, bool]:
    """See ``gpu_model.exactness``, in batch-invariant mode."""
    shape = dataclasses.replace(sizes.shape, num_layers=sizes.exact_layers)
    ops.set_batch_invariant(True)
    try:
        return exactness(RandomModel(shape, 4, 64, bench.device, bench.weights), bench.backend())
    finally:
        ops.set_batch_invariant(False)


def kernel_tests() -> dict[str, Any]:
    """The tests of tests/kernels/gpu on the card, in a process of their own."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/gpu"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)  # noqa: S603
    return {"passed": done.returncode == 0, "last_line": done.stdout.strip().rpartition("\n")[2]}


def run(bench: Bench, sizes: Sizes, *, tests: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Everything, as one picklable and printable result."""
    tested = tests()
    exact = check_exactness(bench, sizes)
    limits = ceilings(
        bench.device,
        torch.bfloat16,
        bench.kernel_timer,
        sizes.repeats,
        copy_bytes=sizes.copy_bytes,
        matmul_size=sizes.matmul_size,
    )
    kernels = measure_kernels(bench, sizes, limits)
    random = RandomModel(sizes.shape, max(sizes.batches), sizes.context, bench.device, bench.weights)
    steps = decode_times(random, sizes.batches, bench.step_timer, sizes.repeats, bench.backend())
    return {
        "torch": torch.__version__,
        "kernels": registry.active_name(),
        "weights": bench.weights,
        "parameters": random.num_parameters,
        "context_tokens": sizes.context,
        "kernel_tests": tested,
        "exactness": exact,
        "ceilings": dataclasses.asdict(limits),
        "operations": {name: [_operation(each) for each in group] for name, group in kernels.items()},
        "steps": [_step(each, kernels[f"decode {each.num_requests}"]) for each in steps],
    }


def _operation(measured: Measured) -> dict[str, Any]:
    return {
        "name": measured.case.name,
        "seconds": measured.seconds,
        "bytes_per_s": measured.case.num_bytes / measured.seconds,
        "flops": measured.case.num_flops / measured.seconds,
        "bandwidth_share": measured.bandwidth_share,
        "flops_share": measured.flops_share,
        "roofline_share": measured.roofline_share,
    }


def _step(times: StepTimes, kernels: Iterable[Measured]) -> dict[str, Any]:
    parts = breakdown(kernels, times.best_s)
    return dataclasses.asdict(times) | {"tokens_per_s": times.tokens_per_s, "breakdown_s": parts}


def show(result: dict[str, Any], console: Console) -> None:
    """Tables."""
    limits = result["ceilings"]
    console.print(
        f"{result['device']}: copy {limits['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
        f"matrix product {limits['matmul_flops'] / 1e12:.1f} TFLOP/s; {result['kernels']} kernels, "
        f"{result['weights']} weights"
    )
    console.print(f"kernel tests: {result['kernel_tests']['last_line']}")
    for name, holds in result["exactness"].items():
        console.print(f"same bits {name}: {'yes' if holds else 'NO'}")
    table = Table("operation", "us", "GB/s", "TFLOP/s", "of copy", "of matmul", title="Operations")
    for group in result["operations"].values():
        for each in group:
            table.add_row(
                each["name"],
                f"{each['seconds'] * 1e6:.1f}",
                f"{each['bytes_per_s'] / 1e9:.0f}",
                f"{each['flops'] / 1e12:.2f}",
                f"{each['bandwidth_share']:.0%}",
                f"{each['flops_share']:.0%}",
            )
        table.add_section()
    console.print(table)
    table = Table("requests", "eager ms", "graph ms", "tokens/s", "largest parts of the step", title="Decode")
    for step in result["steps"]:
        parts = sorted(step["breakdown_s"].items(), key=lambda part: -part[1])[:4]
        table.add_row(
            str(step["num_requests"]),
            f"{step['eager_s'] * 1e3:.2f}",
            "-" if step["graph_s"] is None else f"{step['graph_s'] * 1e3:.2f}",
            f"{step['tokens_per_s']:.0f}",
            ", ".join(f"{part} {seconds * 1e3:.2f} ms" for part, seconds in parts),
        )
    console.print(table)


def holds(result: dict[str, Any]) -> bool:
    """Whether every check does."""
    return bool(result["kernel_tests"]["passed"]) and all(result["exactness"].values())


def finish(result: dict[str, Any], out: Path, console: Console) -> int:
    """Write and print; the exit status."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1))
    show(result, console)
    return 0 if holds(result) else EXIT_FAILED


def parsed(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, Sizes]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", action="store_true", help="no card is an error")
    parser.add_argument("--kernels", default="triton", help="implementation of the operations")
    parser.add_argument("--weights", default="bf16", help="how matrices are kept")
    parser.add_argument("--layers", type=int, default=EIGHT_BILLION.num_layers, help="of the random model")
    parser.add_argument("--repeats", type=int, default=Sizes().repeats, help="timed runs of each thing")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu.json")
    options = parser.parse_args(arguments)
    shape = dataclasses.replace(EIGHT_BILLION, num_layers=options.layers)
    return options, Sizes(shape=shape, repeats=options.repeats)


def main() -> int:
    """Measure and print; the exit status."""
    options, sizes = parsed()
    if not torch.cuda.is_available():
        print("make gpu: nothing was run, torch sees no card here")
        return EXIT_NO_CARD if options.require else 0
    registry.use(options.kernels)
    bench = Bench(torch.device("cuda"), CudaTimer(), HostTimer(), CudaGraphs, options.weights)
    result = run(bench, sizes, tests=kernel_tests) | {"device": torch.cuda.get_device_name()}
    return finish(result, options.out, Console())


if __name__ == "__main__":
    sys.exit(main())
