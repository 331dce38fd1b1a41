"""The plots of a report. Each takes summaries of runs and gives a matplotlib figure.

Raises:
    PlotsUnavailable: (all of them) matplotlib is missing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from report import style
from report.summary import (
    NUM_POINTS,
    RunSummary,
    at,
    band,
    classes_of,
    names_of,
    pooled_curve,
    rates_of,
)
from workloads.statistics import TARGETS, Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_QUANTITY_NAMES = {
    "ttft": "time to first token, s",
    "tpot": "time per output token, ms",
    "e2e": "whole request, s",
}
_SCALES = {"ttft": 1.0, "tpot": 1e3, "e2e": 1.0}


def latency_cdfs(
    summaries: Sequence[RunSummary], quantity: str, rate: float, targets: Mapping[str, Target] = TARGETS
) -> "Figure":
    """Share of requests that were at least so quick, by class; all seeds together.

    Args:
        summaries: runs at any rates.
        quantity: ``ttft``, ``tpot`` or ``e2e``.
        rate: the one that is shown, of ``rates_of``.
        targets: marked where finite.
    """
    classes, names = classes_of(summaries), names_of(summaries)
    figure, axes = style.figure(1, len(classes), row_in=3.6, sharey=True)
    shares = [i / (NUM_POINTS - 1) for i in range(NUM_POINTS)]
    for column, class_name in zip(axes[0], classes, strict=True):
        for index, name in enumerate(names):
            curve = pooled_curve(at(summaries, name, rate), class_name, quantity)
            values = [max(1e-4, value * _SCALES[quantity]) for value in curve]
            column.plot(values, shares[: len(values)], label=name, **{**style.look(index), "marker": ""})
        target = targets.get(class_name, Target())
        limit = {"ttft": target.ttft_s, "tpot": target.tpot_s, "e2e": math.inf}[quantity]
        if math.isfinite(limit):
            style.reference(column, limit * _SCALES[quantity], "target")
        style.logarithmic(column.xaxis)
        column.set_title(class_name)
        column.set_xlabel(_QUANTITY_NAMES[quantity])
    axes[0][0].set_ylim(0, 1.005)
    axes[0][0].set_ylabel("share of requests")
    style.legend(figure, axes[0][0])
    return figure


def against_rate(summaries: Sequence[RunSummary]) -> "Figure":
    """Goodput and SLO attainment of each class against the offered rate, with 95 % intervals over seeds."""
    classes = classes_of(summaries)
    panels: list[tuple[str, Callable[[RunSummary], float | None], float]] = [
        ("goodput, requests/s within target", lambda s: s.goodput_rps, math.inf),
        ("output, tokens/s", lambda s: s.output_tokens_per_s, math.inf),
        *((f"{name}: share within target", _attainment(name), 1.0) for name in classes),
    ]
    num_rows = math.ceil(len(panels) / 2)
    figure, axes = style.figure(num_rows, 2, row_in=2.9, sharex=True)
    for axis, (title, value, most) in zip(axes.flat, panels, strict=False):
        _lines(axis, summaries, value, most)
        axis.set_title(title)
        axis.set_ylim(bottom=0, **({"top": 1.03} if most == 1.0 else {}))
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    rates = rates_of(summaries)
    if rates:  # what would be if everything that is offered were good
        axes[0][0].plot([0, rates[-1]], [0, rates[-1]], color=style.faint(), linewidth=1.0, zorder=0)
    for axis in axes[-1]:
        axis.set_xlabel("offered, requests/s")
    style.legend(figure, axes[0][0])
    return figure


def latency_against_rate(
    summaries: Sequence[RunSummary], targets: Mapping[str, Target] = TARGETS
) -> "Figure":
    """TTFT of each class, median and 99th percentile, against the offered rate."""
    classes = classes_of(summaries)
    figure, axes = style.figure(2, len(classes), row_in=2.8, sharex=True)
    for column, class_name in enumerate(classes):
        for row, share in enumerate(("p50", "p99")):
            axis = axes[row][column]
            _lines(axis, summaries, _ttft(class_name, share), math.inf, in_logarithms=True)
            limit = targets.get(class_name, Target()).ttft_s
            if math.isfinite(limit):
                style.reference(axis, limit, "target", vertical=False)
            style.logarithmic(axis.yaxis)
            axis.set_title(f"{class_name}: TTFT {share}, s")
        axes[1][column].set_xlabel("offered, requests/s")
    style.legend(figure, axes[0][0])
    return figure


def throughput_against_interactivity(
    summaries: Sequence[RunSummary], class_name: str | None = None
) -> "Figure":
    """What the device makes against what one user sees: up and to the right is better.

    Args:
        summaries: runs at several rates; each configuration's are joined by a line.
        class_name: whose speed is on the x axis; None: the most urgent class there is.
    """
    class_name = class_name or classes_of(summaries)[0]
    figure, axes = style.figure(1, 1, row_in=4.2)
    axis = axes[0][0]
    for index, name in enumerate(names_of(summaries)):
        points = []
        for rate in rates_of(summaries):
            runs = at(summaries, name, rate)
            speeds = [1 / p.tpot_s.p50 for s in runs if (p := s.of_class(class_name)) and p.tpot_s.p50]
            if speeds:
                points.append((fmean(speeds), fmean([s.output_tokens_per_s for s in runs]), rate))
        if not points:
            continue
        axis.plot([p[0] for p in points], [p[1] for p in points], label=name, **style.look(index))
        for speed, output, rate in points if index == 0 else ():
            style.label(axis, speed, output, f"{rate:.3g}/s")
    for scale in (axis.xaxis, axis.yaxis):  # from 0, with room for markers and labels
        scale.set_view_interval(0, 1.08 * scale.get_data_interval()[1], ignore=True)
    axis.set_xlabel(f"output speed that the median {class_name} request sees, tokens/s")
    axis.set_ylabel("output of the device, tokens/s")
    style.legend(figure, axis)
    return figure


def time_series(summaries: Sequence[RunSummary], rate: float) -> "Figure":
    """Running, waiting, KV use and preemptions over time, of each configuration's first seed at one rate."""
    runs = [at(summaries, name, rate)[:1] for name in names_of(summaries)]
    panels: list[tuple[str, Callable[[Any], float]]] = [
        ("running", lambda s: s.num_running),
        ("waiting", lambda s: s.num_waiting),
        ("KV blocks held, %", lambda s: 100 * s.kv_use),
        ("preemptions so far", lambda s: s.num_preemptions),
    ]
    figure, axes = style.figure(len(panels), 1, row_in=1.75, sharex=True)
    for axis, (title, value) in zip(axes[:, 0], panels, strict=True):
        for index, run in enumerate(runs):
            for summary in run:
                times = [sample.time_s for sample in summary.samples]
                values = [value(sample) for sample in summary.samples]
                look = {**style.look(index), "marker": "", "linewidth": 1.3}
                axis.plot(times, values, label=summary.name, drawstyle="steps-post", **look)
        axis.set_title(title, loc="left")
        axis.set_ylim(bottom=0)
    axes[-1][0].set_xlabel("s from the start of the run")
    style.legend(figure, axes[0][0])
    return figure


def recompute_tax(summaries: Sequence[RunSummary]) -> "Figure":
    """Share of computed tokens that had been computed before, and preemptions per request."""
    figure, axes = style.figure(1, 2, row_in=3.2)
    _lines(axes[0][0], summaries, lambda s: None if s.recompute_tax is None else 100 * s.recompute_tax, 100.0)
    _lines(axes[0][1], summaries, lambda s: s.num_preemptions / max(1, s.num_requests), math.inf)
    for axis, title in zip(
        axes[0], ("recompute tax, % of computed tokens", "preemptions per request"), strict=True
    ):
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("offered, requests/s")
    style.legend(figure, axes[0][0])
    return figure


def side_by_side(
    summaries: Sequence[RunSummary], rate: float, targets: Mapping[str, Target] = TARGETS
) -> "Figure":
    """Policy against policy at one rate: TTFT and TPOT of each class, from median to 99th percentile."""
    names, classes = names_of(summaries), classes_of(summaries)
    figure, axes = style.figure(2, len(classes), row_in=0.9 + 0.27 * len(names), sharey=True)
    for column, class_name in enumerate(classes):
        target = targets.get(class_name, Target())
        for row, (quantity, limit) in enumerate((("ttft", target.ttft_s), ("tpot", target.tpot_s))):
            axis = axes[row][column]
            for index, name in enumerate(names):
                curve = pooled_curve(at(summaries, name, rate), class_name, quantity)
                if curve:
                    _span(axis, [_SCALES[quantity] * v for v in curve], index)
            if math.isfinite(limit):
                style.reference(axis, limit * _SCALES[quantity], "target")
            style.logarithmic(axis.xaxis)
            axis.set_title(f"{class_name}: {_QUANTITY_NAMES[quantity]}", fontsize=9.5)
            axis.set_yticks(range(len(names)), names)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.grid(axis="y", visible=False)
    return figure


def _span(axis: "Axes", curve: Sequence[float], index: int) -> None:
    """A bar from the median over the 90th to the 99th percentile."""
    p50, p90, p99 = (curve[round(share * (NUM_POINTS - 1))] for share in (0.5, 0.9, 0.99))
    colour = style.COLOURS[index % len(style.COLOURS)]
    axis.plot([p50, p99], [index, index], color=colour, linewidth=2, alpha=0.5, solid_capstyle="butt")
    axis.plot([p50, p90], [index, index], color=colour, linewidth=7, alpha=0.5, solid_capstyle="butt")
    axis.plot([p50], [index], color=colour, marker="o", markersize=8)
    axis.plot([p99], [index], color=colour, marker="|", markersize=11, markeredgewidth=2)


def _lines(
    axis: "Axes",
    summaries: Sequence[RunSummary],
    value: Callable[[RunSummary], float | None],
    most: float,
    *,
    in_logarithms: bool = False,
) -> None:
    """A line for each configuration over the rates, with its band."""
    for index, name in enumerate(names_of(summaries)):
        rates, bands = [], []
        for rate in rates_of(summaries):
            values = [v for s in at(summaries, name, rate) if (v := value(s)) is not None]
            found = band(values, most=most, in_logarithms=in_logarithms)
            if found is not None:
                rates.append(rate)
                bands.append(found)
        look = style.look(index)
        axis.plot(rates, [b.mean for b in bands], label=name, **look)
        if any(b.high > b.low for b in bands):
            lows, highs = [b.low for b in bands], [b.high for b in bands]
            axis.fill_between(rates, lows, highs, color=look["color"], alpha=0.18, linewidth=0)


def _attainment(class_name: str) -> Callable[[RunSummary], float | None]:
    return lambda s: None if (part := s.of_class(class_name)) is None else part.attainment


def _ttft(class_name: str, share: str) -> Callable[[RunSummary], float | None]:
    return lambda s: None if (part := s.of_class(class_name)) is None else getattr(part.ttft_s, share)
