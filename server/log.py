"""Logs: structlog to stderr, JSON off a terminal. Nothing else is decided here.

Lines are written by a thread of their own, so that a reader of stderr who stops
reading stops nobody else: what does not fit the queue is dropped and counted.
"""

import contextlib
import logging
import queue
import sys
import threading
from typing import Any, TextIO

import structlog

LEVELS = ("debug", "info", "warning", "error")
#: Lines that may wait to be written.
MAX_WAITING_LINES = 4096
#: Seconds that the lines still waiting at the end of the process get.
FLUSH_S_MAX = 1.0


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
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.dict_tracebacks)
    writer = LineWriter(sys.stderr)
    as_file: Any = writer
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(as_file),
        cache_logger_on_first_use=True,
    )
    return writer
