"""The process that computes: ``python -m engine.runner.worker FD PARENT_PID``.

Loads a model, then answers one plan at a time on its main thread; the next one may
wait in the socket meanwhile. A side thread
gives signs of life meanwhile, so that a long step can be told from a stopped
process. It decides nothing, ignores signals meant for the server, and ends when
the server does: the kernel kills it, and the socket's end tells it.
"""

import ctypes
from typing import Any

from engine.runner import process_life
from engine.runner.base import ModelBroken, ModelInfo, StepModel
from engine.runner.channel import (
    LOAD_FAILED,
    READY,
    RESULT,
    STEP_FAILED,
    BlockingChannel,
    pack_error,
)
from engine.runner.delta import PlanDecoder
from engine.scheduler.plan import Plan, StepResult


def main() -> None:
    """Serve the process that started this one."""
    channel = process_life.begin()
    try:
        _serve(channel)
    except OSError:  # nobody is left to listen
        process_life.end()
    except ModelBroken as broken:
        process_life.end_broken(broken)


def _serve(channel: BlockingChannel) -> None:
    try:
        message = channel.receive()  # may fail to import what it is to load
        if message is None:
            return
        _, source, pool, beat_s = message
        model: StepModel = source.load(pool)
        info: ModelInfo = model.info
    except Exception as error:
        channel.send((LOAD_FAILED, pack_error(error)))
        return
    _give_back_memory()
    channel.send((READY, info, model.pool))
    process_life.start_beating(channel, beat_s)
    decoder = PlanDecoder()
    while (message := channel.receive()) is not None:
        plan = decoder.decode(message[1])
        channel.send(_outcome(model, plan, decoder))
    process_life.end()


def _give_back_memory() -> None:
    """Return to the system what loading needed for a while; only glibc has to be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _outcome(model: StepModel, plan: Plan, decoder: PlanDecoder) -> tuple[Any, ...]:
    try:
        result = model.run(plan)
        decoder.sampled(result.sampled)
        return _packed(plan, result)
    except ModelBroken:
        raise
    except Exception as error:
        return STEP_FAILED, plan.step, pack_error(error)


def _packed(plan: Plan, result: StepResult) -> tuple[Any, ...]:
    """Sampled tokens in the order of the grants that sample, None for who failed."""
    sampled = [result.sampled.get(g.request_id) for g in plan.grants if g.output_index is not None]
    failures = {request_id: pack_error(error) for request_id, error in result.failures.items()}
    return RESULT, plan.step, sampled, failures


if __name__ == "__main__":
    main()
