"""How much of the running batch a tenant may hold: counts by tenant of who has a seat.

A tenant at its limit waits for its own requests alone: others pass it without being
held up, and it may evict its own less urgent ones, nobody else's.
"""

from collections import Counter
from collections.abc import Iterable

from engine.errors import InvalidRequest
from engine.request import Request, RequestSpec, RequestStatus
from engine.scheduler.config import TenantConfig


class TenantSeats:
    """Counts the seats, and the tokens at the longest, of each tenant that has a limit.

    Args:
        tenants: all that are configured.
    """

    def __init__(self, tenants: Iterable[TenantConfig]) -> None:
        limits = ((t.name, t.max_running_requests, t.max_running_tokens) for t in tenants)
        self._limits = {name: (n, tokens) for name, n, tokens in limits if (n, tokens) != (None, None)}
        self._num_requests: Counter[str] = Counter()
        self._num_tokens: Counter[str] = Counter()

    @property
    def has_limits(self) -> bool:
        """Whether any tenant is held to one."""
        return bool(self._limits)

    def check(self, spec: RequestSpec, num_tokens_max: int) -> None:
        """Refuse what could never run under its tenant's limit.

        Raises:
            InvalidRequest: prompt + output at the longest are more than may run.
        """
        limit = self._limits.get(spec.tenant, (None, None))[1]
        if limit is not None and num_tokens_max > limit:
            rule = f"must keep prompt + output within the {limit} tokens that may run for this tenant"
            raise InvalidRequest("sampling.max_tokens", rule, spec.sampling.max_tokens)

    def seat(self, request: Request) -> None:
        """It got a seat."""
        if request.spec.tenant in self._limits:
            self._count(request, 1)

    def unseat(self, request: Request) -> None:
        """It lost its seat."""
        if request.spec.tenant in self._limits:
            self._count(request, -1)

    def has_room_for(self, request: Request, without: Iterable[Request] = ()) -> bool:
        """Whether its tenant may run it, if ``without`` were gone."""
        tenant = request.spec.tenant
        limits = self._limits.get(tenant)
        if limits is None:
            return True
        num_requests, num_tokens = self._num_requests[tenant], self._num_tokens[tenant]
        for other in without:
            if other.spec.tenant == tenant and other.status is RequestStatus.RUNNING:
                num_requests -= 1
                num_tokens -= other.num_tokens_max
        max_requests, max_tokens = limits
        if max_requests is not None and num_requests >= max_requests:
            return False
        return max_tokens is None or num_tokens + request.num_tokens_max <= max_tokens

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        limited = [request for request in running if request.spec.tenant in self._limits]
        assert self._num_requests == Counter(request.spec.tenant for request in limited)
        num_tokens: Counter[str] = Counter()
        for request in limited:
            num_tokens[request.spec.tenant] += request.num_tokens_max
        assert self._num_tokens == num_tokens

    def _count(self, request: Request, sign: int) -> None:
        tenant = request.spec.tenant
        self._num_requests[tenant] += sign
        self._num_tokens[tenant] += sign * request.num_tokens_max
        assert self._num_requests[tenant] >= 0
