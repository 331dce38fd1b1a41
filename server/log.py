"""Logs: structlog to stderr, JSON off a terminal.

Lines are written by a thread of their own, so that a reader of stderr who stops
reading stops nobody else: what does not fit the queue is dropped and counted. A line
is bounded in bytes, holds no secret (``timeline.secrecy``), no local variable of a
traceback (``engine.failure``), and no control character that a caller chose.
"""

import contextlib
import logging
import queue
import sys
import threading
from typing import Any, TextIO

import structlog

from engine.failure import log_strays, trace_of
from timeline.printable import printable, printable_lines
from timeline.secrecy import redacted

LEVELS = ("debug", "info", "warning", "error")
#: Lines that may wait to be written.
MAX_WAITING_LINES = 4096
#: Seconds that the lines still waiting at the end of the process get.
FLUSH_S_MAX = 1.0
#: Bytes of a line. What is longer has its texts shortened, to the first of the lengths with which it fits.
MAX_LINE_BYTES = 16 * 1024
_TEXT_CHARACTERS = (8192, 1024, 64)
#: Depth and members to which values that are no text are looked at.
_MAX_DEPTH, _MAX_MEMBERS = 4, 64


class LineWriter:
    """Writes lines to a file on a thread, as far as the file takes them. Looks like a file to structlog.

    Args:
        file: where they go.
        max_lines: how many may wait; further ones are dropped.

    Attributes:
        num_dropped: lines dropped so far. Where lines went missing a line of its own says how many.
    """

    def __init__(self, file: TextIO, max_lines: int = MAX_WAITING_LINES) -> None:
        self._file = file
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._lock = threading.Lock()
        self._num_missing = 0
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Take a line; never blocks and never raises."""
        with self._lock:
            try:
                self._lines.put_nowait(self._missing() + text)
                self._num_missing = 0
            except queue.Full:
                self._num_missing += 1
                self.num_dropped += 1

    def flush(self) -> None:
        """Nothing to do: the thread flushes when no line waits."""

    def close(self, timeout_s: float = FLUSH_S_MAX) -> None:
        """Write what waits, as far as it can be written within ``timeout_s``. Nothing is written later."""
        with self._lock, contextlib.suppress(queue.Full):
            self._lines.put(self._missing(), timeout=timeout_s / 2)
            self._lines.put(None, timeout=timeout_s / 2)
        self._thread.join(timeout_s)

    def _missing(self) -> str:
        return f'{{"event": "log.dropped", "num_lines": {self._num_missing}}}\n' if self._num_missing else ""

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._file.write(line)
                if self._lines.empty():
                    self._file.flush()
            except (OSError, ValueError):  # nobody reads it any more, or it is closed
                continue


def set_up(level: str = "info", form: str = "auto") -> LineWriter:
    """Configure structlog for this process.

    Returns:
        What takes the lines; close it at the end.

    Args:
        level: least severe level that is written, one of ``LEVELS``.
        form: ``json``, ``console`` or ``auto`` (console on a terminal, else JSON).
    """
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    writer = LineWriter(sys.stderr)
    as_file: Any = writer
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _with_trace,
            BoundedRenderer(as_json=as_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(as_file),
        cache_logger_on_first_use=True,
    )
    log_strays(structlog.get_logger("vorrang.server"))
    return writer


class BoundedRenderer:
    """Makes a line of an event: the last of structlog's processors.

    Args:
        as_json: one JSON object; else for people, where a trace has lines of its own.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._render: Any = (
            structlog.processors.JSONRenderer(default=lambda value: type(value).__name__)
            if as_json
            # No library may format a traceback: they show local variables.
            else structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        )

    def __call__(self, logger: Any, method: str, event: Any) -> str:
        """The line, in at most ``MAX_LINE_BYTES``."""
        for num_characters in _TEXT_CHARACTERS:
            shown = {str(key): self._shown(value, num_characters, key) for key, value in event.items()}
            line: str = self._render(logger, method, shown)
            if (num_bytes := len(line.encode(errors="replace"))) <= MAX_LINE_BYTES:
                return line
        kept = {key: self._shown(event[key], 64, key) for key in _ALWAYS if key in event}
        rest: str = self._render(logger, method, {**kept, "left_out_bytes": num_bytes})
        return rest

    def _shown(self, value: Any, num_characters: int, key: object = "", depth: int = 0) -> Any:
        if isinstance(value, bytes | bytearray):
            return f"{len(value)} bytes"
        if isinstance(value, str):
            text = redacted(value[: 2 * num_characters])  # before it is cut: half a secret has no form
            if len(text) > num_characters or len(value) > 2 * num_characters:
                text = f"{text[:num_characters]}... ({len(value)} characters)"
            if self._as_json:
                return text  # it escapes all that is not ASCII
            return printable_lines(text) if key == "exception" else printable(text)
        if value is None or isinstance(value, bool | int | float):
            return value if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
        if depth == _MAX_DEPTH:
            return "..."
        if isinstance(value, dict):
            members = list(value.items())[:_MAX_MEMBERS]
            return {printable(str(k)[:64]): self._shown(v, num_characters, k, depth + 1) for k, v in members}
        if isinstance(value, list | tuple | set | frozenset):
            return [self._shown(v, num_characters, key, depth + 1) for v in list(value)[:_MAX_MEMBERS]]
        return self._shown(str(value), num_characters, key)


#: What a line keeps that is too long even with the shortest texts.
_ALWAYS = ("event", "level", "timestamp", "incident_id", "request_id")


def _with_trace(_logger: Any, _method: str, event: Any) -> Any:
    """Whoever gives an exception to structlog gets what ``trace_of`` makes of it."""
    found = event.pop("exc_info", None)
    if found is True:
        found = sys.exc_info()
    error = found[1] if isinstance(found, tuple) else found
    if isinstance(error, BaseException):
        event["exception"] = trace_of(error, with_text=False)
    event.pop("stack_info", None)
    return event
