"""What may be decided while a step is still being computed: at most one plan ahead.

``plan`` may be called once more before the last plan is committed. It then looks
ahead: every request stands where the step in flight (n) will leave it, its tokens
computed and its new token counted, though nobody knows the id yet, and the next
step (n + 1) is planned from there. Commits come in the order of the plans.

**What is known** of a step in flight is which tokens it computes and how long every
output is afterwards; so whoever reaches its longest length in it (``LENGTH``,
``CAPACITY``) is *ending*: it keeps seat and blocks until the commit and is granted
nothing more. **What is not known** is the id, and with it an end by an end token, a
stop token or a stop string, and a failed row. Such a request has ended when step
n + 1 is committed, and what that step computed for it is dropped there.

**One rule for results**: what a step in flight samples for a request that is alive at
the commit is kept and delivered, whether it still has its seat or was preempted or
parked meanwhile; of one that has ended it is dropped. So a token is delivered once or
never, and whoever resumes computes it like the others. When the runner is lost
(``LoseKv``), nothing of the steps in flight has happened.

**Why blocks need no other fence.** The runner computes steps in their order, and a
grant writes only positions from its ``start`` on.

1. A block that its owner loses after plan n may be in plan n + 1's tables: the new
   owner writes each position in n + 1, or later, before it reads it there, which is
   after whatever step n wrote.
2. A vain grant of n + 1 (its request ended in the commit of n) writes into blocks that
   are free from then on, so given to others in plan n + 2 at the earliest.
3. Who finds a block in the cache reads what others wrote. A block is findable only once
   the step that filled it is committed (``Request.num_committed_tokens``): had it been
   before, a failed step would leave garbage under a good hash. No step in flight writes
   into a findable block: what it writes lies behind what was committed.

**Who sits out.** A row whose mask is late samples nothing (``StepResult.sat_out``), though a
plan may have been made that computes the token it was to sample. Its commit takes the
look ahead back: the request misses its last known token again, and what the plan made
ahead grants it is *void*: not looked ahead to, not booked, sampled by nobody.

So who is preempted while a step computes its tokens finds less in the cache when it
resumes, by that step's tokens.

It does not know what a runner is, nor why it should be kept busy.
"""

from typing import cast

from engine.request import Request, RequestStatus
from engine.scheduler.plan import Grant, Plan
from engine.scheduler.state import SchedulerState


class UncommittedPlans:
    """The plans that are not committed yet: the last one, and the one before it when there was a look ahead.

    Invariant (``check_integrity``): a request counts tokens or an output in flight
    exactly when the earlier one grants them.
    """

    def __init__(self) -> None:
        self._last: Plan | None = None
        self._before: Plan | None = None
        self._void: set[Request] = set()  # of the last plan
        self._void_before: set[Request] = set()

    def look_ahead(self, state: SchedulerState) -> None:
        """Before a plan: go on from where the one that is being computed will leave its requests."""
        if self._last is None:
            return
        assert self._before is None or not _holders(self._before), "more than one step is in flight"
        if state.config.speculation_tokens:
            alive = (_request(grant) for grant in self._last.grants)
            drafted = any(r.draft_token_ids for r in alive if r.status is not RequestStatus.FINISHED)
            assert not drafted, "how far drafts get is not known"
        grants = cast("tuple[tuple[Request, int, int, object, int | None], ...]", self._last.grants)
        state.look_ahead([g for g in grants if g[0] not in self._void] if self._void else grants)
        self._before, self._last = self._last, None
        self._void_before, self._void = self._void, set()

    def planned(self, plan: Plan) -> None:
        """A plan was made."""
        self._last = plan

    def land(self, plan: Plan) -> tuple[bool, set[Request]]:
        """A plan is about to be committed.

        Returns:
            Whether its outcome was looked ahead to, and whose grants are void.
        """
        if plan is self._before:
            self._before = None
            void, self._void_before = self._void_before, set()
            return True, void
        assert plan is self._last, "a plan was committed twice, or out of turn"
        assert self._before is None or not _holders(self._before), "an earlier plan comes first"
        self._last = self._before = None
        void, self._void, self._void_before = self._void, set(), set()
        return False, void

    def void(self, request: Request) -> None:
        """A request has sat out the plan that was just committed: what the last one grants it is void."""
        if self._last is not None and any(grant.request is request for grant in self._last.grants):
            self._void.add(request)

    def lose(self) -> None:
        """None of them will ever have been computed. Whoever held blocks has lost them before."""
        for request in _holders(self._before) if self._before is not None else ():
            assert request.num_tokens_in_flight == 0
            request.num_outputs_in_flight = 0
        for grant in self._last.grants if self._last is not None else ():
            _request(grant).draft_token_ids = ()
        self._last = self._before = None
        self._void, self._void_before = set(), set()

    def check_integrity(self, state: SchedulerState) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        holders = _holders(self._before) if self._before is not None else []
        for request in state.requests.values():
            in_flight = request.num_tokens_in_flight + request.num_outputs_in_flight
            assert (in_flight > 0) == (request in holders), "something is in flight that no plan grants"
        if self._before is not None:
            for grant in self._before.grants:
                request = _request(grant)
                if request.status is not RequestStatus.FINISHED and request not in self._void_before:
                    assert request.num_outputs_in_flight == (grant.output_index is not None)
                    holds = grant.block_table is request.block_table
                    assert request.num_tokens_in_flight == (grant.num_tokens if holds else 0)


def _request(grant: Grant) -> Request:
    request = grant.request
    assert isinstance(request, Request)
    return request


def _holders(plan: Plan) -> list[Request]:
    """Requests that are alive and have something of this plan in flight."""
    requests = map(_request, plan.grants)
    return [
        request
        for request in requests
        if request.status is not RequestStatus.FINISHED
        and (request.num_outputs_in_flight or request.num_tokens_in_flight)
    ]
