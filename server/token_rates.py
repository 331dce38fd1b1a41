"""Tokens a second by tenant: an account that fills with time, from which what was used is taken.

A request is let in while the account is not empty; it may go into debt then, which the
next requests wait for. So a long output is never cut, and the average still holds.
"""

from collections.abc import Callable, Mapping

from engine.errors import Displaced
from engine.events import Failed, Finished, LevelChanged, Preempted, Resumed, Started
from engine.request import RequestSpec
from engine.scheduler.plan import Plan
from server.bucket import Bucket
from server.errors import TokenRateExceeded
from server.sections import TenantSection

#: Seconds' worth of tokens that a tenant may be ahead, unless its settings say otherwise.
DEFAULT_BURST_S = 10.0


class TokenRates:
    """The accounts of all tenants that have a rate.

    Args:
        tenants: by name.
        now: seconds of a monotonic clock.
    """

    def __init__(self, tenants: Mapping[str, TenantSection], now: Callable[[], float]) -> None:
        self._now = now
        self._per_s = {name: t.tokens_per_s for name, t in tenants.items() if t.tokens_per_s is not None}
        self._accounts = {
            name: Bucket(per_s, tenants[name].burst_tokens or DEFAULT_BURST_S * per_s)
            for name, per_s in self._per_s.items()
        }

    def __bool__(self) -> bool:
        """Whether any tenant has a rate."""
        return bool(self._accounts)

    def check(self, tenant: str) -> None:
        """Refuse a newcomer of a tenant that is in debt.

        Raises:
            TokenRateExceeded: says when the debt is paid.
        """
        account = self._accounts.get(tenant)
        if account is None:
            return
        level, per_s = account.level(self._now()), self._per_s[tenant]
        if level <= 0:
            raise TokenRateExceeded(tenant, per_s, max(0.001, -level / per_s))

    # What the engine tells: an ``EngineObserver``.

    def produced(self, spec: RequestSpec, num_tokens: int, gap_s: float | None) -> None:
        """Take output tokens from an account as they come."""
        self.spend(spec.tenant, num_tokens)

    def submitted(self, spec: RequestSpec) -> None:
        """Take a prompt from an account; several outputs share theirs."""
        if not spec.shares_prompt:
            self.spend(spec.tenant, len(spec.prompt_token_ids))

    def step_made(self, plan: Plan, duration_s: float) -> None:
        """Steps belong to no tenant."""

    def happened(self, spec: RequestSpec, event: Started | Preempted | Resumed | LevelChanged) -> None:
        """What is computed again after a preemption is not the tenant's to pay."""

    def ended(
        self, spec: RequestSpec, event: Finished | Failed, ttft_s: float | None, total_s: float
    ) -> None:
        """All is spent already. A prompt that was displaced was never computed, so it is given back."""
        if isinstance(event, Failed) and isinstance(event.error, Displaced) and not spec.shares_prompt:
            self.spend(spec.tenant, -len(spec.prompt_token_ids))

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Tokens were computed for a tenant."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.spend(num_tokens)
