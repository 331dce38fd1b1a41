"""Who gets a seat, and who gives way for it: shared by all disciplines.

Every test comes before the first change: a request that is not admitted leaves
no trace.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.events import Preempted
from engine.request import PreemptReason, Request, RequestId, RequestStatus
from engine.scheduler.draft import Gate, StepDraft
from engine.scheduler.eviction import choose_latest, choose_victims
from engine.scheduler.state import SchedulerState
from kv.block_manager import PrefixHit

_NO_HIT = PrefixHit((), 0, 0)


class Reserve(Protocol):
    """Blocks an admission must leave free for outputs to come."""

    def num_blocks(self, request: Request, num_tokens: int, without: Sequence[Request]) -> int:
        """How many, if ``request`` were admitted with room for ``num_tokens`` and ``without`` were gone."""
        ...

    def admitted(self, request: Request) -> None:
        """A request got a seat in this step."""
        ...

    def preempted(self, request: Request) -> None:
        """A request is about to lose its blocks."""
        ...


class Admission:
    """Admits waiting requests into one step, and finds blocks for running ones.

    Args:
        state: who stands where.
        draft: the step.
        reserve: what to leave free beyond the watermark; None = nothing.
        for_good: who is admitted holds all it can ever need, is never evicted, and
            need not compute a token in this step.
    """

    def __init__(
        self,
        state: SchedulerState,
        draft: StepDraft,
        *,
        reserve: Reserve | None = None,
        for_good: bool = False,
    ) -> None:
        self._state = state
        self._config = state.config
        self._blocks = state.blocks
        self._policy = state.policy
        self._draft = draft
        self._reserve = reserve
        self._for_good = for_good
        #: Blocks that ordinary requests must leave to a starved one.
        self.num_reserved_blocks = 0

    def try_admit(self, request: Request, *, from_reserve: bool = False) -> Gate | None:
        """Give a waiting request a seat and blocks, evicting strictly less urgent ones if that helps.

        Args:
            request: which.
            from_reserve: it may use what is reserved for the starved; one of these then holds its
                longest length.

        Returns:
            What kept it out; None when it was admitted.
        """
        if request.preempted_in_step == self._draft.step:
            return Gate.JUST_PREEMPTED
        if request.is_ending:
            return Gate.IN_FLIGHT
        if request.awaits_mask:
            return Gate.GRAMMAR  # it may lack nothing but the token that it may not sample
        num_seats_missing = max(0, len(self._state.running) + 1 - self._config.max_running_requests)
        hit = self._hit(request)
        if (
            hit is not None
            and not from_reserve
            and not self._for_good
            and self._waits_for_prefix(request, hit)
        ):
            return Gate.PREFIX
        in_reserve = from_reserve and request.is_starved
        holds_all = self._for_good or in_reserve
        holds_all |= request.num_preemptions >= self._config.max_preemptions
        num_tokens = self._num_tokens_to_hold(request, holds_all=holds_all)
        num_needed = self._num_blocks_needed(request, hit, num_tokens)
        victims = self._victims(
            request, num_tokens, num_needed, hit or _NO_HIT, num_seats_missing, from_reserve=from_reserve
        )
        if isinstance(victims, Gate):
            return victims
        if not self._for_good and not self._draft.has_room(without=victims):
            return Gate.BUDGET
        reason = PreemptReason.SEATS if num_seats_missing else PreemptReason.BLOCKS
        for victim in victims:
            self.preempt(victim, reason, request)
            self._draft.num_preemptions += 1
        event = self._state.admit(request, hit, num_tokens, self._draft.now)
        request.holds_all = holds_all
        request.in_reserve = in_reserve
        if self._reserve is not None:
            self._reserve.admitted(request)
        if event is not None:
            self._draft.events.append(event)
        return None

    def _waits_for_prefix(self, request: Request, hit: PrefixHit) -> bool:
        """Whether somebody computes the next tokens of its prompt right now, enough to wait for them.

        That prefill inherits the request's urgency until the shared blocks are done: it
        is granted them now, and is not evicted for anybody less urgent.
        """
        if not request.is_scored:
            return False  # it computes its prompt itself
        found = self._blocks.being_computed(request, hit)
        if found is None:
            return False
        prefill, num_blocks = self._state.requests[RequestId(found[0].request_id)], found[1]
        if prefill.status is not RequestStatus.RUNNING:
            return False
        shared_tokens = hit.num_tokens + num_blocks * self._blocks.block_size
        is_sibling = bool(request.spec.family) and request.spec.family == prefill.spec.family
        num_least = 1 if is_sibling else self._config.prefix_wait_tokens  # siblings share it, however short
        if shared_tokens - prefill.num_committed_tokens < num_least:
            return False  # what is in flight can't be found yet, so it is waited for like the rest
        inherited = self._state.inherited
        urgency = min(self._policy.urgency(request), inherited.get(prefill, self._policy.urgency(prefill)))
        inherited[prefill] = urgency
        num_missing = shared_tokens - prefill.num_computed_tokens - self._draft.granted.get(prefill, 0)
        if num_missing > 0:
            self._draft.grant_chunk(prefill, self._config.max_chunk_tokens, num_missing)
        return True

    def _hit(self, request: Request) -> PrefixHit | None:
        """Its prefix in the cache, as far as it may be used; None when it holds its blocks already."""
        if self._blocks.holds(request.request_id):
            return None
        return self._blocks.match(request, request.num_cacheable_tokens)

    def num_blocks_for_starved(self, request: Request) -> int:
        """Free blocks that admitting a starved request would consume."""
        hit = self._hit(request)
        return self._num_blocks_needed(request, hit, self._num_tokens_to_hold(request, holds_all=True))

    def num_blocks_at_longest(self, request: Request) -> int:
        """Blocks that a request can hold at most."""
        return self._blocks.blocks_for(self._num_tokens_to_hold(request, holds_all=True))

    def preempt(self, victim: Request, reason: PreemptReason, beneficiary: Request | None) -> Preempted:
        """Take a request's blocks, seat and grant."""
        self._draft.take_back(victim)
        if self._reserve is not None:
            self._reserve.preempted(victim)
        event = self._state.preempt(victim, reason, beneficiary, self._draft.step, self._draft.now)
        self._draft.events.append(event)
        return event

    def let_decodes_grow(self) -> None:
        """See to it that every decode has a block for its next token, in policy order.

        Who holds blocks without a seat, and strictly less urgent ones, give way
        first, then the last-arrived equals that came after it, then itself. Requests
        that hold all they can ever need neither ask nor give. So the most urgent,
        earliest of the others always advances.
        """
        growing = self._state.growing
        requests = sorted(growing.values(), key=self._policy.key)
        if len(requests) <= self._blocks.num_free_blocks:  # each lacks a single one
            self._blocks.grow_each(requests)
            growing.clear()
            return
        for request in requests:
            if request.request_id in growing and self._blocks.grow(request, request.num_tokens):
                del growing[request.request_id]
            elif request.request_id in growing:
                self._make_room_to_grow(request)

    def _make_room_to_grow(self, request: Request) -> None:
        victims = self._victims_for_growth(request)
        for victim in victims or [request]:
            self.preempt(victim, PreemptReason.GROWTH, request if victim is not request else None)
        if victims:
            grown = self._blocks.grow(request, request.num_tokens)
            assert grown, "the victims promised a block"
            del self._state.growing[request.request_id]

    def _num_blocks_needed(self, request: Request, hit: PrefixHit | None, num_tokens: int) -> int:
        if hit is not None:
            return self._blocks.num_blocks_to_admit(request, hit, num_tokens)
        # It kept those it holds while it was parked.
        return max(0, self._blocks.blocks_for(num_tokens) - len(request.block_table))

    def _num_tokens_to_hold(self, request: Request, *, holds_all: bool) -> int:
        if not holds_all:
            return request.num_tokens
        return min(request.max_known_tokens, self._blocks.num_blocks * self._blocks.block_size)

    def _victims(
        self,
        request: Request,
        num_tokens: int,
        num_needed: int,
        hit: PrefixHit,
        num_seats: int,
        *,
        from_reserve: bool,
    ) -> list[Request] | Gate:
        """Whom to evict so that ``request`` fits: nobody, some, or what keeps it out."""
        tenants, running = self._state.tenants, self._state.running
        tenant_has_room = tenants.has_room_for(request)
        may_preempt = self._config.preempt_for_arrivals
        if num_seats and running and not (may_preempt and self._evictable_for(request)):
            return Gate.SEAT if tenant_has_room else Gate.TENANT  # what most fail for, so it is asked first
        num_missing = num_needed - self._blocks.num_free_blocks
        num_reserved = 0 if from_reserve else self.num_reserved_blocks
        num_kept = max(num_reserved, 0 if from_reserve else self._watermark_blocks(request))

        def spare(without: Sequence[Request]) -> int:
            if self._reserve is None or from_reserve:
                return num_kept
            return max(num_kept, self._reserve.num_blocks(request, num_tokens, without))

        num_spare = spare(())
        if tenant_has_room and not num_seats and (num_missing + num_spare <= 0 or num_needed <= 0):
            return []
        gate = Gate.SEAT if num_seats else Gate.BLOCKS if num_missing > 0 else Gate.WATERMARK
        if not tenant_has_room:
            gate = Gate.TENANT
        if not may_preempt:
            return gate
        candidates = self._evictable_for(request)
        if not candidates and running:
            return gate

        def credit(chosen: Sequence[Request]) -> int:
            return num_spare - spare(chosen)

        def choose(num_blocks: int, *, with_spare: bool = True) -> list[Request] | None:
            return choose_victims(
                candidates,
                num_seats=num_seats,
                num_blocks=max(0, num_blocks),
                keep=hit.blocks,
                blocks=self._blocks,
                policy=self._policy,
                credit=credit if with_spare and self._reserve is not None else None,
                allows=None if tenant_has_room else lambda chosen: tenants.has_room_for(request, chosen),
            )

        victims = choose(num_missing + num_spare if num_needed > 0 else 0)
        if victims is None and not num_reserved:
            all_may_go = sum(r.status is RequestStatus.RUNNING for r in candidates) == len(running)
            if all_may_go and choose(num_missing, with_spare=False) is not None:
                victims = candidates  # with nothing left running there is no watermark
        if victims is None:
            return gate
        used = self._draft.num_preemptions
        if used and used + len(victims) > self._config.max_preemptions_per_step:
            return gate
        return victims

    def _evictable_for(self, request: Request) -> list[Request]:
        """Who may be evicted for an arrival: idle holders of blocks, and clearly less urgent running ones."""
        least = self._policy.urgency(request) + self._config.preempt_level_gap
        return self._idle_holders(request, alone=not self._state.running) + [
            r for r in self._state.running_from(least) if self._may_be_evicted(r)
        ]

    def _idle_holders(self, request: Request, *, alone: bool) -> list[Request]:
        """Who holds blocks without a seat and gives them to ``request``: it makes no progress anyway.

        Equals and less urgent ones; anybody, when it would be the only one that runs (``alone``).
        """
        urgency = self._policy.urgency(request)
        holders = self._state.idle_holders.values()
        return [r for r in holders if r is not request and (alone or self._policy.urgency(r) >= urgency)]

    def _may_be_evicted(self, request: Request) -> bool:
        if request.holds_all:
            return False
        at_resume = request.num_outputs_at_resume
        if at_resume is None:
            return True
        return request.num_output_tokens - at_resume >= self._config.resume_quantum_tokens

    def _watermark_blocks(self, request: Request) -> int:
        if not self._state.running:
            return 0
        share = self._state.rules(request).watermark
        if request.has_started:
            share = max(share, self._config.standard.watermark)
        return -int(-share * self._blocks.num_blocks // 1)

    def _victims_for_growth(self, request: Request) -> list[Request] | None:
        urgency = self._policy.urgency(request)
        idle = self._idle_holders(request, alone=len(self._state.running) == 1)
        less_urgent = [r for r in self._state.running_from(urgency + 1) if not r.holds_all]
        victims = choose_victims(
            idle + less_urgent,
            num_seats=0,
            num_blocks=1,
            keep=(),
            blocks=self._blocks,
            policy=self._policy,
        )
        if victims is None:
            key = self._policy.key  # it may have been lent an urgency, and not stand among its equals
            behind = [r for r in self._state.running_from(urgency) if key(r) > key(request)]
            victims = choose_latest([r for r in behind if not r.holds_all], blocks=self._blocks)
        return victims
