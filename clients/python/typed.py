"""Lines that are typed while something else is drawn in the terminal. On POSIX alone; elsewhere none come."""

import asyncio
import codecs
import os
import re
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

try:
    import termios
    import tty
except ImportError:  # not POSIX
    termios = tty = None  # type: ignore[assignment]

_ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-_])?")
_ERASE_LINE = "\x15"  # Ctrl-U
_READ_BYTES = 4096


class LineBuffer:
    """Characters as they are typed, and the lines they make. Pure.

    Attributes:
        text: what stands after the last line.
    """

    def __init__(self) -> None:
        self.text = ""

    def type(self, characters: str) -> list[str]:
        """Take in what was typed; returns the lines that are complete now."""
        lines = []
        for character in _ESCAPE_SEQUENCE.sub("", characters):
            if character in "\r\n":
                lines.append(self.text)
                self.text = ""
            elif character in "\x7f\b":
                self.text = self.text[:-1]
            elif character == _ERASE_LINE:
                self.text = ""
            elif character.isprintable():
                self.text += character
        return lines


class TypedLines:
    """Reads standard input, which must be a terminal, while an event loop runs; a context manager.

    The terminal shows nothing of what is typed meanwhile, and Ctrl-C works as ever.

    Args:
        on_line: called with every line.

    Attributes:
        buffer: what stands after the last line.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.buffer = LineBuffer()
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __enter__(self) -> Self:
        if termios is not None:
            self._fd = sys.stdin.fileno()
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSANOW)
            asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if termios is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)

    def _read(self) -> None:
        for line in self.buffer.type(self._decoder.decode(os.read(self._fd, _READ_BYTES))):
            self._on_line(line)
