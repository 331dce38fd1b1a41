"""``vorrang serve``: one process, one event loop, one server."""

import asyncio
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import structlog

from engine import descriptors
from engine.errors import VorrangError
from engine.failure import on_loop_failure
from server import event_loop, standard_files
from server import log as logs
from server.app import END_S_MAX, App, EngineDied, Ready
from server.load import load
from server.settings import Settings

#: Exit status when the engine died.
EXIT_ENGINE_DIED = 1

log = structlog.get_logger("vorrang.server")


def serve(settings: Settings, on_failure: Callable[[str], NoReturn]) -> None:
    """Serve until SIGTERM, SIGINT, SIGHUP or SIGQUIT; the second one means now.

    Args:
        settings: all of them.
        on_failure: is told of a known failure, in words; ends the process.
    """
    descriptors.raise_limit()
    descriptors.RESERVE.take()
    lines = logs.set_up(settings.log.level, settings.log.format)
    failure = ""
    try:
        with asyncio.Runner(loop_factory=event_loop.factory(settings.server.event_loop)) as runner:
            runner.run(_serve(settings))
    except EngineDied:
        lines.write("vorrang: the engine died; the log says why\n")
        sys.exit(EXIT_ENGINE_DIED)
    except VorrangError as error:
        failure = str(error)
    finally:
        lines.close()
        descriptors.RESERVE.give_up()
    if failure:
        on_failure(failure)


async def _serve(settings: Settings) -> None:
    app = App(settings, functools.partial(load, settings))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_loop_failure)

    is_draining = False

    def draining(grace_s: float) -> None:
        nonlocal is_draining
        is_draining = True
        # A step that never ends can't be interrupted in this process: then the process itself must end.
        backstop = threading.Timer(grace_s + 4 * END_S_MAX, os._exit, (EXIT_ENGINE_DIED,))
        backstop.daemon = True
        backstop.start()

    app.on_drain = draining
    numbers = _signals()
    for number in numbers:
        loop.add_signal_handler(number, app.stop)
    try:
        await app.run(_say_ready)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            if is_draining:  # what is left takes a moment, and must not end as killed
                signal.signal(number, signal.SIG_IGN)
    log.info("server.stopped")


def _signals() -> list[signal.Signals]:
    """Those that drain: told to end, or losing the terminal, unless that is ignored already (``nohup``)."""
    from_terminal = (signal.SIGHUP, signal.SIGQUIT)
    heard = [number for number in from_terminal if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGTERM, signal.SIGINT, *heard]


def _say_ready(ready: Ready) -> None:
    standard_files.say(ready)
