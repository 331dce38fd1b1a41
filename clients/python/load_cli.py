"""``vorrangctl load``: put a server under a known load and say what its callers see."""

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from clients.python.command import (
    DEFAULT_TARGET,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Control,
    Target,
    expected_failures,
    run,
)
from clients.python.load import LoadOptions, run_load, tenants_without_token
from clients.python.load_report import LoadSummary, summarise
from clients.python.load_state import LoadState
from clients.python.load_view import LoadView, print_summary
from clients.python.load_workload import Wish, parse_classes, workload_of
from timeline.console import PlainConsole
from timeline.secrecy import redacted
from workloads.arrivals import Workload
from workloads.errors import InvalidWorkload
from workloads.records import Run, write_runs
from workloads.statistics import parse_target

_PLAIN_COLUMNS = 120

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME",
        help='LoRA adapter; repeatable: requests name them in turn. "" = none.',
    ),
]
_TICK_S = 0.25


def load(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="A ready workload or a mix by name, a workload file (.toml), or a trace.",
        ),
    ] = None,
    target: Target = DEFAULT_TARGET,
    control: Control = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; brings a file to it.", show_default="1")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds over which requests are due.", show_default="30")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests at most.")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson or constant.")] = "poisson",
    classes: Annotated[
        str | None,
        typer.Option(help="Shares, as interactive=0.2,batch=0.8.", show_default="standard"),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="N, LOW-HIGH, ~MEDIAN or ~MEDIAN/SIGMA.")] = "64",
    output_tokens: Annotated[str, typer.Option(help="The same, of outputs.")] = "64",
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    slo: Annotated[
        list[str] | None, typer.Option("--target-latency", help="CLASS=TTFT_S/TPOT_S; repeatable.")
    ] = None,
    connections: Annotated[int, typer.Option(help="TCP connections.")] = 1,
    sessions: Annotated[int, typer.Option(help="Sessions on each connection.")] = 1,
    max_in_flight: Annotated[int, typer.Option(help="Requests alive at most; more are not sent.")] = 10_000,
    drain: Annotated[float, typer.Option(help="Seconds to wait for requests at the end.")] = 60.0,
    tenant_token: Annotated[
        list[str] | None,
        typer.Option(help="TENANT=VARIABLE: environment variable with its token; repeatable."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model that is asked for.")] = "",
    adapter: Adapters = None,
    sample: Annotated[
        float, typer.Option(help="Seconds between looks at the server's load; 0 = none.")
    ] = 0.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures; - = standard output.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a JSON line for each request.")
    ] = None,
    max_failed: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of failed requests that is still a success.")
    ] = 0.0,
) -> None:
    """Send requests when they are due, whatever becomes of earlier ones, and measure from then on.

    Exits with 1 when more than --max-failed of the requests failed, 130 after Ctrl-C (with what was
    measured until then; a second Ctrl-C ends at once).
    """
    with expected_failures():
        shares = None if classes is None else parse_classes(classes)
        wish = Wish(rate, duration, requests, arrivals, shares, prompt_tokens, output_tokens, seed)
        workload = workload_of(source, wish)
        targets = dict(parse_target(text) for text in slo) if slo else None
        options = LoadOptions(
            num_connections=connections,
            num_sessions=sessions,
            max_in_flight=max_in_flight,
            drain_s=drain,
            tokens=tokens_of(tenant_token or []),
            model=model,
            adapters=adapter or (),
            sample_s=sample,
            control=control or "",
        )
        for file in (json_file, records):
            check_writable(file)
    # Where the figures go to standard output, tables must not.
    console = _console(to_stderr=json_file == Path("-"))
    unknown = tenants_without_token(workload, options.tokens)
    if unknown:
        console.print(
            Text(f"{len(unknown)} tenants have no --tenant-token; they share one identity", "yellow")
        )
    done, interrupted = run(watched_load(target, workload, options, seed, console))
    summary = summarise(done, targets=targets, interrupted=interrupted)
    with expected_failures():
        _write(json_file, records, summary, done)
    if json_file != Path("-"):
        print_summary(console, summary)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if summary.total.num_failed > max_failed * summary.total.num_requests:
        raise typer.Exit(EXIT_FAILED)


async def watched_load(
    target: str, workload: Workload, options: LoadOptions, seed: int, console: Console
) -> tuple[Run, bool]:
    """The run, and whether it was interrupted."""
    loop = asyncio.get_running_loop()
    state, stop = LoadState(), asyncio.Event()
    done = Run(
        "load",
        offered_rps=_rate(workload),
        seed=seed,
        command=redacted(shlex.join(["vorrangctl", *sys.argv[1:]])),
    )
    with _stopping(stop), LoadView(console, state, time.monotonic) as view:
        running = loop.create_task(run_load(target, workload, options, state=state, stop=stop, run=done))
        try:
            while not running.done():
                await asyncio.wait([running], timeout=_TICK_S)
                view.tick()
        finally:
            running.cancel()
            await asyncio.wait([running])
    return running.result(), stop.is_set()


@contextmanager
def _stopping(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C, or SIGTERM, ends the run; the second has its usual effect."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def handle() -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    for number in signals:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        restore()


def _write(json_file: Path | None, records: Path | None, summary: LoadSummary, done: Run) -> None:
    if records is not None:
        write_runs(records, [done])
    if json_file is not None:
        text = json.dumps(summary.as_json(), indent=2) + "\n"
        if json_file == Path("-"):
            sys.stdout.write(text)
        else:
            json_file.write_text(text, encoding="utf-8")


def check_writable(file: Path | None) -> None:
    """Find out before the run, not after it."""
    if file is None or file == Path("-"):
        return
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ValueError(f"{file} can't be written: {error.strerror}") from None


def tokens_of(texts: list[str]) -> dict[str, str]:
    """Tokens by tenant, out of the environment: command lines are seen by everybody."""
    tokens = {}
    for text in texts:
        tenant, _, variable = text.partition("=")
        token = os.environ.get(variable, "")
        if not (tenant and token):
            raise InvalidWorkload("tenant-token", "must be TENANT=VARIABLE of a variable that is set", text)
        tokens[tenant] = token
    return tokens


def _rate(workload: Workload) -> float | None:
    try:
        return workload.mean_rate_rps
    except InvalidWorkload:
        return None


def _console(*, to_stderr: bool) -> Console:
    stream = sys.stderr if to_stderr else sys.stdout
    # A file or pipe has no width of its own, and 80 columns would cut the tables.
    return PlainConsole(file=stream) if stream.isatty() else PlainConsole(file=stream, width=_PLAIN_COLUMNS)
