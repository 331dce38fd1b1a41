"""File descriptors: how many this process may have, a few kept back, and what it means to have no more.

A server that has none left must still be able to put another runner in the place of a dead one.
"""

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator

#: What ``raise_limit`` raises the limit to, where the system lets it.
LIMIT_MAX = 65536
#: Descriptors kept back: a socket pair, the three that starting a process takes, and as many again.
NUM_KEPT = 16

#: Errors that say nothing of what was tried, but that the machine or this process has no more of something.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})


def is_shortage(error: BaseException) -> bool:
    """Whether what failed may succeed a little later, when somebody has given something back."""
    return isinstance(error, OSError) and error.errno in SHORTAGES


def limit() -> int:
    """Descriptors this process may have open; ``LIMIT_MAX`` where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMIT_MAX if soft == resource.RLIM_INFINITY else soft


def raise_limit(most: int = LIMIT_MAX) -> int:
    """Raise the soft limit to the hard one, or to ``most``; never lowers it.

    Returns:
        The limit that holds now; processes started from now on inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have a bound they do not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def num_open() -> int:
    """Descriptors that are open, as far as the system tells; 0 where it does not."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder)) - 1
    return 0


class Reserve:
    """Descriptors held on nothing, so that there are some when a process must be started. For any thread.

    Args:
        size: how many; fewer are held while there are fewer to be had.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []
        self._lock = threading.Lock()
        self._is_open = False

    @property
    def num_held(self) -> int:
        """Descriptors held now."""
        return len(self._held)

    def take(self) -> None:
        """Hold them from now on."""
        with self._lock:
            self._is_open = True
            self._fill()

    def give_up(self) -> None:
        """Hold none any more."""
        with self._lock:
            self._is_open = False
            self._empty()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free meanwhile. What is opened in it and stays open comes from the others afterwards."""
        with self._lock:
            self._empty()
            try:
                yield
            finally:
                if self._is_open:
                    self._fill()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _empty(self) -> None:
        while self._held:
            os.close(self._held.pop())


#: Of this process; it holds none until a server takes them.
RESERVE = Reserve(NUM_KEPT)
