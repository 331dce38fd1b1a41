"""Which running requests lose their place: the cheapest set that covers the need."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby

from engine.request import Request, RequestStatus
from engine.scheduler.order import Policy
from kv.block_manager import BlockManager, Reclaim


def choose_victims(
    candidates: Iterable[Request],
    *,
    num_seats: int,
    num_blocks: int,
    keep: Collection[int],
    blocks: BlockManager,
    policy: Policy,
    credit: Callable[[Sequence[Request]], int] | None = None,
    allows: Callable[[Sequence[Request]], bool] | None = None,
) -> list[Request] | None:
    """Choose who gives way.

    Worst urgency first; within it who holds blocks without a seat (it makes no
    progress anyway), then the fewest tokens to recompute (that no shared
    prefix gives back) per block freed, or in all when only a seat is needed; ties
    by fewest past preemptions, then latest arrival. Candidates are taken in that
    order until the need is covered; then whoever is not needed after all is spared,
    dearest first, so no member of the result can be left out. Blocks shared inside
    the set count once all their holders are in it; blocks shared with others never
    do.

    Args:
        candidates: requests with blocks that may be evicted; those without a seat help for blocks alone.
        num_seats: seats needed.
        num_blocks: blocks needed.
        keep: blocks the beneficiary will take over from the cache; freeing them gains nothing.
        blocks: who holds what.
        policy: whose urgency counts.
        credit: blocks by which the need shrinks when these are gone, beyond those they hold.
        allows: what else must hold when these are gone; going without more of them never breaks it.

    Returns:
        The victims, cheapest first, or None when no set covers the need.
    """
    keep = frozenset(keep)
    reclaim = blocks.reclaim(keep)

    def cost(request: Request) -> tuple[bool, float, int, int]:
        num_shared = blocks.num_shared_prefix_blocks(request, keep)
        lost = max(0, request.num_computed_tokens - num_shared * blocks.block_size)
        if request.is_ending:
            lost = 0  # it need not compute anything again
        price = float(lost)
        if num_blocks > 0:
            gain = len(request.block_table) - num_shared
            price = lost / gain if gain else math.inf
        return _has_seat(request), price, request.num_preemptions, -request.arrival_seq

    def covered(chosen: Sequence[Request]) -> bool:
        num_gained = reclaim.num_blocks + (credit(chosen) if credit else 0)
        enough = num_gained >= num_blocks and sum(map(_has_seat, chosen)) >= num_seats
        return enough and (allows is None or allows(chosen))

    def worst_first() -> Iterator[Request]:
        by_urgency = sorted(candidates, key=policy.urgency, reverse=True)
        for _, equals in groupby(by_urgency, key=policy.urgency):
            yield from sorted(equals, key=cost)  # what is not reached costs nothing

    return _smallest_prefix(worst_first(), reclaim, covered)


def choose_latest(candidates: Sequence[Request], *, blocks: BlockManager) -> list[Request] | None:
    """Of requests in policy order, the fewest, last ones first, whose eviction frees a block.

    Returns:
        The victims, or None when evicting all of them would free nothing.
    """
    reclaim = blocks.reclaim()
    return _smallest_prefix(reversed(candidates), reclaim, lambda _: reclaim.num_blocks >= 1)


def retraction_order(candidates: Iterable[Request], policy: Policy) -> list[Request]:
    """Who gives way first when a decode batch as a whole lacks blocks.

    Worst urgency first; within it who holds blocks without a seat, then the fewest
    output tokens, the longest prompt, the latest arrival.

    Source: SGLang's retraction by length, which urgency precedes here.
    """
    return sorted(
        candidates,
        key=lambda r: (
            -policy.urgency(r),
            _has_seat(r),
            r.num_output_tokens,
            -r.num_prompt_tokens,
            -r.arrival_seq,
        ),
    )


def _has_seat(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING


def _smallest_prefix(
    candidates: Iterable[Request], reclaim: Reclaim, covered: Callable[[Sequence[Request]], bool]
) -> list[Request] | None:
    """Take candidates in order until they cover the need; then spare those not needed, last first."""
    chosen: list[Request] = []
    for request in candidates:
        if covered(chosen):
            break
        chosen.append(request)
        reclaim.add(request.request_id)
    if not covered(chosen):
        return None
    for request in chosen[::-1]:
        reclaim.remove(request.request_id)
        if covered([r for r in chosen if r is not request]):
            chosen.remove(request)
        else:
            reclaim.add(request.request_id)
    return chosen
