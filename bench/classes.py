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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.serving import serving
from clients.python.load import LoadOptions, run_load
from workloads.arrivals import Workload
from workloads.files import read_workload
from workloads.records import Run
from workloads.statistics import class_reports

WORKLOAD = Path(__file__).with_suffix(".toml")
POLICIES = ("fcfs", "priority", "fair")
SEATS, SEED = 4, 1
#: Who has not ended so long after the last arrival is cut off.
DRAIN_S = 5.0


def measure(policy: str, workload: Workload) -> Run:
    """The workload under one policy."""
    options = ("--threads", "1", "--policy", policy, "--max-running-requests", str(SEATS))
    with serving(*options) as process:
        return asyncio.run(run_load(process.address, workload, LoadOptions(drain_s=DRAIN_S), run=Run(policy)))


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
    written: dict[str, Any] = {
        "seed": SEED,
        "seats": SEATS,
        "duration_s": options.duration,
        "policies": figures,
    }
    ttft = {
        policy: found["classes"]["interactive"]["ttft_s"]["p50"]
        for policy, found in figures.items()
        if "interactive" in found["classes"]
    }
    first, last = ttft.get("fcfs"), ttft.get("priority")
    if first and last:  # under fcfs there may be nobody who got one in time
        written["interactive_ttft_times_sooner"] = first / last
        said = f"{first / last:.1f} times sooner under priority (median)"
        console.print(f"interactive requests see their first token {said}")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "bench-classes.json").write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
