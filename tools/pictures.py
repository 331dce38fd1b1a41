"""Make the pictures of ``vorrangctl chat``, ``load`` and ``top`` in docs/pictures from real runs.

Each command runs in a pseudo-terminal against a real server, with the default model for
``chat`` and ``top``, under a real load, and what its terminal shows at a telling moment is drawn as SVG.
With ``--png`` each is also rendered by a headless Chromium into build/pictures, to be looked at.

Usage: ``python tools/pictures.py [chat] [load] [top] [--png]``
"""

import asyncio
import fcntl
import io
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
from rich.color import ColorParseError
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clients.python.demo_server import serve_command, serving

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/pictures"
RENDERED = ROOT / "build/pictures"
SEATS, KV_BLOCKS = 4, 160
PATIENCE_S = 240.0
CLASSES = "interactive=0.3,standard=0.2,batch=0.5"


class Terminal:
    """A command in a pseudo-terminal, and what that shows.

    Args:
        arguments: of ``vorrangctl``.
        target: the server's address.
        columns: width.
        lines: height.
    """

    def __init__(self, arguments: tuple[str, ...], target: str, columns: int = 110, lines: int = 30) -> None:
        self.command = " ".join(("vorrangctl", *arguments))
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {
            **os.environ,
            "VORRANG_TARGET": target,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "LANG": "C.UTF-8",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clients.python.cli", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(ours, False)
        self._terminal = ours

    def text(self) -> str:
        """What is shown, without colours."""
        return "\n".join(self._screen.display)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    async def until(self, shown: Callable[[str], bool], patience_s: float = PATIENCE_S) -> None:
        """Wait until the screen shows something, or the command has ended and shows it."""
        end = time.monotonic() + patience_s
        while not (self._read() and shown(self.text())):
            if time.monotonic() > end or (self.process.poll() is not None and not shown(self.text())):
                self._read()
                if shown(self.text()):
                    return
                raise SystemExit(f"{self.command} never showed what was waited for:\n{self.text()}")
            await asyncio.sleep(0.02)

    async def look(self, time_s: float) -> None:
        """Let time pass. A terminal that nobody reads would hold up the command."""
        end = time.monotonic() + time_s
        while time.monotonic() < end:
            self._read()
            await asyncio.sleep(0.02)

    def _read(self) -> bool:
        try:
            while data := os.read(self._terminal, 65536):
                self._stream.feed(data)
        except (BlockingIOError, OSError):  # the latter: the command has ended
            pass
        return True

    def save(self, name: str, title: str, *, command: bool = False) -> None:
        """Draw what is shown into docs/pictures, below the command if asked for.

        Empty lines at the end are left out.
        """
        lines = [self._line(number) for number in range(self._screen.lines)]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        console = Console(
            record=True,
            width=self._screen.columns,
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
        )
        if command:
            console.print(Text(f"$ {self.command}", "bold"))
        for line in lines:
            console.print(line, soft_wrap=True)
        PICTURES.mkdir(parents=True, exist_ok=True)
        console.save_svg(str(PICTURES / f"{name}.svg"), title=title)

    def _line(self, number: int) -> Text:
        line, row = Text(), self._screen.buffer[number]
        for column in range(self._screen.columns):
            cell = row[column]
            if cell.data:  # the second half of a wide character is empty
                line.append(cell.data, _style(cell))
        if row[self._screen.columns - 1].bg == "default":
            line.rstrip()
        return line

    def close(self) -> None:
        """End the command."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._terminal)


def _style(cell: pyte.screens.Char) -> Style:
    return Style(
        color=_color(cell.fg), bgcolor=_color(cell.bg), bold=cell.bold, italic=cell.italics,
        underline=cell.underscore, reverse=cell.reverse,
    )  # fmt: skip


def _color(name: str) -> str | None:
    if name == "default":
        return None
    named = {"brown": "yellow"}.get(name, name).replace("bright", "bright_")
    for candidate in (named, f"#{name}"):
        try:
            Style(color=candidate)
        except (ColorParseError, ValueError):
            continue
        return candidate
    return None


@contextmanager
def terminal(*arguments: str, target: str, columns: int = 110, lines: int = 30) -> Iterator[Terminal]:
    """A command in a terminal, ended on the way out."""
    one = Terminal(arguments, target, columns, lines)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def traffic(target: str, *arguments: str) -> Iterator[None]:
    """A load beside what is pictured."""
    command = ("load", "--target", target, "--duration", "600", *arguments)
    process = subprocess.Popen(
        [sys.executable, "-m", "clients.python.cli", *command],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


async def chat(target: str) -> None:
    """An answer of low priority, at the moment when it has been preempted."""
    arguments = ("chat", "--priority", "batch", "--max-tokens", "160", "--temperature", "0")
    urgent = ("--classes", "interactive", "--rate", "2", "--arrivals", "constant", "--output-tokens", "30-60")
    with terminal(*arguments, target=target, columns=100, lines=24) as one:
        await one.until(lambda text: "> " in text)
        one.type("Name three colours.\n")
        await one.until(lambda text: text.count("> ") >= 2)
        one.type("Tell me a story about a lighthouse.\n")
        with traffic(target, *urgent):
            await one.until(lambda text: "PREEMPTED" in text)
            one.save("chat", one.command)


async def load(target: str) -> None:
    """A run as it goes, and the tables at its end."""
    arguments = (
        "load", "--rate", "3.5", "--duration", "20", "--classes", "interactive=0.3,batch=0.7",
        "--output-tokens", "~24", "--target-latency", "interactive=0.2/0.05",
    )  # fmt: skip
    with terminal(*arguments, target=target, columns=116, lines=40) as one:
        await one.until(lambda text: "TTFT p50" in text)
        await one.look(12)
        await one.until(lambda text: "interactive" in text and "batch" in text)
        one.save("load-live", "vorrangctl load", command=True)
        await one.until(lambda text: "the generator itself" in text)
        one.save("load", "vorrangctl load", command=True)


async def top(target: str) -> None:
    """All classes at work, somebody preempted, somebody waiting."""
    mixed = ("--rate", "0.6", "--classes", CLASSES, "--prompt-tokens", "~120", "--output-tokens", "20-60")
    with (
        traffic(target, *mixed),
        terminal("top", target=target, columns=112, lines=26) as one,
    ):
        await one.until(lambda text: "live" in text)
        await one.look(20)
        # The words stand in the headings, too.
        await one.until(lambda text: text.count("preempted") > 2 and text.count("decode") > 2)
        one.save("top", one.command)
        one.type("q")


def render(name: str) -> None:
    """Turn a picture into PNG, to be looked at."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium: nothing is rendered")
        return
    out = RENDERED / f"{name}.png"
    subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--window-size=1500,1100", f"--screenshot={out}", (PICTURES / f"{name}.svg").as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    print(f"rendered {out.relative_to(ROOT)}")


#: How each picture is made, and the server's model. The load is pictured with a model whose steps take
#: as long everywhere, so that the picture does not depend on the machine.
SCENES = {
    "chat": (chat, ("--threads", "1")),
    "load": (load, ("--model", "scripted", "--config", str(ROOT / "tools/pictures.toml"))),
    "top": (top, ("--threads", "1")),
}


async def main(names: list[str], *, png: bool) -> None:
    """Make the pictures that are named, or all."""
    RENDERED.mkdir(parents=True, exist_ok=True)
    for name in names or SCENES:
        scene, model = SCENES[name]
        command = serve_command("--max-running-requests", str(SEATS), "--kv-blocks", str(KV_BLOCKS), *model)
        async with serving(command, RENDERED / "server.log", ready_timeout_s=PATIENCE_S) as server:
            await scene(server.target)
        print(f"made docs/pictures/{name}.svg")
    if png:
        for path in sorted(PICTURES.glob("*.svg")):
            if path.stem.split("-")[0] in (names or SCENES):
                render(path.stem)


if __name__ == "__main__":
    given = sys.argv[1:]
    unknown = set(given) - {*SCENES, "--png"}
    if unknown:
        sys.exit(__doc__)
    asyncio.run(main([name for name in given if name != "--png"], png="--png" in given))
