"""Who comes first: policies, and the queues kept in their order."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

from sortedcontainers import SortedDict

from engine.request import Request, RequestId

#: (urgency, arrival): the fixed part of an order.
Key = tuple[int, int]
#: What requests are compared by right now.
Rank = tuple[float, ...]


class WaitingQueue:
    """Waiting requests, sorted by a key; every operation is O(log n).

    A request's key must not change while it waits: take it out, change it, put it back.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._by_key: SortedDict[Key, Request] = SortedDict()
        self._keys: dict[RequestId, Key] = {}

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._keys)

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether it waits."""
        return request_id in self._keys

    def __iter__(self) -> Iterator[Request]:
        """Requests in order; the queue must not change meanwhile."""
        return iter(self._by_key.values())

    def __reversed__(self) -> Iterator[Request]:
        """Requests by reversed key; the queue must not change meanwhile."""
        return (self._by_key[key] for key in reversed(self._by_key))

    @property
    def first(self) -> Request | None:
        """Who comes first; None when nobody waits."""
        return next(iter(self)) if self._keys else None

    def push(self, request: Request) -> None:
        """Add a request."""
        assert request.request_id not in self._keys
        key = self._key(request)
        self._keys[request.request_id] = key
        self._by_key[key] = request

    def discard(self, request_id: RequestId) -> Request | None:
        """Take a request out, wherever it stands; None when it does not wait."""
        key = self._keys.pop(request_id, None)
        return None if key is None else self._by_key.pop(key)

    def position(self, request: Request) -> int:
        """Requests with a smaller key than this one, which waits."""
        return int(self._by_key.bisect_left(self._keys[request.request_id]))

    def check_integrity(self) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        assert len(self._by_key) == len(self._keys)
        for request_id, key in self._keys.items():
            request = self._by_key[key]
            assert request.request_id == request_id
            assert key == self._key(request), "a key changed while its request waited"


class Policy(Protocol):
    """An order of requests. One object belongs to one scheduler.

    Attributes:
        name: as in the configuration.
        uses_level: whether the level means anything.
        charges_outputs: whether it wants to be told of output tokens.
    """

    name: str
    uses_level: bool
    charges_outputs: bool

    def urgency(self, request: Request) -> int:
        """The level that counts when one request would preempt another; lower is more urgent."""
        ...

    def key(self, request: Request) -> Key:
        """Urgency, then arrival. A preempted request keeps its arrival."""
        ...

    def rank(self, request: Request) -> Rank:
        """What orders prefills and admissions right now."""
        ...

    def new_queue(self) -> WaitingQueue:
        """An empty queue in this order."""
        ...

    def arrived(self, request: Request) -> None:
        """A request is about to join the queue for the first time."""
        ...

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """A request got its first seat, and ``num_cached_tokens`` from the prefix cache."""
        ...

    def goes_on(self, request: Request) -> None:
        """A request got a seat again after it was parked."""
        ...

    def produced(self, requests: Iterable[Request], num_tokens: int = 1) -> None:
        """Each of these requests produced so many output tokens."""
        ...

    def wait_for_themselves(self, tenants: Collection[str]) -> None:
        """What waits of these tenants is kept out by their own limits."""
        ...

    def left(self, request: Request) -> None:
        """A request has ended."""
        ...


class _StaticPolicy:
    """A policy whose order is the key alone."""

    name = ""
    uses_level = False
    charges_outputs = False

    def urgency(self, request: Request) -> int:
        """The same for all."""
        return 0

    def key(self, request: Request) -> Key:
        """Urgency, then arrival."""
        return self.urgency(request), request.arrival_seq

    def rank(self, request: Request) -> Rank:
        """The key."""
        return self.key(request)

    def new_queue(self) -> WaitingQueue:
        """Sorted by the key."""
        return WaitingQueue(self.key)

    def arrived(self, request: Request) -> None:
        """Nothing to remember."""

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Nothing to remember."""

    def goes_on(self, request: Request) -> None:
        """Nothing to remember."""

    def produced(self, requests: Iterable[Request], num_tokens: int = 1) -> None:
        """Nothing to remember."""

    def wait_for_themselves(self, tenants: Collection[str]) -> None:
        """Nothing to remember."""

    def left(self, request: Request) -> None:
        """Nothing to remember."""


class FcfsPolicy(_StaticPolicy):
    """Arrival alone; all requests are equals, so nobody is preempted for an arrival."""

    name = "fcfs"

    def key(self, request: Request) -> Key:
        """Arrival."""
        return 0, request.arrival_seq


class PriorityPolicy(_StaticPolicy):
    """Level, then arrival."""

    name = "priority"
    uses_level = True

    def urgency(self, request: Request) -> int:
        """The request's level."""
        return request.level

    def key(self, request: Request) -> Key:
        """Level, then arrival."""
        return request.level, request.arrival_seq
