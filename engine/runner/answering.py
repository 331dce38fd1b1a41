"""Plans in, results out, in their order: what a process that computes does once it has a model.

A model that computes while its thread goes on (``LaunchingModel``) is given the next
plan before the answer to the one it computes, so that the device finds its next step
when it is done with this one. Knows no device; what it reads from and writes to is a
few lines of protocol.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine.request import RequestId
from engine.runner.base import LaunchingModel, ModelBroken, StepModel, Ticket
from engine.runner.channel import RESULT, STEP_FAILED, Message, pack_error
from engine.runner.delta import PlanDecoder, PlanDelta, run_without, without
from engine.scheduler.plan import Plan, StepResult

#: While one plan is computed and the next is due, seconds between two looks for either.
LOOK_S = 0.0001


class PlanChannel(Protocol):
    """Where plans come from and results go: see ``BlockingChannel``."""

    def receive(self) -> Message | None:
        """The next message; None when the other end is gone."""
        ...

    def has_message(self) -> bool:
        """Whether ``receive`` has something to read, be it the end."""
        ...

    def send(self, message: Message) -> None:
        """Send a message."""
        ...


def answer_plans(model: StepModel, channel: PlanChannel) -> None:
    """Answer plans until the other end is gone.

    Raises:
        OSError: the other end went while it was answered.
        ModelBroken: nothing can be computed any more; the plans that were computed before are answered.
    """
    if isinstance(model, LaunchingModel):
        _Launching(model, channel).answer_plans()
        return
    decoder = PlanDecoder()
    while (message := channel.receive()) is not None:
        plan = decoder.decode(message[1])
        channel.send(_outcome(plan, lambda: run_without(plan, decoder.void, model.run), decoder))  # noqa: B023


@dataclass(frozen=True, slots=True)
class _Begun:
    """A plan that is not answered.

    Attributes:
        plan: which.
        ticket: what it was launched as; None = not at all.
        error: why not; None = it grants nothing.
        void: requests whose grants were left out.
    """

    plan: Plan
    ticket: Ticket | None
    error: Exception | None
    void: frozenset[RequestId] = frozenset()


class _Launching:
    """At most two plans are begun and not answered: the one that is computed and the next.

    A sender that waits for every answer never has a plan here while one is unanswered. So
    until that has been seen once, this one waits for results alone; afterwards it waits for
    whichever comes first, the result or the next plan.
    """

    def __init__(
        self,
        model: LaunchingModel[Ticket],
        channel: PlanChannel,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model = model
        self._channel = channel
        self._sleep = sleep
        self._decoder = PlanDecoder()
        self._plans_come_early = False

    def answer_plans(self) -> None:
        """See the function."""
        while (message := self._channel.receive()) is not None:
            begun: _Begun | None = self._begin(message[1], is_ahead=False)
            while begun is not None:
                following: _Begun | None = None
                if self._is_next_here_before(begun):
                    message = self._channel.receive()
                    if message is None:
                        return
                    following = self._begin(message[1], is_ahead=True)
                self._answer(begun)
                begun = following

    def _is_next_here_before(self, begun: _Begun) -> bool:
        """Whether the next plan is here while a plan is still being computed."""
        while begun.ticket is not None and not begun.ticket.is_computed:
            if self._channel.has_message():
                self._plans_come_early = True
                return True
            if not self._plans_come_early:
                return False
            self._sleep(LOOK_S)
        return False

    def _begin(self, delta: PlanDelta, *, is_ahead: bool) -> _Begun:
        """Launch a plan. What goes wrong is its outcome, which is told after that of the plan before."""
        plan = self._decoder.decode(delta, is_ahead=is_ahead)
        void = self._decoder.void
        left = without(plan, void)
        if not left.grants:
            return _Begun(plan, None, None, void)
        try:
            return _Begun(plan, self._model.launch(left), None, void)
        except Exception as error:
            return _Begun(plan, None, error)

    def _answer(self, begun: _Begun) -> None:
        answer = _outcome(begun.plan, lambda: self._result(begun), self._decoder)
        self._plans_come_early = self._plans_come_early or self._channel.has_message()
        self._channel.send(answer)

    def _result(self, begun: _Begun) -> StepResult:
        if begun.error is not None:
            raise begun.error
        result = StepResult({}) if begun.ticket is None else self._model.collect(begun.ticket)
        return replace(result, sat_out=result.sat_out | begun.void) if begun.void else result


def _outcome(plan: Plan, compute: Callable[[], StepResult], decoder: PlanDecoder) -> Message:
    """The answer to a plan; the decoder is told what it sampled."""
    try:
        result = compute()
    except ModelBroken:
        raise
    except Exception as error:
        decoder.sampled({})
        return STEP_FAILED, plan.step, pack_error(error)
    decoder.sampled(result.sampled)
    return _packed(plan, result)


def _packed(plan: Plan, result: StepResult) -> Message:
    """Sampled tokens in the order of the grants that sample, None for failures; then what drafts brought."""
    sampled = [result.sampled.get(g.request_id) for g in plan.grants if g.output_index is not None]
    failures = {request_id: pack_error(error) for request_id, error in result.failures.items()}
    more = (
        result.logprobs, result.prompt_logprobs, result.complete, result.after_drafts,
        result.sat_out, result.awaiting,
    )  # fmt: skip
    if any(more):
        return RESULT, plan.step, sampled, failures, *more
    return RESULT, plan.step, sampled, failures
