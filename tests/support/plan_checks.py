"""What must hold of a plan whatever the rules said on the way: the invariants of docs/SCHEDULING.md.

Single rules are in ``tests.support.oracle``. Numbers in comments are those of the invariants.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.events import TERMINAL, Preempted
from engine.request import PreemptReason, Request, RequestId
from engine.scheduler.plan import Plan
from tests.support import admissible, oracle
from tests.support.seen import Standing

if TYPE_CHECKING:
    from tests.support.drive import Driver


def check_plan(driver: "Driver", plan: Plan, before: Standing, after: Standing, held: Sequence[Request]):
    config, running = driver.config, after.running
    ids = {grant.request_id for grant in plan.grants}
    assert len(ids) == len(plan.grants)
    assert plan.num_tokens <= config.max_step_tokens
    assert len(ids) <= config.max_running_requests
    ended = {e.request_id for e in plan.events if isinstance(e, TERMINAL)}
    is_held = any(request.awaits_mask for request in (*before.alive, *after.alive))
    if not is_held and before.num_alive > len(ended) + len(after.parked):
        assert plan.grants or driver.flights, "something admissible waits, but the step is empty"
    for grant in plan.grants:
        request = driver.scheduler.find(grant.request_id)
        assert request is not None
        n, num_to_come = grant.num_tokens, driver.num_outputs_to_come(grant.request_id)
        n_known = n - grant.num_drafts
        assert 1 <= n_known <= config.max_chunk_tokens
        assert grant.num_drafts <= config.speculation_tokens
        driver.noted["guessed"] += grant.num_drafts > 0
        assert grant.start == request.num_computed_tokens
        known = request.token_ids[grant.start : grant.start + n_known]
        assert list(grant.token_ids) == known + list(request.draft_token_ids)
        assert len(grant.token_ids) == n - grant.has_unknown_token
        assert grant.has_unknown_token <= num_to_come <= driver.depth
        assert grant.output_index is None or n > 1 or not request.awaits_mask, "its mask is not there"
        assert not driver.has_its_last(request), "granted in vain, and one could know"
        num_outputs = len(driver.seen_alive[grant.request_id].tokens) + num_to_come
        assert grant.output_index in (None, num_outputs)
        driver.noted["granted a token nobody knew"] += grant.has_unknown_token
        assert (grant.output_index is None) == (grant.start + n < request.num_tokens)
        assert grant.banned_token_ids == oracle.banned(request.spec, grant.output_index)
    driver.num_forced.update(
        e.request_id for e in plan.events if isinstance(e, Preempted) and e.request_id in before.idle
    )
    _check_preemptions(driver, plan, before.idle, after.seated)
    if held:
        _check_quarantine(driver, plan, held)
        return
    if config.discipline == "unified":
        for request in running:
            # A starved one may be given its seat and its blocks before its first token.
            is_due = request.num_missing_tokens == 1 and not driver.has_its_last(request)
            is_due = is_due and not request.awaits_mask
            if is_due and request.request_id in before.seated:
                assert request.request_id in ids, "a decode was left out"
    if config.discipline == "static" and before.seated & after.seated:
        assert before.seated >= after.seated, "somebody joined a batch that was closed"
    oracle.check_scored(driver, plan)
    oracle.check_watermark(driver, before, after)
    oracle.check_growth(driver, plan, before, after)
    oracle.check_victims(driver, plan, before, after)
    oracle.check_tenants(driver, after)
    _check_overtaking(driver, plan, before, after)
    oracle.check_order(driver, plan, before, after)


def _check_quarantine(driver: "Driver", plan: Plan, held: Sequence[Request]):
    """Who may have killed the runner is computed alone, and only more urgent ones before it."""
    if any(driver.scheduler.is_quarantined(grant.request_id) for grant in plan.grants):
        assert len(plan.grants) == 1
        return
    held = [r for r in held if driver.scheduler.find(r.request_id)]  # some may have run out of time
    held = [r for r in held if not driver.has_its_last(r) and not r.awaits_mask]
    if held:
        most_urgent = min(admissible.urgency(driver, r) for r in held)
        for grant in plan.grants:
            assert admissible.urgency(driver, driver.scheduler.find(grant.request_id)) < most_urgent


def check_stalls(driver: "Driver", plan: Plan):
    """6: nobody goes without a token for longer than the stated bound (docs/SCHEDULING.md)."""
    granted = {grant.request_id for grant in plan.grants}
    max_wait_s, turn_s = _stall_bound(driver)
    for num_earlier, (request_id, seen) in enumerate(driver.seen_alive.items()):
        if request_id in granted:
            seen.progress_at = seen.idle_at = driver.now
            seen.num_earlier = num_earlier
        elif not seen.disturbed and not admissible.has_seat_limit(driver.config, seen.spec.tenant):
            assert driver.now - seen.progress_at <= max_wait_s + (seen.num_earlier + 1) * turn_s


def _stall_bound(driver: "Driver") -> tuple[float, float]:
    """Longest wait before the starved tier, and longest turn in it, in seconds; a step takes one."""
    config, longest = driver.config, driver.longest
    pool_tokens = driver.blocks.num_blocks * driver.blocks.block_size
    num_tokens = max(1, config.max_step_tokens - config.max_running_requests)
    share = max(1, config.num_reserved_tokens(num_tokens))
    if any(seen.spec.sampling.prompt_logprobs is not None for seen in driver.seen.values()):
        num_tokens, share = (min(n, config.max_scored_tokens) for n in (num_tokens, share))
    drain = pool_tokens / num_tokens + longest
    serve = longest / share + longest
    if config.discipline == "prefill_first":
        drain, serve = 2 * drain, 2 * serve  # two kinds of steps take turns
    if driver.depth:
        drain, serve = 2 * drain, 2 * serve  # every other plan may have to wait for a commit
    return driver.max_wait_s, drain + serve


def _check_preemptions(driver: "Driver", plan: Plan, idle_before: set[RequestId], seated: set[RequestId]):
    """5: for an arrival only across a level gap; for growth only who comes later."""
    for_arrivals: list[RequestId] = []
    for event in plan.events:
        if isinstance(event, Preempted):
            assert event.request_id not in seated, "admitted in the step that preempted it"
        if isinstance(event, Preempted) and event.beneficiary is not None:
            victim = driver.scheduler.find(event.request_id)
            winner = driver.scheduler.find(event.beneficiary)
            assert victim is not None
            assert winner is not None
            idle = event.request_id in idle_before
            assert idle or admissible.key(driver, winner) < admissible.key(driver, victim)
            assert event.count <= driver.config.max_preemptions + driver.num_forced[event.request_id]
            if event.reason in (PreemptReason.SEATS, PreemptReason.BLOCKS):
                gap = admissible.urgency(driver, victim) - admissible.urgency(driver, winner)
                assert idle or gap >= driver.config.preempt_level_gap
                assert idle or oracle.had_its_quantum(driver, event.request_id)
                for_arrivals.append(event.beneficiary)
    if len(for_arrivals) > driver.config.max_preemptions_per_step:
        assert len(set(for_arrivals)) == 1, "too many for arrivals in one step"  # but one may need more


def _check_overtaking(driver: "Driver", plan: Plan, before: Standing, after: Standing):
    """2: no less urgent prefill or admission while a more urgent admissible request waits.

    The starved tier is excepted, and ``static`` admits nobody to a batch under way. A
    decode step of ``prefill_first`` admits nobody either; it may only precede a step of
    prefills that could be formed when a bounded decode gap is set (never twice in a row:
    ``oracle.check_order``).
    """
    config = driver.config
    if config.discipline == "static" or any(r.is_starved for r in after.alive):
        return
    preempted_now = {e.request_id for e in plan.events if isinstance(e, Preempted)}
    if len(preempted_now) >= config.max_preemptions_per_step:
        return
    first = admissible.must_be_next(driver, after.waiting, preempted_now, plan)
    if not first:
        return
    running = {r.request_id: r for r in after.running}
    granted = [running[grant.request_id] for grant in plan.grants]
    num_tokens = plan.num_tokens - sum(grant.num_drafts for grant in plan.grants)
    is_full = num_tokens == config.max_step_tokens
    if config.discipline == "prefill_first":
        if oracle.may_be_decodes(granted, before) and any(map(oracle.is_decoding, granted)):
            if preempted_now:
                return  # what a retraction frees comes after prefills were tried
            assert config.prefill_first_max_decode_gap_ms is not None, "somebody could prefill"
            assert not driver.decoded_last, "two decode steps in a row while somebody could prefill"
            return
        is_full |= plan.num_tokens == config.prefill_first_max_input_tokens
        is_full |= plan.num_tokens == config.prefill_first_max_chunk_tokens
        is_full |= len(granted) == config.prefill_first_max_requests
    for waiting in first:
        assert is_full, f"{waiting.request_id} fits but was left out"
        for request in granted:
            if admissible.comes_after(driver, request, waiting):
                assert config.discipline == "unified"
                assert request.num_missing_tokens == 1
                assert request.request_id in before.seated
