"""A session that the load generator keeps open: when it is lost, the next one is opened."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from clients.python.client import VorrangClient
from clients.python.errors import ConnectionLost, VorrangError
from clients.python.session import Session

_REOPEN_S = 0.2
#: How long a server may take to hear of the end of a session.
_LEAVE_S_MAX = 5.0


class LaneClient(VorrangClient):
    """A client with a TCP connection of its own; gRPC's channels to one address share one otherwise."""

    def __init__(
        self, target: str, *, channel_options: Sequence[tuple[str, Any]] = (), **options: Any
    ) -> None:
        own = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2000),
        )
        super().__init__(target, channel_options=[*own, *channel_options], **options)

    @classmethod
    def of_tenant(cls, target: str, token: str) -> Self:
        """A client with another bearer token than the environment's, everything else as there."""
        client = cls.from_environment(target)
        client._metadata = (("authorization", f"Bearer {token}"),)
        return client


class Lane:
    """One session at a time; an async context manager.

    Attributes:
        num_alive: requests of ours in it, for whoever chooses among lanes.
    """

    def __init__(self, client: VorrangClient) -> None:
        self._client = client
        self._session: Session | None = None
        self._error: VorrangError = ConnectionLost("no session is open")
        self._broken = asyncio.Event()
        self.num_alive = 0

    @property
    def session(self) -> Session:
        """The session.

        Raises:
            ConnectionLost: there is none at the moment; says why.
        """
        if self._session is None:
            message = f"no session is open: {self._error.message}"
            raise ConnectionLost(message, code=self._error.code, reason=self._error.reason)
        return self._session

    async def __aenter__(self) -> Self:
        """Open the first session.

        Raises:
            ConnectionLost: the server can't be reached.
            VorrangError: it refuses the session.
        """
        self._session = await self._open()
        self._keeper = asyncio.get_running_loop().create_task(self._keep_open())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    def lost(self, session: Session, error: VorrangError) -> None:
        """Say that a session is of no use any more."""
        if session is self._session:
            self._error = error
            self._broken.set()

    async def leave(self) -> None:
        """Cancel what is alive in it on the server, and end it; the second time does nothing."""
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper
        with suppress(TimeoutError, VorrangError):
            async with asyncio.timeout(_LEAVE_S_MAX):
                await self._leave()

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            # Left with an error it cancels what is alive, and does not wait for its end.
            await session.__aexit__(ConnectionLost, ConnectionLost("the session was left"), None)

    async def _keep_open(self) -> None:
        while True:
            await self._broken.wait()
            self._broken.clear()
            await self._leave()
            while self._session is None:
                try:
                    self._session = await self._open()
                except VorrangError as error:
                    self._error = error
                    await asyncio.sleep(_REOPEN_S)

    async def _open(self) -> Session:
        return await self._client.session(client_name="vorrangctl load", reconnect_s=0.0).__aenter__()
