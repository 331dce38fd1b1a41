"""Steps that differ in nothing but their tokens, made at once: for who simulates, not for who serves.

Between two arrivals and ends most steps are alike: everybody decodes, nobody is
admitted or gives way. Such a **stretch** needs no plans. It may begin after any
committed plan, ends with the step in which somebody ends, and lasts while all of this holds:

1. Nobody prefills, is ending, parked, lent urgency, or holds blocks without a seat, so the
   next plan's grants are the decodes.
2. No token ends an output, length alone does (``engine.scheduler.bulk``).
3. The free blocks suffice for all that grow, and are handed out in policy order: ``prefill_first``
   does so unless requests that differ in when they came to need a block need one now.
4. No deadline passes, and nobody comes due to be looked at for starvation.
5. No starved request waits, unless the seats of their share are taken.
6. Nobody who waits can be admitted:

   - ``static`` admits nobody while anybody runs.
   - All seats are taken and nobody who runs is less urgent than the first in the queue by
     ``preempt_level_gap``: it fails for its seat, and the pass ends there.
   - Or blocks were missing when the plan before was made, under ``unified`` and an order that does
     not move (under ``fair`` it does with every token, so somebody else may be looked at); it held
     decodes alone and decided nothing, nobody ended or came since, and again nobody is less urgent.
     Free blocks only become fewer, and a cache hit only shorter, while requests decode; so whoever
     did not fit does not fit later either.

Tests hold a simulation with stretches to the results of one without.
"""

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from engine.request import Request
from engine.scheduler.draft import Gate
from engine.scheduler.state import SchedulerState


class Stretch(NamedTuple):
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


def stretch_of(state: SchedulerState, gate: Gate | None, *, was_quiet: bool) -> Stretch:
    """The stretch that begins now.

    Args:
        state: after a commit.
        gate: of the plan that was committed.
        was_quiet: it held decodes alone and decided nothing, and nobody ended or came since.
    """
    requests = state.decoding
    if (
        not requests
        or len(requests) != len(state.running)
        or state.idle_holders
        or state.parked
        or state.inherited
        or not (was_quiet or state.config.discipline != "prefill_first" or not state.growing)
        or not _starved_are_served(state)
        or not _nobody_gets_in(state, gate if was_quiet else None)
    ):
        return NO_STRETCH
    num_steps = min([request.num_tokens_max - request.num_computed_tokens for request in requests]) - 1
    num_steps = min(num_steps, _num_steps_in_blocks(state))
    if num_steps < 1:
        return NO_STRETCH
    return Stretch(requests, num_steps, state.starvation.next_due)


def pass_stretch(
    state: SchedulerState, num_steps: int, planned_at: float, output: Sequence[int]
) -> list[Request]:
    """Leave every decode where ``num_steps`` steps leave it, block for block.

    Args:
        state: where a stretch of at least so many steps begins.
        num_steps: how many.
        planned_at: when the last of them was planned.
        output: what the model says: the token of each output index.

    Returns:
        Who has reached its longest length, in policy order.
    """
    block_size = state.blocks.block_size
    growths: list[tuple[int, int, Request]] = []
    filled: list[Request] = []
    ended: list[Request] = []
    for position, request in enumerate(state.decoding):
        token_ids, num_before = request.token_ids, request.num_computed_tokens
        first = len(token_ids) - request.num_prompt_tokens
        token_ids += output[first : first + num_steps]
        request.num_computed_tokens = num_computed = num_before + num_steps
        request.idle_since = planned_at
        num_fitting = len(request.block_table) * block_size - num_before
        if num_fitting < num_steps:
            growths += [(step, position, request) for step in range(num_fitting, num_steps, block_size)]
        if not num_computed % block_size:
            filled.append(request)
        if num_computed + 1 >= request.num_tokens_max:
            ended.append(request)
    growths.sort(key=itemgetter(0, 1))  # as the plans would have: step by step, in policy order
    state.blocks.grow_each([request for _, _, request in growths])
    state.growing.clear()
    for request in filled:
        state.filled_block(request)
    return ended


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
    first = state.waiting.first
    if first is None or config.discipline == "static":
        return True
    if state.tenants.has_limits or state.running_from(state.policy.urgency(first) + config.preempt_level_gap):
        return False
    if len(state.running) >= config.max_running_requests:
        return True
    is_fixed = config.discipline == "unified" and state.policy.is_fixed
    return is_fixed and gate in (Gate.BLOCKS, Gate.WATERMARK)
