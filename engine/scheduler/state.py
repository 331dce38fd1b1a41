"""Who waits, who runs, and the moves between the two. Decides nothing.

Every move keeps the block manager, the queue and the running list in step, and
returns the event that tells of it.
"""

from bisect import insort

from engine.errors import VorrangError
from engine.events import Failed, Finished, Preempted, Resumed, Started
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestStatus
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.order import Policy, WaitingQueue
from kv.block_manager import BlockManager, PrefixHit


class SchedulerState:
    """Requests and where they stand.

    Attributes:
        running: requests that hold a seat, in policy order.
        waiting: requests that wait, never admitted or preempted.
        requests: all that are alive, by id.
        num_new_waiting: of those that wait, the ones never admitted (what the queue limit counts).
    """

    def __init__(self, config: SchedulerConfig, policy: Policy, blocks: BlockManager) -> None:
        self.config = config
        self.policy = policy
        self.blocks = blocks
        self.running: list[Request] = []
        self.waiting = WaitingQueue(policy)
        self.requests: dict[RequestId, Request] = {}
        self.num_new_waiting = 0

    def enqueue(self, request: Request) -> None:
        """A new request joins the queue."""
        self.requests[request.request_id] = request
        self.waiting.push(request)
        self.num_new_waiting += 1

    def admit(self, request: Request, hit: PrefixHit, now: float) -> Started | Resumed:
        """The request at the head of the queue gets a seat, and blocks for all its known tokens."""
        self.waiting.discard(request.request_id)
        admitted = self.blocks.admit(request, hit)
        assert admitted, "admission tests promised the blocks"
        request.spend(now)
        is_new = request.status is RequestStatus.WAITING
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit.num_tokens
        insort(self.running, request, key=self.policy.key)
        if is_new:
            self.num_new_waiting -= 1
            request.num_cached_tokens = hit.num_tokens
            return Started(request.request_id, request.num_prompt_tokens, hit.num_tokens)
        num_recomputed = max(0, request.num_lost_tokens - hit.num_tokens)
        request.num_lost_tokens = 0
        request.num_recomputed_tokens += num_recomputed
        return Resumed(request.request_id, num_recomputed)

    def preempt(
        self, request: Request, reason: PreemptReason, beneficiary: Request | None, step: int, now: float
    ) -> Preempted:
        """A running request loses seat and blocks and returns to the queue with its output and seniority."""
        self.running.remove(request)
        num_blocks = self.blocks.free(request)
        request.spend(now)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.preempted_in_step = step
        self.waiting.push(request)
        return Preempted(
            request.request_id,
            reason,
            request.num_preemptions,
            beneficiary.request_id if beneficiary else None,
            num_blocks,
            request.num_lost_tokens,
        )

    def set_level(self, request: Request, level: int) -> None:
        """Give a request another level, and the place in the order that goes with it."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            request.level = level
            insort(self.running, request, key=self.policy.key)
        else:
            self.waiting.discard(request.request_id)
            request.level = level
            self.waiting.push(request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        stop_string: str | None = None,
    ) -> Finished:
        """A request ends with its output."""
        self._leave(request, now)
        return Finished(request.request_id, reason, request.usage(), stop_token_id, stop_string)

    def fail(self, request: Request, error: VorrangError, now: float) -> Failed:
        """A request ends with an error."""
        self._leave(request, now)
        return Failed(request.request_id, error, request.usage())

    def _leave(self, request: Request, now: float) -> None:
        request.spend(now)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.blocks.free(request)
        else:
            self.waiting.discard(request.request_id)
            self.num_new_waiting -= request.status is RequestStatus.WAITING
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def check_integrity(self) -> None:
        """Recount everything; an ``AssertionError`` here is a bug of ours."""
        self.blocks.check_integrity()
        self.waiting.check_integrity()
        assert len(self.running) <= self.config.max_running_requests
        assert self.running == sorted(self.running, key=self.policy.key)
        assert len(self.running) + len(self.waiting) == len(self.requests)
        assert self.blocks.num_owners == len(self.running)
        num_new = 0
        for request in self.requests.values():
            runs = request.status is RequestStatus.RUNNING
            waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert runs != waits
            assert waits == (request.request_id in self.waiting)
            num_new += request.status is RequestStatus.WAITING
            if runs:
                assert request in self.running
                assert 0 <= request.num_computed_tokens < request.num_tokens
                num_held = len(self.blocks.table(request.request_id)) * self.blocks.block_size
                assert num_held >= request.num_computed_tokens
            else:
                assert request.num_computed_tokens == 0
        assert num_new == self.num_new_waiting
