"""``vorrangctl chat``: a conversation in the terminal that shows what the scheduler does to it.

All answers are requests of one session, so a lost connection is found again in the middle of one,
and its priority can be changed while it is made.
"""

import asyncio
import sys
from collections import deque
from contextlib import nullcontext, suppress

from rich.console import Console
from rich.text import Text

from clients.python.beside import beside
from clients.python.chat_view import AnswerView, PlainAnswer, TerminalAnswer
from clients.python.client import VorrangClient
from clients.python.errors import ConnectionLost, SessionClosed, VorrangError
from clients.python.events import Delta, PriorityChanged, QueueUpdate
from clients.python.progress import Progress
from clients.python.request import RequestOptions, check_priority
from clients.python.request_stream import RequestStream
from clients.python.session import Session
from clients.python.typed import TypedLines
from timeline.console import PlainConsole
from timeline.printable import printable

HELP = "/priority NAME or LEVEL, at any time; /reset forgets, /quit leaves; Ctrl-C stops an answer"
#: How long the server may take to confirm that an answer was stopped.
_STOP_S_MAX = 1.0
_LOOK_S = 0.1
#: Events that change what is shown without a change of state.
_SHOWN = (Delta, QueueUpdate, PriorityChanged)


class Conversation:
    """Turns of a conversation, and how the next answer is to be made.

    Args:
        system: system message; empty = none.
        priority: class name or level of the answers.
        max_tokens: longest answer.
        temperature: 0 = greedy.
        adapter: LoRA adapter of the model; empty = none.
    """

    def __init__(
        self, *, system: str, priority: str, max_tokens: int, temperature: float, adapter: str = ""
    ) -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self.priority = priority
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._adapter = adapter
        self._turns: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    def options(self, text: str) -> RequestOptions:
        """How to ask for an answer to ``text``."""
        return RequestOptions(
            messages=[*self._system, *self._turns, {"role": "user", "content": text}],
            priority=self.priority,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            adapter=self._adapter,
            label="vorrangctl chat",
        )

    def remember(self, text: str, answer: str) -> None:
        """Both turns were; a turn without an answer never was."""
        if answer:
            self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


class Chat:
    """Answers lines in one session, and opens another when that is lost.

    Args:
        client: whom to ask.
        conversation: what was said so far.
    """

    def __init__(self, client: VorrangClient, conversation: Conversation) -> None:
        self._client = client
        self._conversation = conversation
        self._session: Session | None = None

    async def close(self) -> None:
        """Leave the session; a loss is of no interest any more."""
        if self._session is not None:
            with suppress(VorrangError):
                await self._session.__aexit__(None, None, None)

    async def answer(self, text: str, progress: Progress, view: AnswerView, commands: list[str]) -> None:
        """Ask for an answer to ``text`` and remember both.

        Args:
            text: what the user says.
            progress: of the answer; filled.
            view: told of what is new.
            commands: slash commands to be obeyed meanwhile, taken from the front as they are appended.

        Raises:
            VorrangError: the request failed; what was produced is remembered.

        Cancellation: cancels the request on the server; what was produced is remembered.
        """
        stream: RequestStream | None = None
        try:
            stream = await self._start(self._conversation.options(text))
            async with beside(self._look_around(stream, progress, view, commands)):
                async for event in stream:
                    if progress.apply(event) or isinstance(event, _SHOWN):
                        view.show(event.text if isinstance(event, Delta) else "")
        except asyncio.CancelledError:
            progress.stop()
            if stream is not None:
                await _stop(stream)
            raise
        except VorrangError as error:
            progress.fail(error)
            raise
        finally:
            self._conversation.remember(text, progress.text)

    async def _start(self, options: RequestOptions) -> RequestStream:
        if self._session is not None:
            try:
                return await self._session.start(**options)
            except (ConnectionLost, SessionClosed):
                await self._session.end()
        session = self._client.session(client_name="vorrangctl chat")
        self._session = None
        await session.__aenter__()
        self._session = session
        return await session.start(**options)

    async def _look_around(
        self, stream: RequestStream, progress: Progress, view: AnswerView, commands: list[str]
    ) -> None:
        """Obey what is typed, and see whether the connection is there, while an answer is made."""
        while True:
            await asyncio.sleep(_LOOK_S)
            assert self._session is not None
            if progress.is_cut_off == self._session.connected:
                progress.is_cut_off = not self._session.connected
                view.show("")
            while commands:
                await self._obey(commands.pop(0), stream, view)

    async def _obey(self, command: str, stream: RequestStream, view: AnswerView) -> None:
        match command.split():
            case ["/priority", priority]:
                try:
                    check_priority(priority)
                    await stream.reprioritize(priority)
                except (ValueError, TimeoutError, VorrangError) as error:
                    view.say(str(error) or "no acknowledgement")
                else:
                    self._conversation.priority = priority
            case _:
                view.say(HELP)


async def _stop(stream: RequestStream) -> None:
    """Cancel a request and give the server time to hear of it."""
    with suppress(TimeoutError, VorrangError):
        async with asyncio.timeout(_STOP_S_MAX):
            await stream.cancel()
            await stream.result()


def converse(target: str, conversation: Conversation) -> None:
    """Read lines and answer them until the input ends.

    The event loop rests while a line is typed, so Ctrl-C there leaves at once;
    while an answer is made it stops the answer alone, and what is typed then waits its turn.

    Raises:
        ValueError: the priority is none.
        VorrangError: the server can't be reached at the start.
        KeyboardInterrupt: Ctrl-C at the prompt.
    """
    check_priority(conversation.priority)
    console = PlainConsole()
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    waiting: deque[str] = deque()
    with asyncio.Runner() as runner:
        client = VorrangClient.from_environment(target)
        runner.run(client.__aenter__())
        chat = Chat(client, conversation)
        try:
            model = runner.run(client.get_model())
            if interactive:
                console.print(Text(f"{model.name} at {target}. {HELP}", "dim"))
            while (line := _next_line(conversation.priority, interactive, waiting)) is not None:
                if line.startswith("/"):
                    if not _obey(line, conversation):
                        break
                elif line.strip():
                    _answer(runner, chat, line, console if interactive else None, waiting)
            runner.run(chat.close())
        finally:
            runner.run(client.__aexit__(None, None, None))


def _answer(
    runner: asyncio.Runner, chat: Chat, line: str, console: Console | None, waiting: deque[str]
) -> None:
    """Make one answer; the console is None when nobody types meanwhile."""
    progress = Progress()
    commands: list[str] = []

    def on_line(typed: str) -> None:
        if typed.startswith("/priority"):
            commands.append(typed)
        else:
            waiting.append(typed)

    typed_lines = TypedLines(on_line) if console else None
    view: AnswerView = PlainAnswer(progress)
    if console and typed_lines:
        view = TerminalAnswer(console, progress, lambda: typed_lines.buffer.text)

    async def answer() -> None:
        with typed_lines or nullcontext():
            await chat.answer(line, progress, view, commands)

    try:
        with view:
            runner.run(answer())
    except VorrangError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
    except KeyboardInterrupt:
        pass  # The view has shown that it was stopped.
    if typed_lines and typed_lines.buffer.text:
        _prefill(typed_lines.buffer.text)


def _next_line(priority: str, interactive: bool, waiting: deque[str]) -> str | None:
    if waiting:
        line = waiting.popleft()
        sys.stdout.write(f"[{priority}] > {line}\n")
        return line
    try:
        return input(f"[{priority}] > ") if interactive else input()
    except EOFError:
        return None


def _prefill(text: str) -> None:
    """Let the next prompt begin with ``text``, where the terminal's library can do so."""
    with suppress(ImportError):
        import readline

        def insert() -> None:
            readline.insert_text(text)
            readline.set_startup_hook(None)

        readline.set_startup_hook(insert)


def _obey(line: str, conversation: Conversation) -> bool:
    """Obey a slash command; False = leave."""
    match line.split():
        case ["/quit" | "/exit"]:
            return False
        case ["/reset"]:
            conversation.reset()
        case ["/priority", priority]:
            try:
                check_priority(priority)
                conversation.priority = priority
            except ValueError as error:
                sys.stderr.write(f"{error}\n")
        case _:
            sys.stderr.write(f"{HELP}\n")
    return True
