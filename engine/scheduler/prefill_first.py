"""The prefill-first discipline: a step computes prompts if it can, else it decodes.

The idea is SGLang's (Zheng et al., "SGLang: Efficient Execution of Structured
Language Model Programs", NeurIPS 2024, and its scheduler): admission is optimistic
about outputs, a ratio learns how optimistic it may be, and a decode batch that runs
out of blocks retracts some of its members. Ours differs: several prefills may be
under way, urgency decides before length who is retracted, who is retracted keeps
its place and is never refused, more urgent arrivals preempt, starved requests
are served, and the gap between decodes may be bounded.
"""

import math
from collections.abc import Collection, Sequence

from engine.request import PreemptReason, Request, RequestStatus
from engine.scheduler.admission import Admission
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import StepDraft
from engine.scheduler.eviction import retraction_order
from engine.scheduler.prefill import PrefillPass, grant_decodes
from engine.scheduler.state import SchedulerState

#: Output tokens beyond which nothing is reserved for a request.
MAX_RESERVED_OUTPUT_TOKENS = 4096
#: The ratio before anything is known, at conservativeness 1, and the share of it that is its floor.
INITIAL_RATIO, FLOOR_SHARE = 0.7, 0.14
#: Decode steps in which the ratio falls from start to floor.
NUM_DECAY_STEPS = 600
#: Output tokens each survivor of a retraction should be able to produce before the next one.
NUM_TOKENS_AFTER_RETRACTION = 20


class NewTokenRatio:
    """Share of the outputs still allowed that is expected to come.

    Attributes:
        value: the ratio now.
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._start = min(INITIAL_RATIO * conservativeness, 1.0)
        self.floor = self._start * FLOOR_SHARE
        self._decay = (self._start - self.floor) / NUM_DECAY_STEPS
        self.value = self._start

    def decode(self) -> None:
        """A decode step went by without a retraction."""
        self.value = max(self.value - self._decay, self.floor)

    def retracted(self, survivors: Collection[Request]) -> None:
        """Expect what the survivors have shown so far, and a little more."""
        num_tokens = sum(r.num_output_tokens + NUM_TOKENS_AFTER_RETRACTION for r in survivors)
        num_tokens_max = sum(r.spec.sampling.max_tokens for r in survivors)
        self.value = min(num_tokens / (num_tokens_max + 1), 1.0)

    def reset(self) -> None:
        """Nothing runs."""
        self.value = self._start


class OutputReserve:
    """Blocks to leave free for the outputs of one step's running requests and of a newcomer.

    A request that ran before the step is expected to produce ``ratio`` of what it
    may; a newcomer, and who was admitted in this step, all of it and a block. The
    sums are made when first asked for, and kept up as requests come and go.
    """

    def __init__(self, state: SchedulerState, ratio: float) -> None:
        self._state = state
        self._ratio = ratio
        self._new: dict[Request, int] = {}  # tokens by who was admitted in this step
        self._num_new_tokens = 0
        self._num_expected_tokens: int | None = None  # of who ran before it, at the longest

    def num_blocks(self, request: Request, num_tokens: int, without: Sequence[Request]) -> int:
        """How many, if ``request`` were admitted with room for ``num_tokens``; 0 if it were alone."""
        num_seated = sum(r.status is RequestStatus.RUNNING for r in without)
        if num_seated == len(self._state.running):
            return 0
        expected = self._expected() - sum(map(self._expected_of, without))
        new = self._num_new_tokens - sum(self._new.get(r, 0) for r in without)
        tokens = self._new_tokens(request, num_tokens) + new + self._ratio * expected
        return math.ceil(tokens / self._state.blocks.block_size)

    def admitted(self, request: Request) -> None:
        """A request got a seat in this step."""
        self._expected(newcomer=request)
        self._new[request] = 0 if request.holds_all else self._new_tokens(request, request.num_tokens)
        self._num_new_tokens += self._new[request]

    def preempted(self, request: Request) -> None:
        """A request is about to lose its blocks."""
        self._num_expected_tokens = self._expected() - self._expected_of(request)
        self._num_new_tokens -= self._new.pop(request, 0)

    def _expected(self, newcomer: Request | None = None) -> int:
        """Output tokens still allowed of those that ran before the step and still do."""
        if self._num_expected_tokens is None:
            self._num_expected_tokens = sum(
                [
                    _num_output_tokens_left(r, r.num_tokens)
                    for r in self._state.running
                    if not r.holds_all and r is not newcomer
                ]
            )
        return self._num_expected_tokens

    def _expected_of(self, request: Request) -> int:
        """What one request adds to that."""
        if request.holds_all or request in self._new or request.status is not RequestStatus.RUNNING:
            return 0
        return _num_output_tokens_left(request, request.num_tokens)

    def _new_tokens(self, request: Request, num_tokens: int) -> int:
        return _num_output_tokens_left(request, num_tokens) + self._state.blocks.block_size


def _num_output_tokens_left(request: Request, num_tokens: int) -> int:
    """Output tokens that may follow so many of a request, as far as anything is reserved for them."""
    left = request.max_known_tokens - num_tokens
    if left > MAX_RESERVED_OUTPUT_TOKENS:
        return MAX_RESERVED_OUTPUT_TOKENS
    return left if left > 0 else 0


class PrefillFirst:
    """Fills a step with prefills and admissions, or with decodes.

    Attributes:
        ratio: what is expected of outputs.
    """

    name = "prefill_first"

    def __init__(self, config: SchedulerConfig) -> None:
        self.ratio = NewTokenRatio(config.prefill_first_conservativeness)
        self._decoded_last = False

    def fill(self, state: SchedulerState, draft: StepDraft) -> None:
        """Grant tokens, admit, preempt; all of it written into ``draft``."""
        starved = state.starvation.update(draft.now)
        admission = Admission(state, draft, reserve=OutputReserve(state, self.ratio.value))
        if not state.running:
            self.ratio.reset()
        decode_comes_first = self._decode_is_due(state, draft, starved)
        if decode_comes_first:
            self._decode(state, draft, admission)
        if draft.is_empty:
            self._prefill(state, draft, admission, starved)
        if draft.is_empty and not decode_comes_first:
            self._decode(state, draft, admission)

    def repeated(self, num_steps: int) -> None:
        """The ratio falls in each of them."""
        self._decoded_last = True
        for _ in range(num_steps):
            if self.ratio.value == self.ratio.floor:
                break
            self.ratio.decode()

    def _decode_is_due(self, state: SchedulerState, draft: StepDraft, starved: Collection[Request]) -> bool:
        """Whether decodes may not wait for one more prefill step; never twice in a row.

        While anyone starves the two kinds of steps alternate, so that neither can hold up the other.
        """
        if self._decoded_last:
            return False
        if any(r.status is not RequestStatus.PARKED for r in starved):
            return True
        gap_ms = state.config.prefill_first_max_decode_gap_ms
        return gap_ms is not None and any((draft.now - r.idle_since) * 1000 > gap_ms for r in state.decoding)

    def _prefill(
        self, state: SchedulerState, draft: StepDraft, admission: Admission, starved: Collection[Request]
    ) -> None:
        """A step of prefills within five budgets.

        KV is watched by the output reserve and seats by the admission itself; tokens
        of the step, chunk tokens and the number of prefills are the draft's.
        """
        config, full_tokens = state.config, draft.budget_tokens
        draft.budget_tokens = min(
            full_tokens, config.prefill_first_max_input_tokens, config.prefill_first_max_chunk_tokens
        )
        draft.max_requests = config.prefill_first_max_requests
        PrefillPass(state, draft, admission).run(starved)
        if not draft.is_empty:
            self._decoded_last = False
        else:
            draft.budget_tokens, draft.max_requests = full_tokens, None

    def _decode(self, state: SchedulerState, draft: StepDraft, admission: Admission) -> None:
        """A step of decodes; if their blocks run out, some are retracted first."""
        retracted = self._retract(state, admission)
        for request in state.growing.values():
            grown = state.blocks.grow(request, request.num_tokens)
            assert grown, "retraction promised the blocks"
        state.growing.clear()
        grant_decodes(state, draft)
        if retracted:
            self.ratio.retracted(state.running)
        elif not draft.is_empty:
            self.ratio.decode()
        self._decoded_last = not draft.is_empty

    def _retract(self, state: SchedulerState, admission: Admission) -> bool:
        """Preempt until all decodes that are left can grow.

        One request always keeps its seat; it fits, since what outgrows the pool ends at once.

        Returns:
            Whether a running request was retracted.
        """
        candidates: list[Request] | None = None
        retracted = False
        while len(state.growing) > state.blocks.num_free_blocks:
            if candidates is None:
                holders = [*state.idle_holders.values(), *(r for r in state.running if not r.holds_all)]
                candidates = retraction_order(holders, state.policy)
            victim = next(r for r in candidates if [r] != state.running)
            candidates.remove(victim)
            retracted |= victim.status is RequestStatus.RUNNING
            admission.preempt(victim, PreemptReason.GROWTH, None)
        return retracted
