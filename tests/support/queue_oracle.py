"""Who may wait, worked out from outside: docs/SCHEDULING.md, "Queue limits".

Shares no code with the scheduler, not even what a class is. What waits is counted anew for
every question: the requests that a ``Driver`` has seen arrive and never seen start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import (
    Displaced,
    InvalidRequest,
    QueueFull,
    TenantQuotaExceeded,
    VorrangError,
)
from engine.events import Failed, LevelChanged, SchedulerEvent
from engine.request import RequestId, RequestSpec
from engine.scheduler.config import SchedulerConfig
from tests.support import admissible

if TYPE_CHECKING:
    from tests.support.drive import Driver

_CLASSES = {"interactive": range(-100, 0), "standard": range(10), "batch": range(10, 101)}


class Queued(NamedTuple):
    """One that waits and never had a seat, or wants to."""

    request_id: str
    level: int
    tenant: str
    size: int
    family: str
    place: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What must come of it: who ends for it, or why it is refused (``never``, ``tenant``, ``queue``)."""

    displaced: frozenset[str] = frozenset()
    refused: str = ""


def level_of(driver: "Driver", request_id: RequestId) -> int:
    """As its events told."""
    seen = driver.seen[request_id]
    changes = [event.level for event in seen.events if isinstance(event, LevelChanged)]
    return changes[-1] if changes else seen.spec.level


def queued(driver: "Driver") -> list[Queued]:
    """All that count."""
    return [
        newcomer(driver, seen.spec, level_of(driver, request_id), number)
        for number, (request_id, seen) in enumerate(driver.seen.items())
        if seen.terminal is None and not seen.started
    ]


def newcomer(driver: "Driver", spec: RequestSpec, level: int, arrival: int) -> Queued:
    place = (level, *admissible.ORDERS[driver.config.policy](spec), arrival)
    return Queued(spec.request_id, level, spec.tenant, len(spec.prompt_token_ids), spec.family, place)


def broken(config: SchedulerConfig, waiting: Sequence[Queued]) -> list[tuple[str, str, int]]:
    """(whose, unit, limit) of every limit that does not hold."""
    found: list[tuple[str, str, int]] = []

    def hold(whose: str, members: list[Queued], most_requests: int, most_tokens: int | None) -> None:
        if len(members) > most_requests:
            found.append((whose, "requests", most_requests))
        if most_tokens is not None and sum(member.size for member in members) > most_tokens:
            found.append((whose, "tokens", most_tokens))

    hold("queue", list(waiting), config.max_waiting_requests, None)
    for name, levels in _CLASSES.items():
        rules = getattr(config, name)
        members = [member for member in waiting if member.level in levels]
        hold(f"class {name}", members, rules.max_waiting_requests, rules.max_waiting_tokens)
    for tenant in {member.tenant for member in waiting}:
        most_requests, most_tokens = config.max_tenant_waiting_requests, config.max_tenant_waiting_tokens
        for own in config.tenants:
            if own.name == tenant:
                most_requests = own.max_waiting_requests or most_requests
                most_tokens = own.max_waiting_tokens or most_tokens
        hold("tenant", [m for m in waiting if m.tenant == tenant], most_requests, most_tokens)
    return found


def expected(driver: "Driver", newcomers: Sequence[Queued], moving: frozenset[str] = frozenset()) -> Outcome:
    """What must come of it when these join together, or of a new level for those that are ``moving``."""
    config = driver.config
    if broken(config, newcomers):
        return Outcome(refused="never")
    waiting = [member for member in queued(driver) if member.request_id not in moving]
    displaced: set[str] = set()
    for member in newcomers:
        kinds = {whose.split()[0] for whose, _, _ in broken(config, [*waiting, member])}
        if "tenant" in kinds:
            return Outcome(refused="tenant")
        if kinds:
            unit = next(
                (
                    unit
                    for unit in _units(driver, waiting, member, moving)
                    if not broken(config, [w for w in [*waiting, member] if w.request_id not in unit])
                ),
                None,
            )
            if unit is None:
                return Outcome(refused="queue")
            displaced |= unit
            waiting = [other for other in waiting if other.request_id not in unit]
        waiting.append(member)
    return Outcome(frozenset(displaced))


def _units(
    driver: "Driver", waiting: Sequence[Queued], member: Queued, moving: frozenset[str]
) -> list[frozenset[str]]:
    """Who may end for it, with its siblings, in the order in which they would."""
    if driver.config.policy in admissible.WITHOUT_LEVELS:
        return []
    units: list[frozenset[str]] = []
    for other in sorted(waiting, key=lambda other: other.place, reverse=True):
        siblings = [
            r.request_id
            for r in driver.alive()
            if (other.family and r.spec.family == other.family) or r.request_id == other.request_id
        ]
        may_end = other.family not in driver.started_families
        may_end &= all(level_of(driver, sibling) > member.level for sibling in siblings)
        may_end &= not moving.intersection(siblings) and other.request_id in siblings
        unit = frozenset(map(str, siblings))
        if may_end and unit not in units:
            units.append(unit)
    return units


def check_accepted(driver: "Driver", outcome: Outcome, events: Sequence[SchedulerEvent]) -> None:
    """Those that had to end for it did, as retryable, and nobody else."""
    assert not outcome.refused, f"accepted, though {outcome.refused}"
    assert all(isinstance(event, Failed) and isinstance(event.error, Displaced) for event in events)
    assert len({event.request_id for event in events}) == len(events)
    assert {event.request_id for event in events} == outcome.displaced
    assert all(not driver.seen[RequestId(i)].started for i in outcome.displaced)


def check_refused(
    driver: "Driver", outcome: Outcome, error: VorrangError, newcomers: Sequence[Queued]
) -> None:
    """It was refused for what is so: a limit that would be broken, by its name and number."""
    if isinstance(error, QueueFull):
        refused = "tenant" if isinstance(error, TenantQuotaExceeded) else "queue"
        assert outcome.refused == refused, f"refused by {error}, not {outcome}"
        whose = {"tenant": "tenant"}.get(refused, error.subject.removeprefix("queue of "))
        named = {member.request_id for member in newcomers}
        others = [member for member in queued(driver) if member.request_id not in named]
        assert (whose, error.unit, error.limit) in broken(driver.config, [*others, *newcomers])
    elif isinstance(error, InvalidRequest) and not is_for_other_reasons(error):
        assert outcome.refused == "never", f"refused by {error}, not {outcome}"


def is_for_other_reasons(error: InvalidRequest) -> bool:
    """Whether it does not fit pool or context, or what its tenant may have running, or is no request."""
    return type(error) is not InvalidRequest or error.field not in ("prompt", "num_outputs")
