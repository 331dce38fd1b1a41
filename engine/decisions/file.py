"""Decision logs on disk: written behind the loop's back, read line by line."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import structlog

from engine.decisions.codec import (
    End,
    Malformed,
    end_line,
    origin_line,
    parse,
    read_call,
    read_end,
    read_origin,
    record_line,
)
from engine.errors import VorrangError
from engine.failure import trace_of
from engine.scheduler.decisions import Call, Origin, Record

#: Records that may wait to be written.
MAX_BACKLOG = 8192
#: Seconds that closing waits for a slow disk.
CLOSE_S_MAX = 10.0
#: Longest line that is read.
MAX_LINE_BYTES = 256 * 1024 * 1024
#: What is kept free for the last line.
_END_BYTES = 128

log = structlog.get_logger("vorrang.engine")

T = TypeVar("T")


class DecisionLogUnavailable(VorrangError):
    """The decision log can't be read or written; the message is for an operator."""


class DamagedDecisionLog(VorrangError):
    """A file that is no decision log, or not a whole one.

    Args:
        path: which.
        line: number of the line, from 1.
        rule: what it breaks.
    """

    def __init__(self, path: Path, line: int, rule: str) -> None:
        super().__init__(f"{path}: line {line}: {rule}")
        self.path = path
        self.line = line
        self.rule = rule


class DecisionFile:
    """A sink that writes a decision log, on a thread of its own.

    ``record`` puts a reference into a bounded queue and returns. The log is a
    whole from its beginning or it is worth nothing, so when it can't go on it
    ends for good: at ``max_bytes``, when the disk fails, or when it is so slow
    that ``MAX_BACKLOG`` records wait. That is logged once, and the last line says it.

    Args:
        path: an existing file is replaced; only its owner may read the new one.
        max_bytes: largest size; None = as long as the disk takes it.
        wait: let ``record`` wait for the disk instead of ending the log. Not for an event loop.

    Raises:
        DecisionLogUnavailable: the file can't be written.
    """

    def __init__(self, path: Path, *, max_bytes: int | None = None, wait: bool = False) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._wait = wait
        try:
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    path.unlink()  # a reader of the old one keeps it
            self._file: BinaryIO = open(path, "wb", opener=_private)  # noqa: SIM115
        except OSError as error:
            reason = error.strerror or str(error)
            raise DecisionLogUnavailable(f"the decision log {path} can't be written: {reason}") from None
        self._queue: queue.Queue[Callable[[], str] | None] = queue.Queue(MAX_BACKLOG)
        self._is_open = True
        self._is_closing = False
        self._end = "closed"
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._write_all, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it still records."""
        return self._is_open

    def begin(self, origin: Origin) -> None:
        """Write the first line."""
        self._put(lambda: origin_line(origin))

    def record(self, record: Record) -> None:
        """Write a call, later."""
        self._put(lambda: record_line(record))

    def close(self) -> None:
        """Write what waits and the last line. Waits for the disk, ``CLOSE_S_MAX`` at most for each."""
        if self._is_closing:
            return
        self._is_open = False
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S_MAX)
        self._thread.join(CLOSE_S_MAX)
        if self._thread.is_alive():
            log.warning("decisions.not_closed", path=str(self.path))

    def _put(self, line: Callable[[], str]) -> None:
        if not self._is_open:
            return
        try:
            self._queue.put(line, block=self._wait)
        except queue.Full:
            self._stop("backlog")

    def _stop(self, reason: str, error: Exception | None = None) -> None:
        if self._end == "closed":  # the first reason counts
            self._end = reason
            self._is_open = False
            trace = {} if error is None else {"exception": trace_of(error, with_text=True)}
            log.warning("decisions.recording_stopped", reason=reason, path=str(self.path), **trace)

    def _write_all(self) -> None:
        """Runs on the thread; goes on taking records after a stop, so that nobody waits for it."""
        is_writing, num_lines = True, 0
        while (line := self._queue.get()) is not None:
            if not is_writing:
                continue
            try:
                if is_writing := self._write(line() + "\n"):
                    num_lines += 1
                if self._queue.empty() or not is_writing:
                    self._file.flush()
            except Exception as error:
                is_writing = False
                self._stop("failed", error)
        with contextlib.suppress(OSError), self._file:
            self._file.write(f"{end_line(End(self._end, max(0, num_lines - 1)))}\n".encode())

    def _write(self, line: str) -> bool:
        raw = line.encode()
        if self._max_bytes is not None and self._num_bytes + len(raw) + _END_BYTES > self._max_bytes:
            self._stop("max_bytes")
            return False
        self._file.write(raw)
        self._num_bytes += len(raw)
        return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log.

    Attributes:
        number: from 1.
        call: the call.
        now: its time.
        body: all of it, as written.
    """

    number: int
    call: Call
    now: float
    body: dict[str, Any]


class DecisionLog:
    """A decision log that is read. Iterate it once.

    Args:
        path: the file.
        file: what to read instead of it; ``path`` is then a name for messages.

    Attributes:
        path: the file.
        origin: what its scheduler was made of.
        end: why it ends; None before its last line was read, or when it has none
            since the process was killed. Half a line at the end counts as that, too.
        num_bytes_read: how far one is.

    Raises:
        DecisionLogUnavailable: the file can't be read.
        DamagedDecisionLog: this is no decision log. Iterating raises it as well.
    """

    def __init__(self, path: Path, file: BinaryIO | None = None) -> None:
        self.path = path
        self.end: End | None = None
        self.num_bytes_read = 0
        try:
            self._file: BinaryIO = path.open("rb") if file is None else file
        except OSError as error:
            reason = error.strerror or str(error)
            raise DecisionLogUnavailable(f"the decision log {path} can't be read: {reason}") from None
        try:
            raw = self._next_line(1)
            self.origin = self._checked(1, lambda: read_origin(parse(raw)))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "DecisionLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Line]:
        number = 1
        while raw := self._next_line(number := number + 1):
            if not raw.endswith(b"\n"):
                return
            if self.end is not None:
                raise DamagedDecisionLog(self.path, number, "must not follow the last line")
            body = self._checked(number, lambda: parse(raw))
            self.end = self._checked(number, lambda: read_end(body))  # noqa: B023
            if self.end is None:
                call, now = self._checked(number, lambda: read_call(body))  # noqa: B023
                yield Line(number, call, now, body)
            elif self.end.num_records != number - 2:
                rule = f"says that {self.end.num_records} calls came before it, but {number - 2} did"
                raise DamagedDecisionLog(self.path, number, rule)

    def _next_line(self, number: int) -> bytes:
        try:
            raw = self._file.readline(MAX_LINE_BYTES)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DecisionLogUnavailable(f"the decision log {self.path} can't be read: {reason}") from None
        if len(raw) == MAX_LINE_BYTES:
            raise DamagedDecisionLog(self.path, number, f"must be shorter than {MAX_LINE_BYTES} bytes")
        self.num_bytes_read += len(raw)
        return raw

    def _checked(self, number: int, read: Callable[[], T]) -> T:
        try:
            return read()
        except Malformed as error:
            raise DamagedDecisionLog(self.path, number, str(error)) from None
