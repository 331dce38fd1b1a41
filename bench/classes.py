"""Latency by class and tokens a second of the default model through gRPC, policy beside policy.

    PYTHONPATH=.:protos python bench/classes.py [--duration 40] [--folder build]

The real server with four seats under ``bench/classes.toml``, a load it can't keep up with.
Requests start when they are due (open loop), and every latency counts from there. Every
policy gets the same arrivals on a server of its own, one after the other, and is cut off at
the same time, so its tokens a second are what it made of the machine until then.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from clients.python.load import LoadOptions, run_load
from workloads.arrivals import Workload
from workloads.files import read_workload
from workloads.records import Run
from workloads.statistics import class_reports

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = Path(__file__).with_suffix(".toml")
POLICIES = ("fcfs", "priority", "fair")
SEATS, SEED = 4, 1
#: Who has not ended so long after the last arrival is cut off.
DRAIN_S = 5.0


@contextmanager
def server(policy: str) -> Iterator[str]:
    """``vorrang serve`` in a process of its own; its address."""
    command = [sys.executable, "-m", "server.cli", "serve", "--listen", "127.0.0.1:0", "--threads", "1"]
    command += ["--policy", policy, "--max-running-requests", str(SEATS), "--log-level", "error"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    with subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready on "), line
            yield line.removeprefix("ready on ").split(": ")[0]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def measure(policy: str, workload: Workload) -> Run:
    """The workload under one policy."""
    with server(policy) as address:
        return asyncio.run(run_load(address, workload, LoadOptions(drain_s=DRAIN_S), run=Run(policy)))


def figures_of(run: Run) -> dict[str, Any]:
    """What a run has shown; latencies in seconds."""
    num_output_tokens = sum(record.num_output_tokens for record in run.records)
    return {
        "tokens_per_s": num_output_tokens / run.end_s,
        "recompute_share": sum(r.num_recomputed_tokens for r in run.records) / max(1, num_output_tokens),
        "preemptions": sum(record.num_preemptions for record in run.records),
        "generator_lateness_s_p99": run.figures.get("send_lateness_s_p99"),
        "classes": {
            report.name: dataclasses.asdict(report) for report in class_reports(run.records, {}, run.end_s)
        },
    }


def as_table(figures: dict[str, dict[str, Any]], title: str) -> Table:
    """A row for each policy and class."""
    table = Table(title=title)
    columns = ("policy", "class", "requests", "served", "TTFT p50", "TTFT p90", "TPOT p50", "tokens/s")
    for column in columns:
        table.add_column(column, justify="left" if column in ("policy", "class") else "right")
    for policy, found in figures.items():
        for name, report in found["classes"].items():
            ttft, tpot = report["ttft_s"], report["tpot_s"]
            shown = ["-" if value is None else f"{value:.2f} s" for value in (ttft["p50"], ttft["p90"])] + [
                "-" if tpot["p50"] is None else f"{tpot['p50'] * 1e3:.0f} ms"
            ]
            counts = (f"{report['num_requests']}", f"{report['num_served']}")
            table.add_row(policy, name, *counts, *shown, f"{found['tokens_per_s']:.0f}")
    return table


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of arrivals")
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    workload = read_workload(WORKLOAD, SEED, options.duration)
    figures = {policy: figures_of(measure(policy, workload)) for policy in options.policies}
    console = Console(width=110)
    console.print(as_table(figures, f"{workload.name}: {SEATS} seats, {options.duration:g} s of arrivals"))
    first, last = figures.get("fcfs"), figures.get("priority")
    written: dict[str, Any] = {
        "seed": SEED,
        "seats": SEATS,
        "duration_s": options.duration,
        "policies": figures,
    }
    if first and last:
        sooner = (
            first["classes"]["interactive"]["ttft_s"]["p50"] / last["classes"]["interactive"]["ttft_s"]["p50"]
        )
        written["interactive_ttft_times_sooner"] = sooner
        console.print(
            f"interactive requests see their first token {sooner:.1f} times sooner under priority (median)"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "bench-classes.json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
