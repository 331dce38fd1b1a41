"""A run as a timeline: who sat on which seat and computed what, who waited, who gave way to whom.

Plain data; ``timeline.builder`` makes it. Times are in seconds from the beginning of the run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Piece:
    """What was computed for a request, in one step or in several that follow each other.

    Attributes:
        kind: ``prefill``, ``recompute`` or ``decode``.
        begin_s: when the first of the steps began.
        end_s: when the last of them was over.
        num_tokens: known tokens computed.
        num_steps: steps.
        num_drafted: tokens that were guessed and computed behind them.
        num_accepted: of these, the ones that were right.
    """

    kind: str
    begin_s: float
    end_s: float
    num_tokens: int
    num_steps: int = 1
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Stay:
    """A request on a seat.

    Attributes:
        seat: which, from 0.
        request_id: who.
        class_name: its class then.
        begin_s: when it was given the seat.
        end_s: when it lost it.
        left: why: ``preempted``, ``parked``, how it ended, or empty when it sits there still.
        is_resume: whether it had a seat before.
        pieces: what it computed there.
    """

    seat: int
    request_id: str
    class_name: str
    begin_s: float
    end_s: float
    left: str = ""
    is_resume: bool = False
    pieces: list[Piece] = field(default_factory=list)


@dataclass(slots=True)
class Wait:
    """A request without a seat.

    Attributes:
        lane: row in which it is drawn; no two at a time have the same.
        request_id: who.
        class_name: its class then.
        kind: ``queued``, ``preempted`` or ``parked``.
        begin_s: since when.
        end_s: until when.
    """

    lane: int
    request_id: str
    class_name: str
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A preemption.

    Attributes:
        at_s: when.
        victim: who gave way.
        beneficiary: for whom; empty = for nobody in particular.
        reason: what was needed.
        num_lost_tokens: computed tokens it lost.
        seat: it had; None = it held blocks alone.
    """

    at_s: float
    victim: str
    beneficiary: str
    reason: str
    num_lost_tokens: int
    seat: int | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts when a step was planned, or a request came.

    Attributes:
        at_s: when.
        waiting: requests that wait, by class.
        num_running: requests with a seat.
        used_blocks: KV blocks held.
        step_tokens: tokens the last step planned computes.
        gate: what kept the first of the queue out; empty = nothing, or nobody waits.
    """

    at_s: float
    waiting: dict[str, int]
    num_running: int
    used_blocks: int
    step_tokens: int
    gate: str


@dataclass(slots=True)
class Run:
    """All of it.

    Attributes:
        classes: their names, most urgent first.
        num_seats: places in the batch; None = not known.
        num_blocks: of the pool; None = not known.
        end_s: the last time that was told.
    """

    classes: tuple[str, ...]
    num_seats: int | None
    num_blocks: int | None
    stays: list[Stay] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def begin_s(self) -> float:
        """When the first of its stretches begins."""
        begins = [stay.begin_s for stay in self.stays] + [wait.begin_s for wait in self.waits]
        return min(begins, default=0.0)

    def between(self, begin_s: float, end_s: float) -> "Run":
        """What happened between two times, which count from the same beginning; stretches are cut there."""

        def is_in(one: Stay | Wait) -> bool:
            return one.begin_s < end_s and one.end_s > begin_s

        def clipped(stay: Stay) -> Stay:
            pieces = [p for p in stay.pieces if p.begin_s < end_s and p.end_s > begin_s]
            begin, end = max(stay.begin_s, begin_s), min(stay.end_s, end_s)
            return replace(stay, begin_s=begin, end_s=end, pieces=pieces)

        return replace(
            self,
            stays=[clipped(stay) for stay in self.stays if is_in(stay)],
            waits=[
                replace(wait, begin_s=max(wait.begin_s, begin_s), end_s=min(wait.end_s, end_s))
                for wait in self.waits
                if is_in(wait)
            ],
            cuts=[cut for cut in self.cuts if begin_s <= cut.at_s <= end_s],
            samples=[sample for sample in self.samples if begin_s <= sample.at_s <= end_s],
            end_s=min(self.end_s, end_s),
        )


class Paths:
    """The stretches of a run by request, in order, and which of them belong to a preemption.

    Args:
        run: which.
    """

    def __init__(self, run: Run) -> None:
        self._stays: dict[str, list[Stay]] = {}
        self._waits: dict[str, list[Wait]] = {}
        for stay in run.stays:
            self._stays.setdefault(stay.request_id, []).append(stay)
        for wait in run.waits:
            self._waits.setdefault(wait.request_id, []).append(wait)

    def lost(self, cut: Cut) -> Stay | None:
        """The stay that ended with it."""
        return self._first(
            self._stays.get(cut.victim), lambda s: s.end_s == cut.at_s and s.left == "preempted"
        )

    def gap(self, cut: Cut) -> Wait | None:
        """The victim's wait that began with it."""
        return self._first(self._waits.get(cut.victim), lambda w: w.begin_s == cut.at_s)

    def resumed(self, gap: Wait) -> Stay | None:
        """The stay that ended a wait."""
        return self._first(self._stays.get(gap.request_id), lambda s: s.begin_s == gap.end_s)

    def taken(self, cut: Cut) -> Stay | None:
        """The beneficiary's stay that began with it."""
        return self._first(self._stays.get(cut.beneficiary), lambda s: s.begin_s == cut.at_s)

    def before(self, cut: Cut) -> Wait | None:
        """The beneficiary's wait that it ended."""
        return self._first(self._waits.get(cut.beneficiary), lambda w: w.begin_s < cut.at_s == w.end_s)

    @staticmethod
    def _first(found: list[T] | None, fits: Callable[[T], bool]) -> T | None:
        return next(filter(fits, found or ()), None)
