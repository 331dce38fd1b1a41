"""Steps that differ in nothing but their tokens, made at once: for who simulates, not for who serves.

Between two arrivals and ends most steps are alike: everybody decodes, nobody is
admitted or gives way. Such a **stretch** needs no plans. It may begin after a
committed plan that held decodes alone and decided nothing, when nothing has been
submitted or applied since, and while all of this holds:

1. Nobody prefills, is ending, parked, or holds blocks without a seat, so the plan's
   grants are the decodes and nothing is lent urgency.
2. Nobody reaches the longest length, and no token id ends an output.
3. The free blocks suffice for all that grow.
4. No deadline passes, and nobody comes due to be looked at for starvation.
5. No starved request waits, unless the seats of their share are taken.
6. Nobody who waits can be admitted:

   - ``static`` admits nobody while anybody runs.
   - All seats are taken and nobody who runs is less urgent than the first in the queue by
     ``preempt_level_gap``: it fails for its seat, and the pass ends there.
   - Or blocks were missing, under ``unified`` and an order that does not move, and again nobody is
     less urgent. Free blocks only become fewer, and a cache hit only shorter, while requests
     decode; so whoever did not fit does not fit later either.

Tests hold a simulation with stretches to the results of one without.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.request import Request, RequestId
from engine.scheduler.draft import Gate
from engine.scheduler.state import SchedulerState

#: (request, index of its next output token, how many) -> the tokens.
Sample = Callable[[RequestId, int, int], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that may be made at once.

    Attributes:
        requests: who decodes in each of them.
        num_steps: at most so many; 0: none.
        until: each must be planned before this time.
    """

    requests: Sequence[Request] = ()
    num_steps: int = 0
    until: float = math.inf


NO_STRETCH = Stretch()


def stretch_of(state: SchedulerState, gate: Gate | None) -> Stretch:
    """The stretch that begins now.

    Args:
        state: after a commit.
        gate: of the plan that was committed, which held decodes alone and no events.
    """
    requests = state.decoding
    if (
        not requests
        or len(requests) != len(state.running)
        or state.idle_holders
        or state.parked
        or not _starved_are_served(state)
        or not _nobody_gets_in(state, gate)
    ):
        return NO_STRETCH
    num_steps = min([request.num_tokens_max - request.num_computed_tokens for request in requests]) - 2
    num_steps = min(num_steps, _num_steps_in_blocks(state))
    if num_steps < 1 or any(request.ending_token_ids for request in requests):
        return NO_STRETCH
    return Stretch(requests, num_steps, state.starvation.next_due)


def pass_stretch(state: SchedulerState, num_steps: int, planned_at: float, sample: Sample) -> None:
    """Leave every decode where ``num_steps`` steps leave it, block for block.

    Args:
        state: where a stretch of at least so many steps begins.
        num_steps: how many.
        planned_at: when the last of them was planned.
        sample: what the model says.
    """
    block_size = state.blocks.block_size
    growths: list[tuple[int, int, Request]] = []
    for position, request in enumerate(state.decoding):
        step = len(request.block_table) * block_size - request.num_computed_tokens + 1
        while step <= num_steps:
            growths.append((step, position, request))
            step += block_size
    growths.sort(key=lambda growth: growth[:2])  # as the plans would have: step by step, in policy order
    for _, _, request in growths:
        grown = state.blocks.grow(request, (len(request.block_table) + 1) * block_size)
        assert grown, "the stretch promised the blocks"
    state.growing.clear()
    for request in state.decoding:
        request.token_ids.extend(sample(request.request_id, request.num_output_tokens, num_steps))
        request.num_computed_tokens += num_steps
        request.idle_since = planned_at
        state.filled_block(request)


def _num_steps_in_blocks(state: SchedulerState) -> int:
    """Steps for which the free blocks certainly suffice."""
    block_size, num_decodes = state.blocks.block_size, len(state.decoding)
    if state.config.discipline == "static":  # they were taken when the batch was made
        return 1 << 30
    # In as many steps as a block has tokens each takes one block at most.
    return state.blocks.num_free_blocks // num_decodes * block_size


def _starved_are_served(state: SchedulerState) -> bool:
    starved = state.starvation.starved
    if not starved or state.config.discipline == "static":
        return True
    if not any(request.request_id in state.waiting for request in starved.values()):
        return True
    return sum(request.in_reserve for request in state.running) >= state.config.num_reserved_seats


def _nobody_gets_in(state: SchedulerState, gate: Gate | None) -> bool:
    config = state.config
    first = next(iter(state.waiting), None)
    if first is None or config.discipline == "static":
        return True
    if state.tenants.has_limits or state.running_from(state.policy.urgency(first) + config.preempt_level_gap):
        return False
    if len(state.running) >= config.max_running_requests:
        return True
    is_fixed = config.discipline == "unified" and not state.policy.charges_outputs
    return is_fixed and gate in (Gate.BLOCKS, Gate.WATERMARK)
