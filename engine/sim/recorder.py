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
from engine.request import FinishReason, PreemptReason, RequestId
from engine.scheduler.plan import Plan
from engine.sim.workload import SimRequest


@dataclass(slots=True)
class RequestRecord:
    """What became of one request. Times in virtual seconds.

    Attributes:
        request: what was asked for.
        num_output_tokens: tokens it got.
        first_token_s: when it got the first; None: never.
        last_token_s: when it got the last so far.
        longest_stall_s: longest time between two of its tokens.
        num_preemptions: times it lost its place.
        ended: why it ended; None while it has not.
        refused: the error it was refused with, or failed with.
        waits: whether it has arrived and holds no seat.
    """

    request: SimRequest
    num_output_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    longest_stall_s: float = 0.0
    num_preemptions: int = 0
    ended: FinishReason | None = None
    refused: VorrangError | None = None
    waits: bool = True
    num_reached: int = 0  # tokens that have ever been computed


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
    """

    records: dict[RequestId, RequestRecord] = field(default_factory=dict)
    end_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    preemptions: Counter[PreemptReason] = field(default_factory=Counter)
    num_inversions: int = 0
    inversion_s: float = 0.0


class Recorder:
    """Makes a ``Recording``. Times must not go back."""

    def __init__(self) -> None:
        self.recording = Recording()
        self._waiting: Counter[int] = Counter()  # requests without a seat, by level

    def arrived(self, request: SimRequest) -> None:
        """A request joined the queue."""
        self.recording.records[request.request_id] = RequestRecord(request)
        self._waiting[request.level] += 1

    def refused(self, request: SimRequest, error: VorrangError) -> None:
        """A request was refused on arrival."""
        record = RequestRecord(request, refused=error, waits=False)
        self.recording.records[request.request_id] = record

    def happened(self, events: Iterable[SchedulerEvent | RequestEvent], now: float) -> None:
        """Events of requests, of the scheduler or of their handles."""
        for event in events:
            record = self.recording.records[event.request_id]
            if isinstance(event, TokensSampled | Delta):
                self._tokens(record, len(event.token_ids), now)
            elif isinstance(event, Started | Resumed):
                self._waits(record, waits=False)
                if isinstance(event, Started):
                    self.recording.num_cached_tokens += event.num_cached_tokens
                    record.num_reached = event.num_cached_tokens
            elif isinstance(event, Preempted):
                self._waits(record, waits=True)
                record.num_preemptions += 1
                self.recording.preemptions[event.reason] += 1
            elif isinstance(event, Finished):
                self._waits(record, waits=False)
                record.ended = event.reason
            elif isinstance(event, Failed):
                self._waits(record, waits=False)
                record.refused = event.error

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
            record = recording.records[grant.request_id]
            end = grant.start + num_tokens
            if grant.start < record.num_reached:
                recording.num_recomputed_tokens += min(record.num_reached, end) - grant.start
            if end > record.num_reached:
                record.num_reached = end
            if most_urgent_waiting is not None and most_urgent_waiting < grant.level:
                inverted = True
                recording.num_inversions += num_tokens > 1 or not grant.output_index
        recording.inversion_s += (end_s - start_s) * inverted

    def _tokens(self, record: RequestRecord, num_tokens: int, now: float) -> None:
        if num_tokens == 0:
            return
        record.num_output_tokens += num_tokens
        if record.last_token_s is None:
            record.first_token_s = now
        elif now - record.last_token_s > record.longest_stall_s:
            record.longest_stall_s = now - record.last_token_s
        record.last_token_s = now

    def _waits(self, record: RequestRecord, *, waits: bool) -> None:
        if record.waits != waits:
            record.waits = waits
            self._waiting[record.request.level] += 1 if waits else -1
