"""Single rules of docs/SCHEDULING.md, judged from outside after every step of a ``Driver``.

Each function looks at what is public and at what the driver has seen, and asserts.
Numbers are those of the rules under "One step".
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.events import Finished, Preempted
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestSpec
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.scheduler.plan import Plan
from tests.support import admissible
from tests.support.seen import Seen, Standing

if TYPE_CHECKING:
    from tests.support.drive import Driver

#: Ends that come of the output itself; the others come from outside.
NATURAL = (FinishReason.STOP, FinishReason.STOP_TOKEN, FinishReason.LENGTH, FinishReason.CAPACITY)
FOR_ARRIVALS = (PreemptReason.SEATS, PreemptReason.BLOCKS)
_NOBODY: frozenset[int] = frozenset()


# How requests end


def natural_end(spec: RequestSpec, expected: Sequence[int], pool_tokens: int) -> tuple[int, FinishReason]:
    """Output tokens and reason with which a request ends if nobody ends it before (rule 10 for the pool)."""
    eos, stops = spec.eos_token_ids, spec.sampling.stop_token_ids
    num_fitting = pool_tokens - len(spec.prompt_token_ids)
    if eos or stops:
        for index in range(max(0, spec.sampling.min_tokens - 1), min(len(expected), num_fitting + 1)):
            if expected[index] in eos:
                return index + 1, FinishReason.STOP
            if expected[index] in stops:
                return index + 1, FinishReason.STOP_TOKEN
    if len(expected) <= num_fitting + 1:
        return len(expected), FinishReason.LENGTH
    return num_fitting + 1, FinishReason.CAPACITY


def check_end(driver: "Driver", seen: Seen, event: Finished) -> None:
    """An output ends where it must: not before, not after, and for that reason."""
    num_tokens, reason = seen.end
    if event.reason in NATURAL:
        assert (len(seen.tokens), event.reason) == (num_tokens, reason)
    else:
        assert len(seen.tokens) < num_tokens
    if event.reason is FinishReason.TIME_LIMIT:  # rule 1
        queue, total = seen.spec.queue_deadline, seen.spec.total_deadline
        in_queue = queue is not None and queue <= driver.now and not seen.started
        assert in_queue or (total is not None and total <= driver.now), "its time had not run out"


def banned(spec: RequestSpec, output_index: int | None) -> frozenset[int]:
    """What must not be sampled: whatever ends an output, before ``min_tokens``."""
    if output_index is None or output_index >= spec.sampling.min_tokens:
        return _NOBODY
    return spec.eos_token_ids.union(spec.sampling.stop_token_ids)


def check_deadlines(driver: "Driver", plan: Plan) -> None:
    """Rule 1: nobody is alive in a step whose deadline has come."""
    for seen in driver.seen_alive.values():
        spec = seen.spec
        assert spec.total_deadline is None or spec.total_deadline > driver.now, "a deadline was missed"
        if spec.queue_deadline is not None and not seen.started:
            assert spec.queue_deadline > driver.now, "a queue deadline was missed"


# The cache


def check_cached(driver: "Driver", seen: Seen, num_tokens: int) -> None:
    """A prefix is found only where somebody of the same salt and adapter had it."""
    assert num_tokens < len(seen.spec.prompt_token_ids)
    prefix = driver.texts[seen.spec.request_id].token_ids[:num_tokens]
    salt = seen.spec.cache_salt, seen.spec.adapter
    assert any(
        other is not seen
        and (other.spec.cache_salt, other.spec.adapter) == salt
        and driver.texts[other.spec.request_id].token_ids[:num_tokens] == prefix
        for other in driver.seen.values()
    ), "a prefix was found that nobody of this salt and adapter had"


# Rules 2, 3, 6 and 7


def check_order(driver: "Driver", plan: Plan, before: Standing, after: Standing) -> None:
    """Rule 2: prefills under way are served in policy order; ``prefill_first`` decodes only when it may."""
    granted = {grant.request_id: grant.num_tokens for grant in plan.grants}
    prefills = [r for r in after.running if r.num_missing_tokens > 1 and r.request_id in before.seated]
    starving = any(r.is_starved for r in after.running + after.waiting)
    if driver.config.discipline == "prefill_first" and granted:
        members = [r for r in after.running if r.request_id in granted]
        decodes = may_be_decodes(members, before) and any(map(is_decoding, members))
        if decodes and prefills:
            assert starving or driver.config.prefill_first_max_decode_gap_ms is not None
            assert not driver.decoded_last, "two decode steps in a row while a prefill is under way"
        driver.decoded_last = decodes
        if not may_be_decodes(members, before):
            assert len(granted) <= driver.config.prefill_first_max_requests
            assert plan.num_tokens <= driver.config.prefill_first_max_input_tokens
            assert plan.num_tokens <= driver.config.prefill_first_max_chunk_tokens
    if len(prefills) < 2 or starving or any(isinstance(e, Preempted) for e in plan.events):
        return  # the starved have a share of their own; what a victim gives back goes to its beneficiary
    for first in prefills:
        if first.num_scored_tokens is not None:
            continue  # see check_scored
        if granted.get(first.request_id, 0) < min(first.num_missing_tokens, driver.config.max_chunk_tokens):
            for second in prefills:
                late = admissible.comes_after(driver, second, first) and second.request_id in granted
                late = late and not any(  # rule 12: it may have been lent its urgency
                    admissible.computes_prefix_of(driver, second, w)
                    for w in after.waiting
                    if not admissible.comes_after(driver, w, first)
                )
                assert not late, f"{second.request_id} computed while {first.request_id} could have"


def check_scored(driver: "Driver", plan: Plan) -> None:
    """Rule 2: who scores more than one token of its prompt does so within the share of all of them."""
    scored = [
        min(grant.num_tokens, len(spec.prompt_token_ids) - 1 - grant.start)
        for grant in plan.grants
        if (spec := driver.seen[grant.request_id].spec).sampling.prompt_logprobs is not None
    ]
    assert sum(n for n in scored if n > 1) <= driver.config.max_scored_tokens, "too much was scored in a step"


def check_growth(driver: "Driver", plan: Plan, before: Standing, after: Standing) -> None:
    """Rule 5: nobody gives way to growth while somebody who must go before it keeps its seat."""
    for event in plan.events:
        if not isinstance(event, Preempted) or event.reason is not PreemptReason.GROWTH:
            continue
        victim = driver.scheduler.find(event.request_id)
        if victim is None or event.request_id in before.idle:
            continue
        others = [r for r in after.running if r.request_id in before.seated and not r.holds_all]
        if driver.config.discipline == "prefill_first":  # the least urgent of the batch
            assert all(admissible.urgency(driver, r) <= admissible.urgency(driver, victim) for r in others)
        elif event.beneficiary is None and not driver.blocks.enable_prefix_cache:
            last = admissible.key(driver, victim)
            assert not any(admissible.key(driver, r) > last for r in others), "gave itself up too early"


def check_victims(driver: "Driver", plan: Plan, before: Standing, after: Standing) -> None:
    """Rule 6: nobody gives way in vain, and nobody while a worse level that holds as much keeps its place.

    Judged where it is certain: in steps in which ``unified`` preempts for one arrival alone.
    """
    victims = [e for e in plan.events if isinstance(e, Preempted) and e.reason in FOR_ARRIVALS]
    if not victims or driver.config.discipline != "unified" or any(r.is_starved for r in after.alive):
        return
    admitted = [r for r in after.running if r.request_id not in before.seated]
    if len(admitted) != 1 or before.idle:
        return
    (winner,) = admitted
    if admissible.has_seat_limit(driver.config, winner.spec.tenant):
        return  # it may have had to make room inside its tenant
    share = max(_rules(driver.config, level).watermark for level in (winner.level, 0))
    num_spare = driver.blocks.num_free_blocks - math.ceil(share * driver.blocks.num_blocks)
    for event in victims:
        victim = driver.scheduler.find(event.request_id)
        assert victim is not None
        # It may have had a block for a token that was in flight.
        num_held = max(driver.blocks.blocks_for(victim.num_tokens), event.num_blocks)
        in_vain = num_spare >= num_held and len(after.seated) < driver.config.max_running_requests
        assert not in_vain, f"{victim.request_id} gave way in vain"
        if driver.blocks.enable_prefix_cache:
            continue  # what they share decides as well
        for other in after.running:
            if other is not winner and admissible.urgency(driver, other) > admissible.urgency(driver, victim):
                kept = admissible.is_evictable(driver, other, winner)
                kept &= len(driver.blocks.table(other.request_id)) >= num_held
                assert not kept, f"{victim.request_id} gave way instead of {other.request_id}"


def check_watermark(driver: "Driver", before: Standing, after: Standing) -> None:
    """Rule 3: whoever is admitted beside others leaves its watermark free; not the starved and the unparked.

    Called before the events of the plan are booked. Whoever was admitted last found all others seated.
    """
    admitted = [r for r in after.running if r.request_id not in before.seated]
    if not admitted or len(after.seated) < 2:
        return
    if any(r.is_starved or r.request_id in before.idle for r in admitted):
        return
    config, shares = driver.config, []
    for request in admitted:
        rules = _rules(config, 0 if config.policy in admissible.WITHOUT_LEVELS else request.level)
        resumes = driver.seen_alive[request.request_id].started
        shares.append(max(rules.watermark, config.standard.watermark if resumes else 0.0))
    assert driver.blocks.num_free_blocks >= math.ceil(min(shares) * driver.blocks.num_blocks)


def had_its_quantum(driver: "Driver", request_id: RequestId) -> bool:
    """Rule 7: whether an arrival may evict a request that has resumed."""
    seen = driver.seen_alive[request_id]
    at_resume = seen.num_tokens_at_resume
    return at_resume is None or len(seen.tokens) - at_resume >= driver.config.resume_quantum_tokens


# Rule 8


def check_bypass(driver: "Driver", before: Standing, after: Standing) -> None:
    """Rule 8: at most ``max_bypass`` later ones are admitted past a request that waits; the starved may.

    Who waits for its own tenant's limit, or for its own grammar, may be passed by anybody.
    """
    if not before.waiting or after.seated <= before.seated:
        return
    admitted = [r for r in after.running if r.request_id not in before.seated and not r.is_starved]
    for waiting in after.waiting:
        may_be_passed = waiting.awaits_mask or admissible.has_seat_limit(driver.config, waiting.spec.tenant)
        if waiting in before.waiting and not may_be_passed:
            seen = driver.seen_alive[waiting.request_id]
            seen.num_passed += sum(admissible.comes_after(driver, r, waiting) for r in admitted)
            assert seen.num_passed <= driver.config.max_bypass, f"{waiting.request_id} was passed too often"


# Rule 9


def check_ageing(driver: "Driver", plan: Plan, before: Standing, after: Standing) -> None:
    """Rule 9: who waits too long is starved, and the oldest of them is served before anybody else."""
    starved: list[Request] = []
    for request in after.running + after.waiting:
        seen = driver.seen_alive[request.request_id]
        if request.is_starved:
            starved.append(request)
            if not seen.starved:
                seen.starved = True
                assert driver.now - seen.progress_at >= max_wait_s(driver, request), "starved before its time"
        else:
            assert driver.now - seen.idle_at < max_wait_s(driver, request), "starved, but nobody noticed"
    # Who waits for its own tenant's limit is owed nothing; who lost its seat in this step had its share.
    starved = [
        r
        for r in starved
        if r.request_id in after.seated | before.seated
        or not admissible.has_seat_limit(driver.config, r.spec.tenant)
    ]
    if starved:
        starved.sort(key=lambda r: r.arrival_seq)
        check_share(driver, plan, before, after, starved)


def check_share(
    driver: "Driver", plan: Plan, before: Standing, after: Standing, starved: list[Request]
) -> None:
    """The reserved share: tokens for the oldest if it is seated, else a seat and blocks."""
    discipline = driver.config.discipline
    running, seated = after.running, after.seated
    oldest = starved[0]
    if oldest.request_id in seated and discipline != "static":
        granted = [r for r in running if any(g.request_id == r.request_id for g in plan.grants)]
        if driver.has_its_last(oldest) or oldest.awaits_mask:
            is_due = False
        elif discipline == "unified":
            is_due = True
        elif may_be_decodes(granted, before):
            is_prefill = bool(granted) and not any(map(is_decoding, granted))  # of prompts that miss a token
            is_due = oldest.num_missing_tokens == 1 and not (is_prefill and is_decoding(oldest))
        else:
            is_due = not is_decoding(oldest) or oldest.request_id not in before.seated
        assert oldest in granted or not is_due, "no token for the oldest that starves"
    if any(isinstance(e, Preempted) for e in plan.events):
        return
    served = [r for r in running if r.in_reserve]
    owed = [r for r in starved if not driver.has_its_last(r) and not r.awaits_mask]
    left_out = next((r for r in owed if r.request_id not in seated), None)
    if left_out is None or len(served) >= driver.config.num_reserved_seats or left_out not in before.waiting:
        return
    pool_tokens = driver.blocks.num_blocks * driver.blocks.block_size
    num_blocks = sum(len(r.block_table) for r in served)
    num_blocks += driver.blocks.blocks_for(min(left_out.max_known_tokens, pool_tokens))
    if served and num_blocks > driver.config.num_reserved_blocks(driver.blocks.num_blocks):
        return
    if any(r.request_id not in before.seated and r.is_starved and not r.in_reserve for r in running):
        return  # an older one did not fit the share, stopped it for this step, and got in by the other door
    for request in running:  # what it lacks is kept free for it, so nobody else may take a block
        if request.request_id not in before.seated and not request.is_starved:
            assert request.request_id in before.idle, f"{request.request_id} passed one that starves"


def max_wait_s(driver: "Driver", request: Request) -> float:
    """How long it may go without a token."""
    level = 0 if driver.config.policy in admissible.WITHOUT_LEVELS else request.level
    return _rules(driver.config, level).max_wait_s


@lru_cache(maxsize=1024)
def _rules(config: SchedulerConfig, level: int) -> ClassConfig:
    return config.class_config(level)


# Tenants


def check_tenants(driver: "Driver", after: Standing) -> None:
    """No tenant holds more seats, or tokens in them, than it may."""
    pool_tokens = driver.blocks.num_blocks * driver.blocks.block_size
    for tenant in driver.config.tenants:
        own = [r for r in after.running if r.spec.tenant == tenant.name]
        longest = [min(r.max_known_tokens, driver.config.max_context_tokens, pool_tokens + 1) for r in own]
        assert len(own) <= (tenant.max_running_requests or len(own))
        assert sum(longest) <= (tenant.max_running_tokens or sum(longest))


def is_decoding(request: Request) -> bool:
    """Whether a running request misses its last output token alone."""
    return request.num_missing_tokens == 1 and request.num_tokens > request.num_prompt_tokens


def may_be_decodes(granted: Sequence[Request], before: Standing) -> bool:
    """Whether ``prefill_first`` may have decoded; such a step also computes a prompt's last token alone."""
    return all(r.num_missing_tokens == 1 and r.request_id in before.seated for r in granted)
