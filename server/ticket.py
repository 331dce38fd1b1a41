"""A request that the engine has taken, as the server's calls see it."""

from dataclasses import dataclass

from engine.handle import RequestHandle
from vorrang.v1.generation_pb2 import AcceptedEvent


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A request that is submitted.

    Attributes:
        handle: the engine's.
        accepted: the first event its caller gets.
    """

    handle: RequestHandle
    accepted: AcceptedEvent
