"""The policy ``fair``: inside a level, the tenant that was served least comes first.

Service is counted in virtual tokens, by level and tenant: a prompt token computed costs 1,
an output token 2, both divided by the tenant's weight; tokens found in the prefix cache and
tokens computed again after a preemption are free. Levels have counters of their own, because
a request that waits below others is not owed what these are given.

Only a tenant with something *waiting* goes without, so only that is made good. When a tenant
begins to wait, for whatever reason, its counter is lifted:

- to the least counter among the tenants that wait at the level;
- when nobody waits there, to the greatest counter of all. Everybody had what it asked for, so nobody
  is owed anything, however differently they were served.

A tenant that only waits for its own limit of seats is lifted likewise.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (virtual token
counter). The paper lifts to the counter of the tenant last taken from the queue when nobody waits;
that lets a tenant that was taken last, and then did little, outrun one that was served without
queueing meanwhile.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from sortedcontainers import SortedDict

from engine.priority import DEFAULT_LEVEL
from engine.request import Request, RequestId
from engine.scheduler.order import PriorityPolicy, Rank, WaitingQueue

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
#: Counters that a level keeps at least before it looks for some to forget.
MIN_KEPT = 64


class _Level:
    """The counters of one level.

    Attributes:
        served: virtual tokens by tenant.
        base: those of a tenant without an entry.
        greatest: of all that were ever in ``served``.
    """

    __slots__ = ("base", "greatest", "served")

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self.base = 0.0
        self.greatest = 0.0

    def of(self, tenant: str) -> float:
        """Virtual tokens of a tenant."""
        return self.served.get(tenant, self.base)

    def set(self, tenant: str, served: float) -> None:
        """Change a counter."""
        self.served[tenant] = served
        self.greatest = max(self.greatest, served)

    def make_equal(self) -> None:
        """Nobody waits: lift everybody to the greatest."""
        self.served.clear()
        self.base = self.greatest


class _Advance(NamedTuple):
    """What a request that went on after a pause was charged ahead, before the weight, and where."""

    level: int
    tenant: str
    cost: float


class FairPolicy(PriorityPolicy):
    """Level, then tenants by virtual token counter, then arrival.

    Args:
        weights: share of a tenant relative to others; 1 for those not named.
    """

    name = "fair"
    is_fixed = False

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._levels: dict[int, _Level] = {}
        self._num_alive: Counter[str] = Counter()
        self._queue = _FairQueue(self)
        self._advances: dict[RequestId, _Advance] = {}

    def served(self, tenant: str, level: int = DEFAULT_LEVEL) -> float:
        """Virtual tokens a tenant was served at a level; only differences mean anything."""
        counters = self._levels.get(level)
        return 0.0 if counters is None else counters.of(tenant)

    def rank(self, request: Request) -> Rank:
        """(level, virtual tokens of its tenant, arrival)."""
        return request.level, self.served(request.spec.tenant, request.level), request.arrival_seq

    def new_queue(self) -> WaitingQueue:
        """A queue that looks at the counters whenever it is read."""
        self._queue = _FairQueue(self)
        return self._queue

    def arrived(self, request: Request) -> None:
        """Count it as alive."""
        self._num_alive[request.spec.tenant] += 1

    def left(self, request: Request) -> None:
        """Count it no longer."""
        tenant = request.spec.tenant
        self._num_alive[tenant] -= 1
        if self._num_alive[tenant] == 0:
            del self._num_alive[tenant]
        advance = self._advances.pop(request.request_id, None)
        if advance is not None:
            self._add(advance.level, tenant, -advance.cost)

    def begins_to_wait(self, tenant: str, level: int, waiting: Iterable[str]) -> None:
        """Lift a tenant of which nothing waited at a level.

        Args:
            tenant: whose request is about to join the queue.
            level: at which it will wait.
            waiting: the tenants that wait there already.
        """
        counters = self._at(level)
        least = min(map(counters.of, waiting), default=None)
        if least is None:
            counters.make_equal()
            self._forget_advances(level)
        elif len(counters.served) > MIN_KEPT + 2 * len(self._num_alive):
            # Whoever has gone and comes back would be lifted as far as that.
            kept = {t: n for t, n in counters.served.items() if n > least or t in self._num_alive}
            counters.served = kept
        self._lift(tenant, level, counters.base if least is None else least)

    def wait_for_themselves(self, tenants: Collection[str]) -> None:
        """Lift these as if they began to wait, beside those that wait for others."""
        for level, waiting in self._queue.tenants():
            counters = self._at(level)
            least = min([counters.of(t) for t in waiting if t not in tenants], default=counters.greatest)
            for tenant in waiting:
                if tenant in tenants:
                    self._lift(tenant, level, least)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Charge the prompt."""
        self._charge(request, PROMPT_TOKEN_COST * (request.num_prompt_tokens - num_cached_tokens))

    def produced(self, requests: Iterable[Request], num_tokens: int = 1) -> None:
        """Charge output tokens, one after the other: sums of fractions depend on how they are made."""
        if self._advances:
            requests = [r for r in requests if not self._is_paid(r, OUTPUT_TOKEN_COST * num_tokens)]
        by_counter = Counter([(_paid_level(request), request.spec.tenant) for request in requests])
        for (level, tenant), num_requests in by_counter.items():
            counters = self._at(level)
            cost = OUTPUT_TOKEN_COST / self._weights.get(tenant, 1.0)
            served = counters.of(tenant)
            if cost.is_integer() and served.is_integer():  # then the sum is exact, however it is made
                served += cost * num_requests * num_tokens
            else:
                for _ in range(num_requests * num_tokens):
                    served += cost
            counters.set(tenant, served)

    def goes_on(self, request: Request) -> None:
        """Charge its prompt ahead, as an arrival's is, until its outputs have cost as much or it ends.

        Otherwise all that a tenant has paused could take any number of seats in one step.
        """
        if request.request_id not in self._advances:
            cost = PROMPT_TOKEN_COST * request.num_prompt_tokens
            self._charge(request, cost)
            self._advances[request.request_id] = _Advance(_paid_level(request), request.spec.tenant, cost)

    def _is_paid(self, request: Request, cost: float) -> bool:
        """Whether output tokens were charged ahead; what goes beyond that is charged now."""
        advance = self._advances.get(request.request_id)
        if advance is None or advance.level != _paid_level(request):
            return False
        if cost < advance.cost:
            self._advances[request.request_id] = advance._replace(cost=advance.cost - cost)
        else:
            del self._advances[request.request_id]
            self._charge(request, cost - advance.cost)
        return True

    def _lift(self, tenant: str, level: int, least: float) -> None:
        """What was charged ahead is not given back to one that is lifted: that would be a claim again."""
        counters = self._at(level)
        if counters.of(tenant) < least:
            self._forget_advances(level, tenant)
        counters.set(tenant, max(counters.of(tenant), least))

    def _forget_advances(self, level: int, tenant: str | None = None) -> None:
        for request_id, advance in list(self._advances.items()):
            if advance.level == level and tenant in (None, advance.tenant):
                del self._advances[request_id]

    def _charge(self, request: Request, cost: float) -> None:
        self._add(_paid_level(request), request.spec.tenant, cost)

    def _add(self, level: int, tenant: str, cost: float) -> None:
        counters = self._at(level)
        counters.set(tenant, counters.of(tenant) + cost / self._weights.get(tenant, 1.0))

    def _at(self, level: int) -> _Level:
        counters = self._levels.get(level)
        if counters is None:
            counters = self._levels[level] = _Level()
        return counters


def _paid_level(request: Request) -> int:
    """The level at which a seat is paid for: to be less urgent once one has it makes it no cheaper."""
    return min(request.seat_level, request.level)


def _turn(group: tuple[float, SortedDict[int, Request]]) -> tuple[float, bool, int]:
    served, requests = group
    arrival_seq, first = requests.peekitem(0)
    return served, not first.has_started, arrival_seq


class _FairQueue(WaitingQueue):
    """Also kept apart by level and tenant; the groups are compared by their counters when read.

    Of tenants that were served alike the one comes first whose request had a seat before: it lost its
    seat, not its place. ``reversed`` and ``position`` go by level and arrival alone.
    """

    def __init__(self, policy: FairPolicy) -> None:
        super().__init__(policy.key)
        self._policy = policy
        self._groups: SortedDict[int, dict[str, SortedDict[int, Request]]] = SortedDict()

    def __iter__(self) -> Iterator[Request]:
        """Requests by level, then by their tenants' counters, then by arrival."""
        served = self._policy.served
        for level, tenants in self._groups.items():
            groups = [(served(tenant, level), requests) for tenant, requests in tenants.items()]
            for _, requests in sorted(groups, key=_turn):
                yield from requests.values()

    def tenants(self) -> Iterator[tuple[int, Collection[str]]]:
        """Every level at which anybody waits, and the tenants that wait there."""
        return ((level, tenants.keys()) for level, tenants in self._groups.items())

    def push(self, request: Request) -> None:
        """Add a request; a tenant of which nothing waited at its level is lifted."""
        super().push(request)
        tenants = self._groups.setdefault(request.level, {})
        if request.spec.tenant not in tenants:
            self._policy.begins_to_wait(request.spec.tenant, request.level, tenants)
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
