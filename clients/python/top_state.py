"""What ``vorrangctl top`` knows of a server: readings, rates between them, and the order of its rows.

Knows no screen, no network and no clock.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from clients.python.admin_types import LiveRequest, ServerLoad

#: Readings that are kept for the curve.
HISTORY_READINGS = 60
#: Rates are means over this time, so that a step that ends just before or after a look does not show.
RATE_WINDOW_S = 3.0
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server said at one time.

    Attributes:
        time_s: when it was asked, on any steady clock.
        load: its load.
        requests: who was alive, most urgent first; perhaps not all.
    """

    time_s: float
    load: ServerLoad
    requests: tuple[LiveRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Rates:
    """What happens in a second; all 0 before there are two readings."""

    output_tokens: float = 0.0
    computed_tokens: float = 0.0
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the requests, and what its rows are sorted by."""

    name: str
    key: Callable[[LiveRequest], Any]
    numeric: bool = False


_STATE_ORDER = ("DECODE", "PREFILL", "PREEMPTED", "WAITING", "PARKED")

#: By position; the first is the server's own order.
COLUMNS: tuple[Column, ...] = (
    Column("level", lambda r: r.level, numeric=True),
    Column("state", lambda r: _STATE_ORDER.index(r.state) if r.state in _STATE_ORDER else len(_STATE_ORDER)),
    Column("id", lambda r: (len(r.server_request_id), r.server_request_id)),
    Column("client's id", lambda r: r.request_id),
    Column("tenant", lambda r: r.tenant),
    Column("prompt", lambda r: -r.usage.prompt_tokens, numeric=True),
    Column("output", lambda r: -r.usage.output_tokens, numeric=True),
    Column("age", lambda r: -r.age_s, numeric=True),
    Column("preempted", lambda r: -r.usage.preemptions, numeric=True),
    Column("blocks", lambda r: -r.num_blocks, numeric=True),
    Column("label", lambda r: r.label),
)


@dataclass(slots=True)
class Board:
    """The state of the screen.

    Attributes:
        readings: newest last; emptied when the server has started again.
        curve: output tokens a second, one for each reading.
        sort_column: position in ``COLUMNS``.
        reverse: whether its order is turned round.
        class_name: only requests of that class; empty = all.
        trouble: why there is no news; empty while there is.
    """

    readings: deque[Reading] = field(default_factory=deque)
    curve: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_READINGS))
    sort_column: int = 0
    reverse: bool = False
    class_name: str = ""
    trouble: str = ""

    @property
    def latest(self) -> Reading | None:
        """The newest reading."""
        return self.readings[-1] if self.readings else None

    def take(self, reading: Reading) -> None:
        """A new reading has come; times must not go back."""
        latest = self.latest
        if latest is not None and reading.load.num_steps < latest.load.num_steps:
            self.readings.clear()  # it has started again: its counts have, too
            self.curve.clear()
        self.readings.append(reading)
        while len(self.readings) > 2 and reading.time_s - self.readings[1].time_s >= RATE_WINDOW_S:
            self.readings.popleft()
        self.curve.append(self.rates().output_tokens)
        self.trouble = ""

    def rates(self) -> Rates:
        """What happened in a second, over the last ``RATE_WINDOW_S``."""
        if len(self.readings) < 2:
            return Rates()
        first, last = self.readings[0], self.readings[-1]
        time_s = last.time_s - first.time_s
        if time_s <= 0:
            return Rates()
        return Rates(
            (last.load.num_output_tokens - first.load.num_output_tokens) / time_s,
            (last.load.num_computed_tokens - first.load.num_computed_tokens) / time_s,
            (last.load.num_steps - first.load.num_steps) / time_s,
        )

    def rows(self, class_of: Callable[[int], str]) -> list[LiveRequest]:
        """Requests to be shown, in order; equal ones stay most urgent first."""
        latest = self.latest
        if latest is None:
            return []
        shown = [r for r in latest.requests if not self.class_name or class_of(r.level) == self.class_name]
        return sorted(shown, key=COLUMNS[self.sort_column].key, reverse=self.reverse)

    def sort_by(self, column: int) -> None:
        """Sort by a column; the same one again turns the order round."""
        self.reverse = not self.reverse if column == self.sort_column else False
        self.sort_column = column


def curve_text(values: Iterable[float], width: int) -> str:
    """A curve of block characters, the newest value at the right; its top is the largest value."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    steps = len(_BARS) - 1
    bars = "".join(_BARS[0 if top <= 0 else round(value / top * steps)] for value in shown)
    return bars.rjust(width)


def bar_text(share: float, width: int) -> tuple[str, str]:
    """Filled and empty part of a bar; ``share`` of it, 0 to 1, is filled."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return "█" * filled, "░" * (width - filled)
