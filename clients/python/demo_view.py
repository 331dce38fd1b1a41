"""How the demo shows itself: a live table on a terminal, plain lines elsewhere."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clients.python.demo_report import Check, ClassSummary
from clients.python.progress import Progress, State

_STYLE_BY_STATE = {
    State.SENT: "dim",
    State.QUEUED: "dim",
    State.RUNNING: "green",
    State.PREEMPTED: "bold white on red",
    State.RESUMED: "bold green",
    State.DONE: "cyan",
    State.FAILED: "bold red",
    State.STOPPED: "red",
}
_STYLE_BY_CLASS = {"interactive": "bold yellow", "batch": "blue"}
_REFRESHES_PER_S = 6
_TABLE_COLUMNS = 100


class DemoView:
    """The requests of one run, side by side; a context manager.

    Args:
        console: where to draw.
        title: what runs.
        elapsed_s: seconds since the run began.
    """

    def __init__(self, console: Console, title: str, elapsed_s: Callable[[], float]) -> None:
        self._console = console
        self._title = title
        self._elapsed_s = elapsed_s
        self._rows: dict[str, tuple[str, Progress]] = {}
        self._live: Live | None = None
        self._width = min(_TABLE_COLUMNS, console.width)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self.table, refresh_per_second=_REFRESHES_PER_S
            )
            self._live.__enter__()
        else:
            self._console.print(Text(self._title), soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def add(self, name: str, class_name: str, progress: Progress) -> None:
        """Show a request that was just sent."""
        self._rows[name] = (class_name, progress)

    def changed(self, name: str) -> None:
        """The state of a request has changed: a plain line is due; the table redraws itself."""
        if self._live is None:
            line = f"{self._elapsed_s():7.2f} s  {name:<15}{self._rows[name][1].describe()}"
            self._console.print(Text(line), soft_wrap=True)

    def table(self) -> Table:
        """The table as it is now; at most 100 columns wide."""
        table = Table(
            title=f"{self._title}   {self._elapsed_s():.1f} s", title_justify="left", width=self._width
        )
        table.add_column("request", width=14)
        table.add_column("state", width=10)
        table.add_column("tokens", justify="right", width=6)
        table.add_column("preempted", justify="right", width=9)
        table.add_column("latest output", no_wrap=True)
        for name, (class_name, progress) in self._rows.items():
            style = _STYLE_BY_STATE[progress.state]
            table.add_row(
                Text(name, _STYLE_BY_CLASS.get(class_name, "")),
                Text(progress.state, style),
                str(progress.num_tokens),
                f"{progress.preemptions}x" if progress.preemptions else "",
                Text(tail_of(progress), "red" if progress.state is State.FAILED else "dim"),
            )
        return table


def tail_of(progress: Progress, num_characters: int = 42) -> str:
    """The end of a request's text on one line, or why it failed."""
    if progress.state is State.FAILED:
        return progress.note[:num_characters]
    return " ".join(progress.text.split())[-num_characters:]


def print_summary(console: Console, summaries: list[ClassSummary]) -> None:
    """The statistics, by policy and class; needs 94 columns."""
    table = Table(
        title="By policy and class; TTFT and TPOT (median) in seconds, recomputed in tokens",
        title_justify="left",
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("class", no_wrap=True)
    for heading in ("number", "TTFT p50", "TTFT max", "TPOT", "preempted", "recomputed", "took"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in summaries:
        table.add_row(
            one.policy,
            Text(one.class_name, _STYLE_BY_CLASS.get(one.class_name, "")),
            str(one.num_requests),
            _number(one.ttft_s_median, 2),
            _number(one.ttft_s_max, 2),
            _number(one.tpot_s_median, 3),
            str(one.preemptions),
            str(one.recomputed_tokens),
            f"{one.duration_s:.1f} s",
        )
    console.print(table)


def print_verdict(console: Console, checks: list[Check]) -> None:
    """What was promised and whether it held, a line each."""
    for check in checks:
        mark = Text("  ok  ", "bold green") if check.passed else Text(" FAIL ", "bold red")
        console.print(mark + Text(check.text), soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
