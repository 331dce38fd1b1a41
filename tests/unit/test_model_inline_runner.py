"""The inline runner: one thread, in order, and a cancellation that waits for the step in flight."""

import asyncio
import threading

import pytest

from engine.runner.base import ModelInfo, PoolShape
from engine.runner.inline import InlineRunner
from engine.scheduler.plan import Plan, StepResult

pytestmark = pytest.mark.asyncio


class GatedModel:
    """Computes when told to; notes which thread computes which step."""

    info = ModelInfo("gated", "None", 8, 16, frozenset())
    pool = PoolShape(4, 2)

    def __init__(self):
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.threads = []
        self.finished = []

    def run(self, plan):
        self.threads.append(threading.get_ident())
        self.begun.set()
        assert self.gate.wait(10)
        if plan.step < 0:
            raise ValueError("the step failed")
        self.finished.append(plan.step)
        return StepResult({"a": plan.step})


@pytest.fixture
def model():
    return GatedModel()


async def _begun(model):
    assert await asyncio.to_thread(model.begun.wait, 10)


async def test_steps_run_on_one_thread_off_the_loop_in_order(model):
    runner = InlineRunner(model)
    model.gate.set()

    results = await asyncio.gather(*(runner.execute(Plan(step, ())) for step in range(5)))

    assert [result.sampled["a"] for result in results] == [0, 1, 2, 3, 4]
    assert model.finished == [0, 1, 2, 3, 4]
    assert len(set(model.threads)) == 1
    assert threading.get_ident() not in model.threads
    assert (runner.info, runner.pool) == (model.info, model.pool)
    await runner.close()


async def test_the_loop_goes_on_while_a_step_computes(model):
    runner = InlineRunner(model)
    step = asyncio.create_task(runner.execute(Plan(1, ())))

    await _begun(model)
    assert not step.done()
    model.gate.set()

    assert (await step).sampled == {"a": 1}
    await runner.close()


async def test_what_the_model_raises_is_raised_and_the_next_step_runs(model):
    runner = InlineRunner(model)
    model.gate.set()

    with pytest.raises(ValueError, match="the step failed"):
        await runner.execute(Plan(-1, ()))
    assert (await runner.execute(Plan(2, ()))).sampled == {"a": 2}
    await runner.close()


@pytest.mark.parametrize("step_number", [1, -1])
async def test_a_cancelled_step_returns_after_the_computation_ended(model, step_number):
    runner = InlineRunner(model)
    step = asyncio.create_task(runner.execute(Plan(step_number, ())))
    await _begun(model)

    for _ in range(3):  # however impatient the caller is
        step.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not step.done()
    model.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await step

    assert model.finished == ([1] if step_number == 1 else [])
    assert (await runner.execute(Plan(2, ()))).sampled == {"a": 2}
    await runner.close()


async def test_close_waits_for_the_step_in_flight_ends_the_thread_and_may_be_repeated(model):
    runner = InlineRunner(model)
    step = asyncio.create_task(runner.execute(Plan(1, ())))
    await _begun(model)
    closing = asyncio.create_task(runner.close())
    await asyncio.sleep(0)
    assert not closing.done()

    model.gate.set()
    await closing
    await runner.close()

    assert (await step).sampled == {"a": 1}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vorrang-step")]
    with pytest.raises(RuntimeError):
        await runner.execute(Plan(2, ()))
