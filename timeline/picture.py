"""A run as a picture for documents: seats, who waits, what the queue and the KV pool hold.

Class is told by colour and by lightness, so it survives a grey printer; the background
is white, so it is the same on a dark screen. Needs matplotlib, which is not in the base install.
"""

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timeline.printable import printable
from timeline.run import Cut, Paths, Run, Stay, Wait
from timeline.sentences import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Fill and edge by rank of the class, most urgent first.
_COLORS = (("#d9480f", "#8a2c06"), ("#4c8ec9", "#1f4e79"), ("#cfd8dc", "#78909c"))
_INK, _FAINT, _CUT = "#1c1c1c", "#8a8a8a", "#b00020"
_ROW_HEIGHT = 0.78
_MAX_ROWS = 24
_WORDS = {"queued": "waits", "preempted": "was preempted", "parked": "is parked"}
_MAX_ARROWS = 60
#: More would take minutes, and nobody could tell them apart.
MAX_STRETCHES = 5000
#: Letters that fit from one side to the other.
_LETTERS = 170
_DPI = 150


class PictureUnavailable(Exception):
    """It can't be drawn; the message says why."""


def draw(run: Run, path: Path) -> None:
    """Draw a run.

    Args:
        run: which.
        path: a PNG, SVG or PDF, by its ending.

    Raises:
        PictureUnavailable: there is no matplotlib, the ending says nothing, nothing ran, or too much did.
        OSError: the file can't be written.
    """
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise PictureUnavailable(f"an image must end in .png, .svg or .pdf, got {path.name!r}")
    if not run.stays:
        raise PictureUnavailable("nothing ran, so there is nothing to draw")
    if len(run.stays) + len(run.waits) > MAX_STRETCHES:
        rule = f"at most {MAX_STRETCHES:,} stays and waits can be drawn, and there are"
        raise PictureUnavailable(f"{rule} {len(run.stays) + len(run.waits):,}: choose a part of the run")
    try:
        from matplotlib import rc_context
    except ImportError:
        raise PictureUnavailable("an image needs matplotlib: pip install 'vorrang[report]'") from None
    with rc_context(
        {
            "font.family": "sans-serif",
            "font.size": 9,
            "svg.fonttype": "none",
            "text.parse_math": False,
            "hatch.linewidth": 0.6,
        }
    ):
        figure(run).savefig(path, dpi=_DPI, facecolor="white")


def figure(run: Run) -> "Figure":
    """The picture of a run, in which somebody has run."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    num_seats = min(max(stay.seat for stay in run.stays) + 1, _MAX_ROWS)
    lanes = _lanes(run)
    num_lanes = max(1, min(len(lanes), _MAX_ROWS))
    heights = [0.42 * num_seats + 0.3, 0.26 * num_lanes + 0.3, 1.15]
    made = Figure(figsize=(11.0, sum(heights) + 1.9), layout=ConstrainedLayoutEngine(h_pad=0.06, hspace=0.02))
    grid = made.add_gridspec(3, 1, height_ratios=heights)
    seats = made.add_subplot(grid[0])
    queue, counts = made.add_subplot(grid[1], sharex=seats), made.add_subplot(grid[2], sharex=seats)
    seats.set_xlim(run.begin_s, max(run.end_s, run.begin_s + 1e-6))  # first: labels ask whether they fit
    seats.autoscale(enable=False, axis="x")
    _draw_seats(seats, run, num_seats)
    _draw_queue(queue, run, lanes, num_lanes)
    _draw_counts(counts, run)
    _draw_cuts(made, seats, queue, run, lanes, num_seats)
    for axes in (seats, queue):
        axes.tick_params(axis="x", labelbottom=False)
    _legend(made, run)
    made.suptitle(printable(_title(run)), fontsize=12, fontweight="bold", color=_INK)
    return made


def _title(run: Run) -> str:
    first = _telling(run)
    if first is None:
        return "Who sat on which seat of the running batch"
    paths = Paths(run)
    wait, gap, taken = paths.before(first), paths.gap(first), paths.taken(first)
    waited = f" {duration(wait.end_s - wait.begin_s)} later" if wait is not None else ""
    is_after = gap is not None and taken is not None and taken.end_s <= gap.end_s
    when = f"once {first.beneficiary} is done" if is_after else "later"
    urgent = f"{_urgency_of(first, run)}{first.beneficiary}"
    return f"No seat is free when {urgent} comes:{waited} {first.victim} gives way, and goes on {when}"


def _urgency_of(cut: Cut, run: Run) -> str:
    wait = Paths(run).before(cut)
    return "urgent " if wait is not None and wait.class_name == run.classes[0] else ""


def _telling(run: Run) -> Cut | None:
    """The preemption that shows best what it is about: the first for the most urgent class, if it resumes."""
    paths = Paths(run)
    rank = {name: number for number, name in enumerate(run.classes)}
    found = []
    for number, cut in enumerate(run.cuts):
        gap, wait = paths.gap(cut), paths.before(cut)
        if cut.beneficiary and gap is not None and wait is not None and paths.resumed(gap) is not None:
            found.append((rank.get(wait.class_name, 99), number, cut))
    return min(found)[2] if found else None


def _style(run: Run, class_name: str) -> tuple[str, str]:
    rank = run.classes.index(class_name) if class_name in run.classes else len(_COLORS) - 1
    return _COLORS[min(rank, len(_COLORS) - 1)]


def _draw_seats(axes: "Axes", run: Run, num_rows: int) -> None:
    for stay in run.stays:
        if stay.seat < num_rows:
            _draw_stay(axes, run, stay)
    axes.set_ylim(num_rows - 0.5, -0.5)
    axes.set_yticks(range(num_rows), [f"seat {number + 1}" for number in range(num_rows)])
    axes.tick_params(axis="y", length=0)
    axes.set_title("on a seat: computed in every step", loc="left", fontsize=9, color=_FAINT)
    _plain(axes)


def _draw_stay(axes: "Axes", run: Run, stay: Stay) -> None:
    fill, edge = _style(run, stay.class_name)
    low = stay.seat - _ROW_HEIGHT / 2
    axes.broken_barh(
        [(stay.begin_s, stay.end_s - stay.begin_s)],
        (low, _ROW_HEIGHT),
        facecolor=fill,
        edgecolor=edge,
        linewidth=0.8,
    )
    for kind, hatch in (("prefill", "////"), ("recompute", "xxxx")):
        spans = [
            (piece.begin_s, min(piece.end_s, stay.end_s) - piece.begin_s)
            for piece in stay.pieces
            if piece.kind == kind and piece.begin_s < stay.end_s
        ]
        axes.broken_barh(
            spans,
            (low, _ROW_HEIGHT),
            facecolor="none",
            edgecolor=edge if kind == "prefill" else _CUT,
            hatch=hatch,
            linewidth=0,
        )
    names = (f"{stay.request_id} goes on", stay.request_id) if stay.is_resume else (stay.request_id,)
    _label(axes, stay, stay.seat, names, light=fill == _COLORS[0][0])


def _label(axes: "Axes", one: Stay | Wait, row: float, texts: tuple[str, ...], *, light: bool) -> bool:
    """The longest of its texts that fits inside; False when none does."""
    share = (one.end_s - one.begin_s) / _width_s(axes)
    text = next((text for text in texts if share * _LETTERS >= len(text) + 1), None)
    if text is not None:
        axes.text(
            (one.begin_s + one.end_s) / 2,
            row,
            printable(text),
            ha="center",
            va="center",
            fontsize=8,
            clip_on=True,
            color="white" if light else _INK,
            fontweight="bold" if light else "normal",
        )
    return text is not None


def _label_beside(axes: "Axes", wait: Wait, row: float, next_s: float) -> None:
    """What it does, behind it, where the row has room for that until the next one."""
    text = f"{wait.request_id} comes, waits {duration(wait.end_s - wait.begin_s)}"
    if (next_s - wait.end_s) / _width_s(axes) * _LETTERS >= len(text) + 2:
        gap_s = _width_s(axes) / _LETTERS / 2
        axes.text(wait.end_s + gap_s, row, printable(text), ha="left", va="center", fontsize=8, color=_INK)


def _width_s(axes: "Axes") -> float:
    begin_s, end_s = axes.get_xlim()
    return float(end_s - begin_s) or 1.0


def _lanes(run: Run) -> dict[int, int]:
    """Rows of those that were preempted, first, then of those that waited for long enough to be seen."""
    preempted = sorted({w.lane for w in run.waits if w.kind != "queued" and w.end_s > w.begin_s})
    shown_s = (run.end_s - run.begin_s) / 400
    others = sorted({w.lane for w in run.waits if w.end_s - w.begin_s >= shown_s} - set(preempted))
    return {lane: row for row, lane in enumerate([*preempted, *others])}


def _draw_queue(axes: "Axes", run: Run, lanes: dict[int, int], num_rows: int) -> None:
    begins: dict[int, list[float]] = {}
    for wait in run.waits:
        begins.setdefault(wait.lane, []).append(wait.begin_s)
    for wait in run.waits:
        row = lanes.get(wait.lane, num_rows)
        if row >= num_rows:
            continue
        fill, edge = _style(run, wait.class_name)
        is_preempted = wait.kind != "queued"
        axes.broken_barh(
            [(wait.begin_s, wait.end_s - wait.begin_s)],
            (row - 0.3, 0.6),
            facecolor=fill if wait.class_name == run.classes[0] else "white",
            edgecolor=_CUT if is_preempted else edge,
            linewidth=1.0 if is_preempted else 0.8,
            linestyle="--" if is_preempted else "-",
        )
        names = (f"{wait.request_id} {_WORDS[wait.kind]}", wait.request_id)
        if not _label(axes, wait, row, names, light=False) and wait.kind == "queued":
            later = begins[wait.lane]
            next_in = bisect_right(later, wait.begin_s)
            next_s = later[next_in] if next_in < len(later) else run.end_s
            _label_beside(axes, wait, row, next_s)
    axes.set_ylim(num_rows - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_title("without a seat: waits", loc="left", fontsize=9, color=_FAINT)
    _plain(axes)


def _draw_cuts(
    made: "Figure", seats: "Axes", queue: "Axes", run: Run, lanes: dict[int, int], num_seats: int
) -> None:
    """From the seat that was lost down to where its holder waits, and up again to where it goes on."""
    from matplotlib.patches import ConnectionPatch

    paths = Paths(run)
    telling = _telling(run)
    cuts = run.cuts if len(run.cuts) <= _MAX_ARROWS else [telling] if telling else []
    for cut in cuts:
        lost, gap = paths.lost(cut), paths.gap(cut)
        if lost is None or gap is None or gap.lane not in lanes or lost.seat >= num_seats:
            continue
        row = lanes[gap.lane]
        resumed = paths.resumed(gap)
        ends: list[tuple[float, float, Axes, float, float, Axes]] = [
            (cut.at_s, lost.seat + _ROW_HEIGHT / 2, seats, cut.at_s, row - 0.3, queue)
        ]
        if resumed is not None and resumed.seat < num_seats:
            ends.append((gap.end_s, row - 0.3, queue, gap.end_s, resumed.seat + _ROW_HEIGHT / 2, seats))
        for x, y, axes, other_x, other_y, other_axes in ends:
            arrow: Any = ConnectionPatch(
                (x, y), (other_x, other_y), "data", "data", axesA=axes, axesB=other_axes,
                arrowstyle="-|>", color=_CUT, linewidth=1.1, mutation_scale=9,
            )  # fmt: skip
            arrow.set_in_layout(False)
            made.add_artist(arrow)


def _draw_counts(axes: "Axes", run: Run) -> None:
    from matplotlib.ticker import MaxNLocator

    times = [sample.at_s for sample in run.samples] + [run.end_s]
    below = [0.0] * len(times)
    for name in reversed(run.classes):
        counts = [float(sample.waiting.get(name, 0)) for sample in run.samples]
        above = [a + b for a, b in zip(below, [*counts, counts[-1] if counts else 0.0], strict=True)]
        axes.fill_between(times, below, above, step="post", facecolor=_style(run, name)[0], linewidth=0)
        below = above
    axes.set_ylabel("waiting")
    axes.set_ylim(0, max([*below, 1.0]) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.set_xlabel("seconds")
    _plain(axes)
    if run.num_blocks:
        shares = [100 * sample.used_blocks / run.num_blocks for sample in run.samples]
        other = axes.twinx()
        other.step(times, [*shares, shares[-1] if shares else 0.0], where="post", color=_INK, linewidth=1.0)
        other.set_ylabel("KV pool used, %")
        other.set_ylim(0, 105 if max(shares, default=0.0) > 40 else max(10.0, max(shares, default=1.0) * 1.6))
        for side in ("top", "left", "bottom"):
            other.spines[side].set_visible(False)


def _plain(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(made: "Figure", run: Run) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {stay.class_name for stay in run.stays} | {wait.class_name for wait in run.waits}
    handles: list[Any] = []
    for name in run.classes:
        if name in seen:
            fill, edge = _style(run, name)
            handles.append(Patch(facecolor=fill, edgecolor=edge, label=name))
    kinds = {piece.kind for stay in run.stays for piece in stay.pieces}
    if "prefill" in kinds:
        handles.append(Patch(facecolor="white", edgecolor=_FAINT, hatch="////", label="computes its prompt"))
    if "recompute" in kinds:
        handles.append(
            Patch(facecolor="white", edgecolor=_CUT, hatch="xxxx", label="computes again what it had lost")
        )
    if run.cuts:
        handles.append(
            Line2D([], [], color=_CUT, marker=">", markersize=4, label="loses its seat, gets one again")
        )
    if run.num_blocks:
        handles.append(Line2D([], [], color=_INK, label="KV pool used"))
    made.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
