"""Where jobs are done, and the simpler of the two places: a thread of this process.

One job at a time is given to a place; whose turn it is is the caller's business.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from engine.errors import InvalidRequest
from engine.text import Tokenizer
from engine.text_work.jobs import TextJob

Result = TypeVar("Result")


class TooDear(InvalidRequest):
    """A text took more of the processor's time than one may; it is tried no further.

    Args:
        num_bytes: its size.
        cpu_s_max: what one may take.
    """

    def __init__(self, num_bytes: int, cpu_s_max: int) -> None:
        rule = f"must be turned into tokens in {cpu_s_max} s of processor time"
        super().__init__("prompt", rule, f"more for {num_bytes} bytes")


class TextPlace(Protocol):
    """Does one job at a time."""

    async def run(self, job: TextJob[Result]) -> Result:
        """Do a job.

        Raises:
            VorrangError: the caller's fault, or ``TooDear``.

        Cancellation: of a thread, waits for the job; of a process, kills it.
        """
        ...

    def warm_up(self) -> None:
        """Have it load what the first chat would wait for; nobody waits for it."""
        ...

    async def close(self) -> None:
        """Leave nothing behind."""
        ...


class TextThread:
    """Jobs on a thread of its own: for tokenizers that are quick, and where no process is wanted.

    Args:
        tokenizer: the model's.
        name: of the thread.
    """

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"vorrang-{name}")

    async def run(self, job: TextJob[Result]) -> Result:
        """See ``TextPlace``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, job.run, self._tokenizer)

    def warm_up(self) -> None:
        """See ``TextPlace``."""
        warm_up = getattr(self._tokenizer, "warm_up", None)
        if warm_up is not None:
            threading.Thread(target=warm_up, name="warm-up", daemon=True).start()

    async def close(self) -> None:
        """End the thread, once it is idle."""
        self._executor.shutdown(wait=False, cancel_futures=True)
