"""Policies by name."""

from collections.abc import Mapping

from engine.scheduler.config import InvalidSetting
from engine.scheduler.fair import FairPolicy
from engine.scheduler.order import FcfsPolicy, Policy, PriorityPolicy


def policy_named(name: str, weights: Mapping[str, float] | None = None) -> Policy:
    """A fresh policy of that name.

    Args:
        name: as in the configuration.
        weights: shares of tenants relative to others, for the policy that looks at tenants.

    Raises:
        InvalidSetting: there is none.
    """
    policies: dict[str, type[Policy]] = {p.name: p for p in (PriorityPolicy, FairPolicy, FcfsPolicy)}
    if name not in policies:
        raise InvalidSetting("scheduler.policy", f"must be one of {', '.join(sorted(policies))}", name)
    return FairPolicy(weights) if name == FairPolicy.name else policies[name]()
