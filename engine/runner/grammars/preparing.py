"""Grammars in the process that computes: compiled beside the plans, which never wait for one.

One channel brings both. What is to be compiled is given to threads as soon as somebody looks for a plan,
and each answers on its own when it is done.
"""

from collections import deque
from concurrent.futures import Future
from typing import Protocol

from engine.errors import Unimplemented
from engine.runner.channel import PREPARE, PREPARED, Message, pack_error
from engine.runner.grammars.cache import Grammars
from engine.runner.grammars.compiled import Grammar


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
        grammars: compiles; None = there are none here.
    """

    def __init__(self, channel: Channel, grammars: Grammars | None) -> None:
        self._channel = channel
        self._grammars = grammars
        self._plans: deque[Message | None] = deque()

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
        if message is None or message[0] != PREPARE:
            self._plans.append(message)
            return
        _, number, grammar = message
        try:
            if self._grammars is None:
                raise Unimplemented("grammar")
            future = self._grammars.prepare(grammar)
        except Exception as error:
            self._answer(number, error)
        else:
            future.add_done_callback(lambda done: self._done(number, done))

    def _done(self, number: int, future: "Future[Grammar]") -> None:
        self._answer(number, future.exception())

    def _answer(self, number: int, error: BaseException | None) -> None:
        try:
            self._channel.send((PREPARED, number, None if error is None else pack_error(error)))
        except OSError:  # nobody is left to listen, which whoever reads will see
            return
