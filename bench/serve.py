"""Serving the default model through gRPC, beside the bare model computing the same batches.

    PYTHONPATH=.:protos python bench/serve.py [--rounds 3] [--threads 1 2]

One workload: 32 requests at once, prompts of 16 to 256 tokens, outputs of 16 to 128,
8 seats. *Bare* is scheduler and model in a loop, without engine, text, process or
wire. Rounds alternate, since other load on the machine disturbs both alike. The
arithmetic of the workload, 2 x parameters x (prompt + output tokens), is compared with
what a float32 matrix product does in the same run.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from bench.serving import serving
from clients.python import VorrangClient
from engine.models import registry
from engine.request import RequestId, RequestSpec
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from kernels import ops
from kv.block_manager import BlockManager

ROOT = Path(__file__).resolve().parents[1]
NUM_REQUESTS, SEATS, NUM_BLOCKS = 32, 8, 512
#: Memory that server and runner may hold: this factor of weights, KV pool and something for the programs.
MEMORY_FACTOR, MEMORY_EXTRA_BYTES = 1.3, 400_000_000


@dataclass(frozen=True)
class Workload:
    """Prompts and output lengths, one entry a request."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def output_tokens(self) -> int:
        """Tokens that come out."""
        return sum(self.outputs)

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(map(len, self.prompts)) + self.output_tokens


def new_workload(turn: int = 0) -> Workload:
    """The same lengths in every turn, but other tokens, which no prefix cache knows."""
    lengths, tokens = random.Random(1), random.Random(turn)
    sizes = [(lengths.randint(16, 256), lengths.randint(16, 128)) for _ in range(NUM_REQUESTS)]
    prompts = [[tokens.randrange(100, 40_000) for _ in range(size)] for size, _ in sizes]
    return Workload(prompts, [size for _, size in sizes])


def run_bare(loaded: registry.LoadedModel, workload: Workload) -> float:
    """Seconds for the workload without a server around the model."""
    pool = loaded.model.pool
    config = SchedulerConfig(max_running_requests=SEATS)
    scheduler = Scheduler(config, BlockManager(pool.num_blocks, pool.block_size, enable_prefix_cache=False))
    begin = time.perf_counter()
    for index, (prompt, num_tokens) in enumerate(zip(workload.prompts, workload.outputs, strict=True)):
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        scheduler.submit(RequestSpec(RequestId(f"r{index}"), tuple(prompt), sampling), 0.0)
    while scheduler.has_requests:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, loaded.model.run(plan), 0.0)
    return time.perf_counter() - begin


async def run_served(address: str, workload: Workload) -> float:
    """Seconds for the workload over one session."""
    async with VorrangClient(address) as client, client.session() as session:
        begin = time.perf_counter()
        streams = [
            await session.start(token_ids=prompt, temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            for prompt, num_tokens in zip(workload.prompts, workload.outputs, strict=True)
        ]
        results = await asyncio.gather(*(stream.result() for stream in streams))
        elapsed_s = time.perf_counter() - begin
    assert sum(len(result.token_ids) for result in results) == workload.output_tokens
    return elapsed_s


def resident_bytes(pid: int) -> int:
    """Memory of a process and of those it started."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if int(status.parent.name) == pid or int(fields["PPid"]) == pid:
            total += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    return total


def parameters_in(folder: Path) -> int:
    """Elements of all tensors of a model's folder."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def matmul_flops(threads: int) -> tuple[float, float]:
    """Float operations a second of a float32 matrix product, torch's and ours, best of several."""
    ops.set_num_threads(threads)
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    packed = ops.pack_linear(b, "fp32")
    rates = []
    for product in (lambda: torch.mm(a, b), lambda: ops.linear(a, packed)):
        times = []
        for _ in range(12):
            begin = time.perf_counter()
            product()
            times.append(time.perf_counter() - begin)
        rates.append(2 * size**3 / min(times))
    return rates[0], rates[1]


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    console, workload = Console(), new_workload()
    figures: dict[str, float] = {"output_tokens": workload.output_tokens, "tokens": workload.tokens}
    table = Table(title=f"{NUM_REQUESTS} requests, {SEATS} seats, {workload.output_tokens} output tokens")
    for column in ("threads", "bare tokens/s", "served tokens/s", "served / bare"):
        table.add_column(column, justify="right")
    for threads in options.threads:
        loaded = registry.load(None, num_threads=threads, num_blocks=NUM_BLOCKS)
        num_parameters = parameters_in(loaded.folder)
        settings = ("--threads", str(threads), "--max-running-requests", str(SEATS))
        with serving(*settings, "--kv-blocks", str(NUM_BLOCKS)) as process:
            loaded_bytes = resident_bytes(process.pid)
            bare, served = [], []
            asyncio.run(run_served(process.address, workload))  # warms up the server's caches of code
            run_bare(loaded, workload)
            for turn in range(1, options.rounds + 1):
                bare.append(run_bare(loaded, new_workload(turn)))
                served.append(asyncio.run(run_served(process.address, new_workload(turn))))
            resident = resident_bytes(process.pid)
        bare_s, served_s = statistics.median(bare), statistics.median(served)
        ratio = statistics.median(b / s for b, s in zip(bare, served, strict=True))
        rates = [workload.output_tokens / bare_s, workload.output_tokens / served_s]
        table.add_row(str(threads), f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{ratio:.2f}")
        memory_max = MEMORY_FACTOR * (
            loaded.model._decoder.weights.num_bytes + loaded.model._kv.num_bytes + MEMORY_EXTRA_BYTES
        )
        del loaded
        torch_flops, own_flops = matmul_flops(threads)
        flops = 2 * num_parameters * workload.tokens / served_s
        figures |= {
            f"bare_tokens_per_s_{threads}": rates[0],
            f"served_tokens_per_s_{threads}": rates[1],
            f"served_to_bare_{threads}": ratio,
            f"matmul_gflops_{threads}": torch_flops / 1e9,
            f"own_matmul_gflops_{threads}": own_flops / 1e9,
            f"share_of_matmul_{threads}": flops / torch_flops,
            f"share_of_own_matmul_{threads}": flops / own_flops,
            f"loaded_mb_{threads}": loaded_bytes / 1e6,
            f"resident_mb_{threads}": resident / 1e6,
            f"memory_mb_max_{threads}": memory_max / 1e6,
            f"ready_s_{threads}": process.ready_s,
        }
        console.print(
            f"{threads} thread(s): served / bare {ratio:.2f} ({rates[1]:.1f} / {rates[0]:.1f} tokens/s)\n"
            f"  arithmetic {flops / 1e9:.0f} GFLOP/s: {flops / torch_flops:.0%} of torch's matrix product "
            f"({torch_flops / 1e9:.0f}), {flops / own_flops:.0%} of ours ({own_flops / 1e9:.0f})\n"
            f"  ready after {process.ready_s:.1f} s; server and runner hold "
            f"{loaded_bytes / 1e6:.0f} MB then, {resident / 1e6:.0f} MB at the end "
            f"(wanted: at most {memory_max / 1e6:.0f})"
        )
    console.print(table)
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "bench-serve.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"written: {options.folder}/bench-serve.json")


if __name__ == "__main__":
    main()
