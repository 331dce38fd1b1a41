"""The unified discipline: one ordered pass over running and waiting requests.

There is no prefill or decode phase; a request computes the next tokens it
misses. The idea is vLLM V1's (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", SOSP 2023, and its successor
scheduler), made aware of urgency: see docs/SCHEDULING.md for the numbered rules.
"""

from engine.request import Request, RequestId, RequestStatus
from engine.scheduler.admission import Admission
from engine.scheduler.draft import Gate, StepDraft
from engine.scheduler.state import SchedulerState

#: Waiting requests that are looked at past a head that does not fit.
MAX_SCAN = 64


class Unified:
    """Fills a step: decodes, then the share of the starved, then prefill chunks and admissions."""

    name = "unified"

    def fill(self, state: SchedulerState, draft: StepDraft) -> None:
        """Grant tokens, admit, preempt; all of it written into ``draft``."""
        _Pass(state, draft).run()


class _Pass:
    def __init__(self, state: SchedulerState, draft: StepDraft) -> None:
        self._state = state
        self._config = state.config
        self._policy = state.policy
        self._draft = draft
        self._admission = Admission(state, draft)

    def run(self) -> None:
        starved = self._state.starvation.update(self._draft.now)
        self._grant_decodes()
        self._serve_starved(starved)
        self._grant_prefills_and_admit()

    def _grant_decodes(self) -> None:
        for request in [r for r in self._state.running if r.num_missing_tokens == 1]:
            if request.status is RequestStatus.RUNNING and self._admission.make_room_to_grow(request):
                self._draft.grant(request, 1)

    def _serve_starved(self, starved: list[Request]) -> None:
        """Oldest first, within reserved seats and tokens; blocks the next one lacks are kept free for it.

        A seat needs no keeping: the starved are served before anybody else is admitted.
        """
        num_tokens = self._config.num_reserved_tokens(self._draft.budget_tokens)
        num_seats = self._config.num_reserved_seats
        num_seats -= sum(request.status is RequestStatus.RUNNING for request in starved)
        for request in starved:
            if request.status is RequestStatus.RUNNING:
                if request.num_missing_tokens > 1:
                    num_tokens -= self._draft.grant_chunk(request, self._config.max_chunk_tokens, num_tokens)
            elif request.request_id in self._state.waiting and num_seats > 0:
                if self._admission.try_admit(request, from_reserve=True) is not None:
                    self._admission.num_reserved_blocks = self._admission.num_blocks_for_starved(request)
                    return
                num_seats -= 1
                num_tokens -= self._draft.grant_chunk(request, self._config.max_chunk_tokens, num_tokens)

    def _grant_prefills_and_admit(self) -> None:
        """Prefills under way and waiting requests stand in one order."""
        running = iter(sorted(self._prefilling(), key=self._policy.rank))
        prefill = next(running, None)
        misfits: dict[RequestId, Request] = {}
        waiting = self._state.waiting.first()
        while prefill or waiting:
            if prefill and (not waiting or self._policy.rank(prefill) < self._policy.rank(waiting)):
                if prefill.status is RequestStatus.RUNNING:
                    self._draft.grant_chunk(prefill, self._config.max_chunk_tokens)
                prefill = next(running, None)
            elif waiting:
                waiting = (
                    self._state.waiting.first(misfits) if self._admit_or_pass(waiting, misfits) else None
                )

    def _prefilling(self) -> list[Request]:
        return [r for r in self._state.running if r.num_missing_tokens > 1]

    def _admit_or_pass(self, request: Request, misfits: dict[RequestId, Request]) -> bool:
        """Admit a request, or count it among those that others may pass.

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
        if gate not in (Gate.BLOCKS, Gate.WATERMARK):
            return False  # seats and budget are not to be had for whoever comes later, either
        misfits[request.request_id] = request
        return request.num_bypassed < self._config.max_bypass and len(misfits) < MAX_SCAN
