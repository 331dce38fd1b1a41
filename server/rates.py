"""Tokens a second by tenant: an account that fills with time, from which what was used is taken.

A request is let in while the account is not empty; it may go into debt then, which the
next requests wait for. So a long output is never cut, and the average still holds.
"""

from collections.abc import Callable, Mapping

from engine.events import Failed, Finished, LevelChanged, Preempted, Resumed, Started
from engine.request import RequestSpec
from engine.scheduler.plan import Plan
from server.errors import TokenRateExceeded
from server.sections import TenantSection

#: Seconds' worth of tokens that a tenant may be ahead, unless its settings say otherwise.
DEFAULT_BURST_S = 10.0


class _Account:
    __slots__ = ("burst", "credit", "per_s", "seen_at")

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self.credit = burst
        self.seen_at = now


class TokenRates:
    """The accounts of all tenants that have a rate.

    Args:
        tenants: by name.
        now: seconds of a monotonic clock.
    """

    def __init__(self, tenants: Mapping[str, TenantSection], now: Callable[[], float]) -> None:
        self._now = now
        self._accounts = {
            name: _Account(t.tokens_per_s, t.burst_tokens or DEFAULT_BURST_S * t.tokens_per_s, now())
            for name, t in tenants.items()
            if t.tokens_per_s is not None
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
        now = self._now()
        account.credit = min(account.burst, account.credit + (now - account.seen_at) * account.per_s)
        account.seen_at = now
        if account.credit <= 0:
            raise TokenRateExceeded(tenant, account.per_s, max(0.001, -account.credit / account.per_s))

    # What the engine tells: an ``EngineObserver``.

    def produced(self, spec: RequestSpec, num_tokens: int, gap_s: float | None) -> None:
        """Take output tokens from an account as they come."""
        self.spend(spec.tenant, num_tokens)

    def submitted(self, spec: RequestSpec) -> None:
        """Take a prompt from an account."""
        self.spend(spec.tenant, len(spec.prompt_token_ids))

    def step_made(self, plan: Plan, duration_s: float) -> None:
        """Steps belong to no tenant."""

    def happened(self, spec: RequestSpec, event: Started | Preempted | Resumed | LevelChanged) -> None:
        """What is computed again after a preemption is not the tenant's to pay."""

    def ended(
        self, spec: RequestSpec, event: Finished | Failed, ttft_s: float | None, total_s: float
    ) -> None:
        """All is spent already."""

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Tokens were computed for a tenant."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.credit -= num_tokens
