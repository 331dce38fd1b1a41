"""Every benchmark, one after the other: ``make bench``. Writes ``build/bench.json`` and the plots.

    PYTHONPATH=.:protos python bench/all.py [--only scheduler serve] [--folder build]

Each part is a command of its own, which can be run alone and says what it measures; here
its figures are put into one file, with the command, its duration and the machine it ran
on. A part that fails is named, the others still run, and the exit code is 1. Speeds of two
machines, or of one machine on two days, can't be compared; ratios within a part can.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vorrang", "torch", "triton", "transformers", "grpcio", "protobuf", "numpy")
#: A part that takes longer hangs.
PART_S_MAX = 300.0


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark.

    Attributes:
        name: its key in ``bench.json``.
        arguments: the script and what it is called with, quick enough for all to end within ten minutes.
        output: the file it writes into the folder.
        title: what it measures.
    """

    name: str
    arguments: tuple[str, ...]
    output: str
    title: str


PARTS = (
    Part(
        "demo",
        ("bench/demo.py",),
        "bench-demo.json",
        "what the demo prints, and its picture",
    ),
    Part(
        "scheduler",
        ("bench/scheduler.py", "--repeats", "15"),
        "bench-scheduler.json",
        "what planning costs; submit, cancel, blocks",
    ),
    Part(
        "static",
        ("bench/static_batching.py",),
        "bench-static.json",
        "continuous against static batches",
    ),
    Part(
        "simulator",
        ("bench/simulator.py", "--rounds", "3"),
        "bench-simulator.json",
        "steps a second in virtual time",
    ),
    Part(
        "fairness",
        ("bench/fairness.py",),
        "bench-fairness.json",
        "tenants on VTC's real trace, in virtual time",
    ),
    Part(
        "speculation",
        ("bench/speculation.py", "--rounds", "3", "--threads", "1"),
        "bench-speculation.json",
        "guessed tokens at batch 1",
    ),
    Part(
        "classes",
        ("bench/classes.py", "--duration", "20"),
        "bench-classes.json",
        "latency by class through gRPC, policy beside policy",
    ),
    Part(
        "model",
        ("bench/model.py", "--repeats", "7"),
        "bench-model.json",
        "a step of the default model, beside transformers",
    ),
    Part(
        "serve",
        ("bench/serve.py", "--rounds", "3", "--threads", "1"),
        "bench-serve.json",
        "served against bare model; time to ready, memory",
    ),
    Part(
        "neighbour",
        ("bench/neighbour.py",),
        "bench-neighbour.json",
        "one thread and two beside a busy process",
    ),
    Part(
        "grpc",
        ("bench/grpc_cost.py", "--rounds", "2"),
        "bench-grpc-asyncio.json",
        "a token's way out, beside a bare grpc.aio server",
    ),
)


def processor() -> str:
    """Name of the processor, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def run_part(part: Part, folder: Path) -> dict[str, Any]:
    """Run one benchmark; its output goes to the terminal.

    Returns:
        Command, duration, load averages before and after, and either ``figures`` or ``error``.
    """
    output = folder / part.output
    output.unlink(missing_ok=True)
    command = [sys.executable, *part.arguments]
    where = ["--out", str(output)] if part.name == "model" else ["--folder", str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    load, begin = os.getloadavg()[0], time.perf_counter()
    error = ""
    try:
        done = subprocess.run([*command, *where], cwd=ROOT, env=environment, timeout=PART_S_MAX, check=False)  # noqa: S603
        if done.returncode:
            error = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        error = f"took longer than {PART_S_MAX:g} s"
    result: dict[str, Any] = {
        "command": " ".join(("python", *part.arguments)),
        "seconds": round(time.perf_counter() - begin, 1),
        "load_average": [load, os.getloadavg()[0]],
    }
    if error:
        return result | {"error": error}
    return result | {"figures": json.loads(output.read_text())}


def main() -> None:
    """Run the parts, print how they went, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--folder", type=Path, default=ROOT / "build")
    options = parser.parse_args()
    console = Console()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    begin = time.perf_counter()
    for part in PARTS:
        if part.name in options.only:
            console.rule(f"{part.name}: {part.title}")
            results[part.name] = run_part(part, folder)
    table = Table("part", "took", "", title=f"{time.perf_counter() - begin:.0f} s in all")
    for name, result in results.items():
        table.add_row(name, f"{result['seconds']:.0f} s", result.get("error", "ok"))
    console.print(table)
    written = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "seconds": round(time.perf_counter() - begin, 1),
        "parts": results,
    }
    path = folder / "bench.json"
    path.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")
    console.print(f"written: {path}")
    sys.exit(any("error" in result for result in results.values()))


if __name__ == "__main__":
    main()
