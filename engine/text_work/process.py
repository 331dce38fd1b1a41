"""A process that works on texts, as the event loop sees it: started when needed, killed when it must be.

What runs there can hold neither the event loop nor the GIL of the server, and ends at its bound
in time whatever a text does to a tokenizer or a template.
"""

import asyncio
import pickle
import signal
import struct
import subprocess
from typing import Any, TypeVar

import structlog

from engine.runner import process_life
from engine.runner.channel import LOAD, LOAD_FAILED, LOG, PLAN, Message, frame, unpack_error
from engine.runner.process_life import death_by
from engine.text_work.jobs import TextJob
from engine.text_work.places import TooDear
from engine.text_work.worker import TokenizerSource

#: Seconds of the processor's time that a job may take.
CPU_S_MAX = 10
#: Seconds after which a job, or loading, hangs, however busy the machine.
HANGS_S = 120.0
#: Times a job is begun: what killed the process may have come from outside.
ATTEMPTS = 2

_LENGTH = struct.Struct("<I")

Result = TypeVar("Result")

log = structlog.get_logger("vorrang.server")


class TextProcessDied(Exception):
    """It ended in the midst of something; the message says how."""


class TextProcess:
    """One process at a time; another is started when one is needed. For the event loop's thread.

    Args:
        source: loads the tokenizer there.
        niceness: how much it gives way to other processes.
        cpu_s_max: seconds of the processor's time that a job may take.
        hangs_s: seconds after which a job, or loading, hangs.
    """

    def __init__(
        self,
        source: TokenizerSource,
        *,
        niceness: int = 0,
        cpu_s_max: int = CPU_S_MAX,
        hangs_s: float = HANGS_S,
    ) -> None:
        self._source = source
        self._niceness = niceness
        self._cpu_s_max = cpu_s_max
        self._hangs_s = hangs_s
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Have a process that has loaded its tokenizer.

        Raises:
            TextProcessDied: it died while it loaded.
            OSError: it could not be started.
            Exception: what loading raised.

        Cancellation: it is killed.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        self._process, ours = process_life.spawn_connected("engine.text_work.worker")
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            answer = await self._ask((LOAD, self._source, self._niceness, self._cpu_s_max))
        except BaseException:
            self.kill()
            raise
        if answer[0] == LOAD_FAILED:
            self.kill()
            raise unpack_error(answer[1])

    def warm_up(self) -> None:
        """Have it load what the first chat would wait for; nobody waits for it."""
        if self._writer is not None:
            self._writer.write(frame((PLAN, None)))

    async def run(self, job: TextJob[Result]) -> Result:
        """See ``TextPlace``.

        Raises:
            VorrangError: the caller's fault, or ``TooDear``.
            TextProcessDied: it died each time.
            OSError: it could not be started.
        """
        for attempt in range(ATTEMPTS):
            await self.start()
            try:
                _, result, error = await self._ask((PLAN, job))
            except TextProcessDied as died:
                code = self._process.poll() if self._process is not None else None
                self.kill()
                if code == -signal.SIGXCPU:
                    raise TooDear(job.num_bytes, self._cpu_s_max) from None
                log.warning("text_process.died", cause=str(died), num_bytes=job.num_bytes)
                if attempt + 1 == ATTEMPTS:
                    raise
            except BaseException:  # it works for nobody now
                self.kill()
                raise
            else:
                if error is not None:
                    raise unpack_error(error)
                answer: Result = result
                return answer
        raise AssertionError

    async def close(self) -> None:
        """Kill it."""
        self.kill()

    def kill(self) -> None:
        """End the process, if there is one, whatever it does."""
        writer, self._writer, self._reader = self._writer, None, None
        if writer is not None:
            writer.transport.abort()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    async def _ask(self, message: Message) -> Message:
        assert self._writer is not None and self._reader is not None  # noqa: PT018
        try:
            async with asyncio.timeout(self._hangs_s):
                self._writer.write(frame(message))
                await self._writer.drain()
                while True:
                    answer = await self._next(self._reader)
                    if answer[0] != LOG:
                        return answer
                    _, level, values = answer
                    getattr(log, level)(values.pop("event", ""), **values)
        except TimeoutError:
            raise TextProcessDied(f"no answer for {self._hangs_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise TextProcessDied(await self._how()) from None

    async def _next(self, reader: asyncio.StreamReader) -> Message:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: Any = pickle.loads(await reader.readexactly(size))  # noqa: S301 - our own process
        return tuple(message)

    async def _how(self) -> str:
        """How it ended; it may take a moment to be seen."""
        assert self._process is not None
        for _ in range(200):
            code = self._process.poll()
            if code is not None:
                return death_by(code).cause
            await asyncio.sleep(0.01)
        return "it closed its socket"
