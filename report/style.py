"""How plots look: colours that are told apart on paper, on dark screens and by the colour-blind.

Figures are drawn without a background, in stand-in colours for ink and grid that the
page's own style sheet replaces, so that one drawing suits light, dark and print.
"""

import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Of lines, in order; after Okabe and Ito, evened in lightness so that white and black both suit them.
COLOURS = ("#2f7ec0", "#d9822b", "#2a9d6f", "#c2579b", "#8a6fd1", "#c94f3d", "#3aa6b9", "#8c8c3e")
MARKERS = "osD^vP*X"
DASHES: tuple[Any, ...] = (
    "-",
    "--",
    "-.",
    ":",
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (3, 1)),
    (0, (8, 2)),
    (0, (1, 1)),
)
_INK, _FAINT = "#12345a", "#12345b"
_WIDTH_IN = 9.6


class PlotsUnavailable(Exception):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("plots need matplotlib: pip install 'vorrang[report]'")


def figure(num_rows: int, num_columns: int, *, row_in: float = 3.1, **more: Any) -> "tuple[Figure, Any]":
    """An empty figure and its axes, ``[num_rows, num_columns]``.

    Raises:
        PlotsUnavailable: matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsUnavailable from None
    with rc_context(_settings()):
        drawn = Figure(figsize=(_WIDTH_IN, row_in * num_rows), layout="constrained")
        axes = drawn.subplots(num_rows, num_columns, squeeze=False, **more)
        for one in axes.flat:
            one.grid(color=_FAINT, linewidth=0.6)
            one.set_axisbelow(True)
            one.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def svg(drawn: "Figure", name: str) -> str:
    """A figure as an ``<svg>`` element for a page that defines ``--ink`` and ``--faint``.

    Args:
        drawn: the figure.
        name: unique in the page; the same name gives the same text.
    """
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({**_settings(), "svg.hashsalt": name}):
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    # As wide as the page; the height follows from the view box.
    return re.sub(r'(<svg[^>]*?) height="[^"]*"|(<svg[^>]*?) width="[^"]*"', r"\1\2", text, count=1)


def save(drawn: "Figure", path: Path, *, dark: bool = False) -> None:
    """Write a figure to a file of its own, PNG or SVG by its name, on white or on near black."""
    from matplotlib import rc_context
    from matplotlib.colors import to_hex

    ink, faint, paper = ("#e8e8e8", "#4a4a4a", "#16181c") if dark else ("#222222", "#d9d9d9", "#ffffff")
    colours = {_INK: ink, _FAINT: faint}
    drawn.draw_without_rendering()  # ticks are made when they are first needed
    for artist in drawn.findobj():
        for kind in ("color", "edgecolor", "facecolor"):
            read, write = getattr(artist, f"get_{kind}", None), getattr(artist, f"set_{kind}", None)
            if read is None or write is None:
                continue
            value = read()
            if isinstance(value, str | tuple) and (colour := colours.get(to_hex(value))):
                write(colour)
    for text in (text for one in drawn.legends for text in one.get_texts()):
        text.set_color(ink)
    for axes in drawn.axes:
        axes.tick_params(which="both", color=ink, labelcolor=ink, grid_color=faint)
    with rc_context({**_settings(), "savefig.facecolor": paper, "text.color": ink}):
        drawn.savefig(path, dpi=150, facecolor=paper)


def logarithmic(axis: Any) -> None:
    """Make an axis (``axes.xaxis``, ``axes.yaxis``) logarithmic, labelled with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    span = high / low if low > 0 else math.inf
    subs = (1.0,) if span >= 150 else (1.0, 2.0, 5.0) if span >= 8 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(drawn: "Figure", axes: "Axes") -> None:
    """One legend for all axes, above them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        drawn.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 6), frameon=False,
                     labelcolor=_INK)  # fmt: skip


def faint() -> str:
    """The colour of what only guides the eye."""
    return _FAINT


def label(axes: "Axes", x: float, y: float, text: str) -> None:
    """A few words beside a point."""
    axes.annotate(text, (x, y), textcoords="offset points", xytext=(7, 5), fontsize=8, color=_INK)


def look(index: int) -> dict[str, Any]:
    """Colour, dash and marker of the line with that number."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 5,
        "linewidth": max(1.3, 3.0 - 0.45 * index),  # so that equal lines are all seen
    }


def reference(axes: "Axes", value: float, text: str, *, vertical: bool = True) -> None:
    """A thin line at a value that matters, such as a target."""
    line = axes.axvline if vertical else axes.axhline
    line(value, color=_INK, linewidth=0.9, linestyle=(0, (2, 2)), alpha=0.8)
    x, y = (value, 0.02) if vertical else (0.01, value)
    transform = axes.get_xaxis_transform() if vertical else axes.get_yaxis_transform()
    axes.text(
        x, y, f" {text}", transform=transform, fontsize=8, color=_INK,
        rotation=90 if vertical else 0, va="bottom", ha="right" if vertical else "left",
    )  # fmt: skip


def _settings() -> Any:
    return {
        "svg.fonttype": "none",
        "text.parse_math": False,  # a $ in a name is a $
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _INK,
        "axes.titlecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
