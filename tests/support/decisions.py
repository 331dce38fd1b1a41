"""A decision log in memory."""

import io
from pathlib import Path

from engine.decisions.codec import End, end_line, origin_line, record_line
from engine.decisions.file import DecisionLog
from engine.decisions.replay import replay


class MemoryLog:
    """A sink whose log is text at once."""

    is_open = True

    def __init__(self):
        self.lines = []

    def begin(self, origin):
        """Keep the first line."""
        self.lines.append(origin_line(origin))

    def record(self, record):
        """Keep a call."""
        self.lines.append(record_line(record))

    def text(self) -> bytes:
        """The whole log."""
        lines = [*self.lines, end_line(End("closed", len(self.lines) - 1))]
        return "".join(f"{line}\n" for line in lines).encode()

    def replay(self, num_steps: int) -> None:
        """8: the same calls give the same plans and events, also by way of the log's text."""
        log = DecisionLog(Path("memory"), io.BytesIO(self.text()))
        done = replay(log)
        assert done.difference is None, str(done.difference)
        assert done.num_calls == log.end.num_records
        assert done.num_steps >= num_steps
