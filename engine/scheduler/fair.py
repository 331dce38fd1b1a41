"""The policy ``fair``: inside a level, the tenant that was served least comes first.

Service is counted in virtual tokens per tenant: a prompt token computed costs 1,
an output token 2, both divided by the tenant's weight; tokens found in the
prefix cache and tokens computed again after a preemption are free. A tenant that
comes back after it had nothing to do is lifted to the least served active one,
so idleness earns no credit.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024
(virtual token counter).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from sortedcontainers import SortedDict

from engine.request import Request, RequestId
from engine.scheduler.order import PriorityPolicy, Rank, WaitingQueue

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0


class FairPolicy(PriorityPolicy):
    """Level, then tenants by virtual token counter, then arrival.

    Args:
        weights: share of a tenant relative to others; 1 for those not named.
    """

    name = "fair"
    charges_outputs = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._served: dict[str, float] = {}
        self._num_alive: Counter[str] = Counter()
        self._floor = 0.0

    def served(self, tenant: str) -> float:
        """Virtual tokens a tenant was served; only differences mean anything."""
        return self._served.get(tenant, self._floor)

    def rank(self, request: Request) -> Rank:
        """(level, virtual tokens of its tenant, arrival)."""
        return request.level, self.served(request.spec.tenant), request.arrival_seq

    def new_queue(self) -> WaitingQueue:
        """A queue that looks at the counters whenever it is read."""
        return _FairQueue(self)

    def arrived(self, request: Request) -> None:
        """Lift a tenant that had nothing alive."""
        tenant = request.spec.tenant
        if self._num_alive[tenant] == 0:
            active = [self._served[t] for t, count in self._num_alive.items() if count > 0]
            self._served[tenant] = max(self.served(tenant), min(active, default=self._floor))
        self._num_alive[tenant] += 1

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Charge the prompt, once."""
        if request.num_preemptions == 0:
            self._charge(request, PROMPT_TOKEN_COST * (request.num_prompt_tokens - num_cached_tokens))

    def produced(self, requests: Iterable[Request], num_tokens: int = 1) -> None:
        """Charge output tokens, one after the other: sums of fractions depend on how they are made."""
        by_tenant = Counter([request.spec.tenant for request in requests])
        for tenant, num_requests in by_tenant.items():
            cost = OUTPUT_TOKEN_COST / self._weights.get(tenant, 1.0)
            served = self.served(tenant)
            if cost.is_integer() and served.is_integer():  # then the sum is exact, however it is made
                served += cost * num_requests * num_tokens
            else:
                for _ in range(num_requests * num_tokens):
                    served += cost
            self._served[tenant] = served

    def left(self, request: Request) -> None:
        """Forget a tenant that has nothing alive, but not how far service had come."""
        tenant = request.spec.tenant
        self._num_alive[tenant] -= 1
        if self._num_alive[tenant] == 0:
            del self._num_alive[tenant]
            # As in the paper: who comes back to an idle server starts where the last one left off.
            self._floor = max(self._floor, self._served.pop(tenant))

    def _charge(self, request: Request, cost: float) -> None:
        tenant = request.spec.tenant
        self._served[tenant] = self.served(tenant) + cost / self._weights.get(tenant, 1.0)


class _FairQueue(WaitingQueue):
    """Also kept apart by level and tenant; the groups are compared by their counters when read.

    ``reversed`` and ``position`` go by level and arrival alone.
    """

    def __init__(self, policy: FairPolicy) -> None:
        super().__init__(policy.key)
        self._served = policy.served
        self._groups: SortedDict[int, dict[str, SortedDict[int, Request]]] = SortedDict()

    def __iter__(self) -> Iterator[Request]:
        """Requests by level, then by their tenants' counters, then by arrival."""
        for tenants in self._groups.values():
            for _, _, requests in sorted(
                (self._served(tenant), requests.keys()[0], requests) for tenant, requests in tenants.items()
            ):
                yield from requests.values()

    def push(self, request: Request) -> None:
        """Add a request."""
        super().push(request)
        tenants = self._groups.setdefault(request.level, {})
        requests = tenants.setdefault(request.spec.tenant, SortedDict())
        requests[request.arrival_seq] = request

    def discard(self, request_id: RequestId) -> Request | None:
        """Take a request out, wherever it stands; None when it does not wait."""
        request = super().discard(request_id)
        if request is not None:
            tenants = self._groups[request.level]
            requests = tenants[request.spec.tenant]
            del requests[request.arrival_seq]
            if not requests:
                del tenants[request.spec.tenant]
            if not tenants:
                del self._groups[request.level]
        return request

    def check_integrity(self) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        super().check_integrity()
        assert sorted(request.request_id for request in self) == sorted(self._keys)
