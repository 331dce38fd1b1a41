"""Requests as an operator sees them: copies of what the scheduler knows, made when asked for."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from engine.priority import CLASSES
from engine.request import Request, RequestId, RequestStatus, Usage
from engine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RequestLook:
    """One request.

    Attributes:
        request_id: made by the server.
        arrival_seq: order of arrival.
        tenant: whose.
        level: in force.
        status: where it is.
        is_prefilling: whether known tokens are still to be computed.
        usage: what it has cost so far.
        age_s: seconds since it arrived.
        num_blocks: KV blocks it holds.
        label: the client's.
        max_output_tokens: longest output it may have.
        num_computed_tokens: tokens whose KV it holds.
        num_known_tokens: prompt and output so far.
        is_starved: whether it has waited longer than its class may.
    """

    request_id: RequestId
    arrival_seq: int
    tenant: str
    level: int
    status: RequestStatus
    is_prefilling: bool
    usage: Usage
    age_s: float
    num_blocks: int
    label: str
    max_output_tokens: int
    num_computed_tokens: int
    num_known_tokens: int
    is_starved: bool


@dataclass(slots=True)
class ClassLook:
    """How many requests of one class, and of one tenant where they are told apart, are where."""

    num_waiting: int = 0
    num_running: int = 0
    num_preempted: int = 0
    num_parked: int = 0


def looks(scheduler: Scheduler, now: float) -> list[RequestLook]:
    """All requests alive, most urgent first, older ones first among equals."""
    requests = sorted(_alive(scheduler), key=lambda request: (request.level, request.arrival_seq))
    return [_look(request, now) for request in requests]


def class_looks(scheduler: Scheduler) -> dict[tuple[str, str], ClassLook]:
    """Counts by class and tenant, of those that have any."""
    counts: dict[tuple[str, str], ClassLook] = {}
    for request in _alive(scheduler):
        key = (CLASSES[request.cache_rank].name, request.spec.tenant)
        count = counts.get(key)
        if count is None:
            count = counts[key] = ClassLook()
        match request.status:
            case RequestStatus.WAITING:
                count.num_waiting += 1
            case RequestStatus.RUNNING:
                count.num_running += 1
            case RequestStatus.PREEMPTED:
                count.num_preempted += 1
            case RequestStatus.PARKED:
                count.num_parked += 1
    return counts


def _alive(scheduler: Scheduler) -> Iterable[Request]:
    return (*scheduler.running(), *scheduler.waiting(), *scheduler.parked())


def _look(request: Request, now: float) -> RequestLook:
    usage, phase = request.usage(), request.phase
    spent_s = max(0.0, now - request.phase_since)
    usage = dataclasses.replace(usage, **{f"{phase}_s": getattr(usage, f"{phase}_s") + spent_s})
    times_s = (usage.queued_s, usage.prefill_s, usage.decode_s, usage.preempted_s, usage.parked_s)
    return RequestLook(
        request.request_id,
        request.arrival_seq,
        request.spec.tenant,
        request.level,
        request.status,
        request.is_prefilling,
        usage,
        sum(times_s),
        len(request.block_table),
        request.spec.label,
        request.spec.sampling.max_tokens,
        request.num_committed_tokens,
        len(request.token_ids),
        request.is_starved,
    )
