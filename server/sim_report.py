"""``vorrang sim report``: policies against each other over rates and seeds, as one HTML file."""

import functools
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from engine.errors import VorrangError
from engine.sim.configurations import parse_configuration
from engine.sim.profiles import PROFILES, profile_named
from engine.sim.sweep import Cell, Source, Sweep, num_cores, run_sweep
from report.page import Facts, command_line, write_report
from report.style import PlotsUnavailable, figure
from report.summary import RunSummary, summarise
from server.sim_options import (
    EXIT_USAGE,
    MAX_DURATION_S,
    MAX_NUM_BLOCKS,
    WORKLOAD_HELP,
    parse_settings,
    parse_shares,
)
from timeline.console import PlainConsole
from workloads.arrivals import parse_rates
from workloads.errors import InvalidWorkload
from workloads.sources import TRACE_CLASSES, is_trace
from workloads.statistics import TARGETS, parse_target
from workloads.traces import FORMATS

#: Multiples of the workload's own rate, unless rates are given.
DEFAULT_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
#: What the report calls a policy -> what the configurations call it.
ALIASES = {"prefill_first": "prefill-first"}


def report(
    workload: Annotated[str, typer.Argument(help=WORKLOAD_HELP)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html"),
    profile: Annotated[str, typer.Option(help=f"Hardware: {', '.join(PROFILES)}.")] = "h100",
    policies: Annotated[
        str,
        typer.Option(help="What is compared, PRESET or PRESET:field=value, separated by spaces or commas."),
    ] = "fcfs,priority,fair,prefill_first,static",
    rates: Annotated[
        str | None,
        typer.Option(help="Offered requests a second, separated by commas; default: 0.5 to 8 times its own."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="So many seeds, from 0.")] = 3,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Scheduler setting for all, field=value; repeatable.")
    ] = None,
    trace_format: Annotated[
        str, typer.Option("--format", help=f"Of a trace: auto, {', '.join(FORMATS)}.")
    ] = "auto",
    classes: Annotated[
        str | None,
        typer.Option(help="Classes drawn for the requests; of a trace by default interactive=0.2,batch=0.8."),
    ] = None,
    tenants: Annotated[int, typer.Option(min=0, help="Tenants drawn for the requests; 0: as they are.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.")] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            min=1.0, max=MAX_DURATION_S, help="Arrivals end before then, at the workload's own rate."
        ),
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Drop longer prompts.")] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, max=MAX_NUM_BLOCKS, help="KV blocks; default: the profile's.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Goal of a class, CLASS=TTFT_S/TPOT_S; repeatable.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="At a time; default: one a core.")] = None,
) -> None:
    """Simulate a workload under several policies, rates and seeds, and write one HTML file with plots."""
    console = PlainConsole(stderr=True)
    try:
        figure(1, 1)  # whether plots can be drawn is asked first, not after minutes
        hardware = profile_named(profile)
        shares = TRACE_CLASSES if classes is None and is_trace(workload) else {}
        if classes is not None:
            shares = parse_shares(classes)
        source = Source(
            workload, trace_format, duration, limit, max_prompt_tokens, tuple(shares.items()), tenants
        )
        targets = dict(TARGETS) | dict(map(parse_target, target or []))
        made = source.make(0)
        offered = _rates(rates, lambda: made.mean_rate_rps)
        cells = _cells(policies, settings or [], offered, seeds)
        sweep = Sweep(source, hardware, num_blocks, cells)
        begin = time.monotonic()
        reduce = functools.partial(summarise, targets=targets)
        summaries = _swept(console, sweep, reduce, processes)
        wall_s = time.monotonic() - begin
        num_policies = _counted(len(cells) // (len(offered) * seeds), "policy", "policies")
        facts = Facts(
            title=f"{made.name}: {num_policies} in virtual time",
            workload=_described(source, made.name, len(made.requests)),
            server=f"simulated: {hardware.description}; {num_blocks or hardware.num_blocks:,} KV blocks "
            f"of {hardware.block_size} tokens",
            command=command_line(["vorrang", *sys.argv[1:]]),
            versions=_versions(),
            notes=(
                f"Simulated in virtual time: the real scheduler over a model of what a step costs "
                f"({hardware.source}). {_counted(len(cells), 'run', 'runs')} took {wall_s:.0f} s "
                f"with {processes or num_cores()} processes. "
                "docs/SIMULATOR.md says how well the model agrees with measured runs.",
            ),
        )
        write_report(output, facts, summaries, targets)
    except (VorrangError, InvalidWorkload, PlotsUnavailable, OSError) as error:
        PlainConsole(stderr=True).print(Text(str(error), "red"))
        raise typer.Exit(EXIT_USAGE) from None
    console.print(
        f"{_counted(len(cells), 'run', 'runs')} in {wall_s:.1f} s; written: {output}", highlight=False
    )


def _swept(
    console: Console, sweep: Sweep, reduce: "functools.partial[RunSummary]", processes: int | None
) -> list[RunSummary]:
    """All summaries, in the order of the cells."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    done: dict[Cell, RunSummary] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=len(sweep.cells))
        for cell, summary in run_sweep(sweep, reduce, num_processes=processes):
            done[cell] = summary
            progress.advance(task)
    return [done[cell] for cell in sweep.cells]


def _rates(text: str | None, own: Callable[[], float]) -> list[float]:
    return [factor * own() for factor in DEFAULT_FACTORS] if text is None else parse_rates(text)


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _cells(policies: str, settings: Sequence[str], rates: Sequence[float], num_seeds: int) -> list[Cell]:
    defaults = parse_settings(settings)
    names = policies.split() if " " in policies or ":" in policies else policies.split(",")
    configurations = []
    for name in dict.fromkeys(filter(None, names)):
        preset, colon, rest = name.partition(":")
        written = ALIASES.get(preset, preset) + colon + rest
        configurations.append((name, parse_configuration(written, defaults).config))
    # The slowest first, so that no core is left alone with one in the end.
    return [
        Cell(name, config, rate, seed)
        for rate in sorted(rates, reverse=True)
        for name, config in configurations
        for seed in range(num_seeds)
    ]


def _described(source: Source, name: str, num_requests: int) -> str:
    shares = ", ".join(f"{share:.0%} {name}" for name, share in source.classes)
    parts = [f"{name}: {num_requests:,} requests", f"classes drawn: {shares}" if shares else ""]
    if source.max_prompt_tokens is not None:
        parts.append(f"prompts over {source.max_prompt_tokens:,} tokens left out")
    return "; ".join(filter(None, parts))


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for name in ("vorrang", "matplotlib"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions
