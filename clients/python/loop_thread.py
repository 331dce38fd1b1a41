"""An event loop on a thread, for callers that have none. Knows nothing of Vorrang.

All that use it at the same time share one loop, because grpc.aio is at its best with one loop in
a process. The thread begins with the first of them and ends with the last.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

#: Longest wait for a resource to be left, and for the thread to end; both take milliseconds.
_CLOSE_S_MAX = 10.0


class PortalClosed(Exception):
    """It is not open, or was closed while the work was done."""


class _LoopThread:
    """A thread that runs an event loop until it is told to stop."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar["_LoopThread | None"] = None

    def __init__(self) -> None:
        self._num_users = 0
        self.loop = asyncio.new_event_loop()
        # A daemon, so that a program that forgets to leave its blocks can still end.
        self._thread = threading.Thread(target=self._main, name="vorrang-client", daemon=True)

    @classmethod
    def acquire(cls) -> "_LoopThread":
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
                cls._shared._thread.start()
            cls._shared._num_users += 1
            return cls._shared

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            type(self)._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_S_MAX)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.get_loop().run_forever()


class Portal:
    """Runs coroutines for any number of threads while a resource is open.

    Args:
        resource: entered and left on the loop.
    """

    def __init__(self, resource: AbstractAsyncContextManager[Any]) -> None:
        self._resource = resource
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None
        self._waiting: set[concurrent.futures.Future[Any]] = set()

    def open(self) -> None:
        """Enter the resource; raises what entering raises."""
        thread = _LoopThread.acquire()
        try:
            _wait(asyncio.run_coroutine_threadsafe(self._resource.__aenter__(), thread.loop))
        except BaseException:
            thread.release()
            raise
        self._thread = thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` on the loop and wait for it.

        Ctrl-C, or any other exception that is raised in the waiting thread, cancels the work.

        Raises:
            PortalClosed: it is not open, or was closed meanwhile.
            BaseException: what the work raises.
        """
        with self._lock:
            if self._thread is None:
                work.close()
                raise PortalClosed
            # Under the lock: `close` cancels all that was begun before it.
            future = asyncio.run_coroutine_threadsafe(work, self._thread.loop)
            self._waiting.add(future)
        try:
            return _wait(future)
        except concurrent.futures.CancelledError:
            raise PortalClosed from None
        finally:
            with self._lock:
                self._waiting.discard(future)

    def close(self) -> None:
        """Cancel what is still waited for and leave the resource. Harmless when it is not open."""
        with self._lock:
            thread, self._thread = self._thread, None
            waiting = list(self._waiting)
        if thread is None:
            return
        for future in waiting:
            future.cancel()
        leaving = asyncio.run_coroutine_threadsafe(self._resource.__aexit__(None, None, None), thread.loop)
        try:
            leaving.result(_CLOSE_S_MAX)
        finally:
            thread.release()


def _wait(future: "concurrent.futures.Future[T]") -> T:
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise
    except BaseException:
        future.cancel()
        raise
