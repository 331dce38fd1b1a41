"""The command line ``vorrang``. Imports nothing heavy before it knows what is asked for."""

import enum
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from server import standard_files

if TYPE_CHECKING:
    from server.settings import Loaded

main = typer.Typer(
    name="vorrang",
    help="An LLM inference server whose product is the scheduling of mixed-priority traffic.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at settings.", no_args_is_help=True)
main.add_typer(config_app, name="config")


class RunnerName(enum.StrEnum):
    """Where the model computes."""

    PROCESS = "process"
    INLINE = "inline"


class KernelsName(enum.StrEnum):
    """Which implementation of the operations."""

    AUTO = "auto"
    TRITON = "triton"
    CPU = "cpu"
    REFERENCE = "reference"


class DeviceName(enum.StrEnum):
    """Where the operations compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class WeightsName(enum.StrEnum):
    """How matrices are kept."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    FP8 = "fp8"


class PolicyName(enum.StrEnum):
    """What orders requests."""

    PRIORITY = "priority"
    FAIR = "fair"
    FCFS = "fcfs"


class DisciplineName(enum.StrEnum):
    """How a step is filled."""

    UNIFIED = "unified"
    PREFILL_FIRST = "prefill_first"
    STATIC = "static"


class LogLevel(enum.StrEnum):
    """Least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_SERVER, _MODEL, _SCHEDULING, _OTHER = "Server", "Model and memory", "Scheduling", "Other"

Config = Annotated[
    Path | None,
    typer.Option(help="TOML file with settings.", envvar="VORRANG_CONFIG", rich_help_panel=_OTHER),
]
Listen = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Address; port 0 = any.", rich_help_panel=_SERVER)
]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Allow plaintext on more than loopback.", rich_help_panel=_SERVER),
]
TlsCertificate = Annotated[
    Path | None, typer.Option(metavar="PEM", help="Certificate; makes it TLS.", rich_help_panel=_SERVER)
]
TlsKey = Annotated[
    Path | None, typer.Option(metavar="PEM", help="Private key of the certificate.", rich_help_panel=_SERVER)
]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(metavar="PEM", help="Authorities of clients; makes it mTLS.", rich_help_panel=_SERVER),
]
ControlListen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Own port of ControlService.", rich_help_panel=_SERVER),
]
MetricsListen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Port of metrics for Prometheus.", rich_help_panel=_SERVER),
]
Grace = Annotated[
    float | None, typer.Option(help="Seconds for running requests after SIGTERM.", rich_help_panel=_SERVER)
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Folder, GGUF file or hub id; default: SmolLM2; `scripted`: a fake.", rich_help_panel=_MODEL
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit on the hub.", rich_help_panel=_MODEL)
]
Offline = Annotated[
    bool | None, typer.Option("--offline", help="Do not ask the hub.", rich_help_panel=_MODEL)
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", metavar="NAME=FOLDER", help="A LoRA adapter; may be repeated.", rich_help_panel=_MODEL
    ),
]
ModelName = Annotated[str | None, typer.Option(help="Name under which it is served.", rich_help_panel=_MODEL)]
RunnerOption = Annotated[
    RunnerName | None,
    typer.Option(help="Where it computes: its own process, or a thread.", rich_help_panel=_MODEL),
]
PipelineDepth = Annotated[
    int | None,
    typer.Option(help="Steps planned ahead of the one computed: 0 or 1.", rich_help_panel=_MODEL),
]
Speculation = Annotated[
    int | None,
    typer.Option(
        "--speculation-tokens",
        help="Tokens guessed from prompt and output, and verified in the same step; 0 = none. "
        "Nothing is guessed for requests with logprobs, a grammar, penalties or banned sequences.",
        rich_help_panel=_MODEL,
    ),
]
Threads = Annotated[int | None, typer.Option(help="Threads of a step.", rich_help_panel=_MODEL)]
WeightsOption = Annotated[
    WeightsName | None,
    typer.Option("--weights", help="How weights are kept; auto: exactly.", rich_help_panel=_MODEL),
]
KernelsOption = Annotated[
    KernelsName | None,
    typer.Option("--kernels", help="Which kernels; auto: the quickest.", rich_help_panel=_MODEL),
]
BatchInvariant = Annotated[
    bool | None,
    typer.Option("--batch-invariant", help="Same bits in any batch, on a card too.", rich_help_panel=_MODEL),
]
DeviceOption = Annotated[
    DeviceName | None,
    typer.Option("--device", help="Where they compute; auto: a card, if any.", rich_help_panel=_MODEL),
]
TensorParallel = Annotated[
    int | None, typer.Option(help="Processes (and cards) to cut the model over.", rich_help_panel=_MODEL)
]
KvBlocks = Annotated[int | None, typer.Option(help="Blocks of the KV pool.", rich_help_panel=_MODEL)]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per block.", rich_help_panel=_MODEL)]
StepMs = Annotated[float | None, typer.Option(help="Duration of a scripted step.", hidden=True)]
Policy = Annotated[PolicyName | None, typer.Option(help="Order of service.", rich_help_panel=_SCHEDULING)]
Discipline = Annotated[
    DisciplineName | None, typer.Option(help="How a step is filled.", rich_help_panel=_SCHEDULING)
]
Seats = Annotated[int | None, typer.Option(help="Seats in the running batch.", rich_help_panel=_SCHEDULING)]
Waiting = Annotated[int | None, typer.Option(help="Longest queue.", rich_help_panel=_SCHEDULING)]
RecordDecisions = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Log for `vorrang sim replay`; holds prompts.", rich_help_panel=_OTHER),
]
LogLevelOption = Annotated[LogLevel | None, typer.Option(help="What is logged.", rich_help_panel=_OTHER)]


@main.command()
def serve(
    listen: Listen = None,
    insecure: Insecure = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    control_listen: ControlListen = None,
    metrics_listen: MetricsListen = None,
    grace_s: Grace = None,
    model: Model = None,
    revision: Revision = None,
    offline: Offline = None,
    model_name: ModelName = None,
    adapter: Adapters = None,
    runner: RunnerOption = None,
    pipeline_depth: PipelineDepth = None,
    speculation_tokens: Speculation = None,
    threads: Threads = None,
    weights: WeightsOption = None,
    kernels: KernelsOption = None,
    batch_invariant: BatchInvariant = None,
    device: DeviceOption = None,
    tensor_parallel: TensorParallel = None,
    kv_blocks: KvBlocks = None,
    block_size: BlockSize = None,
    scripted_step_ms: StepMs = None,
    policy: Policy = None,
    discipline: Discipline = None,
    max_running_requests: Seats = None,
    max_waiting_requests: Waiting = None,
    config: Config = None,
    record_decisions: RecordDecisions = None,
    log_level: LogLevelOption = None,
) -> None:
    """Serve a model until SIGTERM."""
    standard_files.open_closed()
    loaded = _load_settings(
        config,
        {
            "server.listen": listen,
            "server.insecure": insecure,
            "tls.certificate": tls_certificate,
            "tls.private_key": tls_key,
            "tls.client_ca": tls_client_ca,
            "control.listen": control_listen,
            "metrics.listen": metrics_listen,
            "server.grace_s": grace_s,
            "model.path": model,
            "model.revision": revision,
            "model.offline": offline,
            "model.name": model_name,
            "model.adapters": _adapters(adapter or ()),
            "model.weights": weights and weights.value,
            "engine.runner": runner and runner.value,
            "engine.pipeline_depth": pipeline_depth,
            "engine.threads": threads,
            "engine.kernels": kernels and kernels.value,
            "engine.batch_invariant": batch_invariant,
            "engine.device": device and device.value,
            "engine.tensor_parallel": tensor_parallel,
            "engine.scripted_step_s": None if scripted_step_ms is None else scripted_step_ms / 1000,
            "engine.record_decisions": record_decisions,
            "kv.num_blocks": kv_blocks,
            "kv.block_size": block_size,
            "scheduler.policy": policy and policy.value,
            "scheduler.speculation_tokens": speculation_tokens,
            "scheduler.discipline": discipline and discipline.value,
            "scheduler.max_running_requests": max_running_requests,
            "scheduler.max_waiting_requests": max_waiting_requests,
            "log.level": log_level and log_level.value,
        },
    )
    from server.serve import serve as run

    run(loaded.settings, on_failure=_fail)


@config_app.command("show")
def config_show(config: Config = None) -> None:
    """Print every effective setting and where it came from."""
    described = _load_settings(config, {}).describe()
    rows = [(entry.path, _shown(entry.value), entry.origin) for entry in described]
    _print_table("Settings", ("setting", "value", "origin"), rows)


@main.command()
def doctor() -> None:
    """Look at this machine and say what a server would find."""
    from server.doctor import findings

    _print_table("", ("what", "found"), findings())


@main.command()
def healthcheck(
    target: Annotated[
        str,
        typer.Option(help="The server; its health needs no login.", envvar="VORRANG_HEALTHCHECK_TARGET"),
    ] = "127.0.0.1:50051",
    service: Annotated[str, typer.Option(help="Service to ask about; empty = the whole server.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 5.0,
) -> None:
    """Ask a server whether it takes requests: exit status 0 if it does, 1 if not."""
    from server.healthcheck import ask

    status = ask(target, service, timeout_s)
    print(status)  # noqa: T201
    sys.exit(0 if status == "SERVING" else 1)


@main.command()
def trace(
    log: Annotated[Path, typer.Argument(help="A decision log, of `vorrang serve --record-decisions`.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Trace to write; open it at ui.perfetto.dev.")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="PNG or SVG to draw (needs vorrang[report]).")] = None,
    every_step: Annotated[bool, typer.Option(help="A slice for each decode, not for many at once.")] = False,
    window: Annotated[
        str | None, typer.Option(metavar="BEGIN:END", help="Only these seconds of the run, such as 2.5:4.")
    ] = None,
) -> None:
    """Turn a decision log into a timeline: who sat where, who waited, who gave way to whom."""
    from engine.errors import VorrangError
    from server.trace import trace as make
    from timeline.picture import PictureUnavailable
    from timeline.printable import printable_lines

    try:
        print(printable_lines(make(log, output, image, every_step=every_step, window=_window(window))))  # noqa: T201
    except (VorrangError, PictureUnavailable) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename} can't be written: {error.strerror}")


@main.command()
def explain(
    log: Annotated[Path, typer.Argument(help="A decision log, of `vorrang serve --record-decisions`.")],
    request_id: Annotated[str, typer.Argument(help="The server's id of a request, such as r12.")],
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON.")] = False,
) -> None:
    """Tell where the time of a request of a decision log went; `vorrangctl explain` asks a server."""
    from engine.errors import VorrangError
    from server.trace import explain as tell

    try:
        tell(log, request_id, as_json=as_json)
    except VorrangError as error:
        _fail(str(error))


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    begin, _, end = text.partition(":")
    try:
        found = float(begin or 0), float(end or "inf")
    except ValueError:
        found = 0.0, 0.0
    if not 0 <= found[0] < found[1]:
        _fail(f"--window must be BEGIN:END in seconds, such as 2.5:4, got {text!r}")
    return found


@main.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def sim(context: typer.Context) -> None:
    """Try scheduling policies in virtual time; replay a server's decisions: run, replay."""
    from server.sim import app

    app(context.args, prog_name="vorrang sim")


def _load_settings(config: Path | None, cli: dict[str, Any]) -> "Loaded":
    from server.settings import SettingsError, load

    try:
        return load(config, cli)
    except SettingsError as error:
        _fail(str(error))


def _adapters(pairs: Sequence[str]) -> dict[str, str] | None:
    """Folders by name; None where none is given."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder):
            _fail(f"--adapter must be NAME=FOLDER, got {pair!r}")
        if name in found:
            _fail(f"--adapter must name each adapter once, got {name!r} twice")
        found[name] = folder
    return found or None


def _fail(message: str, code: int = 2) -> NoReturn:
    """A known failure: one line, no traceback."""
    from timeline.printable import printable
    from timeline.secrecy import redacted

    print(f"vorrang: {printable(redacted(message))}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _print_table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table on a terminal, aligned columns elsewhere."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        for row in rows:
            line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            print(line.rstrip())  # noqa: T201
        return
    from rich.table import Table

    from timeline.console import PlainConsole

    table = Table(*header, title=title or None)
    for row in rows:
        table.add_row(*row)
    PlainConsole().print(table)


if __name__ == "__main__":
    main()
