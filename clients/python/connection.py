"""The gRPC stream of a session, and the next one after it was lost.

It knows the session's token but none of its requests: what a new stream has to begin
with, and who fails when the server has forgotten the session, is its owner's business.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from clients.python.errors import ConnectionLost, ResumeOutOfRange, VorrangError
from clients.python.events import SessionInfo
from clients.python.link import Call, Link
from clients.python.reconnection import Attempts, is_broken
from vorrang.v1 import generation_pb2 as pb

#: Longest wait for the answer in one attempt to find a lost connection again: a path that swallows
#: everything must not use up all the patience.
_ATTEMPT_S_MAX = 3.0
#: How long a first stream is tried again: about the four attempts that calls have (``channel``).
_OPEN_PATIENCE_S = 0.8


class Owner(Protocol):
    """Who uses the connection."""

    def open_frame(self, token: str) -> pb.SessionRequest:
        """What opens the session of that token; "" = a new one."""
        ...

    def on_frame(self, response: pb.SessionResponse) -> None:
        """A frame has arrived."""

    def is_needed(self) -> bool:
        """Whether there is anything that a new stream would be good for."""
        ...

    def has_requests(self) -> bool:
        """Whether requests are alive."""
        ...

    def take_up(self) -> Sequence[pb.SessionRequest | None]:
        """What a new stream has to begin with, so that everything goes on."""
        ...

    def on_forgotten(self, error: VorrangError) -> None:
        """The server does not hold the session any more; the next ``take_up`` is for a new one."""

    def on_lost(self, loss: ConnectionLost) -> None:
        """It is over, for good."""


class Connection:
    """Opens streams, one at a time, until it is lost for good.

    Args:
        make_call: makes a gRPC stream.
        owner: told of everything.
        open_timeout_s: longest wait for the first answer.
        reconnect_s: how long a lost stream is looked for; 0 = not at all.

    Attributes:
        info: what the server said when the stream in use was opened.
        loss: why it is lost for good; None while it is not.
    """

    info: SessionInfo

    def __init__(
        self, make_call: Callable[[], Call], owner: Owner, *, open_timeout_s: float, reconnect_s: float
    ) -> None:
        self._make_call = make_call
        self._owner = owner
        self._open_timeout_s = open_timeout_s
        self._reconnect_s = reconnect_s
        self._link: Link | None = None
        self._keeper: asyncio.Task[None] | None = None
        # Set while there is a stream, and when there will be none any more.
        self._settled = asyncio.Event()
        self.loss: ConnectionLost | None = None
        self.lost = asyncio.Event()

    @property
    def linked(self) -> bool:
        """Whether there is a stream."""
        return self._settled.is_set() and self.loss is None

    async def open(self, token: str) -> None:
        """Open the first stream; a server that can't be reached or drains is asked again, for a moment.

        Raises:
            ConnectionLost: the server can't be reached, or did not answer in time.
            VorrangError: the server refused the session.
        """
        try:
            async with asyncio.timeout(self._open_timeout_s):
                self._use(*await self._open_patiently(token))
        except TimeoutError:
            raise ConnectionLost(f"no answer to open within {self._open_timeout_s:g} s") from None
        self._settled.set()
        # The task ends with the session, in every case, by `end`.
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _open_patiently(self, token: str) -> tuple[Link, SessionInfo]:
        now_s = asyncio.get_running_loop().time
        attempts = Attempts(now_s(), min(_OPEN_PATIENCE_S, self._reconnect_s))
        while True:
            try:
                return await self._open_link(token)
            except VorrangError as error:
                wait_s = attempts.next_wait_s(now_s(), error)
                if error.code is not grpc.StatusCode.UNAVAILABLE or wait_s is None:
                    raise
            await asyncio.sleep(wait_s)

    async def send(self, frame: pb.SessionRequest | None) -> bool:
        """Queue a frame, None = half-close, once there is room; False when there is no stream."""
        if not self.linked or self._link is None:
            return False
        return await self._link.send(frame)

    def put(self, frame: pb.SessionRequest) -> bool:
        """Queue a frame whether or not there is room; False when there is no stream."""
        if not self.linked or self._link is None:
            return False
        return self._link.put([frame])

    async def settled(self) -> None:
        """Wait until there is a stream.

        Raises:
            ConnectionLost: there will be none any more.
        """
        await self._settled.wait()
        if self.loss is not None:
            raise self.loss.again()

    def cut(self) -> None:
        """Cut the stream in use, as when the network fails."""
        if self._link is not None:
            self._link.cut()

    async def end(self) -> None:
        """End everything; safe to be called in any state."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._link is not None:
            await self._link.end()
        self._lose(ConnectionLost("the session was left"))

    def _use(self, link: Link, info: SessionInfo) -> None:
        self._link, self.info = link, info

    async def _open_link(self, token: str) -> tuple[Link, SessionInfo]:
        link = Link(self._make_call(), self._owner.on_frame, self._on_end)
        try:
            return link, await self._open_on(link, token)
        except BaseException:
            await link.end()
            raise

    async def _open_on(self, link: Link, token: str) -> SessionInfo:
        try:
            return await link.open(self._owner.open_frame(token))
        except ResumeOutOfRange as error:
            if self._keeper is None:  # The first one: a caller's token has to be right.
                raise
            self._owner.on_forgotten(error)
            return await link.open(self._owner.open_frame(""))

    def _on_end(self, link: Link) -> None:
        if link is self._link and self.loss is None:
            self._settled.clear()

    async def _keep(self) -> None:
        """Look for a new stream whenever one is lost."""
        loss: VorrangError = ConnectionLost("the session was left")
        try:
            while True:
                assert self._link is not None
                await self._link.lost.wait()
                assert self._link.loss is not None
                loss = self._link.loss
                await self._link.end()
                can_resume = bool(self.info.session_token) or not self._owner.has_requests()
                if not (is_broken(loss) and self._reconnect_s and can_resume and self._owner.is_needed()):
                    return
                loss = await self._find_again(loss) or loss
                if not self.linked:
                    return
        except Exception as error:
            loss = ConnectionLost(f"the stream could not be kept: {error!r}")
            raise
        finally:
            self._lose(loss)

    async def _find_again(self, loss: VorrangError) -> VorrangError | None:
        """Find a lost stream again; returns why there is none when there is none."""
        now_s = asyncio.get_running_loop().time
        attempts = Attempts(now_s(), self._reconnect_s)
        last = loss
        while (wait_s := attempts.next_wait_s(now_s(), last)) is not None:
            await asyncio.sleep(wait_s)
            end_s = min(attempts.give_up_at_s, now_s() + _ATTEMPT_S_MAX)
            try:
                async with asyncio.timeout_at(end_s):
                    self._use(*await self._open_link(self.info.session_token))
            except TimeoutError:
                last = ConnectionLost("no answer to open")
                continue
            except VorrangError as error:
                last = error
                continue
            assert self._link is not None
            if self._link.put(self._owner.take_up()):
                self._settled.set()
                return None
            assert self._link.loss is not None
            last = self._link.loss
        if now_s() < attempts.give_up_at_s and not is_broken(last):
            return last
        return ConnectionLost(
            f"the connection was lost ({loss.message}) and not found again within {self._reconnect_s:g} s: "
            f"{last.message}"
        )

    def _lose(self, why: VorrangError) -> None:
        if self.loss is not None:
            return
        if isinstance(why, ConnectionLost):
            self.loss = why
        else:
            message = f"the server ended the session: {why.message}"
            self.loss = ConnectionLost(message, code=why.code, reason=why.reason)
        self._settled.set()
        self.lost.set()
        self._owner.on_lost(self.loss)
