"""A process that works on texts: ``python -m engine.text_work.worker FD PARENT_PID``.

Does one job after the other. A job that takes more of the processor's time than one may
is ended by the kernel, and the process with it; whoever waits for its answer starts another.
"""

import contextlib
import math
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.runner import process_life
from engine.runner.channel import LOAD_FAILED, READY, RESULT, BlockingChannel, Message, pack_error
from engine.text import Tokenizer

#: Memory that the jobs of a process may take beyond what its tokenizer does.
MAX_MEMORY_BYTES = 2 * 1024**3


class TokenizerSource(Protocol):
    """Loads a tokenizer where it is to be used. Must be picklable, and its class importable there."""

    def load(self) -> Tokenizer:
        """Load it. Slow."""
        ...


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """The tokenizer in a Hugging Face folder.

    Attributes:
        folder: which.
        special_in_chat: see ``HfTokenizer``.
    """

    folder: Path
    special_in_chat: bool = False

    def load(self) -> Tokenizer:
        """See ``TokenizerSource``."""
        from engine.models.tokenizer import HfTokenizer

        return HfTokenizer(self.folder, special_in_chat=self.special_in_chat)


def main() -> None:
    """Serve the process that started this one."""
    channel = process_life.begin()
    with contextlib.suppress(OSError):  # nobody is left to listen
        _serve(channel)
    process_life.end()


def _serve(channel: BlockingChannel) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a text is tokenised by one thread anyway
    message = channel.receive()
    if message is None:
        return
    _, source, niceness, cpu_s_max = message
    try:
        tokenizer: Tokenizer = source.load()
        os.nice(niceness)
    except Exception as error:
        channel.send((LOAD_FAILED, pack_error(error)))
        return
    _bound_memory()
    channel.send((READY,))
    warm_up = getattr(tokenizer, "warm_up", None)
    while (message := channel.receive()) is not None:
        job = message[1]
        if job is None:  # time to load what the first chat would wait for
            if warm_up is not None:
                threading.Thread(target=warm_up, name="warm-up", daemon=True).start()
            continue
        _bound_time(cpu_s_max)
        try:
            answer: Message = (RESULT, job.run(tokenizer), None)
        except MemoryError:
            process_life.end(1)
        except Exception as error:
            answer = (RESULT, None, pack_error(error))
        _bound_time(None)
        channel.send(answer)


def _bound_time(cpu_s_max: int | None) -> None:
    """From now on this process gets so much of the processor's time; then the kernel ends it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = resource.RLIM_INFINITY if cpu_s_max is None else math.ceil(time.process_time()) + cpu_s_max
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else hard, hard))


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold callers' texts
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[5]) * resource.getpagesize()
    except OSError:  # Linux alone says
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (now + MAX_MEMORY_BYTES, hard))


if __name__ == "__main__":
    main()
