"""Who comes first: policies, and the queues kept in their order."""

import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import ClassVar

from sortedcontainers import SortedDict

from engine.request import Request, RequestId

#: (urgency, a policy's own order, arrival): the fixed part of an order, of no two requests the same.
Key = tuple[int, ...]
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
        key = self._key(request)
        assert request.request_id not in self._keys
        assert key not in self._by_key, "two requests with the same key: the queue would lose one"
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


class Policy(abc.ABC):
    """An order of requests. One object belongs to one scheduler.

    A policy whose order is fixed when a request arrives writes ``order`` alone. One whose order moves
    says so (``is_fixed``) and brings ``rank`` and ``new_queue`` together.

    Args:
        weights: shares of tenants relative to others, for a policy that looks at tenants.

    Attributes:
        name: as in the configuration.
        uses_level: whether the level means anything; otherwise all requests are equals, and nobody is
            preempted for an arrival.
        is_fixed: whether the order of two requests stays what it is, whatever is computed.
    """

    name: ClassVar[str]
    uses_level: ClassVar[bool] = True
    is_fixed: ClassVar[bool] = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """The weights mean nothing to most."""

    def __init_subclass__(cls) -> None:
        own = {"rank", "new_queue"} & cls.__dict__.keys()
        if own and (len(own) == 1 or cls.is_fixed):
            raise TypeError(f"{cls.__name__}: rank and new_queue come together, with is_fixed = False")
        if "order" in cls.__dict__ and "key" not in cls.__dict__ and cls.key is not Policy.key:
            raise TypeError(f"{cls.__name__}: inherits a key that does not look at its order")

    @abc.abstractmethod
    def order(self, request: Request) -> tuple[int, ...]:
        """What decides inside a level, lower first; it must not change while the request lives.

        Arrival decides among equals, so ``()`` is arrival alone.
        """

    def urgency(self, request: Request) -> int:
        """The level that counts when one request would preempt another; lower is more urgent."""
        return request.level if self.uses_level else 0

    def key(self, request: Request) -> Key:
        """Urgency, then the policy's order, then arrival. A preempted request keeps its arrival."""
        return (self.urgency(request), *self.order(request), request.arrival_seq)

    def rank(self, request: Request) -> Rank:
        """What orders prefills and admissions right now."""
        return self.key(request)

    def new_queue(self) -> WaitingQueue:
        """An empty queue in this order."""
        return WaitingQueue(self.key)

    def arrived(self, request: Request) -> None:
        """A request is about to join the queue for the first time."""

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """A request got its first seat, and ``num_cached_tokens`` from the prefix cache."""

    def goes_on(self, request: Request) -> None:
        """A request got a seat again after it was parked."""

    def produced(self, requests: Iterable[Request], num_tokens: int = 1) -> None:
        """Each of these requests produced so many output tokens; told unless the order is fixed."""

    def wait_for_themselves(self, tenants: Collection[str]) -> None:
        """What waits of these tenants is kept out by their own limits."""

    def left(self, request: Request) -> None:
        """A request has ended."""


class FcfsPolicy(Policy):
    """Arrival alone; all requests are equals, so nobody is preempted for an arrival."""

    name = "fcfs"
    uses_level = False

    def order(self, request: Request) -> tuple[int, ...]:
        """Arrival alone."""
        return ()

    def key(self, request: Request) -> Key:
        """As it would be, sooner: it is asked for at every move."""
        return 0, request.arrival_seq


class PriorityPolicy(Policy):
    """Level, then arrival."""

    name = "priority"

    def order(self, request: Request) -> tuple[int, ...]:
        """Arrival alone."""
        return ()

    def urgency(self, request: Request) -> int:
        """The level; as it would be, sooner."""
        return request.level

    def key(self, request: Request) -> Key:
        """As it would be, sooner: it is asked for at every move."""
        return request.level, request.arrival_seq
