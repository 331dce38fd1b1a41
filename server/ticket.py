"""A request that the engine has taken, as the server's calls see it."""

from dataclasses import dataclass

from engine.handle import Handle
from vorrang.v1.generation_pb2 import AcceptedEvent


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A request that is submitted.

    Attributes:
        handle: the engine's.
        accepted: the first event its caller gets.
        client_request_id: the id its client chose; may be empty.
    """

    handle: Handle
    accepted: AcceptedEvent
    client_request_id: str = ""
