"""Grammars in the process that computes: their messages among the plans, which never wait for one.

One channel brings both. What is to be compiled is asked for as soon as somebody looks for a plan, and
each answers on its own when it is done.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Protocol

from engine.errors import Unimplemented
from engine.request import RequestId
from engine.runner.channel import MASKS, PREPARE, PREPARED, WITHDRAW, Message, pack_error
from engine.runner.grammars.masks import Masks


class Channel(Protocol):
    """See ``BlockingChannel``."""

    def receive(self) -> Message | None:
        """The next message; None when the other end is gone."""
        ...

    def has_message(self) -> bool:
        """Whether ``receive`` has something to read, be it the end."""
        ...

    def send(self, message: Message) -> None:
        """Send a message; from any thread."""
        ...


class PlansOnly:
    """A ``PlanChannel`` that keeps grammars to itself.

    Args:
        channel: brings plans and grammars.
        masks: compiles and follows; None = there are none here.
    """

    def __init__(self, channel: Channel, masks: Masks | None) -> None:
        self._channel = channel
        self._masks = masks
        self._plans: deque[Message | None] = deque()
        self._preparing: dict[int, Future[None]] = {}
        if masks is not None:
            masks.watch(self._ready)

    def receive(self) -> Message | None:
        """The next plan; None when the other end is gone."""
        while not self._plans:
            self._take()
        return self._plans.popleft()

    def has_message(self) -> bool:
        """Whether ``receive`` has a plan, or the end, to give."""
        while not self._plans and self._channel.has_message():
            self._take()
        return bool(self._plans)

    def send(self, message: Message) -> None:
        """Send a message."""
        self._channel.send(message)

    def _take(self) -> None:
        message = self._channel.receive()
        if message is None or message[0] not in (PREPARE, WITHDRAW):
            self._plans.append(message)
            return
        if message[0] == WITHDRAW:
            preparing = self._preparing.get(message[1])
            if preparing is not None:
                preparing.cancel()
            return
        _, number, grammar, level = message
        try:
            if self._masks is None:
                raise Unimplemented("grammar")
            future = self._masks.prepare(grammar, level)
        except Exception as error:
            self._answer(number, error)
        else:
            self._preparing[number] = future
            future.add_done_callback(lambda done: self._done(number, done))

    def _done(self, number: int, future: "Future[None]") -> None:
        self._preparing.pop(number, None)
        try:
            error = future.exception()
        except CancelledError:
            return  # nobody waits for an answer
        self._answer(number, error)

    def _answer(self, number: int, error: BaseException | None) -> None:
        self._say((PREPARED, number, None if error is None else pack_error(error)))

    def _ready(self, ready: Sequence[tuple[RequestId, int]]) -> None:
        self._say((MASKS, ready))

    def _say(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except OSError:  # nobody is left to listen, which whoever reads will see
            return
