"""``vorrang sim``: scheduling policies compared in virtual time, decision logs replayed.

Exit codes: 0 success, 1 a replayed decision differs, 2 wrong usage, a refused
setting or a damaged file.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from engine.decisions.file import DecisionFile, DecisionLog, DecisionLogUnavailable, Line
from engine.decisions.replay import Replay
from engine.decisions.replay import replay as replay_log
from engine.errors import InvalidRequest, VorrangError
from engine.runner.simulated import SimulatedRunner
from engine.scheduler.config import SchedulerConfig
from engine.sim import simulator
from engine.sim.configurations import (
    Configuration,
    available_presets,
    parse_configuration,
)
from engine.sim.metrics import Report, report
from engine.sim.profiles import PROFILES, HardwareProfile, profile_named
from engine.sim.recorder import Recording
from engine.sim.report import print_reports, to_json
from server.sim_options import (
    EXIT_DIFFERENT,
    EXIT_USAGE,
    MAX_DURATION_S,
    MAX_NUM_BLOCKS,
    WORKLOAD_HELP,
    parse_settings,
    parse_shares,
)
from server.sim_report import report as report_command
from timeline.console import PlainConsole
from workloads.arrivals import Workload
from workloads.errors import InvalidWorkload
from workloads.sources import TRACE_CLASSES, is_trace, workload_from
from workloads.statistics import TARGETS, parse_target
from workloads.traces import FORMATS

app = typer.Typer(
    name="sim",
    help="Try scheduling policies in virtual time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Try scheduling policies in virtual time."""


@app.command()
def run(
    workload: Annotated[str, typer.Argument(help=WORKLOAD_HELP)],
    profile: Annotated[str, typer.Option(help=f"Hardware: {', '.join(PROFILES)}.")] = "rtx4090",
    policy: Annotated[str, typer.Option(help="Order of requests.")] = "priority",
    discipline: Annotated[str | None, typer.Option(help="How a step is filled.")] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of --policy and --discipline, repeatable: PRESET[:field=value,...]; presets: "
            f"{', '.join(available_presets())}; 'all' for all of them."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Scheduler setting for all, field=value; repeatable.")
    ] = None,
    trace_format: Annotated[
        str, typer.Option("--format", help=f"Of the trace: auto, {', '.join(FORMATS)}.")
    ] = "auto",
    classes: Annotated[
        str | None,
        typer.Option(help="Classes drawn for a trace's requests; default interactive=0.2,batch=0.8."),
    ] = None,
    tenants: Annotated[int | None, typer.Option(min=1, help="Tenants drawn for the requests.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests.")] = None,
    scale: Annotated[float, typer.Option(help="Multiplies the arrival rate.")] = 1.0,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Drop longer prompts.")] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            min=1.0, max=MAX_DURATION_S, help="Seconds of arrivals; default: all of them, of a mix 600."
        ),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, max=MAX_NUM_BLOCKS, help="KV blocks; default: the profile's.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Goal of a class, CLASS=TTFT_S/TPOT_S; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, times, classes and tenants.")] = 0,
    driver: Annotated[
        str, typer.Option(help="direct: the scheduler; engine: the whole engine loop, slower.")
    ] = "direct",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers; - for stdout.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the decision log of the run; one configuration only.")
    ] = None,
) -> None:
    """Run a workload under one or more configurations and print how each class fared."""
    console = PlainConsole(stderr=json_path == Path("-"))
    try:
        hardware = profile_named(profile)
        configurations = _configurations(compare, policy, discipline, settings or [])
        if driver not in ("direct", "engine"):
            raise InvalidRequest("driver", "must be direct or engine", driver)
        if record is not None and len(configurations) > 1:
            raise InvalidRequest("record", "must come with one configuration", len(configurations))
        arrivals = _workload(
            workload, trace_format, classes, tenants, limit, scale, max_prompt_tokens, duration, seed, console
        )
        targets = dict(TARGETS) | dict(map(parse_target, target or []))
        reports = []
        for configuration in configurations:
            recording = _simulate(arrivals, hardware, num_blocks, configuration, driver, record)
            reports.append(report(configuration.name, recording, targets))
    except (InvalidRequest, InvalidWorkload, DecisionLogUnavailable) as error:
        PlainConsole(stderr=True).print(Text(str(error), "red"))
        raise typer.Exit(EXIT_USAGE) from None
    title = f"{arrivals.name}: {len(arrivals.requests):,} requests on {hardware.description}"
    _show(console, title, reports, json_path)


app.command(name="report")(report_command)


@app.command()
def replay(log: Annotated[Path, typer.Argument(help="A decision log.")]) -> None:
    """Make every decision of a log again; name the first that differs."""
    console = PlainConsole(soft_wrap=True, highlight=False)
    try:
        with DecisionLog(log) as decisions:
            done = _replay(decisions)
            end = decisions.end
    except VorrangError as error:
        sys.stderr.write(f"vorrang: {error}\n")
        raise typer.Exit(EXIT_USAGE) from None
    if done.difference is not None:
        console.print(f"{done.num_steps:,} steps reproduced, then the first difference:")
        console.print(str(done.difference))
        raise typer.Exit(EXIT_DIFFERENT)
    console.print(f"{done.num_steps:,} steps reproduced, {done.num_calls:,} calls in all")
    if end is None:
        console.print("the log has no last line: whatever wrote it was killed, or writes still")
    elif end.reason != "closed":
        console.print(f"the recording ended early: {end.reason}")


def _replay(decisions: DecisionLog) -> Replay:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    console = PlainConsole(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=decisions.path.stat().st_size)

        def show(line: Line) -> None:
            if line.number % 1024 == 0:
                progress.update(task, completed=decisions.num_bytes_read)

        return replay_log(decisions, show)


def _configurations(
    compare: list[str] | None, policy: str, discipline: str | None, settings: list[str]
) -> list[Configuration]:
    defaults = parse_settings(settings)
    if compare:
        names = [name for text in compare for name in (available_presets() if text == "all" else [text])]
        return [parse_configuration(name, defaults) for name in names]
    own = f"priority:policy={policy}" + (f",discipline={discipline}" if discipline else "")
    name = policy + (f"/{discipline}" if discipline else "")
    return [Configuration(name, parse_configuration(own, defaults).config)]


def _workload(
    source: str,
    trace_format: str,
    classes: str | None,
    tenants: int | None,
    limit: int | None,
    scale: float,
    max_prompt_tokens: int | None,
    duration_s: float | None,
    seed: int,
    console: Console,
) -> Workload:
    arrivals = workload_from(source, seed=seed, duration_s=duration_s, trace_format=trace_format)
    shares = TRACE_CLASSES if classes is None and is_trace(source) else {}
    if classes is not None:
        shares = parse_shares(classes)
    if max_prompt_tokens is not None:
        num_before = len(arrivals.requests)
        arrivals = arrivals.with_prompts_up_to(max_prompt_tokens)
        num_dropped = num_before - len(arrivals.requests)
        console.print(
            f"{num_dropped:,} of {num_before:,} requests dropped: prompt over {max_prompt_tokens:,}"
        )
    if limit is not None:
        arrivals = arrivals.limited(limit)
    if scale != 1.0:
        arrivals = arrivals.scaled(scale)
    if shares:
        arrivals = arrivals.with_classes(shares, seed)
    return arrivals if tenants is None else arrivals.with_tenants(tenants, seed)


def _simulate(
    arrivals: Workload,
    hardware: HardwareProfile,
    num_blocks: int | None,
    configuration: Configuration,
    driver: str,
    record: Path | None,
) -> Recording:
    runner = SimulatedRunner(hardware, num_blocks=num_blocks)
    config: SchedulerConfig = configuration.config
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[now]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=PlainConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(configuration.name, total=len(arrivals.requests), now="")

        def show(state: simulator.Progress) -> None:
            now = f"{state.now_s:,.0f} s simulated, {state.num_alive:,} alive"
            progress.update(task, completed=state.num_arrived - state.num_alive, now=now)

        with _decision_file(record) as decisions:
            if driver == "engine":
                with _only_warnings():
                    return simulator.simulate_engine(arrivals, runner, config, decisions=decisions)
            return simulator.simulate(arrivals, runner, config, on_progress=show, decisions=decisions)


@contextmanager
def _decision_file(path: Path | None) -> Iterator[DecisionFile | None]:
    if path is None:
        yield None
        return
    decisions = DecisionFile(path, wait=True)
    try:
        yield decisions
    finally:
        decisions.close()


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Keep the engine's line per request, of thousands of requests that never were, out of the output."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        structlog.configure(**before)


def _show(console: Console, title: str, reports: list[Report], json_path: Path | None) -> None:
    if json_path == Path("-"):
        sys.stdout.write(to_json(title, reports))
        return
    print_reports(console, title, reports)
    if json_path is not None:
        json_path.write_text(to_json(title, reports), encoding="utf-8")


if __name__ == "__main__":
    app()
