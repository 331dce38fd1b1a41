"""A server of one's own for a while: started as a subprocess, always stopped again."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clients.python.client import VorrangClient

_STOP_GRACE_S = 10.0
_LOG_LINES_SHOWN = 15
_DEATH_WAIT_S_MAX = 0.5


class ServerDied(Exception):
    """The server ended by itself, or did not become ready; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class DemoServer:
    """A running server.

    Attributes:
        target: its address.
        process: the subprocess.
        log: file with all it has written.
    """

    target: str
    process: asyncio.subprocess.Process
    log: Path

    def log_tail(self) -> str:
        """The last lines it has written."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES_SHOWN:])

    async def check_alive(self) -> None:
        """To be asked after a failure: was it the server's end?

        Raises:
            ServerDied: the process has ended.
        """
        # What a dying process does to its connections shows before its end does.
        with suppress(TimeoutError):
            code = await asyncio.wait_for(self.process.wait(), _DEATH_WAIT_S_MAX)
            raise ServerDied(f"the server ended with code {code}:\n{self.log_tail()}")


def free_port() -> int:
    """A loopback port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def serving(command: Sequence[str], log: Path, *, ready_timeout_s: float) -> AsyncIterator[DemoServer]:
    """Run ``command --listen 127.0.0.1:PORT`` and wait until it is ready.

    Args:
        command: program and arguments; the address is added.
        log: file its output is written to.
        ready_timeout_s: longest wait until its health is SERVING.

    Raises:
        ServerDied: it ended or did not become ready in time.

    Cancellation: stops the server, as does any way of leaving.
    """
    target = f"127.0.0.1:{free_port()}"
    with log.open("wb") as sink:
        # A session of its own: Ctrl-C in the terminal reaches the demo alone, which then stops it in order.
        process = await asyncio.create_subprocess_exec(
            *command,
            "--listen",
            target,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    server = DemoServer(target, process, log)
    try:
        await _wait_ready(server, ready_timeout_s)
        yield server
    finally:
        await _stop(process)


def serve_command(*arguments: str) -> list[str]:
    """The command that serves the default model with this Python."""
    return [sys.executable, "-m", "server.cli", "serve", *arguments]


async def _wait_ready(server: DemoServer, timeout_s: float) -> None:
    async with VorrangClient(server.target) as client:
        ready = asyncio.ensure_future(client.wait_ready(timeout_s))
        died = asyncio.ensure_future(server.process.wait())
        try:
            await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise ServerDied(f"the server ended with code {died.result()}:\n{server.log_tail()}")
            if (error := ready.exception()) is not None:
                raise ServerDied(f"{error}:\n{server.log_tail()}")
        finally:
            ready.cancel()
            died.cancel()
            await asyncio.gather(ready, died, return_exceptions=True)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the process: politely, and after a grace by force."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
    except BaseException:  # Impatience (a second Ctrl-C) must not leave it behind.
        process.kill()
        raise
