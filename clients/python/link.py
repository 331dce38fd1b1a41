"""One gRPC stream of a session: the task that writes it and the task that reads it.

It knows no requests. When it is over, for whatever reason, ``loss`` says why and its
owner is told; another link may then take its place (``connection``).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import grpc
import grpc.aio
from google.protobuf.message import Message

from clients.python.errors import ConnectionLost, VorrangError, error_from_call, error_from_status
from clients.python.events import SessionInfo, decode_opened
from vorrang.v1 import generation_pb2 as pb

#: Frames that may wait for the transport before those who send more have to wait.
_FRAMES_MAX = 64

Call = grpc.aio.StreamStreamCall[Message, pb.SessionResponse]


class Link:
    """A stream that is open until ``loss`` is set.

    Args:
        call: the gRPC stream, new; nobody else may use it.
        on_frame: gets every frame but the answer to ``open``, in order.
        on_end: called once, when the stream is over and ``loss`` is set.

    Attributes:
        loss: why it is over; None while it is not.
        lost: set when it is over.
    """

    def __init__(
        self, call: Call, on_frame: Callable[[pb.SessionResponse], None], on_end: Callable[["Link"], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.loss: VorrangError | None = None
        self.lost = asyncio.Event()
        self._call = call
        self._on_frame = on_frame
        self._on_end = on_end
        self._opened: asyncio.Future[SessionInfo] | None = None
        self._frames: deque[pb.SessionRequest | None] = deque()
        self._has_frames = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._turn = asyncio.Lock()
        # The two tasks end with the stream, and at the latest in `end`.
        self._tasks = [loop.create_task(self._write()), loop.create_task(self._read())]

    async def open(self, frame: pb.SessionRequest) -> SessionInfo:
        """Say ``open`` and wait for the answer; may be said again after a refusal.

        Raises:
            VorrangError: the server refused, or the stream broke.

        Cancellation: the stream has to be ended.
        """
        if self.loss is not None:
            raise self.loss.again()
        self._opened = asyncio.get_running_loop().create_future()
        self.put([frame])
        return await self._opened

    async def send(self, frame: pb.SessionRequest | None) -> bool:
        """Queue a frame, None = half-close, once there is room for it; False when the stream is over before.

        Frames are queued in the order of the calls.

        Cancellation: the frame was not queued.
        """
        async with self._turn:
            while self.loss is None and len(self._frames) >= _FRAMES_MAX:
                self._has_room.clear()
                await self._has_room.wait()
            return self.put([frame])

    def put(self, frames: Iterable[pb.SessionRequest | None]) -> bool:
        """Queue frames whether or not there is room; None half-closes. False when the stream is over.

        For what is bounded by the number of requests; everything else has to ``send``.
        """
        if self.loss is not None:
            return False
        self._frames.extend(frames)
        self._has_frames.set()
        return True

    def cut(self) -> None:
        """End the stream at once; the peer learns that it was cancelled."""
        self._call.cancel()

    async def end(self) -> None:
        """Cut the stream and wait for its tasks; safe in any state."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._finish(ConnectionLost("the session was left"))  # The reader may never have begun.

    async def _write(self) -> None:
        """The one writer of the stream."""
        try:
            while self.loss is None:
                if not self._frames:
                    self._has_frames.clear()
                    await self._has_frames.wait()
                    continue
                frame = self._frames.popleft()
                if len(self._frames) < _FRAMES_MAX:
                    self._has_room.set()
                if frame is None:
                    await self._call.done_writing()
                    return
                await self._call.write(frame)
        except asyncio.CancelledError:
            if _is_ending():
                raise
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # The stream is broken; the reader learns why.

    async def _read(self) -> None:
        """The one reader of the stream."""
        loss: VorrangError = ConnectionLost("the session was left")
        try:
            while True:
                response = await self._call.read()
                if not isinstance(response, pb.SessionResponse):
                    # Of its own accord, so another stream would be no better.
                    loss = ConnectionLost("the server ended the session", code=grpc.StatusCode.ABORTED)
                    return
                self._take(response)
        except grpc.aio.AioRpcError as error:
            loss = error_from_call(error)
        except asyncio.CancelledError:
            if _is_ending():
                raise
            # This is how a stream looks that the peer, or something on the way, has cancelled.
            loss = ConnectionLost("the stream was cancelled", code=grpc.StatusCode.CANCELLED)
        except Exception as error:
            loss = ConnectionLost(f"the stream could not be read: {error!r}", code=grpc.StatusCode.DATA_LOSS)
            raise
        finally:
            self._finish(loss)

    def _take(self, response: pb.SessionResponse) -> None:
        case = response.WhichOneof("event")
        rejected = response.command_rejected
        if case == "opened":
            self._answer_open(decode_opened(response.opened))
        elif case == "command_rejected" and rejected.command == "open":
            self._answer_open(error_from_status(rejected.status))
        else:
            self._on_frame(response)

    def _answer_open(self, answer: SessionInfo | VorrangError) -> None:
        if self._opened is None or self._opened.done():
            return
        if isinstance(answer, VorrangError):
            self._opened.set_exception(answer)
        else:
            self._opened.set_result(answer)

    def _finish(self, loss: VorrangError) -> None:
        if self.loss is not None:
            return
        self.loss = loss
        self._frames.clear()
        self._has_frames.set()
        self._has_room.set()
        self._answer_open(loss)
        self.lost.set()
        self._call.cancel()
        self._on_end(self)


def _is_ending() -> bool:
    """Whether the running task itself is being cancelled, and not only the call it uses."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
