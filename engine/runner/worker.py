"""The process that computes: ``python -m engine.runner.worker FD PARENT_PID``.

Loads a model, then answers plans in their order on its main thread; the next one may
wait in the socket meanwhile, or be launched (``engine.runner.answering``). A side
thread gives signs of life, so that a long step can be told from a stopped process; others
compile grammars (``engine.runner.grammars.preparing``).
It decides nothing, ignores signals meant for the server, and ends when the server
does: the kernel kills it, and the socket's end tells it.
"""

import ctypes

from engine.runner import answering, process_life
from engine.runner.base import ModelBroken, ModelInfo, StepModel
from engine.runner.channel import LOAD_FAILED, READY, BlockingChannel, pack_error
from engine.runner.grammars.preparing import PlansOnly


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
    answering.answer_plans(model, PlansOnly(channel, getattr(model, "masks", None)))
    process_life.end()


def _give_back_memory() -> None:
    """Return to the system what loading needed for a while; only glibc has to be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


if __name__ == "__main__":
    main()
