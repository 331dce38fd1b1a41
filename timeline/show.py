"""An account on a terminal: a bar of its parts, a table, sentences."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from timeline.account import Account
from timeline.printable import printable
from timeline.sentences import duration, headline, rows, sentences

_COLORS = {
    "intake": "grey50",
    "queued": "yellow",
    "prefill": "blue",
    "held": "dark_orange",
    "decode": "green",
    "stalled": "dark_orange",
    "preempted": "red",
    "recompute": "magenta",
    "parked": "grey50",
    "returning": "yellow",
    "delivery": "cyan",
}
_LETTERS = {
    "intake": "I",
    "queued": "Q",
    "prefill": "P",
    "held": "H",
    "decode": "D",
    "stalled": "S",
    "preempted": "X",
    "recompute": "R",
    "parked": "Z",
    "returning": "W",
    "delivery": "V",
}
_BAR_WIDTH = 60


def bar(account: Account, width: int = _BAR_WIDTH) -> Text:
    """Its life from left to right, a letter for each phase; what is shorter than a cell may be missing."""
    text = Text()
    end_s = max(account.total_s, 1e-9)
    for cell in range(width):
        at_s = (cell + 0.5) * end_s / width
        phase = next((i.phase for i in account.intervals if i.begin_s <= at_s < i.end_s), "")
        letter = _LETTERS.get(phase, ".")
        text.append(letter, style=f"bold white on {_COLORS[phase]}" if phase in _COLORS else "dim")
    return text


def shown(account: Account) -> RenderableType:
    """All of it for rich."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("why")
    for phase, why, seconds, share in rows(account):
        style = _COLORS.get(phase, "")
        letter, name = Text(_LETTERS.get(phase, "?"), style=style), Text(printable(phase), style=style)
        table.add_row(letter, name, duration(seconds), f"{share:.1%}", Text(printable(why)))
    table.add_row("", Text("in all", style="bold"), duration(account.total_s), "100.0%", Text(""))
    story = Table.grid(padding=(0, 1))
    for sentence in sentences(account):
        story.add_row("-", Text(printable(sentence)))
    head = Text(printable(headline(account)), style="bold")
    return Group(head, Text(), bar(account), Text(), table, Text(), story)


def print_account(console: Console, account: Account) -> None:
    """Print it."""
    console.print(shown(account), highlight=False)
