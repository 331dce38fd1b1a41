"""How much may wait: counts by class and tenant of the requests that were never admitted.

A request that was admitted and preempted never counts: it was accepted, and its
return can't be refused. Nothing is displaced here: it is only said whose end would help.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.errors import InvalidRequest, QueueFull, TenantQuotaExceeded
from engine.priority import class_of
from engine.request import Request, RequestId, RequestSpec
from engine.scheduler.config import SchedulerConfig

#: (subject, name): ("class", "batch"), ("tenant", "a"), ("queue", "").
_Scope = tuple[str, str]
#: Requests that can only end together: the outputs of one prompt, or a single request.
Unit = Sequence[Request]


class Place(NamedTuple):
    """What a request takes of the limits while it waits."""

    level: int
    tenant: str
    num_tokens: int

    @property
    def scopes(self) -> tuple[_Scope, ...]:
        """Where it counts."""
        return ("queue", ""), ("class", class_of(self.level).name), ("tenant", self.tenant)


def place_of(request: Request) -> Place:
    """What a request takes where it is now."""
    return Place(request.level, request.spec.tenant, request.num_prompt_tokens)


def place_for(spec: RequestSpec) -> Place:
    """What a request will take."""
    return Place(spec.level, spec.tenant, len(spec.prompt_token_ids))


class Tally:
    """Requests and prompt tokens by scope."""

    def __init__(self) -> None:
        self.requests: Counter[_Scope] = Counter()
        self.tokens: Counter[_Scope] = Counter()

    def copy(self) -> "Tally":
        """One to try things out."""
        other = Tally()
        other.requests, other.tokens = self.requests.copy(), self.tokens.copy()
        return other

    def add(self, place: Place) -> None:
        """One more waits."""
        for scope in place.scopes:
            self.requests[scope] += 1
            self.tokens[scope] += place.num_tokens

    def remove(self, place: Place) -> None:
        """It waits no more."""
        for scope in place.scopes:
            self.requests[scope] -= 1
            self.tokens[scope] -= place.num_tokens
            if self.requests[scope] == 0:  # tenants come and go; what is counted must not grow
                del self.requests[scope], self.tokens[scope]


class Limit(NamedTuple):
    """One limit: so many ``requests`` or prompt ``tokens`` of a scope may wait."""

    scope: _Scope
    unit: str
    most: int

    def excess(self, tally: Tally, place: Place) -> int:
        """By how much it is broken when one more waits; 0 or less: it holds."""
        if self.unit == "requests":
            return tally.requests[self.scope] + 1 - self.most
        return tally.tokens[self.scope] + place.num_tokens - self.most

    def relief(self, unit: Unit) -> int:
        """What the end of these would give back."""
        places = [place_of(request) for request in unit]
        return sum(
            1 if self.unit == "requests" else place.num_tokens
            for place in places
            if self.scope in place.scopes
        )

    @property
    def error(self) -> QueueFull:
        """It is broken."""
        kind, name = self.scope
        if kind == "tenant":
            return TenantQuotaExceeded(f"queue of tenant {name!r}", self.unit, self.most)
        return QueueFull("queue" if kind == "queue" else f"queue of class {name}", self.unit, self.most)


class QueueLimits:
    """Counts what waits and says which limits a newcomer would break.

    Attributes:
        tally: what waits.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tenants = {tenant.name: tenant for tenant in config.tenants}
        self._counted: set[RequestId] = set()
        self.tally = Tally()

    def add(self, request: Request) -> None:
        """Count a request."""
        self._counted.add(request.request_id)
        self.tally.add(place_of(request))

    def forget(self, request: Request) -> None:
        """Count it no longer; harmless when it does not count."""
        if request.request_id in self._counted:
            self._counted.remove(request.request_id)
            self.tally.remove(place_of(request))

    def check_ever(self, place: Place, num_outputs: int) -> None:
        """Refuse what breaks a limit even when nothing waits.

        Raises:
            InvalidRequest: that is so.
        """
        for limit in self._of(place):
            kind, name = limit.scope
            where = {"queue": "", "class": f" in class {name}", "tenant": " for this tenant"}[kind]
            if limit.unit == "requests" and num_outputs > limit.most:
                rule = f"must be at most {limit.most}, as many requests as may wait{where}"
                raise InvalidRequest("num_outputs", rule, num_outputs)
            if limit.unit == "tokens" and place.num_tokens * num_outputs > limit.most:
                outputs = f" of {num_outputs} outputs" if num_outputs > 1 else ""
                rule = f"must be at most {limit.most // num_outputs} tokens long:"
                rule += f" the prompts{outputs} may wait{where} with {limit.most} tokens in all"
                raise InvalidRequest("prompt", rule, place.num_tokens)

    def room_for(self, newcomer: Place, tally: Tally, units: Iterable[Unit]) -> Unit:
        """Who must end, so that every limit holds with one more.

        Args:
            newcomer: the one more.
            tally: what waits besides; as it is, or as it would be.
            units: who may be made to end for it, in the order in which they would be.

        Returns:
            The first of these whose end is enough; nobody when all limits hold as it is.

        Raises:
            TenantQuotaExceeded: a limit of its tenant would not hold; nobody is made to end for that.
            QueueFull: another would not hold, and nobody's end is enough.
        """
        broken = [(limit, n) for limit in self._of(newcomer) if (n := limit.excess(tally, newcomer)) > 0]
        for limit, _ in broken:
            if limit.scope[0] == "tenant":
                raise limit.error
        if not broken:
            return ()
        hopeless = [limit for limit, _ in broken]
        for unit in units:
            relieved = {limit for limit, excess in broken if limit.relief(unit) >= excess}
            if len(relieved) == len(broken):
                return unit
            hopeless = [limit for limit in hopeless if limit not in relieved]
        raise (hopeless[0] if hopeless else broken[0][0]).error

    def counts(self, request: Request) -> bool:
        """Whether it waits and was never admitted."""
        return request.request_id in self._counted

    def check_integrity(self, never_admitted: Iterable[Request]) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        requests = list(never_admitted)
        assert {request.request_id for request in requests} == self._counted
        tally = Tally()
        for request in requests:
            tally.add(place_of(request))
        assert tally.requests == self.tally.requests
        assert tally.tokens == self.tally.tokens

    def _of(self, place: Place) -> tuple[Limit, ...]:
        """The limits that hold for a request."""
        config, own = self._config, self._tenants.get(place.tenant)
        rules = config.class_config(place.level)
        queue, of_class, of_tenant = place.scopes
        tenant_requests = (own and own.max_waiting_requests) or config.max_tenant_waiting_requests
        tenant_tokens = (own and own.max_waiting_tokens) or config.max_tenant_waiting_tokens
        return (
            Limit(of_tenant, "requests", tenant_requests),
            Limit(of_tenant, "tokens", tenant_tokens),
            Limit(queue, "requests", config.max_waiting_requests),
            Limit(of_class, "requests", rules.max_waiting_requests),
            Limit(of_class, "tokens", rules.max_waiting_tokens),
        )
