"""What arrived of one request: added up to a result, and waiting to be read. Knows no stream."""

from collections import deque

from clients.python.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    Output,
    OutputFinished,
    PositionLogprobs,
    PromptLogprobs,
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
        self._outputs: dict[int, _OutputSoFar] = {}
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._accepted: Accepted | None = None
        self.finished: Finished | None = None

    def add(self, event: Event, now_s: float) -> None:
        """Take in one event that arrived at ``now_s``."""
        match event:
            case Delta():
                output = self._output(event.output_index)
                output.text.append(event.text)
                output.token_ids.extend(event.token_ids)
                output.logprobs.extend(event.logprobs)
                if event.token_ids:
                    self._last_token_at_s = now_s
                    if self._first_token_at_s is None:
                        self._first_token_at_s = now_s
            case Accepted():
                self._accepted = event
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.positions)
            case OutputFinished():
                self._output(event.output_index).finished = event.finished
            case Finished():
                self.finished = event
                self._ended_at_s = now_s
            case _:
                pass

    def result(self) -> Result:
        """Everything so far as a result; only to be asked for once ``finished`` is set."""
        assert self.finished is not None
        first = self._first_token_at_s
        gaps = max((len(output.token_ids) for output in self._outputs.values()), default=0) - 1
        only = self._output(0)
        if len(self._outputs) == 1 and only.finished is None:
            only.finished = self.finished
        outputs = tuple(self._outputs[index].output() for index in sorted(self._outputs))
        return Result(
            text=outputs[0].text,
            token_ids=outputs[0].token_ids,
            finish_reason=self.finished.reason,
            usage=self.finished.usage,
            logprobs=outputs[0].logprobs,
            accepted=self._accepted,
            ttft_s=None if first is None else first - self._sent_at_s,
            tpot_s=None if first is None or gaps < 1 else (self._last_token_at_s - first) / gaps,
            duration_s=self._ended_at_s - self._sent_at_s,
            prompt_logprobs=tuple(self._prompt_logprobs),
            outputs=outputs,
        )

    def _output(self, index: int) -> "_OutputSoFar":
        return self._outputs.setdefault(index, _OutputSoFar())


class _OutputSoFar:
    """One output in the making."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.finished: Finished | None = None

    def output(self) -> Output:
        return Output("".join(self.text), tuple(self.token_ids), self.finished, tuple(self.logprobs))


class _PendingDelta:
    """Deltas of one output that arrived one after the other and were not yet read, as one."""

    def __init__(self, first: Delta) -> None:
        self.output_index = first.output_index
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
            "".join(self._text),
            tuple(self._token_ids),
            self._first_token_index,
            tuple(self._logprobs),
            self.output_index,
        )


class EventBuffer:
    """Events that arrived and were not yet read.

    Bounded by what the request can cause, not by a count: neighbouring deltas of one
    output become one (of several outputs there are at most as many as credit allows tokens),
    of neighbouring queue positions only the latest is kept, and every other event happens a
    bounded number of times.

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
        if (
            isinstance(event, Delta)
            and isinstance(newest, _PendingDelta)
            and event.output_index == newest.output_index
        ):
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
