"""A TCP proxy whose connections a test can cut, hold up or refuse."""

import asyncio
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 2**16


class CuttingProxy:
    """Passes connections on to an address; an async context manager.

    Attributes:
        address: where it listens, as HOST:PORT.
        num_connections: connections it has passed on so far.
        delay_s: seconds for which it says nothing on a new connection.
    """

    def __init__(self, target: str) -> None:
        self.lead_to(target)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self._refuses = False
        self.num_connections = 0
        self.delay_s = 0.0
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def lead_to(self, target: str) -> None:
        """Pass new connections on to this address."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)

    def cut(self) -> None:
        """Reset every connection; what is under way in them is lost."""
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Pass nothing more on in the connections there are, as a path does that swallows everything."""
        for task in self._passing:
            task.cancel()

    def refuse(self, refuses: bool = True) -> None:
        """Reset every connection, new ones as well, until told otherwise."""
        self._refuses = refuses
        if refuses:
            self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            await asyncio.sleep(self.delay_s)
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, there_writer}
            try:
                both = [
                    asyncio.ensure_future(_pass_on(reader, there_writer)),
                    asyncio.ensure_future(_pass_on(there_reader, writer)),
                ]
                self._passing.update(both)
                await asyncio.wait(both)
                if any(each.cancelled() for each in both):
                    await asyncio.Event().wait()  # frozen, until the proxy is left
            finally:
                for each in both:
                    each.cancel()
                self._passing.difference_update(both)
                self._writers -= {writer, there_writer}
                writer.transport.abort()
                there_writer.transport.abort()
        except asyncio.CancelledError:
            pass  # asyncio's server would report it as an error.
        finally:
            self._tasks.discard(task)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()
