"""Who may join the queue, and who ends for that: the same for arrivals and for changes of level.

Requests that join together (the outputs of one prompt) are judged together, before anything
changes. Outputs that wait end together, too, and not at all once one of them had a seat.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence

from engine.request import Request, RequestId
from engine.scheduler.limits import Place, Unit, place_of
from engine.scheduler.state import SchedulerState


def room_for_all(
    state: SchedulerState, newcomers: Sequence[Place], moving: Sequence[Request] = ()
) -> list[Unit]:
    """Who must end so that every limit holds after each of these has joined. Changes nothing.

    Args:
        state: who waits.
        newcomers: what will wait, in this order.
        moving: requests that wait already, and will instead be the newcomers.

    Raises:
        QueueFull, TenantQuotaExceeded: see ``QueueLimits.room_for``.
    """
    tally = state.limits.tally
    if len(newcomers) > 1 or moving:
        tally = tally.copy()
    for request in moving:
        tally.remove(place_of(request))
    displaced: list[Unit] = []
    gone = {request.request_id for request in moving}
    for place in newcomers:
        urgency = place.level if state.policy.uses_level else 0
        unit = state.limits.room_for(place, tally, _units(state, urgency, gone))
        if unit:
            displaced.append(unit)
            gone.update(request.request_id for request in unit)
        if tally is not state.limits.tally:
            for request in unit:
                tally.remove(place_of(request))
            tally.add(place)
    return displaced


def _units(state: SchedulerState, urgency: int, gone: Collection[RequestId]) -> Iterator[Unit]:
    """What waits, was never admitted and is less urgent; the least urgent first, then the last arrived."""
    key = state.policy.key
    parked = [request for request in state.parked.values() if not request.has_started]
    parked.sort(key=key, reverse=True)  # who does not want to run yet holds a place like any other
    seen: set[str] = set()
    for request in heapq.merge(parked, reversed(state.waiting), key=key, reverse=True):
        if state.policy.urgency(request) <= urgency:
            return
        if request.request_id in gone or not state.limits.counts(request):
            continue
        family = state.families.get(request.spec.family)
        if family is None:
            yield (request,)
        elif not family.has_started and request.spec.family not in seen:
            seen.add(request.spec.family)
            unit = tuple(family.members.values())
            if all(state.policy.urgency(r) > urgency and r.request_id not in gone for r in unit):
                yield unit
