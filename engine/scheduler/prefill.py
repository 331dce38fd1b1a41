"""Prefill chunks and admissions in one order: the pass that all disciplines share."""

from collections.abc import Collection

from engine.request import Request, RequestId, RequestStatus
from engine.scheduler.admission import Admission
from engine.scheduler.draft import Gate, StepDraft
from engine.scheduler.state import SchedulerState

#: Waiting requests that are looked past in a step: while they do not fit, and while they wait for a prefix.
MAX_SCAN, MAX_PREFIX_WAITERS = 16, 64


def grant_decodes(state: SchedulerState, draft: StepDraft) -> None:
    """A token for every decode, and for prompts that miss a single one: they cost as little."""
    draft.decode(state.ready_decodes())
    for request in state.prefilling:
        if request.num_missing_tokens == 1 and not request.awaits_mask:
            draft.grant(request, 1)


class PrefillPass:
    """Fills what is left of a step with the share of the starved, then prefill chunks and admissions.

    Args:
        state: who stands where.
        draft: the step.
        admission: who gets in, under the limits of the discipline.
    """

    def __init__(self, state: SchedulerState, draft: StepDraft, admission: Admission) -> None:
        self._state = state
        self._config = state.config
        self._policy = state.policy
        self._draft = draft
        self._admission = admission

    def run(self, starved: Collection[Request]) -> None:
        """Grant tokens and admit; ``starved`` requests come first, oldest first."""
        self._state.inherited.clear()
        self._serve_starved(starved)
        if self._state.prefilling or self._state.waiting:
            self._grant_prefills_and_admit()

    def _serve_starved(self, starved: Collection[Request]) -> None:
        """Oldest first, within reserved tokens, seats and blocks; what the next one lacks is kept for it.

        A seat needs no keeping: the starved are served before anybody else is admitted.
        There is always room in the share for one request, however large.
        """
        if not starved:
            return
        config, draft, admission = self._config, self._draft, self._admission
        # One even of no budget: whoever it evicts gives tokens back.
        num_tokens = max(1, config.num_reserved_tokens(draft.budget_tokens))
        num_prefilling = sum(r.is_starved for r in self._state.prefilling)
        served = [r for r in self._state.running if r.in_reserve]
        num_seats = config.num_reserved_seats - len(served)
        if num_prefilling == 0 and num_seats <= 0:
            return
        num_blocks = config.num_reserved_blocks(self._state.blocks.num_blocks)
        num_blocks -= sum(len(r.block_table) for r in served)
        for request in starved:
            if num_prefilling == 0 and num_seats <= 0:
                return
            if request.is_ending:
                continue  # it needs nothing more
            if request.status is RequestStatus.RUNNING:
                if request.is_prefilling:
                    num_tokens -= draft.grant_chunk(request, config.max_chunk_tokens, num_tokens)
                    num_prefilling -= 1
            elif request.request_id in self._state.waiting and num_seats > 0:
                if request.awaits_mask or not self._state.tenants.has_room_for(request):
                    continue  # it waits for its own grammar or tenant, so nothing is kept for it
                num_needed = admission.num_blocks_at_longest(request)
                if served and num_needed > num_blocks:
                    num_seats = 0
                elif admission.try_admit(request, from_reserve=True) is not None:
                    admission.num_reserved_blocks = admission.num_blocks_for_starved(request)
                    num_seats = 0
                else:
                    served.append(request)
                    num_seats -= 1
                    num_blocks -= num_needed
                    num_tokens -= draft.grant_chunk(request, config.max_chunk_tokens, num_tokens)

    def _grant_prefills_and_admit(self) -> None:
        """Prefills under way and waiting requests stand in one order."""
        running = iter(sorted(self._state.prefilling, key=self._policy.rank))
        prefill = next(running, None)
        misfits: dict[RequestId, Request] = {}
        full_tenants: set[str] = set()
        queue = iter(self._state.waiting)
        waiting = next(queue, None)
        while prefill or waiting:
            if prefill and (not waiting or self._policy.rank(prefill) < self._policy.rank(waiting)):
                if prefill.status is RequestStatus.RUNNING:
                    self._draft.grant_chunk(prefill, self._config.max_chunk_tokens)
                prefill = next(running, None)
            elif waiting and waiting.spec.tenant in full_tenants:
                waiting = next(queue, None)
            elif waiting and waiting.awaits_mask:  # which is nobody's business but its own
                self._draft.kept_out[waiting.request_id] = Gate.GRAMMAR
                waiting = next(queue, None)
            elif waiting:
                may_go_on = self._admit_or_pass(waiting, misfits, full_tenants)
                if waiting.spec.tenant in full_tenants:
                    may_go_on = True
                elif waiting.request_id not in misfits:  # it left the queue, so look at it afresh
                    queue = (r for r in self._state.waiting if r.request_id not in misfits)
                waiting = next(queue, None) if may_go_on else None
        if full_tenants:
            self._policy.wait_for_themselves(full_tenants)

    def _admit_or_pass(
        self, request: Request, misfits: dict[RequestId, Request], full_tenants: set[str]
    ) -> bool:
        """Admit a request, or count it among those that others may pass.

        Who waits for its own tenant's limit may be passed by anybody, and with it all of its tenant.

        Returns:
            Whether the next one may be looked at.
        """
        gate = self._admission.try_admit(request)
        if gate is None:
            self._draft.grant_chunk(request, self._config.max_chunk_tokens)
            for misfit in misfits.values():
                misfit.num_bypassed += 1
            return all(misfit.num_bypassed < self._config.max_bypass for misfit in misfits.values())
        if self._draft.gate is None:
            self._draft.gate = gate
        self._draft.kept_out[request.request_id] = gate
        if gate is Gate.TENANT:
            full_tenants.add(request.spec.tenant)
            return True
        if gate not in (Gate.BLOCKS, Gate.WATERMARK, Gate.PREFIX, Gate.IN_FLIGHT):
            return False  # seats and budget are not to be had for whoever comes later, either
        misfits[request.request_id] = request
        num_max = MAX_PREFIX_WAITERS if gate is Gate.PREFIX else MAX_SCAN
        return request.num_bypassed < self._config.max_bypass and len(misfits) < num_max
