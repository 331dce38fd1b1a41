"""Books a simulation whose decodes are made together (``engine.scheduler.bulk``).

A request that decodes gets a token in every step that has decodes. So it is enough to
count these steps, and to book what it got when it stops to decode: at its end, or when
it is preempted. The outcome is what ``Recorder`` makes of one event for each token.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from engine.events import Failed, Finished, Preempted, RequestEvent, SchedulerEvent
from engine.request import Request
from engine.scheduler.plan import Grant
from engine.sim.recorder import Recorder
from workloads.records import RequestRecord

_STOPPED = (Preempted, Finished, Failed)  # a union would be made anew for each event


class _Stalls:
    """The longest of the gaps since any one of them, in O(log n).

    Only a gap that none after it reaches can be an answer; those are kept, so they fall.
    """

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._gaps_s: list[float] = []

    def add(self, index: int, gap_s: float) -> None:
        """One more; indices rise."""
        while self._gaps_s and self._gaps_s[-1] <= gap_s:
            self._gaps_s.pop()
            self._indices.pop()
        self._gaps_s.append(gap_s)
        self._indices.append(index)

    def longest_s(self, first: int) -> float:
        """The longest of those from this index on, of which there must be one."""
        return self._gaps_s[bisect_left(self._indices, first)]


class BulkRecorder(Recorder):
    """A recorder that is told of decodes by who makes them, once a step.

    Invariant: ``_since`` holds exactly those of the last step's decodes that have not stopped since. So who
    is new among a step's decodes follows from the step itself, however it came to decode: by a
    first token, or because a resume left nothing but the last one to be computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_steps = 0  # that had decodes
        self._end_s = 0.0  # of the last of them
        self._stalls = _Stalls()
        self._since: dict[str, int] = {}  # the first step in which a request decodes, by id
        self._levels: Counter[int] = Counter()  # of all of them

    def happened(self, events: Sequence[SchedulerEvent | RequestEvent], now: float) -> None:
        """Events of the scheduler."""
        records = self.recording.records
        for event in events:
            if isinstance(event, _STOPPED) and event.request_id in self._since:
                self._stop(records[event.request_id])
        super().happened(events, now)

    def mixed(
        self, decodes: Sequence[Request], grants: Sequence[Grant], start_s: float, end_s: float
    ) -> None:
        """A step of these decodes, and of grants to others, was computed; see ``stepped``."""
        waiting = self._most_urgent_waiting()
        is_inverted = self._computed(grants, waiting)
        if decodes:
            self.recording.num_computed_tokens += len(decodes)
            self._decoded(decodes, end_s)
            is_inverted = is_inverted or self._overtakes(waiting)
        self._passed(start_s, end_s, is_inverted=is_inverted)

    def stretched(self, decodes: Sequence[Request], starts_and_ends: Sequence[float]) -> None:
        """Steps of the same decodes were computed, and nothing else.

        Args:
            decodes: who computed a token in each of them.
            starts_and_ends: when the first began and each of them ended.
        """
        recording = self.recording
        durations_s = [end_s - start_s for start_s, end_s in pairwise(starts_and_ends)]
        self._decoded(decodes, starts_and_ends[1])
        is_inverted = self._overtakes(self._most_urgent_waiting())
        for duration_s in durations_s:
            recording.busy_s += duration_s
            recording.inversion_s += duration_s * is_inverted
        recording.num_steps += len(durations_s)
        recording.num_computed_tokens += len(durations_s) * len(decodes)
        recording.end_s = starts_and_ends[-1]
        if len(durations_s) > 1:  # nobody comes or goes in between, so one gap stands for all
            self._num_steps += len(durations_s) - 1
            self._stalls.add(self._num_steps - 1, max(durations_s[1:]))
            self._end_s = starts_and_ends[-1]

    def _decoded(self, decodes: Sequence[Request], end_s: float) -> None:
        """A step that had decodes has ended."""
        since = self._since
        if len(decodes) != len(since):
            for request in decodes:
                if request.request_id not in since:
                    since[request.request_id] = self._num_steps
                    self._begin(self.recording.records[request.request_id], end_s)
            assert len(decodes) == len(since), "somebody stopped to decode and nobody was told"
        self._stalls.add(self._num_steps, end_s - self._end_s)
        self._end_s = end_s
        self._num_steps += 1

    def _begin(self, record: RequestRecord, end_s: float) -> None:
        """It decodes, and gets the first token of these at ``end_s``."""
        assert record.last_token_s is not None
        record.longest_stall_s = max(record.longest_stall_s, end_s - record.last_token_s)
        self._levels[record.request.level] += 1

    def _overtakes(self, waiting: int | None) -> bool:
        """Whether anybody decodes that is less urgent than this level."""
        return waiting is not None and any(waiting < level for level, n in self._levels.items() if n)

    def _stop(self, record: RequestRecord) -> None:
        """It decodes no more."""
        request = record.request
        first = self._since.pop(request.request_id)
        self._levels[request.level] -= 1
        num_tokens = self._num_steps - first
        record.num_output_tokens += num_tokens
        record.last_token_s = self._end_s
        if num_tokens > 1:
            record.longest_stall_s = max(record.longest_stall_s, self._stalls.longest_s(first + 1))
