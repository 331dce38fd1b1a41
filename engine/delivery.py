"""Hands what the scheduler decided and the model said to the requests it is about.

Tokens become text here. A stop string in the text, or a reader who leaves too much
unread, ends a request, through the scheduler like every other end.
"""

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import structlog

from engine.afterwards import Afterwards
from engine.clock import Clock
from engine.errors import InternalError, SlowConsumer, VorrangError
from engine.events import (
    Delta,
    Failed,
    Finished,
    PositionLogProbs,
    Preempted,
    PromptLogProbs,
    SchedulerEvent,
    TokensSampled,
)
from engine.failure import trace_of
from engine.handle import RequestHandle
from engine.observer import EngineObserver
from engine.request import FinishReason, RequestId
from engine.scheduler.commands import Command, Fail, Finish
from engine.text import OutputText

_NO_LOGPROBS: Mapping[RequestId, PositionLogProbs] = {}

log = structlog.get_logger("vorrang.engine")


class _Live:
    """A request that is alive: its handle, its text so far, its times."""

    __slots__ = (
        "arrived", "first_token_at", "handle", "last_token_at", "next_scored", "stop_string", "text",
    )  # fmt: skip

    def __init__(self, handle: RequestHandle, text: OutputText, now: float) -> None:
        self.handle = handle
        self.text = text
        self.stop_string: str | None = None
        self.next_scored = 1  # nothing is before the first token of a prompt that could predict it
        self.arrived = now
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None


class Delivery:
    """The requests that are alive, and how events reach them.

    Readers come first: observers and log lines are told of tokens, happenings and ends
    when the readers have had their turn.

    Args:
        clock: where time comes from.
        apply: gives the scheduler a command at a time; returns what comes of it.
        max_buffered_tokens: output tokens that may wait for a reader before its request fails.
        afterwards: makes what readers need not wait for.
        observer: is told of what happens to requests; None = nobody is.

    Attributes:
        nothing_alive: set while no request is alive.
        num_preemptions: preemptions so far.
        num_output_tokens: output tokens produced so far.
    """

    def __init__(
        self,
        clock: Clock,
        apply: Callable[[Command, float], Sequence[SchedulerEvent]],
        max_buffered_tokens: int,
        afterwards: Afterwards,
        observer: EngineObserver | None,
    ) -> None:
        self._clock = clock
        self._apply = apply
        self._max_buffered_tokens = max_buffered_tokens
        self._observer = observer
        self._afterwards = afterwards
        self._live: dict[RequestId, _Live] = {}
        self.nothing_alive = asyncio.Event()
        self.nothing_alive.set()
        self.num_preemptions = 0
        self.num_output_tokens = 0

    def __len__(self) -> int:
        """How many requests are alive."""
        return len(self._live)

    def __iter__(self) -> Iterator[RequestId]:
        """Who is alive."""
        return iter(self._live)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request is alive."""
        return request_id in self._live

    def add(self, handle: RequestHandle, text: OutputText, now: float) -> None:
        """A request was queued."""
        self._live[handle.request_id] = _Live(handle, text, now)
        self.nothing_alive.clear()
        if self._observer is not None:  # at once: what it spends may decide about the next one
            self._observer.submitted(handle.spec)

    def obey(self, command: Command, now: float) -> Sequence[SchedulerEvent]:
        """Give the scheduler a command, and tell the requests what comes of it; returns that."""
        events = self._apply(command, now)
        self.hand_out(events)
        return events

    def hand_out(
        self,
        events: Iterable[SchedulerEvent],
        logprobs: Mapping[RequestId, PositionLogProbs] = _NO_LOGPROBS,
    ) -> None:
        """Hand scheduler events to their requests, tokens with their text and ``logprobs``."""
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue  # a stop string in its last token has ended it already
            if isinstance(event, TokensSampled):
                self._tokens(live, event, logprobs.get(event.request_id))
            elif isinstance(event, Finished | Failed):
                self._end(live, event)
            else:
                live.handle.put(event)
                if isinstance(event, Preempted):
                    self.num_preemptions += 1
                    self._afterwards(_log_preemption, event)
                if self._observer is not None:
                    self._afterwards(self._observer.happened, live.handle.spec, event)

    def hand_out_prompts(self, found: Mapping[RequestId, PromptLogProbs]) -> None:
        """Hand out log probabilities of prompts; what was computed again after a preemption is known."""
        for request_id, scored in found.items():
            live = self._live.get(request_id)
            if live is None:
                continue
            first = live.next_scored
            assert scored.first_index <= first, "log probabilities of a prompt have a gap"
            if new := scored.positions[first - scored.first_index :]:
                live.next_scored += len(new)
                live.handle.put(PromptLogProbs(request_id, first, new))

    def fail_all(self, error: VorrangError) -> None:
        """End every request with an error."""
        now = self._clock.now()
        for request_id in list(self._live):
            self.obey(Fail(request_id, error), now)

    def _tokens(self, live: _Live, event: TokensSampled, logprobs: PositionLogProbs | None) -> None:
        """Turn tokens into a delta; end the request when they hold a stop string or nobody reads."""
        now = self._clock.now()
        num_sampled = len(event.token_ids)
        self.num_output_tokens += num_sampled
        if live.first_token_at is None:
            live.first_token_at = now
        if self._observer is not None:
            gap_s = None if live.last_token_at is None else now - live.last_token_at
            self._afterwards(self._observer.produced, live.handle.spec, num_sampled, gap_s)
            live.last_token_at = now
        try:
            text, num_tokens = _text_of(live, event)
        except Exception as error:  # one poisoned request fails alone
            self.obey(Fail(event.request_id, incident("request.text_failed", error)), now)
            return
        found = () if logprobs is None else (logprobs,)
        handle = live.handle
        handle.put(Delta(event.request_id, event.first_index, event.token_ids[:num_tokens], text, found))
        if live.stop_string is not None:
            length = None if num_tokens == num_sampled else event.first_index + num_tokens
            self.obey(Finish(event.request_id, FinishReason.STOP_STRING, num_output_tokens=length), now)
        elif handle.num_buffered_tokens > self._max_buffered_tokens:
            rule = f"{handle.num_buffered_tokens} output tokens wait to be read,"
            slow = SlowConsumer(f"{rule} more than {self._max_buffered_tokens}")
            self.obey(Fail(event.request_id, slow), now)

    def _end(self, live: _Live, event: Finished | Failed) -> None:
        handle = live.handle
        if isinstance(event, Finished):
            if live.stop_string is not None:
                reason = FinishReason.STOP_STRING
                event = dataclasses.replace(event, reason=reason, stop_string=live.stop_string)
            elif rest := live.text.flush().text:
                handle.put(Delta(event.request_id, event.usage.output_tokens, (), rest))
        del self._live[event.request_id]
        handle.put(event)
        if not self._live:
            self.nothing_alive.set()
        total_s = self._clock.now() - live.arrived
        ttft_s = None if live.first_token_at is None else live.first_token_at - live.arrived
        self._afterwards(_log_end, handle, event, ttft_s, total_s)
        if self._observer is not None:
            self._afterwards(self._observer.ended, handle.spec, event, ttft_s, total_s)


def incident(what: str, error: Exception, *, with_text: bool = False) -> InternalError:
    """Log what nobody has foreseen; the error that is told carries the log line's id.

    Args:
        what: name of the event.
        error: the failure.
        with_text: log its words, too: no request's text can be in them.
    """
    incident_id = secrets.token_hex(8)
    log.error(what, incident_id=incident_id, exception=trace_of(error, with_text=with_text))
    return InternalError(incident_id)


def _text_of(live: _Live, event: TokensSampled) -> tuple[str, int]:
    """The tokens' text, and how many of them count: none after a stop string."""
    spec = live.handle.spec
    text = ""
    for index, token_id in enumerate(event.token_ids, start=event.first_index):
        may_stop = index + 1 >= spec.sampling.min_tokens
        if may_stop and (token_id in spec.eos_token_ids or token_id in spec.sampling.stop_token_ids):
            continue  # it ends the output and has no text
        piece = live.text.push(token_id, may_stop=may_stop)
        text += piece.text
        if piece.stop_string is not None:
            live.stop_string = piece.stop_string
            return text, index - event.first_index + 1
    return text, len(event.token_ids)


def _log_preemption(event: Preempted) -> None:
    log.info(
        "request.preempted",
        request_id=event.request_id,
        reason=event.reason.value,
        count=event.count,
        beneficiary=event.beneficiary,
        num_blocks=event.num_blocks,
        num_lost_tokens=event.num_lost_tokens,
    )


def _log_end(handle: RequestHandle, event: Finished | Failed, ttft_s: float | None, total_s: float) -> None:
    """The one canonical line of a request."""
    how = (
        {"reason": event.reason.value}
        if isinstance(event, Finished)
        else {"reason": "failed", "error": type(event.error).__name__, "message": event.error.log_text}
    )
    usage = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(event.usage).items()
    }
    log.info(
        "request.ended",
        request_id=handle.request_id,
        label=handle.spec.label,
        level=handle.level,
        **how,
        ttft_s=None if ttft_s is None else round(ttft_s, 4),
        total_s=round(total_s, 4),
        **usage,
    )
