"""How ``vorrangctl load`` shows itself: live figures while it runs, tables at the end."""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from clients.python.admin_view import STYLE_BY_CLASS
from clients.python.load_report import ClassSummary, LoadSummary
from clients.python.load_state import LoadState
from workloads.statistics import Distribution, distribution

_REFRESHES_PER_S = 5
_RATE_HEADINGS = (
    "due", "served", "failed", "offered/s", "achieved/s", "tokens/s", "preempted", "recomputed",
)  # fmt: skip
_PLAIN_EVERY_S = 5.0


class LoadView:
    """A run as it goes: a bar and figures on a terminal, a line now and then elsewhere; a context manager.

    Args:
        console: where to draw.
        state: of the run.
        now_s: the time on the clock of the run.
    """

    def __init__(self, console: Console, state: LoadState, now_s: Callable[[], float]) -> None:
        self._console = console
        self._state = state
        self._now_s = now_s
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(40),
            TextColumn("{task.fields[note]}", markup=False),
        )
        self._task = self._bar.add_task("due", note="")
        self._live: Live | None = None
        self._plain_at_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self.draw,
                refresh_per_second=_REFRESHES_PER_S,
                transient=True,
            )
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def tick(self) -> None:
        """Some time has passed: a plain line may be due; on a terminal the view redraws itself."""
        if self._live is None and self._state.started_s:
            elapsed_s = self._elapsed_s()
            if elapsed_s >= self._plain_at_s + _PLAIN_EVERY_S:
                self._plain_at_s = elapsed_s
                self._console.print(Text(f"{elapsed_s:6.1f} s  {self._counts()}"), soft_wrap=True)

    def draw(self) -> Group:
        """The run as it is now."""
        state = self._state
        note = f"{len(state.records)}/{state.num_total}  {self._elapsed_s():.1f} s"
        self._bar.update(self._task, total=state.num_total or 1, completed=len(state.records), note=note)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("lately, in ms", min_width=14)
        for heading in ("TTFT p50", "p99", "gap p50", "p99"):
            table.add_column(heading, justify="right", min_width=9)
        for name, recent in state.recent_ttft_s.items():
            if recent:
                first, gap = distribution(recent), distribution(state.recent_gap_s[name])
                cells = (_ms(first.p50), _ms(first.p99), _ms(gap.p50), _ms(gap.p99))
                table.add_row(Text(name, STYLE_BY_CLASS[name]), *cells)
        return Group(self._bar, Text(self._counts()), table)

    def _elapsed_s(self) -> float:
        return max(0.0, self._now_s() - self._state.started_s) if self._state.started_s else 0.0

    def _counts(self) -> str:
        state = self._state
        elapsed_s = self._elapsed_s()
        parts = [
            f"{state.num_in_flight} alive",
            f"{state.num_finished} finished",
            f"{sum(state.errors.values())} failed",
            f"{state.num_tokens / elapsed_s if elapsed_s else 0:,.0f} tokens/s",
        ]
        return ", ".join(parts)


def print_summary(console: Console, summary: LoadSummary) -> None:
    """Everything a run says: rates, latencies, errors, warnings; needs about 110 columns."""
    state = " (interrupted)" if summary.interrupted else ""
    console.print(
        Text.assemble(
            (f"{summary.workload}", "bold"),
            f" against {summary.server}: {summary.num_due} requests due in {summary.duration_s:.1f} s, "
            f"all over after {summary.makespan_s:.1f} s{state}",
        ),
        soft_wrap=not console.is_terminal,
    )
    console.print(_rates_table(summary))
    console.print(_latency_table(summary))
    for line in _notes(summary):
        console.print(line, soft_wrap=not console.is_terminal)


def _rows(summary: LoadSummary) -> Iterable[tuple[Text, ClassSummary]]:
    """One for each class, and one for all where there are several."""
    several = len(summary.classes) > 1
    for one in (*summary.classes, *((summary.total,) if several else ())):
        yield Text(one.name, STYLE_BY_CLASS.get(one.name, "bold")), one


def _rates_table(summary: LoadSummary) -> Table:
    table = Table(title="Rates", title_justify="left")
    table.add_column("class", no_wrap=True)
    for heading in (
        "due",
        "served",
        "failed",
        "offered/s",
        "achieved/s",
        "tokens/s",
        "preempted",
        "recomputed",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    with_goodput = summary.total.num_good is not None
    if with_goodput:
        table.add_column("in time", justify="right", no_wrap=True)
    for name, one in _rows(summary):
        cells: list[str | Text] = [
            str(one.num_requests),
            str(one.num_served),
            Text(str(one.num_failed), "bold red" if one.num_failed else ""),
            f"{one.offered_rps:.2f}",
            f"{one.achieved_rps:.2f}",
            f"{one.output_tokens_per_s:,.0f}",
            str(one.num_preemptions),
            f"{one.num_recomputed_tokens:,}",
        ]
        if with_goodput:
            assert one.num_good is not None
            cells.append(f"{one.num_good / one.num_requests:.1%}" if one.num_requests else "-")
        table.add_row(name, *cells)
    return table


def _latency_table(summary: LoadSummary) -> Table:
    table = Table(
        title="Latencies from the intended start, in milliseconds",
        caption="gap: between two arrivals of output of one request",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("class", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("number", "mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, one in _rows(summary):
        kinds: tuple[tuple[str, Distribution], ...] = (
            ("TTFT", one.ttft_s),
            ("TPOT", one.tpot_s),
            ("gap", one.gap_s),
            ("end to end", one.e2e_s),
        )
        for number, (kind, values) in enumerate(kinds):
            figures = (values.mean, values.p50, values.p90, values.p99, values.max)
            last = number == len(kinds) - 1
            table.add_row(
                name if number == 0 else "", kind, f"{values.count:,}", *map(_ms, figures), end_section=last
            )
    return table


def _notes(summary: LoadSummary) -> Iterable[Text]:
    for reason, count in summary.errors.items():
        yield Text(f"{count}x {reason}: {summary.messages[reason]}", "red")
    if summary.total.num_unfinished:
        yield Text(
            f"{summary.total.num_unfinished} requests had not ended; they count with the time they had "
            "waited, so that latencies are lower bounds",
            "yellow",
        )
    send, loop = summary.lateness_s["send"], summary.lateness_s["loop"]
    text = (
        f"the generator itself: sent {_ms(send['p50'])} / {_ms(send['p99'])} / {_ms(send['max'])} ms late, "
        f"its loop {_ms(loop['p50'])} / {_ms(loop['p99'])} / {_ms(loop['max'])} ms (p50 / p99 / max)"
    )
    yield Text(text, "dim")
    if summary.late:
        yield Text(
            "WARNING: the generator was late itself; the figures hold its lateness. Give it a core of its "
            "own, more --connections, or a lower rate",
            "bold yellow",
        )


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{1000 * value_s:,.1f}"
