"""The unified discipline: one ordered pass over running and waiting requests.

There is no prefill or decode phase; a request computes the next tokens it
misses. The idea is vLLM V1's (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", SOSP 2023, and its successor
scheduler), made aware of urgency: see docs/SCHEDULING.md for the numbered rules.
"""

from engine.events import SchedulerEvent
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestStatus
from engine.scheduler.eviction import choose_latest, choose_victims
from engine.scheduler.state import SchedulerState
from kv.block_manager import PrefixHit


class StepDraft:
    """A plan in the making: tokens granted so far, budget left, events.

    Attributes:
        step: number of the step.
        now: when it is planned, in seconds of the caller's clock.
        budget_tokens: tokens that may still be granted.
    """

    def __init__(self, step: int, now: float, budget_tokens: int) -> None:
        self.step = step
        self.now = now
        self.budget_tokens = budget_tokens
        self.granted: dict[RequestId, int] = {}
        self.events: list[SchedulerEvent] = []

    def grant(self, request: Request, num_tokens: int) -> None:
        """Let a request compute ``num_tokens`` in this step."""
        assert 0 < num_tokens <= self.budget_tokens
        self.granted[request.request_id] = num_tokens
        self.budget_tokens -= num_tokens

    def take_back(self, request: Request) -> None:
        """Undo a grant; harmless when there is none."""
        self.budget_tokens += self.granted.pop(request.request_id, 0)


class UnifiedPass:
    """Fills one step."""

    def __init__(self, state: SchedulerState, step: int, now: float) -> None:
        self._state = state
        self._config = state.config
        self._blocks = state.blocks
        self._policy = state.policy
        self._draft = StepDraft(step, now, state.config.max_step_tokens)

    def run(self) -> StepDraft:
        """Decodes first, then prefill chunks and admissions, each in policy order."""
        self._grant_decodes()
        self._grant_prefills_and_admit()
        return self._draft

    def _grant_decodes(self) -> None:
        for request in [r for r in self._state.running if r.num_missing_tokens == 1]:
            if request.status is RequestStatus.RUNNING and self._make_room_to_grow(request):
                self._draft.grant(request, 1)

    def _grant_prefills_and_admit(self) -> None:
        running = iter([r for r in self._state.running if r.num_missing_tokens > 1])
        prefill = next(running, None)
        waiting = self._state.waiting.peek()
        while prefill or waiting:
            if prefill and (not waiting or self._policy.key(prefill) < self._policy.key(waiting)):
                if prefill.status is RequestStatus.RUNNING:
                    self._grant_chunk(prefill)
                prefill = next(running, None)
            elif waiting:
                # Nobody passes a request that does not fit: the queue is served in order.
                waiting = self._state.waiting.peek() if self._try_admit(waiting) else None

    def _grant_chunk(self, request: Request) -> None:
        num_tokens = min(request.num_missing_tokens, self._config.max_chunk_tokens, self._draft.budget_tokens)
        if num_tokens > 0:
            self._draft.grant(request, num_tokens)

    def _try_admit(self, request: Request) -> bool:
        """Give the head of the queue a seat and blocks, evicting strictly less urgent ones if that helps.

        Nothing changes unless every test passes, and the request computes in this very step.
        """
        if request.preempted_in_step == self._draft.step:
            return False
        hit = self._blocks.match(request)
        seat_missing = len(self._state.running) >= self._config.max_running_requests
        victims = self._victims_for_arrival(request, hit, seat_missing=seat_missing)
        if victims is None:
            return False
        budget_tokens = self._draft.budget_tokens
        budget_tokens += sum(self._draft.granted.get(v.request_id, 0) for v in victims)
        if budget_tokens < 1:
            return False
        reason = PreemptReason.SEATS if seat_missing else PreemptReason.BLOCKS
        for victim in victims:
            self._preempt(victim, reason, request)
        self._draft.events.append(self._state.admit(request, hit, self._draft.now))
        self._grant_chunk(request)
        return True

    def _victims_for_arrival(
        self, request: Request, hit: PrefixHit, *, seat_missing: bool
    ) -> list[Request] | None:
        """Whom to evict so that ``request`` fits: nobody, some, or None when no set helps."""
        num_needed = self._blocks.num_blocks_to_admit(request, hit) - self._blocks.num_free_blocks
        watermark = self._watermark_blocks(request)
        if not seat_missing and num_needed + watermark <= 0:
            return []
        urgency = self._policy.urgency(request) + self._config.preempt_level_gap
        candidates = [r for r in self._state.running if self._policy.urgency(r) >= urgency]

        def choose(num_blocks: int) -> list[Request] | None:
            return choose_victims(
                candidates,
                num_seats=int(seat_missing),
                num_blocks=max(0, num_blocks),
                keep=hit.blocks,
                blocks=self._blocks,
                policy=self._policy,
            )

        victims = choose(num_needed + watermark)
        if victims is None and len(candidates) == len(self._state.running) and choose(num_needed):
            return candidates  # with nothing left running there is no watermark
        return victims

    def _watermark_blocks(self, request: Request) -> int:
        exempt = self._policy.uses_level and request.level <= self._config.watermark_exempt_level
        if exempt or not self._state.running:
            return 0
        return self._config.watermark_blocks(self._blocks.num_blocks)

    def _make_room_to_grow(self, request: Request) -> bool:
        """See to it that a decoding request has a block for its next token.

        Strictly less urgent ones give way first, then the last-arrived equals that
        came after it, then itself: the most urgent, earliest request always advances.

        Returns:
            False when the request itself was preempted or ended.
        """
        if self._blocks.grow(request):
            return True
        if self._blocks.blocks_for(request.num_tokens) > self._blocks.num_blocks:
            finished = self._state.finish(request, FinishReason.CAPACITY, self._draft.now)
            self._draft.events.append(finished)
            return False
        urgency = self._policy.urgency(request)
        less_urgent = [r for r in self._state.running if self._policy.urgency(r) > urgency]
        victims = choose_victims(
            less_urgent, num_seats=0, num_blocks=1, keep=(), blocks=self._blocks, policy=self._policy
        )
        if victims is None:
            behind = self._state.running[self._state.running.index(request) + 1 :]
            victims = choose_latest(behind, blocks=self._blocks)
        for victim in victims or [request]:
            self._preempt(victim, PreemptReason.GROWTH, request if victim is not request else None)
        if not victims:
            return False
        grown = self._blocks.grow(request)
        assert grown, "the victims promised a block"
        return True

    def _preempt(self, victim: Request, reason: PreemptReason, beneficiary: Request | None) -> None:
        self._draft.take_back(victim)
        event = self._state.preempt(victim, reason, beneficiary, self._draft.step, self._draft.now)
        self._draft.events.append(event)
