"""Who comes before whom, and who would get a seat, worked out from outside.

Shares no code with the scheduler. Numbers are those of the rules in docs/SCHEDULING.md.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from engine.request import Request, RequestId, RequestSpec
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Plan

if TYPE_CHECKING:
    from tests.support.drive import Driver


#: What each policy orders by inside a level, before arrival; the policies that know no levels.
ORDERS: dict[str, Callable[[RequestSpec], tuple[int, ...]]] = {
    "priority": lambda spec: (),
    "fair": lambda spec: (),  # tenants may change places: see _turn
    "fcfs": lambda spec: (),
}
WITHOUT_LEVELS = {"fcfs"}


def urgency(driver: "Driver", request: Request) -> int:
    return 0 if driver.config.policy in WITHOUT_LEVELS else request.level


def key(driver: "Driver", request: Request) -> tuple[int, ...]:
    return (urgency(driver, request), *ORDERS[driver.config.policy](request.spec), request.arrival_seq)


def _turn(driver: "Driver", request: Request) -> tuple[int, ...]:
    """What certainly orders requests; under ``fair`` tenants of one level may change places."""
    return (urgency(driver, request),) if driver.config.policy == "fair" else key(driver, request)


def comes_after(driver: "Driver", request: Request, other: Request) -> bool:
    """Whether a request certainly stands behind another one in the order of service."""
    if _turn(driver, request) != _turn(driver, other):
        return _turn(driver, request) > _turn(driver, other)
    return request.spec.tenant == other.spec.tenant and request.arrival_seq > other.arrival_seq


def _is_scored(request: Request) -> bool:
    """Whether its prompt need not be scored, or all of it has been."""
    wanted = request.spec.sampling.prompt_logprobs is not None
    return not wanted or request.num_scored_tokens >= request.num_prompt_tokens - 1


def computes_prefix_of(driver: "Driver", running: Request, waiting: Request) -> bool:
    """12: whether enough of a prompt is being computed to wait for it."""
    num_alike = 0
    for mine, theirs in zip(waiting.token_ids[:-1], running.token_ids[:-1], strict=False):
        if mine != theirs or waiting.cache_salt != running.cache_salt:
            break
        num_alike += 1
    num_alike -= num_alike % driver.blocks.block_size
    is_sibling = waiting.spec.family != "" and waiting.spec.family == running.spec.family
    least = 1 if is_sibling else driver.config.prefix_wait_tokens
    return num_alike - running.num_committed_tokens >= least


def _waits_for_prefix(driver: "Driver", waiting: Request, plan: Plan) -> bool:
    """12: somebody who runs computes enough of its prompt right now."""
    if not driver.blocks.enable_prefix_cache or driver.blocks.holds(waiting.request_id):
        return False
    if not _is_scored(waiting):
        return False  # what it may not take it need not wait for
    granted = {grant.request_id for grant in plan.grants}
    # Other disciplines have more budgets, and steps that hold no prefill.
    full = plan.num_tokens == driver.config.max_step_tokens or driver.config.discipline != "unified"
    for running in driver.scheduler.running():
        if computes_prefix_of(driver, running, waiting):
            full |= bool(running.num_tokens_in_flight)  # all of it may be in flight
            assert full or running.request_id in granted, "a prefill that is waited for stands still"
            return True
    return False


def must_be_next(
    driver: "Driver", waiting: Sequence[Request], preempted_now: set[RequestId], plan: Plan
) -> list[Request]:
    """Waiting requests that nothing but the budget of the step may keep out."""
    found: list[Request] = []
    for _, group in groupby(waiting, lambda request: _turn(driver, request)):
        members = [request for request in group if not request.awaits_mask]
        for request in members:
            if driver.has_its_last(request):
                return found
            if request.request_id in preempted_now or not _is_admissible(driver, request, len(preempted_now)):
                return found  # whoever comes after it may be kept behind it
            if _waits_for_prefix(driver, request, plan):
                return found
        found += members
    return found


def _is_admissible(driver: "Driver", waiting: Request, num_used: int) -> bool:
    """Whether it would fit if all that it may evict were gone, after ``num_used`` evictions."""
    running = driver.scheduler.running()
    staying = [r for r in running if not is_evictable(driver, r, waiting)]
    if len(staying) >= driver.config.max_running_requests:
        return False
    if has_seat_limit(driver.config, waiting.spec.tenant):
        return False  # its tenant may keep it out
    gone = {r.request_id for r in running} - {r.request_id for r in staying}
    if driver.blocks.num_owners > len(running):
        gone |= {
            r.request_id
            for r in (*driver.scheduler.waiting(), *driver.scheduler.parked())
            if driver.blocks.holds(r.request_id)
            and (not running or urgency(driver, r) >= urgency(driver, waiting))
        } - {waiting.request_id}
    if num_used and num_used + len(gone) > driver.config.max_preemptions_per_step:
        return False
    held = {
        block
        for request_id, seen in driver.seen_alive.items()
        if driver.blocks.holds(request_id) and request_id not in gone
        for block in driver.blocks.table(request_id)
    }
    pinned = waiting.num_preemptions >= driver.config.max_preemptions
    pool_tokens = driver.blocks.num_blocks * driver.blocks.block_size
    size = min(waiting.max_known_tokens, pool_tokens) if pinned else waiting.num_tokens
    if driver.blocks.holds(waiting.request_id):
        have = len(driver.blocks.table(waiting.request_id))  # it kept them while it was parked
    else:
        most = None if _is_scored(waiting) else waiting.num_scored_tokens
        have = sum(block in held for block in driver.blocks.match(waiting, most).blocks)
    need = driver.blocks.blocks_for(size) - have
    if need <= 0:
        return True
    spare = max(_watermark(driver, waiting, staying), _most_reserved(driver, waiting, size, staying))
    return len(held) + need + spare <= driver.blocks.num_blocks


def is_evictable(driver: "Driver", running: Request, waiting: Request) -> bool:
    if not driver.config.preempt_for_arrivals or running.holds_all:
        return False
    if urgency(driver, running) - urgency(driver, waiting) < driver.config.preempt_level_gap:
        return False
    at = running.num_outputs_at_resume
    return at is None or running.num_output_tokens - at >= driver.config.resume_quantum_tokens


def _most_reserved(driver: "Driver", waiting: Request, size: int, staying: list[Request]) -> int:
    """The most that ``prefill_first`` may keep for outputs: as if all grew to their longest."""
    if driver.config.discipline != "prefill_first" or not staying:
        return 0
    block_size = driver.blocks.block_size
    num_tokens = max(0, waiting.max_known_tokens - size) + block_size
    num_tokens += sum(r.max_known_tokens - r.num_tokens + block_size for r in staying if not r.holds_all)
    return driver.blocks.blocks_for(num_tokens)


def _watermark(driver: "Driver", waiting: Request, staying: list[Request]) -> int:
    if not staying:
        return 0
    rules = driver.config.class_config(waiting.level)
    share = (rules if driver.config.policy not in WITHOUT_LEVELS else driver.config.standard).watermark
    if waiting.has_started:
        share = max(share, driver.config.standard.watermark)
    return math.ceil(share * driver.blocks.num_blocks)


def has_seat_limit(config: SchedulerConfig, tenant: str) -> bool:
    """Whether a tenant may hold only so many seats, or tokens in them."""
    return any(t.name == tenant and (t.max_running_requests or t.max_running_tokens) for t in config.tenants)
