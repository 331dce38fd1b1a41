"""How a process that computes is started, shows that it lives, and ends: the server's child, and ranks."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import structlog

from engine.descriptors import RESERVE
from engine.failure import log_strays
from engine.runner.base import ModelBroken
from engine.runner.channel import BEAT, LOG, BlockingChannel

_PR_SET_PDEATHSIG = 1

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}

log = structlog.get_logger("vorrang.runner")


@dataclass(frozen=True, slots=True)
class Death:
    """Why a process is no more.

    Attributes:
        cause: in words.
        from_outside: it was killed or stopped, as far as one can tell.
    """

    cause: str
    from_outside: bool


def death_by(code: int) -> Death:
    """What an exit status tells."""
    if code >= 0:
        return Death(f"exited with status {code}", from_outside=False)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return Death(f"killed by {name}", from_outside=-code in _FROM_OUTSIDE)


def spawn(module: str, connection: socket.socket) -> "subprocess.Popen[bytes]":
    """Start ``module`` as a process, with its end of the socket and nothing else of ours open.

    Spawned, not forked: threads of gRPC live here. It gets a process group of its
    own, so that a Ctrl-C reaches the server alone, which then drains. The thread
    that calls must live as long as the process (``PR_SET_PDEATHSIG``).
    """
    fd = connection.fileno()
    command = [sys.executable, "-P", "-m", module, str(fd), str(os.getpid())]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(  # noqa: S603 - our own interpreter, our own module
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a library prints is no output of the server
        pass_fds=(fd,),
        process_group=0,
        env=os.environ | {"PYTHONPATH": path},
    )


def spawn_connected(module: str) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """Start ``module`` as a process; the descriptors kept back are free for it.

    Returns:
        The process, and our end of its socket.

    Raises:
        OSError: there is no more of something; nothing is left behind. See ``is_shortage``.
    """
    with RESERVE.lent():
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as on_failure, theirs:
            on_failure.callback(ours.close)
            process = spawn(module, theirs)
            on_failure.pop_all()
    return process, ours


def begin() -> BlockingChannel:
    """What a spawned process does first; its channel to who started it.

    It ignores signals meant for the server, which drains and then ends it, and
    ends when that process does. Log lines go through the channel.
    """
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    die_with(parent_pid)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # says where it is, and goes on
    channel = BlockingChannel(socket.socket(fileno=fd))
    _log_to(channel)
    return channel


def start_beating(channel: BlockingChannel, beat_s: float) -> None:
    """Give a sign of life every ``beat_s`` seconds from now on, on a thread of its own."""
    threading.Thread(target=_beat, args=(channel, beat_s), name="beat", daemon=True).start()


def end(status: int = 0) -> NoReturn:
    """End this process; threads of libraries are not waited for."""
    os._exit(status)


def end_broken(broken: ModelBroken) -> NoReturn:
    """End this process so that whoever started it sees whether something from outside was to blame."""
    log.critical("runner.broken", cause=str(broken), from_outside=broken.from_outside)
    if broken.from_outside:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    end(1)


def _beat(channel: BlockingChannel, beat_s: float) -> None:
    try:
        while True:
            channel.send((BEAT,))
            time.sleep(beat_s)
    except OSError:
        end()


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        end()


def _log_to(channel: BlockingChannel) -> None:
    """Lines go to the server, which writes them among its own."""

    def send(_logger: Any, method: str, event: Any) -> NoReturn:
        event.pop("exc_info", None)  # whoever logs a failure says it in words, by ``trace_of``
        values = {key: value if _is_plain(value) else repr(value) for key, value in event.items()}
        channel.send((LOG, method, values))
        raise structlog.DropEvent

    structlog.configure(processors=[send])
    log_strays(structlog.get_logger("vorrang.runner"))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
