"""Log lines whose reader stops reading."""

import io
import threading
import time

from server.log import LineWriter


class StuckFile(io.StringIO):
    """A file whose writes wait until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.stuck = threading.Event()

    def write(self, text: str) -> int:
        self.stuck.set()
        assert self.go.wait(30)
        return super().write(text)


def test_lines_are_written_in_order() -> None:
    file = io.StringIO()
    writer = LineWriter(file)
    for number in range(1000):
        writer.write(f"{number}\n")
    writer.close(10)
    assert file.getvalue() == "".join(f"{number}\n" for number in range(1000))
    assert writer.num_dropped == 0


def test_a_reader_that_stops_stops_nobody_and_is_told_what_it_missed() -> None:
    file = StuckFile()
    writer = LineWriter(file, max_lines=3)
    writer.write("first\n")
    assert file.stuck.wait(30)
    for number in range(10):
        writer.write(f"{number}\n")
    assert writer.num_dropped == 7
    file.go.set()
    while "2" not in file.getvalue():
        time.sleep(0.001)
    writer.write("next\n")
    writer.close(10)
    lines = file.getvalue().splitlines()
    assert lines == ["first", "0", "1", "2", '{"event": "log.dropped", "num_lines": 7}', "next"]


def test_the_end_does_not_wait_for_a_reader_that_stopped() -> None:
    file = StuckFile()
    writer = LineWriter(file, max_lines=1)
    for _ in range(5):
        writer.write("x\n")
    writer.close(0.05)
    file.go.set()


def test_a_file_that_fails_is_not_the_end_of_the_writer() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    writer = LineWriter(Broken())
    writer.write("x\n")
    writer.write("y\n")
    writer.close(10)
