"""Messages between the server's process and the one that computes.

A message is a picklable tuple whose first member says its kind, in a frame that
begins with its length. The two processes are one program, so pickle is safe here.
Both ends of the format are in this module; it knows no event loop.
"""

import pickle
import select
import socket
import struct
import threading
from collections import deque
from typing import Any

from engine.errors import VorrangError
from engine.failure import REMOTE, trace_of

Message = tuple[Any, ...]

#: From the server: what to load, then plans and grammars, and that nobody waits for a grammar any more.
LOAD, PLAN, PREPARE, WITHDRAW = "load", "plan", "prepare", "withdraw"
#: From the runner: the model is there or not, a step's outcome, a sign of life, a line for the log, whether
#: a grammar was compiled, whose masks are ready.
READY, LOAD_FAILED, RESULT, STEP_FAILED, BEAT, LOG, PREPARED, MASKS = (
    "ready", "load_failed", "result", "step_failed", "beat", "log", "prepared", "masks",
)  # fmt: skip

#: Read at most so many at a time.
RECEIVE_BYTES = 256 * 1024

_LENGTH = struct.Struct("<I")


def frame(message: Message) -> bytes:
    """A message as bytes."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Makes messages of bytes that come in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now, oldest first."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(buffer, at)[0]
            if len(buffer) < end:
                break
            messages.append(pickle.loads(memoryview(buffer)[at + _LENGTH.size : end]))  # noqa: S301
            at = end
        if at:
            del buffer[:at]
        return messages


class BlockingChannel:
    """The far end: blocking reads by one thread, writes by any.

    Args:
        connection: a stream socket; owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()
        self._received: deque[Message] = deque()
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._lock = threading.Lock()

    @property
    def connection(self) -> socket.socket:
        """The socket, for whoever has read all that was sent and goes on otherwise."""
        return self._connection

    def receive(self) -> Message | None:
        """The next message; None when the other end is gone."""
        while not self._received:
            data = self._connection.recv(RECEIVE_BYTES)
            if not data:
                return None
            self._received.extend(self._reader.feed(data))
        return self._received.popleft()

    def receive_alone(self) -> Message | None:
        """The first message, and no byte of what follows it: that is read otherwise, with descriptors.

        Returns:
            None when the other end is gone.
        """
        data = b""
        size = _LENGTH.size
        while len(data) < size:
            piece = self._connection.recv(size - len(data))
            if not piece:
                return None
            data += piece
            if len(data) == _LENGTH.size:
                size += _LENGTH.unpack(data)[0]
        (message,) = self._reader.feed(data)
        return message

    def has_message(self) -> bool:
        """Whether ``receive`` has something to read, be it the end. For the thread that reads."""
        return bool(self._received) or bool(self._readable.poll(0))

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the other end is gone.
        """
        data = frame(message)
        with self._lock:
            self._connection.sendall(data)

    def close(self) -> None:
        """Close this end. Nobody may be reading."""
        self._connection.close()


class RemoteError(Exception):
    """An error of the other process, in words."""


#: class, args, attributes, traceback
PackedError = tuple[type[BaseException], tuple[Any, ...], dict[str, Any], str]


def pack_error(error: BaseException) -> PackedError:
    """An error as something that survives pickling, whatever its constructor wants.

    What can't be sent as it is becomes a ``RemoteError`` with its words.
    """
    text = trace_of(error, with_text=False)
    packed = (type(error), error.args, dict(error.__dict__), text)
    try:
        pickle.loads(pickle.dumps(packed))  # noqa: S301
    except Exception:  # a local class, an open file: anything
        return RemoteError, (f"{type(error).__name__}: {error}",), {}, text
    return packed


def unpack_error(packed: PackedError) -> BaseException:
    """The error, with the other process's traceback as a note."""
    cls, args, attributes, text = packed
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    if not isinstance(error, VorrangError):  # those are for callers, who get no internal text
        error.add_note(f"{REMOTE}{text}")
    return error
