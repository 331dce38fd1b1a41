"""Shows reports: tables for people, JSON for programs."""

import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from engine.sim.metrics import Report
from workloads.statistics import ClassReport, Distribution


def print_reports(console: Console, title: str, reports: Sequence[Report]) -> None:
    """Two tables, as wide as they must be: latencies by class, and each configuration as a whole."""
    tables = (_latencies(title, reports), _totals(reports))
    unlimited = console.options.update(width=1000)
    width = max(console.measure(table, options=unlimited).maximum for table in tables)
    console.width = max(console.width, width)  # cut columns would hide what was asked for
    for table in tables:
        console.print(table)


def to_json(title: str, reports: Sequence[Report]) -> str:
    """All numbers, unrounded; times in seconds."""
    body = {"title": title, "reports": [dataclasses.asdict(report) for report in reports]}
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def _latencies(title: str, reports: Sequence[Report]) -> Table:
    table = Table(title=title, title_justify="left", caption="p50 / p90 / p99", caption_justify="left")
    for heading in ("configuration", "class"):
        table.add_column(heading, no_wrap=True)
    for heading in ("requests", "TTFT s", "TPOT ms", "E2E s", "in target", "preempted", "stall s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        for index, part in enumerate(report.classes):
            table.add_row(report.name if index == 0 else "", *_class_row(part))
        table.add_section()
    return table


def _class_row(part: ClassReport) -> list[str]:
    return [
        part.name,
        str(part.num_requests),
        _percentiles(part.ttft_s),
        _percentiles(part.tpot_s, scale=1e3),
        _percentiles(part.e2e_s),
        f"{part.attainment:.1%}",
        str(part.num_preemptions),
        _short(part.longest_stall_s),
    ]


def _totals(reports: Sequence[Report]) -> Table:
    table = Table()
    table.add_column("configuration", no_wrap=True)
    for heading in (
        "makespan s", "tokens/s", "requests/s", "goodput/s", "busy", "steps", "preemptions", "recomputed",
        "stall s", "inversions", "inverted s", "not served",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for report in reports:
        by_reason = ", ".join(f"{reason} {count}" for reason, count in report.preemptions.items())
        table.add_row(
            report.name,
            f"{report.makespan_s:,.0f}",
            f"{report.output_tokens_per_s:,.0f}",
            f"{report.requests_per_s:.2f}",
            f"{report.goodput_rps:.2f}",
            f"{report.utilization:.0%}",
            f"{report.num_steps:,}",
            f"{report.num_preemptions:,}" + (f" ({by_reason})" if by_reason else ""),
            f"{report.recompute_tax:.1%}",
            _short(report.longest_stall_s),
            f"{report.num_inversions:,}",
            f"{report.inversion_s:,.0f}",
            str(report.num_requests - report.num_served),
        )
    return table


def _percentiles(values: Distribution, *, scale: float = 1.0) -> str:
    shown = (values.p50, values.p90, values.p99)
    return " / ".join("-" if value is None else _short(value * scale) for value in shown)


def _short(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
