"""Who went without a token for longer than its class may: the starved tier.

A starved request keeps its level; it is served from a reserved share, oldest
first, and who was admitted to that share is never evicted.
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterable

from sortedcontainers import SortedDict

from engine.request import Request, RequestId, RequestStatus
from engine.scheduler.config import ClassConfig

#: Entries of ended requests that are left alone until they come due.
MAX_STALE = 256


class StarvationWatch:
    """Finds requests whose wait has become too long, at a cost that follows their number.

    Every request that is watched has an entry in a heap, under the time at which
    it would be starved if it got nothing until then. An entry that comes due too
    early (the request got tokens meanwhile) is put back under its new time.

    Args:
        rules: the rules that a request's class has.
    """

    def __init__(self, rules: Callable[[Request], ClassConfig]) -> None:
        self._rules = rules
        self._due: list[tuple[float, int, RequestId]] = []
        self._watched: dict[RequestId, Request] = {}
        self.starved: SortedDict[int, Request] = SortedDict()  # by arrival

    def watch(self, request: Request) -> None:
        """Watch a request from now on; harmless when it is starved already."""
        if not request.is_starved:
            self._watched[request.request_id] = request
            heapq.heappush(self._due, (self._deadline(request), request.arrival_seq, request.request_id))

    @property
    def next_due(self) -> float:
        """When the next request is looked at; until then an update changes nothing."""
        return self._due[0][0] if self._due else math.inf

    @property
    def num_entries(self) -> int:
        """Entries in the heap, those of ended requests included."""
        return len(self._due)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._watched.pop(request.request_id, None)
        self.starved.pop(request.arrival_seq, None)
        if len(self._due) > 2 * len(self._watched) + MAX_STALE:
            # Entries of the ended would stay until they come due: minutes, in which there may be 100,000.
            self._due = [entry for entry in self._due if entry[2] in self._watched]
            heapq.heapify(self._due)

    def update(self, now: float) -> Collection[Request]:
        """Requests that are starved at ``now``, oldest first."""
        while self._due and self._due[0][0] <= now:
            _, _, request_id = heapq.heappop(self._due)
            request = self._watched.get(request_id)
            if request is None or request.status is RequestStatus.PARKED:
                continue
            if self._deadline(request) > now:
                self.watch(request)
            else:
                del self._watched[request_id]
                request.is_starved = True
                self.starved[request.arrival_seq] = request
        starved: Collection[Request] = self.starved.values()
        return starved

    def _deadline(self, request: Request) -> float:
        return request.idle_since + self._rules(request).max_wait_s

    def check_integrity(self, alive: Iterable[Request]) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        requests = {request.request_id: request for request in alive}
        starved = {i: r for i, r in requests.items() if r.is_starved}
        assert dict(self.starved) == {r.arrival_seq: r for r in starved.values()}
        assert self._watched.keys() == requests.keys() - starved.keys()
        due = {request_id for _, _, request_id in self._due}
        unwatched = self._watched.keys() - due
        assert all(requests[request_id].status is RequestStatus.PARKED for request_id in unwatched)
