"""The process that has the grammar library: ``python -m engine.runner.grammars.nursery FD PARENT_PID``.

It loads the library and the tokenizer once, and then forks a process for each grammar, which is
compiled and followed in there. So a grammar can be stopped at any point, and what it has taken is
given back; a fork is made in milliseconds, since nothing is loaded again. It has no threads when it
forks, nor torch: of that the library uses nothing here (``engine.runner.grammars.library``).

A grammar's process has bounds that the kernel keeps: ``RLIMIT_AS`` for memory, and an interval timer
that counts its time on a processor alone (``ITIMER_PROF``), and ends it.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy comes: threads would not survive a fork

import contextlib
import errno
import gc
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from engine.grammar import GrammarSpec
from engine.runner import process_life
from engine.runner.channel import BlockingChannel, pack_error
from engine.runner.grammars.compiled import Grammar, GrammarCompiler
from engine.runner.grammars.following import Fill, Outputs
from engine.runner.grammars.limits import GrammarLimits

#: To the nursery: what is done to the grammar of a number. A fork comes with the grammar's socket.
FORK, KILL, STOP, CONTINUE, DEMOTE, GIVE_WAY = range(6)
ORDER = struct.Struct("<BQ")
#: From the nursery.
LOADED, FORKED, EXITED, UNFORKED = "loaded", "forked", "exited", "unforked"
#: From a grammar's process.
COMPILED, FILLED = "compiled", "filled"
#: What is dear gives way to all else.
NICEST = 19


def main() -> None:
    """Serve the process that started this one."""
    channel = process_life.begin()
    with contextlib.suppress(OSError):  # nobody is left to listen
        message = channel.receive_alone()  # orders may have come already
        if message is not None:
            _, make_compiler, vocab_size, limits = message
            try:
                compiler = make_compiler()
            except BaseException as error:
                channel.send((LOADED, pack_error(error)))
                process_life.end(1)
            channel.send((LOADED, None))
            _Nursery(channel, compiler, vocab_size, limits).serve()
    process_life.end()


class _Nursery:
    """Forks, signals and reaps."""

    def __init__(
        self, channel: BlockingChannel, compiler: GrammarCompiler, vocab_size: int, limits: GrammarLimits
    ) -> None:
        self._channel = channel
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._limits = limits
        self._pids: dict[int, int] = {}
        self._socket = channel.connection
        self._wake, theirs = socket.socketpair()
        self._wake.setblocking(False)
        theirs.setblocking(False)
        self._theirs = theirs
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()  # pages that nobody writes are shared with all that are forked

    def serve(self) -> None:
        while True:
            readable, _, _ = select.select([self._socket, self._wake], [], [])
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._reap()
            if self._socket in readable and not self._obey():
                return

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._socket, ORDER.size, 1)
        while data and len(data) < ORDER.size:
            data += self._socket.recv(ORDER.size - len(data))
        if not data:
            return False
        order, number = ORDER.unpack(data)
        if order == FORK:
            if descriptors:
                self._fork(number, descriptors[0])
            else:  # the system drops those that this process has no room for
                self._channel.send((UNFORKED, number, os.strerror(errno.EMFILE)))
        elif (pid := self._pids.get(number)) is not None:  # not reaped, so it is still that process
            _signal(pid, order)
        return True

    def _fork(self, number: int, descriptor: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            self._channel.send((UNFORKED, number, str(error)))
            return
        if not pid:
            try:
                self._begin_child()
                mine = socket.socket(fileno=descriptor)
                _serve_grammar(mine, self._compiler, self._vocab_size, self._limits)
            finally:
                os._exit(0)
        os.close(descriptor)
        self._pids[number] = pid
        self._channel.send((FORKED, number, pid))

    def _begin_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process_life.die_with(os.getppid())
        for each in (self._wake, self._theirs, self._socket):
            each.close()

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                self._channel.send((EXITED, number, os.waitstatus_to_exitcode(status), ""))


def _signal(pid: int, order: int) -> None:
    if order == KILL:
        os.kill(pid, signal.SIGKILL)
    elif order == STOP:
        os.kill(pid, signal.SIGSTOP)
    elif order == CONTINUE:
        os.kill(pid, signal.SIGCONT)
    elif order == GIVE_WAY:
        os.setpriority(os.PRIO_PROCESS, pid, NICEST)
    elif sys.platform == "linux":  # where each thread has a priority: the one that compiles, and no other
        for thread in os.listdir(f"/proc/{pid}/task"):
            if int(thread) != pid:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), NICEST)


def _serve_grammar(
    connection: socket.socket, compiler: GrammarCompiler, vocab_size: int, limits: GrammarLimits
) -> None:
    """What a grammar's process does."""
    channel = BlockingChannel(connection)
    message = channel.receive()
    if message is None:
        return
    spec: GrammarSpec = message[0]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(limits.bytes_max)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.compile_s_max)
    found = _on_a_thread(lambda: compiler.compile(spec))
    signal.setitimer(signal.ITIMER_PROF, 0)
    if isinstance(found, BaseException):
        channel.send((COMPILED, pack_error(found)))
        return
    channel.send((COMPILED, None))
    outputs = Outputs(found, vocab_size)
    while (message := channel.receive()) is not None:
        asked = message[0]
        if isinstance(asked, Fill):
            signal.setitimer(signal.ITIMER_PROF, asked.budget_s)
            answer = outputs.answer(asked)
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.send((FILLED, answer))
        else:
            outputs.drop(asked)


def _on_a_thread(work: Callable[[], Grammar]) -> Grammar | BaseException:
    """What comes of some work, or what it raised. Its thread can be given another priority."""
    found: list[Grammar | BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="compile")
    thread.start()
    thread.join()
    return found[0]


def _limit_memory(num_bytes: int) -> None:
    """Bound what this process may map beyond what it has; where the system tells that."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
