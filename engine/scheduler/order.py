"""Who comes first: policies, and the queue kept in their order."""

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from engine.request import Request, RequestId
from engine.scheduler.config import InvalidSetting

Key = tuple[int, int]


class Policy(Protocol):
    """An order of requests.

    Attributes:
        name: as in the configuration.
        uses_level: whether the level means anything.
    """

    name: str
    uses_level: bool

    def urgency(self, request: Request) -> int:
        """The level that counts when one request would preempt another; lower is more urgent."""
        ...

    def key(self, request: Request) -> Key:
        """Sort key: urgency, then arrival. A preempted request keeps its arrival."""
        ...


class PriorityPolicy:
    """Level, then arrival."""

    name = "priority"
    uses_level = True

    def urgency(self, request: Request) -> int:
        """The request's level."""
        return request.level

    def key(self, request: Request) -> Key:
        """(level, arrival)."""
        return request.level, request.arrival_seq


class FcfsPolicy:
    """Arrival alone; all requests are equals, so nobody is preempted for an arrival."""

    name = "fcfs"
    uses_level = False

    def urgency(self, request: Request) -> int:
        """The same for all."""
        return 0

    def key(self, request: Request) -> Key:
        """(0, arrival)."""
        return 0, request.arrival_seq


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (PriorityPolicy(), FcfsPolicy())}


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
        InvalidSetting: there is none.
    """
    try:
        return POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise InvalidSetting("scheduler.policy", f"must be one of {known}", name) from None


class WaitingQueue:
    """Waiting requests in policy order.

    A heap with lazy deletion: ``push``, ``discard`` and ``pop`` are O(log n)
    amortised. Dead entries are dropped when they reach the top, and all at once
    when they outnumber the living.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, RequestId]] = []
        self._live: dict[RequestId, tuple[Key, Request]] = {}
        self._by_urgency: Counter[int] = Counter()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._live)

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether it waits."""
        return request_id in self._live

    def __iter__(self) -> Iterator[Request]:
        """Requests in policy order; sorts, so not for the hot path."""
        return (request for _, request in sorted(self._live.values(), key=lambda entry: entry[0]))

    def push(self, request: Request) -> None:
        """Add a request; its key must not change while it waits."""
        assert request.request_id not in self._live
        key = self._policy.key(request)
        self._live[request.request_id] = (key, request)
        self._by_urgency[key[0]] += 1
        heapq.heappush(self._heap, (key, request.request_id))

    def peek(self) -> Request | None:
        """The first request, which stays; None when nothing waits."""
        while self._heap:
            key, request_id = self._heap[0]
            entry = self._live.get(request_id)
            if entry is not None and entry[0] == key:
                return entry[1]
            heapq.heappop(self._heap)
        return None

    def discard(self, request_id: RequestId) -> Request | None:
        """Take a request out, wherever it stands; None when it does not wait."""
        entry = self._live.pop(request_id, None)
        if entry is None:
            return None
        key, request = entry
        self._by_urgency[key[0]] -= 1
        if self._by_urgency[key[0]] == 0:
            del self._by_urgency[key[0]]
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [(k, r.request_id) for k, r in self._live.values()]
            heapq.heapify(self._heap)
        return request

    def num_before_newcomer(self, urgency: int) -> int:
        """Requests that would be served before a newcomer of that urgency."""
        return sum(count for level, count in self._by_urgency.items() if level <= urgency)

    def check_integrity(self) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        assert self._by_urgency == Counter(key[0] for key, _ in self._live.values())
        in_heap = set(self._heap)
        for request_id, (key, request) in self._live.items():
            assert (key, request_id) in in_heap
            assert key == self._policy.key(request), "a key changed while its request waited"
