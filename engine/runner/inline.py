"""A runner in this process: one dedicated thread computes, the event loop awaits."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.errors import Unimplemented
from engine.grammar import GrammarSpec
from engine.request import RequestId
from engine.runner.base import ModelInfo, PoolShape, StepModel
from engine.runner.delta import PlanDecoder, PlanDelta, PlanEncoder, run_without
from engine.runner.grammars.masks import Masks
from engine.scheduler.plan import Plan, StepResult


class InlineRunner:
    """Runs a ``StepModel`` on a thread of its own, off the event loop.

    Steps are computed one at a time, in the order of the calls, always by the
    same thread. A ``PipelinedRunner``: what is handed in by ``submit`` reaches the
    thread as differences, as it would another process, since the scheduler goes on
    writing into requests while they are computed. It launches nothing ahead, whatever
    the model can (``LaunchingModel``): a step begins when the one before is collected.

    Args:
        model: what computes.
    """

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._masks: Masks | None = getattr(model, "masks", None)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vorrang-step")
        self._encoder, self._decoder = PlanEncoder(), PlanDecoder()

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._model.info

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        return self._model.pool

    async def execute(self, plan: Plan) -> StepResult:
        """Compute every grant of ``plan`` off the event loop.

        Raises:
            RuntimeError: the runner is closed.
            Exception: whatever the model raised; the whole step failed.

        Cancellation: returns only after the computation in flight has ended,
        however often it is cancelled; the result is lost. A step that has not
        begun is computed nevertheless.
        """
        return await _outcome(
            asyncio.get_running_loop().run_in_executor(self._executor, self._model.run, plan)
        )

    def submit(self, plan: Plan) -> asyncio.Future[StepResult]:
        """Hand in a plan; see ``PipelinedRunner``.

        Raises:
            RuntimeError: the runner is closed.

        Cancellation of the future: as for ``execute``; at once while the event loop has
        not come round to it, and then ``close`` alone waits for the computation.
        """
        loop = asyncio.get_running_loop()
        delta = self._encoder.encode(plan)
        return loop.create_task(_outcome(loop.run_in_executor(self._executor, self._run, delta)))

    def _run(self, delta: PlanDelta) -> StepResult:
        """On the thread."""
        plan = self._decoder.decode(delta)
        result = run_without(plan, self._decoder.void, self._model.run)
        self._decoder.sampled(result.sampled)
        return result

    def watch_masks(self, ready: Callable[[Sequence[tuple[RequestId, int]]], None]) -> None:
        """See ``ConstrainingRunner``."""
        if self._masks is not None:
            self._masks.watch(on_loop(ready))

    async def prepare(self, grammar: GrammarSpec, level: int = 0) -> None:
        """See ``ConstrainingRunner``."""
        if self._masks is None:
            raise Unimplemented("grammar")
        await asyncio.wrap_future(self._masks.prepare(grammar, level))

    async def close(self) -> None:
        """Wait for the step in flight and end the thread. May be called twice.

        Cancellation: returns at once; the thread ends after the step in flight.
        """
        if self._masks is not None:
            await asyncio.to_thread(self._masks.close)
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)


def on_loop(
    ready: Callable[[Sequence[tuple[RequestId, int]]], None],
) -> Callable[[Sequence[tuple[RequestId, int]]], None]:
    """``ready`` for other threads: it is called on the event loop that runs now, while that lives."""
    loop = asyncio.get_running_loop()

    def tell(found: Sequence[tuple[RequestId, int]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ready, found)

    return tell


async def _outcome(future: asyncio.Future[StepResult]) -> StepResult:
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await _settle(future)
        raise


async def _settle(future: asyncio.Future[StepResult]) -> None:
    """Wait until ``future`` is done, through any number of cancellations, and drop what it brings."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # marks it as seen; the cancellation that is raised matters more
