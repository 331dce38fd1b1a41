"""Books what happens in a simulation, event by event and step by step. Judges nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from engine.errors import VorrangError
from engine.events import (
    Delta,
    Failed,
    Finished,
    Preempted,
    RequestEvent,
    Resumed,
    SchedulerEvent,
    Started,
    TokensSampled,
)
from engine.request import PreemptReason
from engine.scheduler.plan import Grant, Granted
from workloads.arrivals import Arrival
from workloads.classes import class_of
from workloads.records import RequestRecord, Sample

_SEATED = (Started, Resumed)  # a union would be made anew for each event

#: A grant as its own members, which are read without a call.
Fields = tuple[Granted, int, int, object, int | None]


@dataclass(slots=True)
class Recording:
    """All that a simulation has shown.

    Attributes:
        records: by request id, in order of arrival.
        end_s: when the last step ended.
        busy_s: sum of all steps.
        num_steps: steps made.
        num_computed_tokens: tokens computed.
        num_recomputed_tokens: of those, tokens that had been computed for the same request before.
        num_cached_tokens: prompt tokens that the prefix cache gave at first admissions.
        preemptions: by reason.
        num_inversions: prefill grants (an admission is one) to a request while a strictly
            more urgent one waited.
        inversion_s: time during which a request computed while a strictly more urgent one waited.
        samples: the scheduler's state now and then, when that was asked for.
        failures: the errors of requests that were refused or failed, by request id.
    """

    records: dict[str, RequestRecord] = field(default_factory=dict)
    end_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    preemptions: Counter[PreemptReason] = field(default_factory=Counter)
    num_inversions: int = 0
    inversion_s: float = 0.0
    failures: dict[str, VorrangError] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


class Recorder:
    """Makes a ``Recording``. Times must not go back."""

    def __init__(self) -> None:
        self.recording = Recording()
        self._waiting: Counter[int] = Counter()  # requests without a seat, by level
        self._without_seat: set[str] = set()
        self._reached: dict[str, int] = {}  # tokens that have ever been computed

    def arrived(self, request: Arrival) -> None:
        """A request joined the queue."""
        record = RequestRecord(request, sent_s=request.arrival_s, accepted_s=request.arrival_s)
        self.recording.records[request.request_id] = record
        self._reached[request.request_id] = 0
        self._waits(record, waits=True)

    def refused(self, request: Arrival, error: VorrangError) -> None:
        """A request was refused on arrival."""
        record = RequestRecord(request, sent_s=request.arrival_s)
        self.recording.records[request.request_id] = record
        self._failed(record, error, request.arrival_s)

    def happened(self, events: Sequence[SchedulerEvent | RequestEvent], now: float) -> None:
        """Events of requests, of the scheduler or of their handles."""
        records = self.recording.records
        for event in events:
            record = records[event.request_id]
            if isinstance(event, TokensSampled):
                # What ``got_tokens`` does, without a call: there is one of these for every token.
                record.num_output_tokens += len(event.token_ids)
                last_s = record.last_token_s
                record.last_token_s = now
                if last_s is None:
                    record.first_token_s = now
                elif now - last_s > record.longest_stall_s:
                    record.longest_stall_s = now - last_s
            elif isinstance(event, Delta):
                record.got_tokens(len(event.token_ids), now)
            elif isinstance(event, _SEATED):
                self._waits(record, waits=False)
                if isinstance(event, Started):
                    self._started(record, event.num_cached_tokens, now)
            elif isinstance(event, Preempted):
                self._lost(record)
                self._waits(record, waits=True)
                record.num_preemptions += 1
                self.recording.preemptions[event.reason] += 1
            elif isinstance(event, Finished):
                self._waits(record, waits=False)
                record.reason = event.reason.value
                record.ended_s = now
            elif isinstance(event, Failed):
                self._waits(record, waits=False)
                self._failed(record, event.error, now)

    def stepped(self, grants: Sequence[Grant], start_s: float, end_s: float) -> None:
        """A step was computed; call after its plan's events and before its result's."""
        waiting = self._most_urgent_waiting()
        is_inverted = self._computed(grants, waiting)
        self._passed(start_s, end_s, is_inverted=is_inverted)

    def _computed(self, grants: Sequence[Grant], waiting: int | None) -> bool:
        """Book grants.

        Args:
            grants: of one step.
            waiting: the most urgent level that waits.

        Returns:
            Whether any is less urgent.
        """
        recording = self.recording
        is_inverted = False
        for request, start, num_tokens, _, output_index in cast("Sequence[Fields]", grants):
            recording.num_computed_tokens += num_tokens
            is_prefill = num_tokens > 1 or not output_index
            if is_prefill:  # a decode computes what nobody can have computed before
                self._prefilled(request.request_id, start, num_tokens)
            if waiting is not None and waiting < request.level:
                is_inverted = True
                recording.num_inversions += is_prefill
        return is_inverted

    def _passed(self, start_s: float, end_s: float, *, is_inverted: bool) -> None:
        recording = self.recording
        recording.num_steps += 1
        recording.busy_s += end_s - start_s
        recording.end_s = end_s
        recording.inversion_s += (end_s - start_s) * is_inverted

    def sample(self, now: float, num_running: int, kv_use: float) -> None:
        """Keep the state of the scheduler at one moment."""
        by_class: Counter[str] = Counter()
        for level, num_waiting in self._waiting.items():
            by_class[class_of(level)] += num_waiting
        recording = self.recording
        recording.samples.append(
            Sample(
                now, num_running, len(self._without_seat), kv_use, recording.preemptions.total(),
                recording.num_recomputed_tokens, dict(by_class),
            )
        )  # fmt: skip

    def _most_urgent_waiting(self) -> int | None:
        return min([level for level, n in self._waiting.items() if n], default=None)

    def _prefilled(self, request_id: str, start: int, num_tokens: int) -> None:
        reached, end = self._reached[request_id], start + num_tokens
        if start < reached:
            num_recomputed = min(reached, end) - start
            self.recording.num_recomputed_tokens += num_recomputed
            self.recording.records[request_id].num_recomputed_tokens += num_recomputed
        if end > reached:
            self._reached[request_id] = end

    def _lost(self, record: RequestRecord) -> None:
        """Its blocks are gone: it had computed all but the last of its output tokens, if it had any."""
        if record.num_output_tokens:
            request = record.request
            num_decoded = request.num_prompt_tokens + record.num_output_tokens - 1
            self._reached[request.request_id] = max(self._reached[request.request_id], num_decoded)

    def _started(self, record: RequestRecord, num_cached_tokens: int, now: float) -> None:
        self.recording.num_cached_tokens += num_cached_tokens
        record.num_cached_tokens = num_cached_tokens
        record.queued_s = now - record.request.arrival_s
        self._reached[record.request.request_id] = num_cached_tokens

    def _failed(self, record: RequestRecord, error: VorrangError, now: float) -> None:
        record.error = type(error).__name__
        record.error_message = str(error)
        record.ended_s = now
        self.recording.failures[record.request.request_id] = error

    def _waits(self, record: RequestRecord, *, waits: bool) -> None:
        request = record.request
        if (request.request_id in self._without_seat) != waits:
            (self._without_seat.add if waits else self._without_seat.remove)(request.request_id)
            self._waiting[request.level] += 1 if waits else -1
