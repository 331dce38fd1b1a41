"""What a run of the load generator knows so far: records, counts, recent latencies. Knows no network."""

from collections import Counter, deque
from collections.abc import Sequence

from clients.python.events import Finished
from workloads.arrivals import Arrival
from workloads.classes import LEVELS, class_of
from workloads.records import RequestRecord
from workloads.statistics import distribution

#: Latencies of the recent past that figures of the moment are made of, for each class.
RECENT = 200


class LoadState:
    """A run as it goes.

    Attributes:
        records: of every request that was due so far, in order of arrival.
        num_total: requests of the workload.
        duration_s: when the last of them is due.
        started_s: when the run started, on ``time.monotonic``; 0 = not yet.
        num_sent: requests that were handed to the transport.
        num_in_flight: requests that were sent and have not ended.
        num_finished: requests that ended with an output.
        num_tokens: output tokens so far.
        errors: requests that failed, by reason.
        lags_s: how late the event loop came round, every time.
    """

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.num_total = 0
        self.duration_s = 0.0
        self.started_s = 0.0
        self.num_sent = 0
        self.num_in_flight = 0
        self.num_finished = 0
        self.num_tokens = 0
        self.errors: Counter[str] = Counter()
        self.lags_s: list[float] = []
        self.recent_ttft_s: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in LEVELS}
        self.recent_gap_s: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in LEVELS}

    def begin(self, requests: Sequence[Arrival], started_s: float) -> None:
        """The workload is about to be sent."""
        self.num_total = len(requests)
        self.duration_s = requests[-1].arrival_s if requests else 0.0
        self.started_s = started_s

    def due(self, arrival: Arrival) -> RequestRecord:
        """A request is due; its record."""
        record = RequestRecord(arrival)
        self.records.append(record)
        return record

    def got(self, record: RequestRecord, num_tokens: int, now_s: float) -> None:
        """Tokens have come."""
        class_name = class_of(record.request.level)
        if record.last_token_s is None:
            self.recent_ttft_s[class_name].append(now_s - record.request.arrival_s)
        else:
            self.recent_gap_s[class_name].append(now_s - record.last_token_s)
        record.got_tokens(num_tokens, now_s)
        record.token_times_s += [now_s] * num_tokens
        self.num_tokens += num_tokens

    def finished(self, record: RequestRecord, event: Finished, now_s: float) -> None:
        """A request has ended with an output."""
        record.ended_s = now_s
        record.reason = event.reason.lower()
        usage = event.usage
        record.num_preemptions = usage.preemptions
        record.num_cached_tokens = usage.cached_tokens
        record.num_recomputed_tokens = usage.recomputed_tokens
        record.queued_s, record.preempted_s = usage.queued_s, usage.preempted_s
        self.num_finished += 1

    def failed(self, record: RequestRecord, error: str, message: str, now_s: float) -> None:
        """A request was refused, has failed, or was given up; only the first time counts."""
        if record.ended_s is None:
            record.ended_s = now_s
            record.error, record.error_message = error, message
            self.errors[error] += 1

    def own_lateness(self) -> dict[str, float]:
        """How late the generator itself was: in sending, and in coming round to read.

        Returns:
            ``send_lateness_s_*`` (intended start to transport) and ``loop_lag_s_*``, each p50, p99 and max.
        """
        late = [r.sent_s - r.request.arrival_s for r in self.records if r.sent_s is not None]
        figures: dict[str, float] = {}
        for name, values in (("send_lateness_s", late), ("loop_lag_s", self.lags_s)):
            one = distribution(values)
            figures |= {f"{name}_p50": one.p50 or 0.0, f"{name}_p99": one.p99 or 0.0}
            figures[f"{name}_max"] = one.max or 0.0
        return figures
