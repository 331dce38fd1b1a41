"""How much may wait: counts by class and tenant of the requests that were never admitted.

A request that was admitted and preempted never counts: it was accepted, and its
return can't be refused.
"""

from collections import Counter
from collections.abc import Iterable

from engine.errors import QueueFull, TenantQuotaExceeded
from engine.priority import class_of
from engine.request import Request, RequestId, RequestSpec
from engine.scheduler.config import SchedulerConfig

#: (subject, name): ("class", "batch"), ("tenant", "a"), ("queue", "").
_Scope = tuple[str, str]


class QueueLimits:
    """Counts what waits and says which limit a newcomer would break."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tenants = {tenant.name: tenant for tenant in config.tenants}
        self._num_requests: Counter[_Scope] = Counter()
        self._num_tokens: Counter[_Scope] = Counter()
        self._counted: set[RequestId] = set()

    @property
    def num_requests(self) -> int:
        """Requests that count."""
        return len(self._counted)

    def add(self, request: Request) -> None:
        """Count a request."""
        self._counted.add(request.request_id)
        self._count(request, 1)

    def forget(self, request: Request) -> None:
        """Count it no longer; harmless when it does not count."""
        if request.request_id in self._counted:
            self._counted.remove(request.request_id)
            self._count(request, -1)

    def check_tenant(self, spec: RequestSpec) -> None:
        """Refuse a newcomer whose tenant has as much waiting as it may.

        Raises:
            TenantQuotaExceeded: that is so.
        """
        config, scope = self._config, ("tenant", spec.tenant)
        own = self._tenants.get(spec.tenant)
        max_requests = (own and own.max_waiting_requests) or config.max_tenant_waiting_requests
        max_tokens = (own and own.max_waiting_tokens) or config.max_tenant_waiting_tokens
        subject = f"queue of tenant {spec.tenant!r}"
        if self._num_requests[scope] >= max_requests:
            raise TenantQuotaExceeded(subject, "requests", max_requests)
        if self._num_tokens[scope] + len(spec.prompt_token_ids) > max_tokens:
            raise TenantQuotaExceeded(subject, "tokens", max_tokens)

    def broken_by(self, spec: RequestSpec) -> tuple[_Scope, QueueFull] | None:
        """The first limit of the whole queue or of a class that a newcomer would break; None if none.

        A more urgent newcomer may displace someone instead of being refused.
        """
        config, scope = self._config.class_config(spec.level), ("class", class_of(spec.level).name)
        if self.num_requests >= self._config.max_waiting_requests:
            return ("queue", ""), QueueFull("queue", "requests", self._config.max_waiting_requests)
        if self._num_requests[scope] >= config.max_waiting_requests:
            return scope, QueueFull(f"queue of class {scope[1]}", "requests", config.max_waiting_requests)
        if self._num_tokens[scope] + len(spec.prompt_token_ids) > config.max_waiting_tokens:
            return scope, QueueFull(f"queue of class {scope[1]}", "tokens", config.max_waiting_tokens)
        return None

    def counts(self, request: Request, scope: _Scope) -> bool:
        """Whether a request's end would make room under a limit."""
        return request.request_id in self._counted and scope in self._scopes(request)

    def check_integrity(self, never_admitted: Iterable[Request]) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        requests = list(never_admitted)
        assert {request.request_id for request in requests} == self._counted
        num_requests: Counter[_Scope] = Counter()
        num_tokens: Counter[_Scope] = Counter()
        for request in requests:
            for scope in self._scopes(request):
                num_requests[scope] += 1
                num_tokens[scope] += request.num_prompt_tokens
        assert num_requests == self._num_requests
        assert num_tokens == self._num_tokens

    @staticmethod
    def _scopes(request: Request) -> tuple[_Scope, ...]:
        return ("queue", ""), ("class", class_of(request.level).name), ("tenant", request.spec.tenant)

    def _count(self, request: Request, sign: int) -> None:
        for scope in self._scopes(request):
            self._num_requests[scope] += sign
            self._num_tokens[scope] += sign * request.num_prompt_tokens
            if self._num_requests[scope] == 0:  # tenants come and go; what is counted must not grow
                del self._num_requests[scope], self._num_tokens[scope]
