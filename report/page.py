"""One self-contained HTML file: what was run, how it went, plots and tables."""

import html
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from report import plots, style
from report.summary import RunSummary, at, band, classes_of, names_of, rates_of
from timeline.printable import printable, printable_lines
from timeline.secrecy import redacted
from workloads.statistics import TARGETS, Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Facts:
    """What a reader needs to make the same report again.

    Attributes:
        title: of the page.
        workload: what arrived.
        server: what served it.
        command: that made the report.
        versions: of whatever took part, by name.
        notes: sentences on what the figures do and don't mean.
    """

    title: str
    workload: str = ""
    server: str = ""
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the page: heading, what it shows, and how it is drawn."""

    heading: str
    caption: str
    draw: "Callable[[], Figure]"


def write_report(
    path: Path, facts: Facts, summaries: Sequence[RunSummary], targets: Mapping[str, Target] = TARGETS
) -> None:
    """Write the report.

    Raises:
        PlotsUnavailable: matplotlib is missing.
        OSError: the file can't be written.
    """
    path.write_text(render(facts, summaries, targets), encoding="utf-8")


def render(facts: Facts, summaries: Sequence[RunSummary], targets: Mapping[str, Target] = TARGETS) -> str:
    """The report's HTML; see ``write_report``."""
    drawn = [
        f"<section><h2>{_text(plot.heading)}</h2><p>{_text(plot.caption)}</p>"
        f"<figure>{style.svg(plot.draw(), f'plot{number}')}</figure></section>"
        for number, plot in enumerate(plots_of(summaries, targets))
    ]
    return _PAGE.format(
        title=_text(facts.title),
        facts=_facts(facts, summaries, targets),
        plots="\n".join(drawn),
        table=_table(summaries),
        notes="".join(f"<li>{_text(note)}</li>" for note in (*facts.notes, *_NOTES)),
    )


def plots_of(summaries: Sequence[RunSummary], targets: Mapping[str, Target] = TARGETS) -> list[Plot]:
    """The plots that these runs have something to show in."""
    if not summaries:
        return []
    rates = rates_of(summaries)
    shown = knee(summaries)
    load = f"at {shown:.3g} requests/s offered"
    made = [
        Plot(
            "Policy against policy",
            f"{load.capitalize()}. Dot: median; bar: to the 90th percentile; tick: 99th. Left is better.",
            lambda: plots.side_by_side(summaries, shown, targets),
        ),
        Plot(
            "Time to first token",
            f"Share of requests that had their first token in time, {load}, by class.",
            lambda: plots.latency_cdfs(summaries, "ttft", shown, targets),
        ),
        Plot(
            "Time per output token",
            f"Share of requests whose output came at least so quickly, {load}, by class.",
            lambda: plots.latency_cdfs(summaries, "tpot", shown, targets),
        ),
    ]
    if len(rates) > 1:
        made[:0] = [
            Plot(
                "Goodput and attainment against offered rate",
                "Open loop: requests arrive whether the server keeps up or not. Bands are 95 % confidence "
                "intervals over the seeds. The thin diagonal: everything that is offered, within target.",
                lambda: plots.against_rate(summaries),
            )
        ]
        made += [
            Plot(
                "Latency against offered rate",
                "Median and 99th percentile of the time to the first token, geometric means over the seeds.",
                lambda: plots.latency_against_rate(summaries, targets),
            ),
            Plot(
                "Throughput against interactivity",
                "One point for each offered rate, labelled on the first line; up and to the right is better.",
                lambda: plots.throughput_against_interactivity(summaries),
            ),
            Plot(
                "What preemption costs",
                "Tokens that were computed a second time because their request had lost its blocks.",
                lambda: plots.recompute_tax(summaries),
            ),
        ]
    if any(s.samples for s in summaries):
        made.append(
            Plot(
                "Through the run",
                f"The state of the server over time, {load}, first seed.",
                lambda: plots.time_series(summaries, shown),
            )
        )
    return made


def knee(summaries: Sequence[RunSummary]) -> float:
    """The rate that tells policies apart best: where their most urgent class's attainment differs most.

    Of equals the highest; with one configuration the highest rate there is.
    """
    rates, names, urgent = rates_of(summaries), names_of(summaries), classes_of(summaries)[0]

    def spread(rate: float) -> float:
        shares = []
        for name in names:
            found = [p.attainment for s in at(summaries, name, rate) if (p := s.of_class(urgent))]
            shares += [math.fsum(found) / len(found)] if found else []
        return max(shares) - min(shares) if shares else 0.0

    return max(rates, key=lambda rate: (round(spread(rate), 2), rate))


def _facts(facts: Facts, summaries: Sequence[RunSummary], targets: Mapping[str, Target]) -> str:
    seeds = sorted({s.seed for s in summaries})
    rows = {
        "workload": facts.workload,
        "server": facts.server,
        "requests a run": _range([s.num_requests for s in summaries]),
        "offered rates": ", ".join(f"{rate:.3g}" for rate in rates_of(summaries)) + " requests/s",
        "seeds": ", ".join(map(str, seeds)),
        "targets": "; ".join(_target(name, targets) for name in classes_of(summaries)),
        "versions": ", ".join(f"{name} {value}" for name, value in facts.versions.items()),
    }
    body = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in rows.items() if v)
    command = f"<pre>{html.escape(printable_lines(facts.command))}</pre>" if facts.command else ""
    return f"<dl>{body}</dl>{command}"


def _target(name: str, targets: Mapping[str, Target]) -> str:
    target = targets.get(name, Target())
    ttft = f"first token in {target.ttft_s:g} s" if math.isfinite(target.ttft_s) else ""
    tpot = f"{target.tpot_s * 1e3:g} ms a token" if math.isfinite(target.tpot_s) else ""
    return f"{name}: {', '.join(filter(None, (ttft, tpot))) or 'none'}"


def _table(summaries: Sequence[RunSummary]) -> str:
    rows = []
    for rate in rates_of(summaries):
        for name in names_of(summaries):
            runs = at(summaries, name, rate)
            for number, class_name in enumerate(classes_of(runs)):
                rows.append(_row(runs, class_name, f"{rate:.3g}", name, whole=number == 0))
    head = "".join(f"<th>{_text(h)}</th>" for h in _HEADS)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(runs: Sequence[RunSummary], class_name: str, rate: str, name: str, *, whole: bool) -> str:
    parts = [part for run in runs if (part := run.of_class(class_name)) is not None]

    def mean(values: Sequence[float | None], form: str, scale: float = 1.0) -> str:
        found = band([v for v in values if v is not None])
        return "" if found is None else format(found.mean * scale, form)

    cells = [
        rate if whole else "",
        name if whole else "",
        class_name,
        *(mean([getattr(p.ttft_s, share) for p in parts], ",.3f") for share in ("p50", "p90", "p99")),
        *(mean([getattr(p.tpot_s, share) for p in parts], ",.1f", 1e3) for share in ("p50", "p99")),
        mean([p.attainment for p in parts], ".1%"),
        mean([p.goodput_rps for p in parts], ",.2f"),
        mean([r.output_tokens_per_s for r in runs], ",.0f") if whole else "",
        mean([float(p.num_preemptions) for p in parts], ",.0f"),
        mean([r.recompute_tax for r in runs], ".2%") if whole else "",
    ]
    mark = ' class="first"' if whole else ""
    named = zip(_HEADS, cells, strict=True)
    columns = (f'<td data-head="{_text(head)}">{_text(cell)}</td>' for head, cell in named)
    return f"<tr{mark}>{''.join(columns)}</tr>"


def _range(values: Sequence[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _text(text: str) -> str:
    return html.escape(printable(text))


def command_line(arguments: Sequence[str]) -> str:
    """Arguments as they would be typed, without the password of a URL."""
    return redacted(shlex.join(arguments))


#: Columns of the table.
_HEADS = (
    *("offered/s", "policy", "class", "TTFT p50 s", "TTFT p90", "TTFT p99", "TPOT p50 ms", "TPOT p99"),
    *("in target", "goodput/s", "tokens/s", "preempted", "recomputed"),
)

_NOTES = (
    "Every latency is measured from the moment a request was meant to start, whenever it was sent.",
    "TPOT is (last token - first token) / (tokens - 1) of a request. A request is within target when it was "
    "served whole and met all targets of its class; goodput counts those.",
    "Table and plots show means over the seeds; percentiles are those of each run, averaged.",
)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --ink: #222; --faint: #dcdcdc; --paper: #fff; --soft: #f4f5f7; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e6; --faint: #3a3f47; --paper: #15171b; --soft: #1e2127; }}
}}
@media print {{
  :root {{ --ink: #000; --faint: #ccc; --paper: #fff; --soft: #fff; }}
  section {{ break-inside: avoid; }} table {{ font-size: 7pt; }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; line-height: 1.2; }} h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .2rem; }}
p {{ margin: .2rem 0 .6rem; }} figure {{ margin: 0; overflow-x: auto; }}
svg {{ width: 100%; height: auto; min-width: 34rem; }}
svg text {{ font-family: system-ui, sans-serif !important; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0; }}
dt {{ font-weight: 600; }} dd {{ margin: 0; }}
pre {{ background: var(--soft); padding: .7rem .9rem; border-radius: 6px; white-space: pre-wrap; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: 12px;
  font-variant-numeric: tabular-nums; width: 100%; }}
th, td {{ text-align: right; padding: .16rem .38rem; white-space: nowrap; }}
th:nth-child(2), td:nth-child(2), th:nth-child(3), td:nth-child(3) {{ text-align: left; }}
thead th {{ border-bottom: 2px solid var(--ink); }} tr.first td {{ border-top: 1px solid var(--faint); }}
@media (max-width: 44rem) {{ /* a phone: plots whole, and a row of the table as lines of name and value */
  svg {{ min-width: 0; }} dl {{ grid-template-columns: 1fr; }} dd {{ overflow-wrap: anywhere; }}
  thead {{ display: none; }} table, tbody {{ display: block; }}
  tbody tr {{ display: grid; grid-template-columns: repeat(2, 1fr); column-gap: 1.2rem; padding: .5rem 0;
    border-top: 1px solid var(--faint); }}
  tbody td, tr.first td {{ display: flex; justify-content: space-between; border: 0; padding: .05rem 0; }}
  td:empty {{ display: none; }} td::before {{ content: attr(data-head); color: gray; }}
}}
</style></head><body>
<h1>{title}</h1>
{facts}
{plots}
<section><h2>Figures</h2><div class="wide">{table}</div></section>
<section><h2>How to read this</h2><ul>{notes}</ul></section>
</body></html>
"""
