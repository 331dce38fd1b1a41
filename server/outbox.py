"""What a session's one writer writes next. Pure.

Requests that have news: the most urgent level first, and inside a level in turn.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Requests that have news, each once.

    Args:
        urgency: the level of a request; lower goes first.
    """

    def __init__(self, urgency: Callable[[T], int]) -> None:
        self._urgency = urgency
        self._by_level: dict[int, OrderedDict[T, None]] = {}
        self._levels: dict[T, int] = {}

    def __len__(self) -> int:
        """How many have news."""
        return len(self._levels)

    def put(self, request: T) -> None:
        """It has news; behind all equals, or where it stands already unless its level has changed."""
        level = self._urgency(request)
        known = self._levels.get(request)
        if known == level:
            return
        if known is not None:
            self.discard(request)
        self._levels[request] = level
        self._by_level.setdefault(level, OrderedDict())[request] = None

    def discard(self, request: T) -> None:
        """Its news are not to be written; harmless when it has none."""
        level = self._levels.pop(request, None)
        if level is not None:
            requests = self._by_level[level]
            del requests[request]
            if not requests:
                del self._by_level[level]

    def take(self) -> T:
        """The one whose turn it is; there must be one."""
        request = next(iter(self._by_level[min(self._by_level)]))
        self.discard(request)
        return request
