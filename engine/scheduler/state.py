"""Who waits, who runs, who is parked, and the moves between them. Decides nothing.

Every move keeps the block manager, the queue and the running list in step, and
returns the event that tells of it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from engine.errors import VorrangError
from engine.events import Failed, Finished, Preempted, Resumed, SchedulerEvent, Started
from engine.priority import class_rank
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestStatus
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.scheduler.limits import QueueLimits
from engine.scheduler.order import Key, Policy
from engine.scheduler.starvation import StarvationWatch
from engine.scheduler.tenants import TenantSeats
from kv.block_manager import BlockManager, PrefixHit


class Family:
    """The outputs of one prompt that are alive, and whether any of them ever had a seat."""

    __slots__ = ("has_started", "members")

    def __init__(self) -> None:
        self.members: dict[RequestId, Request] = {}
        self.has_started = False


class SchedulerState:
    """Requests and where they stand.

    Attributes:
        running: requests that hold a seat, in policy order.
        prefilling: those of them that still compute what is known, in the same order.
        decoding: those that miss their last output token alone.
        ending: the others: the step in flight samples their last token, so they are granted nothing more.
        growing: decoding requests whose next token has no block yet.
        idle_holders: requests that hold blocks without a seat: parked, or waiting after they were.
        held: requests that await a mask: they are granted no token to sample.
        inherited: urgency that prefills under way were lent in the last step by who waits for their prefix.
        waiting: requests that wait, never admitted or preempted, in policy order.
        parked: requests that are not to be computed; they may hold blocks.
        requests: all that are alive, by id.
        families: of the requests that are outputs of one prompt, by its name.
        limits: what the requests that were never admitted take of the queue limits.
        tenants: what the seats take of the limits of their tenants.
        starvation: who waited longer than its class may.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy, blocks: BlockManager) -> None:
        self.config = config
        self.policy = policy
        self.blocks = blocks
        self.running: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.ending: list[Request] = []
        self.growing: dict[RequestId, Request] = {}
        self.idle_holders: dict[RequestId, Request] = {}
        self.held: dict[RequestId, Request] = {}
        self.inherited: dict[Request, int] = {}
        self.waiting = policy.new_queue()
        self.parked: dict[RequestId, Request] = {}
        self.requests: dict[RequestId, Request] = {}
        self.families: dict[str, Family] = {}
        self.limits = QueueLimits(config)
        self.tenants = TenantSeats(config.tenants)
        self.starvation = StarvationWatch(self.rules)

    def rules(self, request: Request) -> ClassConfig:
        """Rules of a request's class; where levels mean nothing, everybody's are those of ``standard``."""
        return self.config.class_config(request.level) if self.policy.uses_level else self.config.standard

    def enqueue(self, request: Request) -> None:
        """A new request joins the queue."""
        self.policy.arrived(request)
        self.requests[request.request_id] = request
        if request.spec.family:
            family = self.families.setdefault(request.spec.family, Family())
            family.members[request.request_id] = request
        self.waiting.push(request)
        self.limits.add(request)
        self.starvation.watch(request)

    def admit(
        self, request: Request, hit: PrefixHit | None, num_tokens: int, now: float
    ) -> Started | Resumed | None:
        """A waiting request gets a seat, and blocks up to ``num_tokens``.

        Args:
            request: which.
            hit: its prefix in the cache; None when it kept its blocks while parked.
            num_tokens: tokens that its blocks are to hold.
            now: the time.

        Returns:
            What happened; None when it merely goes on after it was parked.
        """
        self.waiting.discard(request.request_id)
        request.spend(now)
        is_new, was_preempted = not request.has_started, request.status is RequestStatus.PREEMPTED
        if request.status is RequestStatus.WAITING and is_new:
            self.limits.forget(request)
        request.status = RequestStatus.RUNNING
        request.has_started = True
        request.seat_level = request.level
        if request.was_parked:
            request.was_parked = False
            self.policy.goes_on(request)
        if hit is None:
            del self.idle_holders[request.request_id]
            grown = self.blocks.grow(request, num_tokens)
            assert grown, "admission tests promised the blocks"
            self._seat(request)
            return None
        admitted = self.blocks.admit(request, hit, num_tokens)
        assert admitted, "admission tests promised the blocks"
        request.num_computed_tokens = hit.num_tokens
        self._seat(request)
        if is_new:
            self.policy.admitted(request, hit.num_tokens)
            if request.spec.family:
                self.families[request.spec.family].has_started = True
            request.num_cached_tokens = hit.num_tokens
            return Started(request.request_id, request.num_prompt_tokens, hit.num_tokens)
        assert was_preempted
        num_recomputed = max(0, request.num_lost_tokens - hit.num_tokens)
        request.num_lost_tokens = 0
        request.num_recomputed_tokens += num_recomputed
        request.num_outputs_at_resume = request.num_output_tokens
        return Resumed(request.request_id, num_recomputed)

    def preempt(
        self, request: Request, reason: PreemptReason, beneficiary: Request | None, step: int, now: float
    ) -> Preempted:
        """A request loses its blocks, and its seat if it has one; it keeps its output and its seniority."""
        self.blocks.confirm(request, request.num_committed_tokens)
        num_blocks = self.blocks.free(request)
        if request.status is RequestStatus.RUNNING:
            self._unseat(request)
            request.spend(now)
            request.status = RequestStatus.PREEMPTED
            self.waiting.push(request)
        else:
            del self.idle_holders[request.request_id]
        if reason is PreemptReason.RUNNER:
            request.num_kv_losses += 1
        else:
            request.num_preemptions += 1
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.num_tokens_in_flight = 0
        request.preempted_in_step = step
        return Preempted(
            request.request_id,
            reason,
            request.num_preemptions + request.num_kv_losses,
            beneficiary.request_id if beneficiary else None,
            num_blocks,
            request.num_lost_tokens,
        )

    def lose_kv(self, step: int, now: float) -> list[SchedulerEvent]:
        """The pool's content is gone: every holder is preempted, and no block is findable any more."""
        holders = [*self.running, *self.idle_holders.values()]
        events: list[SchedulerEvent] = [
            self.preempt(request, PreemptReason.RUNNER, None, step, now) for request in holders
        ]
        self.inherited.clear()
        for request in list(self.held.values()):
            self.release(request)
        self.blocks.forget_all()
        return events

    def park(self, request: Request, now: float) -> None:
        """A request gives back its seat, or leaves the queue, and keeps its blocks."""
        request.spend(now)
        if request.status is RequestStatus.RUNNING:
            self._unseat(request)
            self.idle_holders[request.request_id] = request
        else:
            self.waiting.discard(request.request_id)
        request.status = RequestStatus.PARKED
        request.was_parked = request.has_started
        self.parked[request.request_id] = request

    def unpark(self, request: Request, now: float) -> None:
        """A parked request returns to the queue with its seniority."""
        request.spend(now)
        del self.parked[request.request_id]
        request.status = RequestStatus.PREEMPTED if request.has_started else RequestStatus.WAITING
        request.idle_since = now
        self.waiting.push(request)
        self.starvation.watch(request)

    def set_level(self, request: Request, level: int) -> None:
        """Give a request another level, and the place in the order that goes with it."""
        if level == request.level:
            return
        needs_block = request.request_id in self.growing
        if request.status is RequestStatus.RUNNING:
            self._unseat(request)
        elif request.status is not RequestStatus.PARKED:
            self.waiting.discard(request.request_id)
        self.limits.forget(request)
        request.level = level
        request.cache_rank = class_rank(level)
        if not request.has_started:
            self.limits.add(request)
        if request.status is RequestStatus.RUNNING:
            self._seat(request)
            if needs_block:
                self.growing[request.request_id] = request
        elif request.status is not RequestStatus.PARKED:
            self.waiting.push(request)
        self.starvation.watch(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        stop_string: str | None = None,
        num_output_tokens: int | None = None,
    ) -> Finished:
        """A request ends with its output, or with the first ``num_output_tokens`` of it."""
        if self.blocks.holds(request.request_id):
            self.blocks.confirm(request, request.num_committed_tokens)
        if num_output_tokens is not None:
            del request.token_ids[request.num_prompt_tokens + num_output_tokens :]
        self._leave(request, now)
        return Finished(request.request_id, reason, request.usage(), stop_token_id, stop_string)

    def fail(self, request: Request, error: VorrangError, now: float) -> Failed:
        """A request ends with an error; what it computed last is not to be found by others."""
        self._leave(request, now)
        return Failed(request.request_id, error, request.usage())

    def prefilled(self, request: Request) -> None:
        """A running request has computed some of what is known; its full blocks can be found from now on."""
        self.blocks.confirm(request, request.num_computed_tokens)
        if not request.is_prefilling:
            self._begin_to_decode(request)

    def _begin_to_decode(self, request: Request) -> None:
        self.filled_block(request)
        position = bisect_left(self.prefilling, self.policy.key(request), key=self.policy.key)
        if position < len(self.prefilling) and self.prefilling[position] is request:
            del self.prefilling[position]
            insort(self.decoding, request, key=self.policy.key)

    def filled_block(self, request: Request) -> None:
        """A decode has computed the last token that had room in a block.

        The block is not hashed before the request loses its blocks: until then nobody
        has a prompt that goes on with its output.
        """
        num_tokens = len(request.token_ids) + request.num_outputs_in_flight
        if num_tokens > len(request.block_table) * self.blocks.block_size:
            self.growing[request.request_id] = request

    def look_ahead(self, grants: "Sequence[tuple[Request, int, int, object, int | None]]") -> None:
        """A step is computed that grants these: count what it will bring as there already.

        What of it must wait for the commit is said in ``engine.scheduler.ahead``.
        """
        finished, running, block_size = RequestStatus.FINISHED, RequestStatus.RUNNING, self.blocks.block_size
        for request, start, num_tokens, table, output_index in grants:
            if request.status is finished:
                continue
            if output_index is not None:
                request.num_outputs_in_flight = 1
            if table is not request.block_table:
                continue  # it was preempted: the token will count, its KV does not
            request.num_computed_tokens = num_computed = start + num_tokens
            request.num_tokens_in_flight = num_tokens
            if request.status is not running:
                continue  # it was parked
            decoded = num_tokens == 1 and output_index
            if num_computed + 1 >= request.num_tokens_max and request.is_ending:
                (self.decoding if decoded else self.prefilling).remove(request)
                self.ending.append(request)
            elif not decoded:
                if not request.is_prefilling:
                    self._begin_to_decode(request)
            elif not num_computed % block_size:
                self.filled_block(request)

    def look_back(self, request: Request, num_computed_tokens: int, table: object) -> None:
        """A step that was looked ahead to has sampled nothing for a request: it misses its last token again.

        Args:
            request: alive; an output of it counts as in flight.
            num_computed_tokens: where that leaves it, if it still has its blocks.
            table: those that the step wrote into.
        """
        is_running = request.status is RequestStatus.RUNNING
        if is_running:
            for each in (self.ending, self.decoding, self.prefilling):
                if request in each:
                    each.remove(request)
            self.growing.pop(request.request_id, None)
        request.num_outputs_in_flight = 0
        if table is request.block_table:
            request.num_tokens_in_flight = 0
            request.num_computed_tokens = num_computed_tokens
            if num_computed_tokens > request.num_confirmed_blocks * self.blocks.block_size:
                self.blocks.confirm(request, num_computed_tokens)
        else:  # it has other blocks, or none; what is cached may be all it knows
            request.num_computed_tokens = min(request.num_computed_tokens, len(request.token_ids) - 1)
        if is_running:
            insort(self.prefilling if request.is_prefilling else self.decoding, request, key=self.policy.key)
            if not request.is_prefilling:
                self.filled_block(request)

    def hold(self, request: Request) -> None:
        """A request is granted no token to sample until ``release``."""
        request.awaits_mask = True
        self.held[request.request_id] = request

    def release(self, request: Request) -> None:
        """A request may sample again; harmless when it may already."""
        request.awaits_mask = False
        self.held.pop(request.request_id, None)

    def ready_decodes(self) -> list[Request]:
        """Decodes that may be granted their token, in policy order."""
        return [r for r in self.decoding if not r.awaits_mask] if self.held else self.decoding

    def running_from(self, urgency: int) -> list[Request]:
        """Running requests of this urgency or less, in policy order; an inherited urgency counts."""
        before_all: Key = (urgency,)
        running = self.running[bisect_left(self.running, before_all, key=self.policy.key) :]
        if self.inherited:
            running = [r for r in running if self.inherited.get(r, urgency) >= urgency]
        return running

    def _seat(self, request: Request) -> None:
        self.tenants.seat(request)
        insort(self.running, request, key=self.policy.key)
        if request.is_ending:
            self.ending.append(request)
        else:
            insort(self.prefilling if request.is_prefilling else self.decoding, request, key=self.policy.key)

    def _unseat(self, request: Request) -> None:
        self.tenants.unseat(request)
        self.running.remove(request)
        if self.ending and request in self.ending:  # though its last token may have come by now
            self.ending.remove(request)
        else:
            (self.prefilling if request.is_prefilling else self.decoding).remove(request)
        self.growing.pop(request.request_id, None)

    def _leave(self, request: Request, now: float) -> None:
        request.spend(now)
        if request.status is RequestStatus.RUNNING:
            self._unseat(request)
        elif request.status is RequestStatus.PARKED:
            del self.parked[request.request_id]
        else:
            self.waiting.discard(request.request_id)
        self.idle_holders.pop(request.request_id, None)
        if self.blocks.holds(request.request_id):
            self.blocks.free(request)
        self.release(request)
        self.limits.forget(request)
        self.starvation.forget(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        if request.spec.family:
            members = self.families[request.spec.family].members
            del members[request.request_id]
            if not members:
                del self.families[request.spec.family]
        self.policy.left(request)

    def check_integrity(self) -> None:
        """Recount everything; an ``AssertionError`` here is a bug of ours."""
        self.blocks.check_integrity()
        self.waiting.check_integrity()
        assert len(self.running) <= self.config.max_running_requests
        assert self.running == sorted(self.running, key=self.policy.key)
        ongoing = [r for r in self.running if not r.is_ending]
        assert self.prefilling == [r for r in ongoing if r.is_prefilling]
        assert self.decoding == [r for r in ongoing if not r.is_prefilling]
        assert sorted(self.ending, key=self.policy.key) == [r for r in self.running if r.is_ending]
        assert self.growing.keys() == {
            r.request_id for r in self.decoding if r.num_tokens > len(r.block_table) * self.blocks.block_size
        }
        holders = {i for i, r in self.requests.items() if self.blocks.holds(i) and r not in self.running}
        assert self.idle_holders.keys() == holders
        assert self.held == {i: r for i, r in self.requests.items() if r.awaits_mask}
        assert len(self.running) + len(self.waiting) + len(self.parked) == len(self.requests)
        for request in self.requests.values():
            self._check_request(request)
        self.limits.check_integrity(r for r in self.requests.values() if not r.has_started)
        self.tenants.check_integrity(self.running)
        in_families = {i for family in self.families.values() for i in family.members}
        assert in_families == {i for i, r in self.requests.items() if r.spec.family}
        self.starvation.check_integrity(self.requests.values())

    def _check_request(self, request: Request) -> None:
        status, holds = request.status, self.blocks.holds(request.request_id)
        assert (status is RequestStatus.PARKED) == (request.request_id in self.parked)
        waits = status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert waits == (request.request_id in self.waiting)
        assert (status is RequestStatus.RUNNING) == (request in self.running)
        assert holds or status is not RequestStatus.RUNNING
        assert request.has_started or not holds
        if holds:
            assert 0 <= request.num_computed_tokens < request.num_tokens
            num_held_tokens = len(request.block_table) * self.blocks.block_size
            assert num_held_tokens >= request.num_computed_tokens
        else:
            assert request.num_computed_tokens == request.num_tokens_in_flight == 0
        assert 0 <= request.num_committed_tokens <= len(request.token_ids)
        assert request.num_outputs_in_flight in (0, 1)
