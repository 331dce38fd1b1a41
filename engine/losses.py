"""What a dead runner, or one that raised, costs: all KV, computed again for everybody but the guilty."""

import secrets
from dataclasses import dataclass

import structlog

from engine.clock import Clock
from engine.delivery import Delivery, incident
from engine.errors import InternalError
from engine.events import Failed, Preempted
from engine.runner.base import RunnerLost
from engine.scheduler.commands import LoseKv
from engine.scheduler.plan import Plan

log = structlog.get_logger("vorrang.engine")


@dataclass(slots=True)
class _Resuming:
    """From the death of a runner to the end of the next step.

    Attributes:
        since: when it died.
        cause: of what, the last time.
        num_recomputed: requests that lost their KV.
    """

    since: float
    cause: str = ""
    num_recomputed: int = 0


class Losses:
    """Tells the scheduler of lost KV, and keeps the books of it.

    Args:
        clock: where time comes from.
        delivery: the requests alive.

    Attributes:
        num_losses: times the runner died and all KV with it.
        last_resume_s: seconds from the last of them to the end of the next step; 0 = none yet.
    """

    def __init__(self, clock: Clock, delivery: Delivery) -> None:
        self._clock = clock
        self._delivery = delivery
        self._resuming: _Resuming | None = None
        self.num_losses = 0
        self.last_resume_s = 0.0

    def runner_lost(self, lost: RunnerLost, plan: Plan | None) -> None:
        """All KV is gone, and every step in flight with it.

        Args:
            lost: how the runner died.
            plan: the step it was given, if it was given one.
        """
        now = self._clock.now()
        self.num_losses += 1
        suspects = tuple(grant.request_id for grant in plan.grants) if plan and lost.step_begun else ()
        error = InternalError(secrets.token_hex(8))
        events = self._delivery.obey(LoseKv(suspects, lost.from_outside, error), now)
        for event in events:
            if isinstance(event, Failed):
                log.error(
                    "request.killed_runner",
                    incident_id=error.incident_id,
                    request_id=event.request_id,
                    cause=lost.cause,
                )
        if self._resuming is None:
            self._resuming = _Resuming(now)
        self._resuming.cause = lost.cause
        self._resuming.num_recomputed += sum(isinstance(event, Preempted) for event in events)

    def step_failed(self, plan: Plan, error: Exception) -> None:
        """The model raised, and nobody knows what it has written: as after a death, but it can go on.

        A request that makes it raise again, alone, fails.
        """
        suspects = tuple(grant.request_id for grant in plan.grants)
        command = LoseKv(suspects, from_outside=False, error=incident("step.failed", error, with_text=True))
        self._delivery.obey(command, self._clock.now())

    def step_made(self, now: float) -> None:
        """A step was computed: whoever died before it is replaced."""
        resuming, self._resuming = self._resuming, None
        if resuming is None:
            return
        self.last_resume_s = now - resuming.since
        log.info(
            "runner.resumed",
            cause=resuming.cause,
            resume_s=round(self.last_resume_s, 3),
            num_recomputed=resuming.num_recomputed,
        )
