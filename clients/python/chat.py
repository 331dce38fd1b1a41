"""``vorrangctl chat``: a conversation in the terminal that shows what the scheduler does to it."""

import asyncio
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from clients.python.client import VorrangClient
from clients.python.errors import VorrangError
from clients.python.events import Delta
from clients.python.progress import Progress, State

HELP = "/priority NAME or LEVEL changes the priority, /reset forgets, /quit leaves; Ctrl-C stops an answer"
_STATUS_LINES = 3


class Conversation:
    """Turns of a conversation, and how the next answer is to be made.

    Args:
        system: system message; empty = none.
        priority: class name or level of the answers.
        max_tokens: longest answer.
        temperature: 0 = greedy.
    """

    def __init__(self, *, system: str, priority: str, max_tokens: int, temperature: float) -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self.priority = priority
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._turns: list[dict[str, str]] = []
        self.progress = Progress()

    def reset(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    async def answer(self, client: VorrangClient, text: str, show: Callable[[str], None]) -> Progress:
        """Ask for an answer to ``text`` and remember both.

        Args:
            client: whom to ask.
            text: what the user says.
            show: called with what is new: the new text, or "" when only the state has changed.
                It finds the progress in ``self.progress``.

        Raises:
            VorrangError: the request failed; the turn is forgotten.

        Cancellation: cancels the request on the server; what was produced is remembered.
        """
        self.progress = Progress()
        asked = [*self._turns, {"role": "user", "content": text}]
        stream = client.generate_stream(
            messages=[*self._system, *asked],
            priority=self.priority,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            label="vorrangctl chat",
        )
        try:
            async with stream:
                async for event in stream:
                    if self.progress.apply(event) or isinstance(event, Delta):
                        show(event.text if isinstance(event, Delta) else "")
        except asyncio.CancelledError:
            self.progress.stop()
            raise
        finally:
            if self.progress.text:
                self._turns = [*asked, {"role": "assistant", "content": self.progress.text}]
        return self.progress


class _TerminalAnswer:
    """Draws an answer as it grows, with a status line below; leaves the whole answer behind."""

    def __init__(self, console: Console, conversation: Conversation) -> None:
        self._console = console
        self._conversation = conversation

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
        progress = self._conversation.progress
        if progress.text:
            self._console.print(Text(progress.text))
        if not isinstance(error, VorrangError):  # Whoever catches that says more.
            self._console.print(Text(progress.describe(), "dim"))

    def show(self, _new: str) -> None:
        """Nothing to do: the view redraws itself."""

    def _draw(self) -> Group:
        progress = self._conversation.progress
        # More than a screen would be cut at the wrong end.
        lines = Text(progress.text).wrap(self._console, self._console.width)
        latest = lines[-max(1, self._console.height - _STATUS_LINES) :]
        style = "bold white on red" if progress.state is State.PREEMPTED else "black on cyan"
        return Group(*latest, Text(f" {progress.describe()} ", style))


class _PlainAnswer:
    """Writes an answer to stdout as it comes and changes of state to stderr."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        if self._conversation.progress.state is State.STOPPED:
            self.show("")

    def show(self, new: str) -> None:
        """Write what is new."""
        if new:
            sys.stdout.write(new)
            sys.stdout.flush()
        else:
            sys.stderr.write(f"[{self._conversation.progress.describe()}]\n")


def converse(target: str, conversation: Conversation) -> None:
    """Read lines and answer them until the input ends.

    The event loop rests while a line is typed, so Ctrl-C there leaves at once;
    while an answer is made it stops the answer alone.

    Raises:
        VorrangError: the server can't be reached at the start.
        KeyboardInterrupt: Ctrl-C at the prompt.
    """
    console = Console()
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with asyncio.Runner() as runner:
        client = VorrangClient.from_environment(target)
        runner.run(client.__aenter__())
        try:
            model = runner.run(client.get_model())
            if interactive:
                console.print(Text(f"{model.name} at {target}. {HELP}", "dim"))
            while (line := _read_line(conversation.priority, interactive)) is not None:
                if line.startswith("/"):
                    if not _obey(line, conversation):
                        return
                elif line.strip():
                    view = (
                        _TerminalAnswer(console, conversation) if interactive else _PlainAnswer(conversation)
                    )
                    _answer(runner, client, conversation, line, view)
        finally:
            runner.run(client.__aexit__(None, None, None))


def _answer(
    runner: asyncio.Runner,
    client: VorrangClient,
    conversation: Conversation,
    line: str,
    view: _TerminalAnswer | _PlainAnswer,
) -> None:
    conversation.progress = Progress()
    try:
        with view:
            runner.run(conversation.answer(client, line, view.show))
    except VorrangError as error:
        sys.stderr.write(f"{error}\n")
    except KeyboardInterrupt:
        pass  # The view has shown that it was stopped.


def _read_line(priority: str, interactive: bool) -> str | None:
    try:
        return input(f"[{priority}] > ") if interactive else input()
    except EOFError:
        return None


def _obey(line: str, conversation: Conversation) -> bool:
    """Obey a slash command; False = leave."""
    match line.split():
        case ["/quit" | "/exit"]:
            return False
        case ["/reset"]:
            conversation.reset()
        case ["/priority", priority]:
            conversation.priority = priority
        case _:
            sys.stderr.write(f"{HELP}\n")
    return True
