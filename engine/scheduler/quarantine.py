"""Who may have killed the runner, and how that is found out.

Whoever was computed in a fatal step is a suspect. One whose death toll weighs
enough is quarantined: it is computed alone, until it has got past all it knew
when the runner died, and then it is innocent. So the guilty one is alone when it
kills again, and it alone fails:

```
cause                       weight    quarantined from 2, guilty from 4 when alone
died by itself, or raised   2         in company, then alone: guilty at the second death
killed or stopped           1         guilty at the fourth death in a row, the last two alone
```

A death that came from outside says little about the requests, so one of those
quarantines nobody: all are computed again together.
"""

from dataclasses import dataclass
from itertools import takewhile

from engine.request import PreemptReason, Request, RequestId, RequestStatus
from engine.scheduler.admission import Admission
from engine.scheduler.draft import StepDraft
from engine.scheduler.plan import Plan
from engine.scheduler.state import SchedulerState

_WEIGHT_BY_ITSELF, _WEIGHT_FROM_OUTSIDE = 2, 1
_QUARANTINED_FROM, _GUILTY_FROM = 2, 4


@dataclass(slots=True)
class _Suspect:
    """What weighs against a request, and the tokens it must have computed to be innocent."""

    weight: int
    num_tokens: int


class Quarantine:
    """Suspects of the runner's deaths. One of them at a time is computed, while any is quarantined.

    Quarantined requests take their turns in policy order. Strictly more urgent ones
    that are no suspects are computed before them, in steps of their own, until a
    quarantined one is starved. Everybody else waits: the quarantined had seats and
    blocks when the runner died, and there are at most as many as one step had requests.

    Invariant: every suspect is innocent, guilty or gone after one pass over its
    tokens, so a quarantine ends.
    """

    def __init__(self) -> None:
        self._suspects: dict[RequestId, _Suspect] = {}

    def __bool__(self) -> bool:
        """Whether there are suspects."""
        return bool(self._suspects)

    def holds(self, request_id: RequestId) -> bool:
        """Whether a request is computed alone."""
        suspect = self._suspects.get(request_id)
        return suspect is not None and suspect.weight >= _QUARANTINED_FROM

    def blame(self, requests: list[Request], *, alone: bool, from_outside: bool) -> Request | None:
        """The runner died while it computed ``requests``, those that are still alive.

        Args:
            requests: the suspects.
            alone: whether the step held nobody else.
            from_outside: whether the runner was killed or stopped.

        Returns:
            The request that is guilty.
        """
        for request in requests:
            suspect = self._suspects.setdefault(request.request_id, _Suspect(0, 0))
            suspect.weight += _WEIGHT_FROM_OUTSIDE if from_outside else _WEIGHT_BY_ITSELF
            suspect.num_tokens = len(request.token_ids)  # one in flight is lost
            if alone and suspect.weight >= _GUILTY_FROM:
                return request
        return None

    def release(self, plan: Plan, state: SchedulerState) -> None:
        """A step was computed: who got past all it knew when the runner died is innocent."""
        for grant in plan.grants:
            suspect = self._suspects.get(grant.request_id)
            if suspect is None:
                continue
            request = state.requests.get(grant.request_id)
            if request is None or request.num_committed_tokens >= suspect.num_tokens:
                del self._suspects[grant.request_id]

    def fill(self, state: SchedulerState, draft: StepDraft) -> bool:
        """Grant a step to the next quarantined request, if there is one, or to more urgent ones.

        Returns:
            Whether there was one; then the step is complete.
        """
        state.inherited.clear()
        state.starvation.update(draft.now)
        request = self._next(state)
        if request is None:
            return False
        is_static = state.config.discipline == "static"
        admission = Admission(state, draft, for_good=is_static)
        if not is_static and not request.is_starved:
            self._serve_more_urgent(request, state, draft, admission)
        if draft.is_empty:
            self._serve(request, state, draft, admission)
        return True

    def _serve(self, request: Request, state: SchedulerState, draft: StepDraft, admission: Admission) -> None:
        while request.status is not RequestStatus.RUNNING and admission.try_admit(request, from_reserve=True):
            self._make_room(request, state, admission)
        self._grow(request, state, admission)
        draft.grant_chunk(request, state.config.max_chunk_tokens)

    def _serve_more_urgent(
        self, than: Request, state: SchedulerState, draft: StepDraft, admission: Admission
    ) -> None:
        """Grant tokens to requests that are more urgent than the next suspect, and admit such."""

        def is_more_urgent(request: Request) -> bool:
            return state.policy.urgency(request) < state.policy.urgency(than)

        for request in list(takewhile(is_more_urgent, state.running)):
            if request.status is not RequestStatus.RUNNING or request.is_ending:
                continue  # it gave way to one that grew, or needs nothing more
            self._grow(request, state, admission)
            draft.grant_chunk(request, state.config.max_chunk_tokens)
        for request in list(takewhile(is_more_urgent, state.waiting)):
            if admission.try_admit(request, from_reserve=True):  # and without waiting for a prefix
                return
            draft.grant_chunk(request, state.config.max_chunk_tokens)

    def _grow(self, request: Request, state: SchedulerState, admission: Admission) -> None:
        """See to it that a running request has a block for its next token."""
        if request.request_id in state.growing:
            while not state.blocks.grow(request, request.num_tokens):
                self._make_room(request, state, admission)
            del state.growing[request.request_id]

    @staticmethod
    def _make_room(request: Request, state: SchedulerState, admission: Admission) -> None:
        """Take seat and blocks from another one: idle holders first, then the least urgent that runs.

        With nobody beside it every request fits, so there is another one.
        """
        holders = [*state.running, *state.idle_holders.values()]
        admission.preempt([r for r in holders if r is not request][-1], PreemptReason.RUNNER, None)

    def _next(self, state: SchedulerState) -> Request | None:
        """The most urgent quarantined request that can be computed; forgets who is gone."""
        for request_id in self._suspects.keys() - state.requests.keys():
            del self._suspects[request_id]
        held = [state.requests[request_id] for request_id in self._suspects if self.holds(request_id)]
        can_go_on = [r for r in held if not (r.is_ending or r.awaits_mask)]
        waiting = [r for r in can_go_on if r.status is not RequestStatus.PARKED]
        return min(waiting, key=state.policy.key, default=None)
