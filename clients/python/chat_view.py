"""How an answer of ``vorrangctl chat`` is shown: in a terminal it is drawn, elsewhere written."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from clients.python.errors import VorrangError
from clients.python.progress import Progress, State
from timeline.printable import printable, printable_lines

#: Stands in an answer where it was preempted.
MARK = "‖"
_MARK_STYLE = "bold red"
_STATUS_LINES = 4


class AnswerView(Protocol):
    """Shows one answer while its block is open."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the whole answer behind."""

    def show(self, new: str) -> None:
        """There is new text, or "" when only the state has changed."""

    def say(self, message: str) -> None:
        """Say something that is not of the answer."""


def marked_text(progress: Progress) -> Text:
    """The answer so far, with a mark wherever it was preempted."""
    marked = Text()
    done = 0
    for offset in progress.preempted_at:
        marked.append(progress.text[done:offset])
        marked.append(MARK, _MARK_STYLE)
        done = offset
    marked.append(progress.text[done:])
    return marked


class TerminalAnswer:
    """Draws an answer as it grows, with its state and what is being typed below.

    Args:
        console: where.
        progress: of the answer.
        typed: what is being typed.
    """

    def __init__(self, console: Console, progress: Progress, typed: Callable[[], str]) -> None:
        self._console = console
        self._progress = progress
        self._typed = typed

    def __enter__(self) -> Self:
        self._live = Live(
            console=self._console, get_renderable=self._draw, transient=True, refresh_per_second=10
        )
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        if self._progress.text:
            self._console.print(marked_text(self._progress))
        if not isinstance(error, VorrangError):  # Whoever catches that says more.
            self._console.print(Text(self._progress.describe(), "dim"))

    def show(self, _new: str) -> None:
        """Nothing to do: the view redraws itself."""

    def say(self, message: str) -> None:
        """Say something above the answer."""
        self._console.print(Text(message, "yellow"))

    def _draw(self) -> Group:
        progress = self._progress
        # More than a screen would be cut at the wrong end.
        lines = marked_text(progress).wrap(self._console, self._console.width)
        latest = lines[-max(1, self._console.height - _STATUS_LINES) :]
        is_held_up = progress.is_cut_off or progress.state is State.PREEMPTED
        status = Text(f" {progress.describe()} ", "bold white on red" if is_held_up else "black on cyan")
        typed = self._typed()
        return Group(*latest, status, *([Text(f"> {typed}", "dim")] if typed else []))


class PlainAnswer:
    """Writes an answer to stdout as it comes and changes of state to stderr."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        if self._progress.state is State.STOPPED:
            self.show("")

    def show(self, new: str) -> None:
        """Write what is new."""
        if new:
            sys.stdout.write(printable_lines(new) if sys.stdout.isatty() else new)
            sys.stdout.flush()
        else:
            self.say(f"[{self._progress.describe()}]")

    def say(self, message: str) -> None:
        """Write something to stderr."""
        sys.stderr.write(f"{printable(message)}\n")
        sys.stderr.flush()
