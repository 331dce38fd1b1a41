"""When requests run out of time, at a cost that follows the number that do."""

import heapq
import math
from collections.abc import Mapping

from engine.request import Request, RequestId

#: Entries of ended requests that are left alone until they come due.
MAX_STALE = 256


class Deadlines:
    """Queue and total deadlines of the requests that have any."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, RequestId]] = []
        self._total: list[tuple[float, int, RequestId]] = []

    @property
    def num_entries(self) -> int:
        """Entries in the heaps, those of ended requests included."""
        return len(self._queue) + len(self._total)

    @property
    def next_due(self) -> float:
        """The earliest deadline; until then nobody expires."""
        return min((heap[0][0] for heap in (self._queue, self._total) if heap), default=math.inf)

    def add(self, request: Request) -> None:
        """Watch a new request."""
        spec = request.spec
        if spec.queue_deadline is not None:
            heapq.heappush(self._queue, (spec.queue_deadline, request.arrival_seq, request.request_id))
        if spec.total_deadline is not None:
            heapq.heappush(self._total, (spec.total_deadline, request.arrival_seq, request.request_id))

    def expired(self, now: float, alive: Mapping[RequestId, Request]) -> list[RequestId]:
        """Requests whose time has run out at ``now``; each is named once."""
        expired: dict[RequestId, None] = {}
        for heap in (self._queue, self._total):
            if len(heap) > 2 * len(alive) + MAX_STALE:
                # Entries of the ended would stay until they come due, which may be hours.
                heap[:] = [entry for entry in heap if entry[2] in alive]
                heapq.heapify(heap)
            while heap and heap[0][0] <= now:
                _, _, request_id = heapq.heappop(heap)
                request = alive.get(request_id)
                if request is not None and not (heap is self._queue and request.has_started):
                    expired[request_id] = None
        return list(expired)
