"""A decision log in memory."""

from engine.decisions.codec import End, end_line, origin_line, record_line


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
