"""What arrived of one request: added up to a result, and waiting to be read. Knows no stream."""

from collections import deque

from clients.python.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    PositionLogprobs,
    QueueUpdate,
    Result,
)


class Collector:
    """Adds up the events of one request; knows when each arrived.

    Args:
        sent_at_s: when the request was sent, on the clock that ``add`` is given.
    """

    def __init__(self, sent_at_s: float) -> None:
        self._sent_at_s = sent_at_s
        self._first_token_at_s: float | None = None
        self._last_token_at_s = sent_at_s
        self._ended_at_s = sent_at_s
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._accepted: Accepted | None = None
        self.finished: Finished | None = None

    def add(self, event: Event, now_s: float) -> None:
        """Take in one event that arrived at ``now_s``."""
        match event:
            case Delta():
                self._text.append(event.text)
                self._token_ids.extend(event.token_ids)
                self._logprobs.extend(event.logprobs)
                if event.token_ids:
                    self._last_token_at_s = now_s
                    if self._first_token_at_s is None:
                        self._first_token_at_s = now_s
            case Accepted():
                self._accepted = event
            case Finished():
                self.finished = event
                self._ended_at_s = now_s
            case _:
                pass

    def result(self) -> Result:
        """Everything so far as a result; only to be asked for once ``finished`` is set."""
        assert self.finished is not None
        first = self._first_token_at_s
        gaps = len(self._token_ids) - 1
        return Result(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finished.reason,
            usage=self.finished.usage,
            logprobs=tuple(self._logprobs),
            accepted=self._accepted,
            ttft_s=None if first is None else first - self._sent_at_s,
            tpot_s=None if first is None or gaps < 1 else (self._last_token_at_s - first) / gaps,
            duration_s=self._ended_at_s - self._sent_at_s,
        )


class _PendingDelta:
    """Deltas that arrived one after the other and were not yet read, as one."""

    def __init__(self, first: Delta) -> None:
        self._first_token_index = first.first_token_index
        self._text = [first.text]
        self._token_ids = list(first.token_ids)
        self._logprobs = list(first.logprobs)

    def merge(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)

    def delta(self) -> Delta:
        return Delta(
            "".join(self._text), tuple(self._token_ids), self._first_token_index, tuple(self._logprobs)
        )


class EventBuffer:
    """Events that arrived and were not yet read.

    Bounded by what the request can cause, not by a count: neighbouring deltas
    become one, of neighbouring queue positions only the latest is kept, and
    every other event happens a bounded number of times.

    Args:
        after_sequence: sequence up to which events were taken elsewhere.

    Attributes:
        last_sequence: sequence up to which events were taken; 0 = none were.
    """

    def __init__(self, after_sequence: int = 0) -> None:
        self._events: deque[Event | _PendingDelta] = deque()
        self._sequences: deque[int] = deque()
        self.last_sequence = after_sequence

    def __len__(self) -> int:
        return len(self._events)

    def push(self, event: Event, sequence: int = 0) -> None:
        """Add ``event`` as the newest."""
        newest = self._events[-1] if self._events else None
        if isinstance(event, Delta) and isinstance(newest, _PendingDelta):
            newest.merge(event)
            self._sequences[-1] = sequence
            return
        if isinstance(event, QueueUpdate) and isinstance(newest, QueueUpdate):
            self._events.pop()
            self._sequences.pop()
        self._events.append(_PendingDelta(event) if isinstance(event, Delta) else event)
        self._sequences.append(sequence)

    def pop(self) -> Event:
        """Take the oldest event."""
        event = self._events.popleft()
        self.last_sequence = self._sequences.popleft()
        return event.delta() if isinstance(event, _PendingDelta) else event
