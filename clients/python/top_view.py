"""How ``vorrangctl top`` draws what it knows: rich renderables, no widgets."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from clients.python.admin_types import LiveRequest, ServerInfo
from clients.python.admin_view import STYLE_BY_CLASS, age_of, output_of, state_text
from clients.python.errors import InvalidRequest
from clients.python.top_state import Board, bar_text, curve_text
from timeline.printable import printable
from workloads.classes import class_of

_BAR_WIDTH, _CURVE_WIDTH = 24, 40
_NARROW = 90


def head(board: Board, info: ServerInfo, target: str, width: int) -> Group:
    """Server, seats, KV, rates; ``width`` in columns."""
    return Group(_title(board, info, target), *_figures(board, narrow=width < _NARROW))


def _title(board: Board, info: ServerInfo, target: str) -> Text:
    title = Text.assemble(
        ("Vorrang ", "bold"),
        printable(f"{info.model} at {target}"),
        (printable(f"  policy {info.policy}"), "dim"),
        no_wrap=True,
    )
    if board.trouble:
        title.append("   reconnecting ", "bold white on red")
        title.append(f" {printable(board.trouble)}", "red")
    elif board.latest is not None and board.latest.load.draining:
        title.append("   draining ", "bold black on yellow")
    elif board.latest is None:
        title.append("   connecting", "dim")
    else:
        title.append("   live", "green")
    return title


def _figures(board: Board, *, narrow: bool) -> list[Text]:
    latest = board.latest
    if latest is None:
        return [Text("", no_wrap=True)] * 3
    load, rates = latest.load, board.rates()
    num_used = load.num_seats - load.num_free_seats
    width = _BAR_WIDTH // 2 if narrow else _BAR_WIDTH
    style = "dim" if board.trouble else ""
    seats = Text("seats ", style, no_wrap=True)
    # All seats taken is how it should be; a full pool is not.
    _append_bar(seats, num_used / load.num_seats if load.num_seats else 0.0, width, board, "cyan")
    seats.append(f" {num_used:>3}/{load.num_seats:<5}")
    seats.append("   KV ")
    _append_bar(seats, load.kv_use, width, board, _kv_style(load.kv_use))
    seats.append(f" {load.kv_use:4.0%}  {load.num_blocks - load.num_free_blocks}/{load.num_blocks} blocks")
    tokens = Text("out   ", style, no_wrap=True)
    tokens.append(curve_text(board.curve, width if narrow else _CURVE_WIDTH), style or "green")
    tokens.append(f" {rates.output_tokens:,.0f} tokens/s")
    tokens.append(f"   {rates.computed_tokens:,.0f} computed/s", "dim")
    steps = Text("steps ", style, no_wrap=True)
    steps.append(f"{rates.steps:.1f}/s, the last took {1000 * load.last_step_s:.1f} ms")
    steps.append(f"   {load.num_steps:,} steps, {load.num_output_tokens:,} tokens", "dim")
    steps.append(f"   {load.num_preemptions:,} preemptions", "" if load.num_preemptions else "dim")
    if load.num_runner_losses:
        steps.append(f"   runner lost {load.num_runner_losses}x", "bold red")
    return [seats, tokens, steps]


def _append_bar(line: Text, share: float, width: int, board: Board, style: str) -> None:
    filled, empty = bar_text(share, width)
    line.append(filled, "dim" if board.trouble else style)
    line.append(empty, "dim")


def _kv_style(share: float) -> str:
    if share >= 0.95:
        return "red"
    return "yellow" if share >= 0.75 else "green"


def classes(board: Board) -> Table:
    """The queue by class; a mark stands at the class that alone is listed."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("class", min_width=14)
    for heading in ("running", "waiting", "preempted", "parked"):
        table.add_column(heading, justify="right", min_width=9)
    table.add_column("waiting for a seat")
    latest = board.latest
    for one in latest.load.classes if latest is not None else ():
        style = STYLE_BY_CLASS.get(one.class_name, "")
        mark = " ◀" if one.class_name == board.class_name else ""
        counts = (one.num_running, one.num_waiting, one.num_preempted, one.num_parked)
        num_shown = min(one.num_queued, _CURVE_WIDTH)
        more = "…" if one.num_queued > num_shown else ""
        table.add_row(
            Text(printable(one.class_name) + mark, style),
            *(Text(str(count), "" if count else "dim") for count in counts),
            Text("▪" * num_shown + more, style),
        )
    return table


def cells(request: LiveRequest) -> tuple[Text, ...]:
    """A request as cells, in the order of ``COLUMNS``."""

    def right(text: str, style: str = "") -> Text:
        return Text(text, style, justify="right")

    return (
        right(str(request.level), STYLE_BY_CLASS[class_of(request.level)]),
        _state(request),
        Text(printable(request.server_request_id)),
        Text(_shortened(request.request_id)),
        Text(_shortened(request.tenant)),
        right(str(request.usage.prompt_tokens)),
        right(output_of(request)),
        right(age_of(request)),
        right(f"{request.usage.preemptions}x" if request.usage.preemptions else ""),
        right(str(request.num_blocks or "")),
        Text(_shortened(request.label)),
    )


def _state(request: LiveRequest) -> Text:
    """Where it stands, a prefill with how much of it is done."""
    state = state_text(request)
    if request.state == "PREFILL" and request.num_known_tokens:
        state.append(f" {request.num_computed_tokens / request.num_known_tokens:.0%}")
    return state


def explanation(error: Exception) -> str:
    """An error in a few words, for a message that goes away."""
    if isinstance(error, InvalidRequest) and error.violations:
        return printable("; ".join(f"{v.field} {v.description}" for v in error.violations))
    return printable(str(error))


def _shortened(text: str, length: int = 18) -> str:
    text = printable(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"
