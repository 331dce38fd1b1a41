"""The process that computes: ``python -m engine.runner.worker FD PARENT_PID``.

Loads a model, then answers one plan at a time on its main thread; the next one may
wait in the socket meanwhile. A side thread
gives signs of life meanwhile, so that a long step can be told from a stopped
process. It decides nothing, ignores signals meant for the server, and ends when
the server does: the kernel kills it, and the socket's end tells it.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import structlog

from engine.runner.base import ModelInfo, StepModel
from engine.runner.channel import (
    BEAT,
    LOAD_FAILED,
    LOG,
    READY,
    RESULT,
    STEP_FAILED,
    BlockingChannel,
    pack_error,
)
from engine.runner.delta import PlanDecoder
from engine.scheduler.plan import Plan, StepResult

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the process that started this one."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the server drains and then ends this process
    _die_with(parent_pid)
    faulthandler.enable()
    channel = BlockingChannel(socket.socket(fileno=fd))
    _log_to(channel)
    try:
        _serve(channel)
    except OSError:  # nobody is left to listen
        _exit()


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
    threading.Thread(target=_beat, args=(channel, beat_s), name="beat", daemon=True).start()
    decoder = PlanDecoder()
    while (message := channel.receive()) is not None:
        plan = decoder.decode(message[1])
        channel.send(_outcome(model, plan, decoder))
    _exit()  # threads of libraries are not waited for


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
    except Exception as error:
        return STEP_FAILED, plan.step, pack_error(error)


def _packed(plan: Plan, result: StepResult) -> tuple[Any, ...]:
    """Sampled tokens in the order of the grants that sample, None for who failed."""
    sampled = [result.sampled.get(g.request_id) for g in plan.grants if g.output_index is not None]
    failures = {request_id: pack_error(error) for request_id, error in result.failures.items()}
    return RESULT, plan.step, sampled, failures


def _beat(channel: BlockingChannel, beat_s: float) -> None:
    try:
        while True:
            channel.send((BEAT,))
            time.sleep(beat_s)
    except OSError:
        _exit()


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        _exit()


def _log_to(channel: BlockingChannel) -> None:
    """Lines go to the server, which writes them among its own."""

    def send(_logger: Any, method: str, event: Any) -> NoReturn:
        values = {key: value if _is_plain(value) else repr(value) for key, value in event.items()}
        channel.send((LOG, method, values))
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.format_exc_info, send])


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _exit() -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    main()
