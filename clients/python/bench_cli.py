"""``vorrangctl bench``: a workload against a live server at several rates, as one HTML report.

Records of earlier runs may be put beside it, so that servers and settings are compared
in one report. Whatever draws plots is imported when the first one is drawn.
"""

import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from clients.python.command import (
    DEFAULT_TARGET,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Control,
    Target,
    expected_failures,
    run,
)
from clients.python.load import LoadOptions
from clients.python.load_cli import Adapters, check_writable, tokens_of, watched_load
from clients.python.load_workload import parse_classes
from clients.python.openai_load import OpenAiTarget, run_openai_load
from report.page import Facts, write_report
from report.style import PlotsUnavailable, figure
from report.summary import summarise
from timeline.console import PlainConsole
from timeline.secrecy import redacted
from workloads.arrivals import Workload, parse_rates
from workloads.errors import InvalidWorkload
from workloads.records import RequestRecord, Run, read_runs, write_runs
from workloads.sources import TRACE_CLASSES, is_trace, workload_from
from workloads.statistics import TARGETS, parse_target


def bench(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="A workload file, a trace, a ready workload or a mix; left out, only --from is reported.",
        ),
    ] = None,
    target: Target = DEFAULT_TARGET,
    control: Control = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("bench.html"),
    rates: Annotated[
        str | None,
        typer.Option(help="Offered requests a second, separated by commas.", show_default="the workload's"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="So many seeds, from 0.")] = 1,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of arrivals of each run at most.")] = 60.0,
    classes: Annotated[
        str | None,
        typer.Option(help="Classes drawn for the requests; of a trace by default interactive=0.2,batch=0.8."),
    ] = None,
    name: Annotated[str, typer.Option(help="What is tried, as the report is to call it.")] = "live",
    slo: Annotated[
        list[str] | None, typer.Option("--target-latency", help="CLASS=TTFT_S/TPOT_S; repeatable.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the records, for a later --from.")
    ] = None,
    others: Annotated[
        list[Path] | None, typer.Option("--from", help="Records of earlier runs to show as well; repeatable.")
    ] = None,
    connections: Annotated[int, typer.Option(help="TCP connections.")] = 1,
    sessions: Annotated[int, typer.Option(help="Sessions on each connection.")] = 1,
    drain: Annotated[float, typer.Option(help="Seconds to wait for requests at the end of a run.")] = 60.0,
    tenant_token: Annotated[
        list[str] | None,
        typer.Option(help="TENANT=VARIABLE: environment variable with its token; repeatable."),
    ] = None,
    adapter: Adapters = None,
    openai: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Drive this server, which speaks OpenAI's protocol, instead of --target (extra: openai). "
            "VORRANG_OPENAI_KEY holds its key.",
        ),
    ] = None,
    openai_model: Annotated[str, typer.Option(help="Name of its model.")] = "",
    openai_prompts: Annotated[
        str, typer.Option(help="How prompts are sent: tokens (ids, as vLLM and SGLang take them) or words.")
    ] = "tokens",
    openai_levels: Annotated[
        bool, typer.Option("--openai-levels", help="Send levels as `priority`, as vLLM reads them.")
    ] = False,
    sample: Annotated[
        float, typer.Option(help="Seconds between looks at the server's load; 0 = none.")
    ] = 0.25,
    max_failed: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of a run's requests whose failure is still a success."),
    ] = 0.0,
) -> None:
    """Send a workload at several rates, one after the other, and write one HTML file with plots.

    Exits with 1 when more than --max-failed of a run's requests failed. Ctrl-C ends the run under way; the
    report shows what was measured until then.
    """
    console = PlainConsole(stderr=True)
    with expected_failures():
        try:
            figure(1, 1)  # whether plots can be drawn is asked first, not after minutes
        except PlotsUnavailable as error:
            raise ValueError(str(error)) from None
        targets = dict(TARGETS) | dict(map(parse_target, slo or []))
        earlier = [found for path in others or [] for found in _read(path)]
        shares = parse_classes(classes) if classes else None
        coming = _workloads(workload, rates, seeds, duration, shares)
        options = LoadOptions(
            num_connections=connections,
            num_sessions=sessions,
            drain_s=drain,
            tokens=tokens_of(tenant_token or []),
            adapters=adapter or (),
            sample_s=sample,
            control=control or "",
        )
        other = _other_server(openai, openai_model, openai_prompts, send_level=openai_levels)
        if other is not None and adapter:
            raise ValueError("--adapter can't be used with --openai: --openai-model names adapters there")
        for path in (output, records):
            check_writable(path)
    done: list[Run] = []
    interrupted = False
    for arrivals, seed, rate in coming:
        console.print(
            f"{arrivals.name}: {len(arrivals.requests):,} requests at {rate:.3g}/s", highlight=False
        )
        if other is None:
            made, interrupted = run(watched_load(target, arrivals, options, seed, console))
        else:
            made = run(run_openai_load(other, arrivals, name=name))
            made.command = redacted(shlex.join(["vorrangctl", *sys.argv[1:]]))  # it goes into files
        made.name, made.offered_rps = name, rate
        _print_failures(console, made)
        done.append(made)
        if interrupted:
            break
    runs = [*earlier, *done]
    with expected_failures():
        if records is not None:
            write_runs(records, done)
        if not any(one.records for one in runs):
            raise InvalidWorkload("workload", "must be given, or records with --from", None)
        summaries = [summarise(one, targets) for one in runs if one.records]
        write_report(output, _facts(runs, workload), summaries, targets)
    console.print(f"written: {output}", highlight=False)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(len(_failed(made)) > max_failed * len(made.records) for made in done):
        raise typer.Exit(EXIT_FAILED)


def _failed(made: Run) -> list[RequestRecord]:
    return [record for record in made.records if record.error is not None]


def _print_failures(console: PlainConsole, made: Run) -> None:
    """Why requests of a run failed, each reason with the words of the first of them."""
    failed = _failed(made)
    if not failed:
        return
    console.print(f"{len(failed)} of {len(made.records)} requests failed:", style="red", highlight=False)
    first = {str(record.error): record.error_message for record in reversed(failed)}
    for reason, count in Counter(str(record.error) for record in failed).most_common():
        told = f"  {count} {reason}: {first[reason]}"
        console.print(told, style="red", highlight=False)


def _other_server(url: str | None, model: str, prompts: str, *, send_level: bool) -> OpenAiTarget | None:
    """A server that speaks OpenAI's protocol, if one was named.

    Raises:
        ValueError: it can't be driven; names option, rule and value.
    """
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--openai must be an http or https address, got {url!r}")
    if not model:
        raise ValueError("--openai-model must name the model that --openai serves")
    if prompts not in ("tokens", "words"):
        raise ValueError(f"--openai-prompts must be tokens or words, got {prompts!r}")
    if find_spec("httpx2") is None:
        raise ValueError("--openai needs the extra `openai`: pip install 'vorrang[openai]'")
    key = os.environ.get("VORRANG_OPENAI_KEY", "")
    return OpenAiTarget(url, model, api_key=key, prompts=prompts, send_level=send_level)


def _workloads(
    source: str | None, rates: str | None, num_seeds: int, duration_s: float, shares: dict[str, float] | None
) -> list[tuple[Workload, int, float]]:
    """What to send, one run after the other: workload, seed, rate."""
    if source is None:
        return []
    made = []
    for seed in range(num_seeds):
        whole = workload_from(source, seed=seed)
        drawn = shares or (TRACE_CLASSES if is_trace(source) else None)
        if drawn:
            whole = whole.with_classes(drawn, seed)
        for rate in parse_rates(rates) if rates else [whole.mean_rate_rps]:
            scaled = whole.at_rate(rate)
            kept = tuple(r for r in scaled.requests if r.arrival_s < duration_s)
            if not kept:
                raise InvalidWorkload("duration", "must be long enough for a request to arrive", duration_s)
            made.append((Workload(whole.name, kept), seed, rate))
    return made


def _read(path: Path) -> list[Run]:
    try:
        return read_runs(path)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None


def _facts(runs: Sequence[Run], source: str | None) -> Facts:
    commands = dict.fromkeys(one.command for one in runs if one.command)
    versions = {key: value for one in runs for key, value in one.versions.items()}
    versions |= {"Python": platform.python_version(), "matplotlib": _version("matplotlib")}
    lateness = [one.figures["send_lateness_s_p99"] for one in runs if "send_lateness_s_p99" in one.figures]
    notes = ["Measured at the client, through gRPC, with requests sent when they were due (open loop)."]
    if lateness:
        notes.append(
            f"The generator itself was late by {max(lateness) * 1e3:.1f} ms at most (99th percentile)."
        )
    return Facts(
        title=f"{source or _joined(one.workload for one in runs)}: live",
        workload=_joined(one.workload for one in runs),
        server=_joined(one.server for one in runs),
        command="\n".join(commands or [redacted(shlex.join(["vorrangctl", *sys.argv[1:]]))]),
        versions=versions,
        notes=notes,
    )


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts)))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
