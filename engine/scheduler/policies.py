"""Policies by name."""

from collections.abc import Mapping

from engine.scheduler.config import InvalidSetting
from engine.scheduler.fair import FairPolicy
from engine.scheduler.order import FcfsPolicy, Policy, PriorityPolicy

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (PriorityPolicy, FairPolicy, FcfsPolicy)}


def policy_named(name: str, weights: Mapping[str, float] | None = None) -> Policy:
    """A fresh policy of that name.

    Args:
        name: as in the configuration.
        weights: shares of tenants relative to others, for a policy that looks at tenants.

    Raises:
        InvalidSetting: there is none.
    """
    if name not in POLICIES:
        raise InvalidSetting("scheduler.policy", f"must be one of {', '.join(sorted(POLICIES))}", name)
    return POLICIES[name](weights)
