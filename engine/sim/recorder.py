"""Books what happens in a simulation, event by event and step by step. Judges nothing."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

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
from engine.scheduler.plan import Plan
from workloads.arrivals import Arrival
from workloads.records import RequestRecord


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

    def happened(self, events: Iterable[SchedulerEvent | RequestEvent], now: float) -> None:
        """Events of requests, of the scheduler or of their handles."""
        for event in events:
            record = self.recording.records[event.request_id]
            if isinstance(event, TokensSampled | Delta):
                record.got_tokens(len(event.token_ids), now)
            elif isinstance(event, Started | Resumed):
                self._waits(record, waits=False)
                if isinstance(event, Started):
                    self._started(record, event.num_cached_tokens, now)
            elif isinstance(event, Preempted):
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

    def stepped(self, plan: Plan, start_s: float, end_s: float) -> None:
        """A step was computed; call after its plan's events and before its result's."""
        recording = self.recording
        recording.num_steps += 1
        recording.busy_s += end_s - start_s
        recording.end_s = end_s
        most_urgent_waiting = min((level for level, n in self._waiting.items() if n), default=None)
        inverted = False
        for grant in plan.grants:
            num_tokens = grant.num_tokens
            recording.num_computed_tokens += num_tokens
            reached = self._reached[grant.request_id]
            end = grant.start + num_tokens
            if grant.start < reached:
                num_recomputed = min(reached, end) - grant.start
                recording.num_recomputed_tokens += num_recomputed
                recording.records[grant.request_id].num_recomputed_tokens += num_recomputed
            if end > reached:
                self._reached[grant.request_id] = end
            if most_urgent_waiting is not None and most_urgent_waiting < grant.level:
                inverted = True
                recording.num_inversions += num_tokens > 1 or not grant.output_index
        recording.inversion_s += (end_s - start_s) * inverted

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
