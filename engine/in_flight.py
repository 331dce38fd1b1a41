"""The plans a pipelined runner has not answered, for the loop: the one it computes and the next.

Knows nothing of requests; what a result means is the loop's business.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from engine.runner.base import PipelinedRunner
from engine.scheduler.plan import Plan, StepResult


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A plan that was handed in.

    Attributes:
        plan: which.
        result: what comes of it.
        since: when it was handed in, in seconds of the engine's clock.
    """

    plan: Plan
    result: "asyncio.Future[StepResult]"
    since: float


class StepsInFlight:
    """Hands in plans, and gives them back with their results in the same order.

    Args:
        runner: computes them.
    """

    def __init__(self, runner: PipelinedRunner) -> None:
        self._runner = runner
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        """Plans that were handed in and not taken back."""
        return len(self._steps)

    def hand_in(self, plan: Plan, now: float) -> None:
        """Have a plan computed; what goes wrong with it, and be it at once, is its result."""
        try:
            result = self._runner.submit(plan)
        except Exception as error:  # such as a plan that can't be pickled
            result = asyncio.get_running_loop().create_future()
            result.set_exception(error)
        self._steps.append(StepInFlight(plan, result, now))

    def take_oldest(self) -> StepInFlight:
        """The step whose result is to be booked next."""
        return self._steps.popleft()

    async def give_up(self) -> None:
        """Have what is left computed for nobody, if at all.

        Cancellation: returns, and raises it, only after the runner is done with them.
        """
        results = [step.result for step in self._steps]
        self._steps.clear()
        for result in results:
            result.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not all(result.done() for result in results):
            try:
                await asyncio.wait(results)
            except asyncio.CancelledError as error:
                cancelled = error
        for result in results:
            if not result.cancelled():
                result.exception()  # marks it as seen
        if cancelled is not None:
            raise cancelled
