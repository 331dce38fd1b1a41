"""Makes a ``Run`` of steps as they were planned and computed, whoever tells of them.

That is a decision log, or a client that watches a server. Times are told in seconds of any
clock, in their order; in the ``Run`` they count from the first one.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from timeline.run import Cut, Piece, Run, Sample, Stay, Wait


class Granted(NamedTuple):
    """Tokens granted to a request in a step.

    Attributes:
        request_id: whose.
        start: tokens computed before.
        num_tokens: tokens granted.
        samples: whether an output token is sampled after them.
    """

    request_id: str
    start: int
    num_tokens: int
    samples: bool


class _Places:
    """Numbers from 0, the lowest free one first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_used = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._num_used += 1
        return self._num_used - 1

    def give_back(self, place: int) -> None:
        heapq.heappush(self._free, place)


@dataclass(slots=True)
class _Known:
    """A request that is alive.

    Attributes:
        computed: tokens it had computed at most.
        has_output: whether it has sampled a token.
    """

    class_name: str
    stay: Stay | None = None
    wait: Wait | None = None
    computed: int = 0
    has_output: bool = False
    has_sat: bool = False


@dataclass(slots=True)
class _Step:
    planned_s: float
    grants: list[tuple[Stay, str, int]]


class RunBuilder:
    """Makes a ``Run`` of what it is told, in order of time.

    Args:
        classes: names of the classes, most urgent first.
        num_seats: places in the batch, where known.
        num_blocks: of the pool, where known.
        every_step: keep decodes step by step, instead of one piece for those that follow each other.
    """

    def __init__(
        self,
        classes: Iterable[str],
        *,
        num_seats: int | None = None,
        num_blocks: int | None = None,
        every_step: bool = False,
    ) -> None:
        self._run = Run(tuple(classes), num_seats, num_blocks)
        self._every_step = every_step
        self._origin: float | None = None
        self._alive: dict[str, _Known] = {}
        self._seats, self._lanes = _Places(), _Places()
        self._waiting = dict.fromkeys(self._run.classes, 0)
        self._steps: dict[int, _Step] = {}
        self._computed_s = 0.0
        self._num_running = 0

    # What it is told.

    def arrived(self, request_id: str, class_name: str, now: float) -> None:
        """A request joined the queue; harmless when it is known."""
        if request_id in self._alive:
            return
        known = self._alive[request_id] = _Known(class_name)
        at_s = self._at(now)
        self._wait(request_id, known, "queued", at_s)
        last = self._run.samples[-1] if self._run.samples else Sample(at_s, {}, 0, 0, 0, "")
        self._run.samples.append(replace(last, at_s=at_s, waiting=dict(self._waiting)))

    def changed_class(self, request_id: str, class_name: str, now: float) -> None:
        """A request has another class from now on; harmless when it is the same."""
        known = self._alive.get(request_id)
        if known is None or known.class_name == class_name:
            return
        at_s, stay, wait = self._at(now), known.stay, known.wait
        if wait is not None:
            self._end_wait(known, at_s)
            known.class_name = class_name
            self._wait(request_id, known, wait.kind, at_s)
        known.class_name = class_name
        if stay is not None:
            stay.class_name = class_name

    def cut(self, victim: str, beneficiary: str, reason: str, num_lost_tokens: int, now: float) -> None:
        """A request lost its blocks, and its seat if it had one."""
        known = self._alive.get(victim)
        at_s = self._at(now)
        seat = known.stay.seat if known is not None and known.stay is not None else None
        self._run.cuts.append(Cut(at_s, victim, beneficiary, reason, num_lost_tokens, seat))
        if known is not None and known.stay is not None:
            self._end_stay(known, "preempted", at_s)
            self._wait(victim, known, "preempted", at_s)

    def planned(
        self,
        step: int,
        now: float,
        grants: Iterable[tuple[Granted, str]],
        *,
        num_free_blocks: int,
        gate: str,
    ) -> None:
        """A step was planned, after those it cuts were told.

        Args:
            step: its number.
            now: when.
            grants: what it computes, and the class of each request.
            num_free_blocks: blocks nobody holds afterwards.
            gate: what kept the first of the queue out; empty = nothing.
        """
        at_s = self._at(now)
        placed = []
        for granted, class_name in grants:
            known = self._alive.get(granted.request_id)
            if known is None:
                known = self._alive[granted.request_id] = _Known(class_name, has_output=granted.start > 0)
            placed.append((self._seated(granted.request_id, known, at_s), *self._piece(granted, known)))
        if placed:
            self._steps[step] = _Step(at_s, placed)
        used = max(0, (self._run.num_blocks or 0) - num_free_blocks)
        num_tokens = sum(num_tokens for _, _, num_tokens in placed)
        sample = Sample(at_s, dict(self._waiting), self._num_running, used, num_tokens, gate)
        self._run.samples.append(sample)

    def computed(self, step: int, now: float, guesses: Iterable[tuple[str, int, int]] = ()) -> None:
        """A step is over; steps that are never told so were never made.

        Args:
            step: its number.
            now: when.
            guesses: requests, how many of their tokens it guessed, and how many of those were right.
        """
        at_s = self._at(now)
        made = self._steps.pop(step, None)
        for older in [number for number in self._steps if number < step]:
            del self._steps[older]
        if made is None:
            return
        begin_s = max(made.planned_s, self._computed_s)
        self._computed_s = at_s
        judged = {request_id: counts for request_id, *counts in guesses}
        for stay, kind, num_tokens in made.grants:
            # Who lost its seat while it was computed, or before: somebody else may have it by now.
            end_s = min(at_s, stay.end_s) if stay.left else at_s
            if end_s < begin_s:
                continue
            piece = stay.pieces[-1] if stay.pieces else None
            if piece is not None and piece.kind == kind == "decode" and not self._every_step:
                piece.end_s, piece.num_steps = end_s, piece.num_steps + 1
                piece.num_tokens += num_tokens
            else:
                piece = Piece(kind, begin_s, end_s, num_tokens)
                stay.pieces.append(piece)
            num_drafted, num_accepted = judged.get(stay.request_id, (0, 0))
            piece.num_drafted += num_drafted
            piece.num_accepted += num_accepted

    def parked(self, request_id: str, now: float) -> None:
        """A request is not to be computed."""
        known = self._alive.get(request_id)
        if known is not None and (known.wait is None or known.wait.kind != "parked"):
            at_s = self._at(now)
            self._end_stay(known, "parked", at_s)
            self._end_wait(known, at_s)
            self._wait(request_id, known, "parked", at_s)

    def unparked(self, request_id: str, now: float) -> None:
        """A parked request is to go on."""
        known = self._alive.get(request_id)
        if known is not None and known.wait is not None and known.wait.kind == "parked":
            at_s = self._at(now)
            self._end_wait(known, at_s)
            self._wait(request_id, known, "preempted" if known.has_sat else "queued", at_s)

    def ended(self, request_id: str, how: str, now: float) -> None:
        """A request is no more."""
        known = self._alive.pop(request_id, None)
        if known is not None:
            at_s = self._at(now)
            self._end_stay(known, how, at_s)
            self._end_wait(known, at_s)

    def finish(self) -> Run:
        """The run; what still goes on ends with it. Call it once."""
        for known in self._alive.values():
            self._end_stay(known, "", self._run.end_s)
            self._end_wait(known, self._run.end_s)
        return self._run

    # What it makes of it.

    def _at(self, now: float) -> float:
        """Seconds of the run; they never go back."""
        if self._origin is None:
            self._origin = now
        self._run.end_s = max(self._run.end_s, now - self._origin)
        return self._run.end_s

    def _seated(self, request_id: str, known: _Known, at_s: float) -> Stay:
        if known.stay is None:
            self._end_wait(known, at_s)
            seat = self._seats.take()
            known.stay = Stay(seat, request_id, known.class_name, at_s, at_s, is_resume=known.has_sat)
            known.has_sat = True
            self._run.stays.append(known.stay)
            self._num_running += 1
        return known.stay

    @staticmethod
    def _piece(granted: Granted, known: _Known) -> tuple[str, int]:
        if granted.start < known.computed:
            kind = "recompute"
        elif granted.num_tokens == 1 and granted.samples and known.has_output:
            kind = "decode"
        else:
            kind = "prefill"
        known.computed = max(known.computed, granted.start + granted.num_tokens)
        known.has_output |= granted.samples
        return kind, granted.num_tokens

    def _end_stay(self, known: _Known, left: str, at_s: float) -> None:
        if known.stay is not None:
            known.stay.end_s, known.stay.left = at_s, left
            self._seats.give_back(known.stay.seat)
            known.stay = None
            self._num_running -= 1

    def _wait(self, request_id: str, known: _Known, kind: str, at_s: float) -> None:
        known.wait = Wait(self._lanes.take(), request_id, known.class_name, kind, at_s, at_s)
        self._run.waits.append(known.wait)
        if kind != "parked":
            self._waiting[known.class_name] = self._waiting.get(known.class_name, 0) + 1

    def _end_wait(self, known: _Known, at_s: float) -> None:
        if known.wait is not None:
            known.wait.end_s = at_s
            self._lanes.give_back(known.wait.lane)
            if known.wait.kind != "parked":
                self._waiting[known.wait.class_name] -= 1
            known.wait = None
