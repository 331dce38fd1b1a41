"""A bar on stderr for what takes long."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_AFTER_S = 2.0


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Work on so many bytes, with a bar once it has taken two seconds; yields what is told of bytes done."""
    begun = time.monotonic()
    done = 0
    bar: Any = None
    task: Any = None

    def advance(num_bytes: int) -> None:
        nonlocal done, bar, task
        done += num_bytes
        if bar is None and time.monotonic() - begun > _AFTER_S:
            from rich.progress import Progress

            from timeline.console import PlainConsole

            bar = Progress(console=PlainConsole(file=sys.stderr))
            bar.start()
            task = bar.add_task(what, total=total_bytes)
        if bar is not None:
            bar.update(task, completed=done)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()
