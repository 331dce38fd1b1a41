"""Raw HTTP/2 on loopback, for clients that do not behave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings


class Http2:
    """One connection. Frames are h2's, but what it would refuse to send may be sent raw."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, acks: bool = True
    ) -> None:
        self.reader, self.writer = reader, writer
        config = h2.config.H2Configuration(client_side=True, validate_outbound_headers=False)
        self.connection = h2.connection.H2Connection(config)
        self.acks = acks
        self.events: list[h2.events.Event] = []
        self.closed = False
        self._grown = asyncio.Event()
        self._task = asyncio.ensure_future(self._read())

    async def begin(self) -> None:
        """Preface and settings."""
        self.connection.initiate_connection()
        await self.flush()

    def headers(self, path: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
        """Of a gRPC call."""
        return [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *more,
        ]

    async def flush(self) -> None:
        """Send what h2 has to send."""
        await self.send(self.connection.data_to_send())

    async def send(self, raw: bytes) -> None:
        """Send bytes, and let the reader see what came; harmless when the server has closed."""
        with contextlib.suppress(ConnectionError):
            if not self.closed:
                self.writer.write(raw)
                await self.writer.drain()
            await asyncio.sleep(0)

    async def until(self, holds: Callable[["Http2"], Any]) -> Any:
        """Wait until ``holds`` gives something."""
        while not (found := holds(self)):
            self._grown.clear()
            if self.closed:
                raise EOFError(f"closed after {self.events[-3:]}")
            await self._grown.wait()
        return found

    async def until_closed(self) -> None:
        """Wait until the server has closed."""
        await self._task

    def of(self, kind: type[h2.events.Event]) -> list[Any]:
        """Events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            while raw := await self.reader.read(65536):
                new: list[h2.events.Event] = []
                with contextlib.suppress(Exception):  # an attacker does not mind
                    new = self.connection.receive_data(raw)
                    self.events += new
                    if self.acks:
                        await self.flush()
                if any(isinstance(event, h2.events.ConnectionTerminated) for event in new):
                    # Sent away. The server may leave the socket open and read no more, so a flood ends here.
                    self.writer.transport.abort()
                    break
                self._grown.set()
        self.closed = True
        self._grown.set()

    async def close(self) -> None:
        """Leave without a word."""
        self._task.cancel()
        self.writer.transport.abort()
        await asyncio.gather(self._task, return_exceptions=True)


@contextlib.asynccontextmanager
async def http2(address: str, *, acks: bool = True, begin: bool = True) -> AsyncIterator[Http2]:
    """A connection to a server."""
    host, _, port = address.rpartition(":")
    client = Http2(*await asyncio.open_connection(host, int(port)), acks=acks)
    try:
        if begin:
            await client.begin()
        yield client
    finally:
        await client.close()
