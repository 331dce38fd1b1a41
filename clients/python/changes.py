"""Changes of priority that wait for the server's answer; it answers those of one request in order."""

import asyncio
from collections import Counter, deque
from collections.abc import Container
from dataclasses import dataclass, field

from clients.python import frames
from clients.python.errors import VorrangError
from clients.python.events import PriorityChanged
from clients.python.request import PriorityLike
from vorrang.v1 import generation_pb2 as pb

_LEVELS = {"interactive": -10, "standard": 0, "batch": 10}


@dataclass(slots=True)
class _Change:
    asked: PriorityLike
    frame: pb.SessionRequest
    answer: asyncio.Future[PriorityChanged] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    was_repeated: bool = False
    rejection: VorrangError | None = None

    def may_become(self, event: PriorityChanged) -> bool:
        """Whether the event can be the answer to it."""
        try:
            level = int(self.asked)
        except ValueError:
            level = _LEVELS.get(str(self.asked), event.level)
        return event.capped or event.level == level


class PriorityChanges:
    """The changes under way in one session. For one event loop.

    A change that was lost with its stream is said again on the next one, for nobody can know whether the
    server had heard it. So a request may be answered once more than was asked; an answer that can't belong
    to the oldest change is passed over then.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Change]] = {}
        self._num_strays: Counter[str] = Counter()

    def add(
        self, request_id: str, priority: PriorityLike
    ) -> tuple[pb.SessionRequest, asyncio.Future[PriorityChanged]]:
        """A new change: its frame, to be sent, and its answer, to be waited for and cancelled after that."""
        change = _Change(priority, frames.reprioritize_frame(request_id, priority))
        self._waiting.setdefault(request_id, deque()).append(change)
        return change.frame, change.answer

    def withdraw(self, request_id: str, answer: asyncio.Future[PriorityChanged]) -> None:
        """The change of that answer was not sent, and won't be."""
        kept = deque(c for c in self._waiting.get(request_id, ()) if c.answer is not answer)
        if kept:
            self._waiting[request_id] = kept
        else:
            self._waiting.pop(request_id, None)

    def answered(self, request_id: str, event: PriorityChanged) -> None:
        """The priority has changed; nobody may have asked for it here, for operators can do so, too."""
        waiting = self._waiting.get(request_id)
        if self._num_strays[request_id] and (not waiting or not waiting[0].may_become(event)):
            self._num_strays[request_id] -= 1
        elif (change := self._next(request_id)) is not None and not change.answer.done():
            change.answer.set_result(event)

    def rejected(self, request_id: str, error: VorrangError, *, is_alive: bool) -> None:
        """The server did not obey.

        Args:
            request_id: whose change.
            error: why.
            is_alive: whether the request's end is still to come; then the answer to what was said before
                the loss may come before it.
        """
        waiting = self._waiting.get(request_id)
        if waiting and waiting[0].was_repeated and is_alive and error.reason == "UNKNOWN_REQUEST":
            waiting[0].rejection = error
        elif (change := self._next(request_id)) is not None and not change.answer.done():
            change.answer.set_exception(error)

    def ended(self, request_id: str) -> None:
        """The request has ended: rejections that might have been no more than late are true."""
        for change in list(self._waiting.get(request_id, ())):
            if change.rejection is not None:
                self._next(request_id)
                if not change.answer.done():
                    change.answer.set_exception(change.rejection)
        del self._num_strays[request_id]

    def repeat(self, alive: Container[str]) -> list[pb.SessionRequest]:
        """What has to be said on a new stream; ``alive`` are the requests that have not ended."""
        again: list[pb.SessionRequest] = []
        for request_id, waiting in list(self._waiting.items()):
            if request_id in alive:
                self._num_strays[request_id] += len(waiting)
            kept = deque(change for change in waiting if not change.answer.done())
            for change in kept:
                change.was_repeated = True
                again.append(change.frame)
            self._waiting[request_id] = kept
            if not kept:
                del self._waiting[request_id]
        return again

    def fail_all(self, error: VorrangError) -> None:
        """Nothing will be answered any more."""
        waiting, self._waiting = self._waiting, {}
        for changes in waiting.values():
            for change in changes:
                if not change.answer.done():
                    change.answer.set_exception(error.again())

    def _next(self, request_id: str) -> _Change | None:
        waiting = self._waiting.get(request_id)
        if not waiting:
            return None
        change = waiting.popleft()
        if not waiting:
            del self._waiting[request_id]
        return change
