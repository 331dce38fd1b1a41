"""Writes the life of every request down as the scheduler's decisions come in.

A sink of decisions. What it does for a step depends on what happens in it, not on how
many requests decode or wait: who decodes is left alone until something else happens
to it, who waits behind others too, and what they have in common is added up by
``StepClock``. Of a step's grants it looks at those of requests that compute known tokens.

Nothing is kept of a request but numbers and names; lives that have ended are kept up
to a number of them.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from engine.errors import InvalidRequest
from engine.events import (
    Failed,
    Finished,
    LevelChanged,
    Preempted,
    Resumed,
    SchedulerEvent,
    Started,
    TokensSampled,
)
from engine.lives.clock import Reading, StepClock
from engine.lives.life import MAX_NEIGHBOURS, Life
from engine.request import PreemptReason, RequestId, Usage
from engine.scheduler.commands import Command, Park, Unpark
from engine.scheduler.decisions import Applied, Committed, Decision, Origin, Planned, Record, Submitted
from engine.scheduler.draft import Gate
from timeline.account import WAITING, Account, Loss, Neighbour

#: Tenants that an error names.
_MAX_NAMED = 8


class LifeRecorder:
    """Keeps lives, and gives account of them.

    Args:
        max_ended: lives that are kept after their end; the oldest go first.
    """

    is_open = True

    def __init__(self, max_ended: int) -> None:
        assert max_ended >= 0
        self._max_ended = max_ended
        self._alive: dict[RequestId, Life] = {}
        self._ended: OrderedDict[RequestId, Life] = OrderedDict()
        #: The last request of each tenant that had the id.
        self._by_client_id: dict[str, dict[str, RequestId]] = {}
        self._clock = StepClock()
        self._num_arrivals = 0
        #: Who was given a seat, the last ones, and how many in all.
        self._seatings: deque[Neighbour] = deque(maxlen=MAX_NEIGHBOURS)
        self._num_seatings = 0
        self._seated: dict[RequestId, Life] = {}
        #: Who came since the last plan.
        self._arrived: list[Life] = []
        #: Who was looked at in the last plan and kept out.
        self._kept_out: Mapping[RequestId, Gate] = {}
        #: Who had a seat and was granted nothing by the last plan.
        self._idle: tuple[RequestId, ...] = ()
        #: Whose grants are looked at: they compute known tokens, or come back with their blocks.
        self._watched: dict[RequestId, Life] = {}
        #: Who gets its first token of a computation when a step is committed.
        self._landing: dict[int, list[Life]] = {}

    # What it is told.

    def begin(self, origin: Origin) -> None:
        """A scheduler was made: there is nobody yet."""

    def record(self, record: Record) -> None:
        """A call was made."""
        call, now = record.call, record.now
        if record.error is not None:
            return
        match call:
            case Planned(decision=decision):
                if decision is not None:
                    self._planned(decision)
            case Committed(step=step, result=result):
                for guesses in record.guesses:
                    self._alive[guesses.request_id].guessed(guesses.num_drafted, guesses.num_accepted)
                self._committed(step, record.events, result.sat_out, now)
            case Submitted(spec=spec):
                reading = self._clock.read(now)
                life = Life(spec, self._num_arrivals, reading)
                life.num_seatings_before = self._num_seatings
                self._num_arrivals += 1
                self._alive[spec.request_id] = life
                self._arrived.append(life)
                self._happened(record.events, reading)
            case Applied(command=command):
                reading = self._clock.read(now)
                self._happened(record.events, reading)
                self._obeyed(command, reading)

    def named(self, request_id: RequestId, client_id: str, num_ahead: int, received_at: float) -> None:
        """What the server knows of a request that was just submitted."""
        life = self._alive.get(request_id)
        if life is not None:
            life.named(client_id, num_ahead, received_at)
            if client_id:
                self._by_client_id.setdefault(client_id, {})[life.tenant] = request_id

    def parking(self, request_id: RequestId, why: str) -> None:
        """Why a request is about to be parked, one of ``timeline.account.PARKINGS``."""
        life = self._alive.get(request_id)
        if life is not None:
            life.parking = why

    def delivered(self, request_id: RequestId, now: float) -> None:
        """The last event of a request was written; harmless when it is not known any more."""
        life = self._ended.get(request_id)
        if life is not None:
            life.delivered(now)

    # What it tells.

    def account(self, request_id: str, now: float, *, by_client_id: bool = True) -> Account | None:
        """The life of a request by the server's id or the client's; None when it is not known.

        Raises:
            InvalidRequest: it is a client's id, and requests of several tenants have it.
        """
        life = self._find(RequestId(request_id))
        if life is None and by_client_id and request_id in self._by_client_id:
            by_tenant = self._by_client_id[request_id]
            if len(by_tenant) > 1:
                raise InvalidRequest("id", _several(by_tenant), request_id)
            life = self._find(next(iter(by_tenant.values())))
        return None if life is None else life.account(self._clock.read(now))

    @property
    def num_kept(self) -> int:
        """Lives that are kept."""
        return len(self._alive) + len(self._ended)

    def check_integrity(self) -> None:
        """Recount; an ``AssertionError`` here is a bug of ours."""
        assert len(self._ended) <= self._max_ended
        for life in self._alive.values():
            assert life.is_seated == (life.request_id in self._seated)
            assert not (life.is_seated and life.phase in (*WAITING, "parked"))
        named = [one for by_tenant in self._by_client_id.values() for one in by_tenant.values()]
        for request_id in (*self._seated, *self._watched, *named):
            assert self._find(request_id) is not None

    # What it makes of it.

    def _find(self, request_id: RequestId) -> Life | None:
        return self._alive.get(request_id) or self._ended.get(request_id)

    def _planned(self, decision: Decision) -> None:
        now = decision.now
        reading = self._clock.read(now)
        if decision.events:
            self._happened(decision.events, reading)
        has_prefill = bool(self._watched) and self._look_at_grants(decision, reading)
        if decision.idle or self._idle:
            self._sit_idle(decision.idle, decision.masked, reading)
        if decision.kept_out or self._kept_out or self._arrived:
            self._keep_out(decision, reading)
        self._clock.planned(now, grants=bool(decision.grants), gate=decision.gate, has_prefill=has_prefill)

    def _look_at_grants(self, decision: Decision, reading: Reading) -> bool:
        """Note who computes known tokens; they come last among the grants."""
        num_left, has_prefill = len(self._watched), False
        for request_id, start, _, output_index, _ in reversed(decision.grants):
            life = self._watched.get(request_id)
            if life is None:
                continue
            if life.phase == "returning":
                self._seat(life)
            if start >= life.recompute_until:
                life.caught_up(reading.now)
            if (
                life.has_output and not life.recompute_until
            ):  # it came back with its blocks, or found them all
                life.enter("decode", "", reading)
                del self._watched[request_id]
            else:
                has_prefill = True
                life.num_prefill_steps += 1
                life.enter("recompute" if life.recompute_until else "prefill", "", reading)
                if output_index is not None:
                    self._landing.setdefault(decision.step, []).append(life)
                    del self._watched[request_id]
            num_left -= 1
            if not num_left:
                break
        return has_prefill

    def _sit_idle(self, idle: tuple[RequestId, ...], masked: frozenset[RequestId], reading: Reading) -> None:
        """Note who has a seat and no grant, and who has one again."""
        for request_id in self._idle:
            life = self._alive.get(request_id)
            if life is not None and life.phase == "stalled" and request_id not in idle:
                life.enter("decode", "", reading)
        for request_id in idle:
            life = self._alive.get(request_id)
            if life is None:
                continue
            gate = "grammar" if request_id in masked else ""
            if life.phase == "returning":
                self._seat(life)
            if life.phase in ("decode", "stalled"):
                life.enter("stalled", gate, reading)
            elif life.is_seated:
                life.enter("held", gate, reading)
        self._idle = idle

    def _keep_out(self, decision: Decision, reading: Reading) -> None:
        """Note what keeps those out that wait, as far as it has changed."""
        kept_out = decision.kept_out
        for request_id in self._kept_out:
            life = self._alive.get(request_id)
            if life is not None and request_id not in kept_out:
                life.kept_out("behind", reading)
        for life in self._arrived:
            if life.phase == "queued" and life.request_id in self._alive:
                life.kept_out("behind", reading)
                holders = tuple(one.neighbour() for one in _first(self._seated.values(), MAX_NEIGHBOURS))
                life.waits_behind(len(self._seated), holders)
        self._arrived = []
        for request_id, gate in kept_out.items():
            life = self._alive.get(request_id)
            if life is not None:
                life.kept_out(gate.value, reading)
        self._kept_out = kept_out

    def _committed(
        self, step: int, events: tuple[SchedulerEvent, ...], sat_out: frozenset[RequestId], now: float
    ) -> None:
        landing = self._landing.pop(step, None)
        for older in [number for number in self._landing if number < step]:
            del self._landing[older]  # it was left out: nobody it was for is alive
        ends = _ends(events)
        if landing is None and not ends:
            return
        reading = self._clock.read(now)
        for life in landing or ():
            if life.end:
                continue
            if life.request_id not in sat_out:
                life.sampled(reading)
            elif life.is_seated:  # its last token is computed again
                self._watched[life.request_id] = life
        self._happened(ends, reading)

    def _happened(self, events: Iterable[SchedulerEvent], reading: Reading) -> None:
        for event in events:
            life = self._alive.get(event.request_id)
            if life is None:
                continue
            match event:
                case Started():
                    num_seated = self._num_seatings - life.num_seatings_before
                    life.started(event.num_cached_tokens)
                    num_named = min(num_seated, len(self._seatings))
                    life.passed(num_seated, tuple(self._seatings)[len(self._seatings) - num_named :])
                    self._admitted(life, reading)
                case Resumed():
                    life.resumed(event.num_recomputed_tokens, reading)
                    self._admitted(life, reading)
                case Preempted():
                    self._preempted(life, event, reading)
                case LevelChanged():
                    life.level = event.level
                case Finished():
                    self._end(life, event.reason.value, event.usage, reading)
                case Failed():
                    name = getattr(event.error, "class_name", type(event.error).__name__)
                    how = f"failed: {name}"
                    self._end(life, how, event.usage, reading)

    def _admitted(self, life: Life, reading: Reading) -> None:
        self._seatings.append(life.neighbour())
        self._num_seatings += 1
        self._seat(life)
        life.enter("held", "", reading)
        self._watched[life.request_id] = life

    def _seat(self, life: Life) -> None:
        life.is_seated = True
        self._seated[life.request_id] = life

    def _unseat(self, life: Life) -> None:
        self._seated.pop(life.request_id, None)
        self._watched.pop(life.request_id, None)

    def _preempted(self, life: Life, event: Preempted, reading: Reading) -> None:
        other = None if event.beneficiary is None else self._alive.get(event.beneficiary)
        beneficiary = None if other is None else other.neighbour()
        self._unseat(life)
        loss = Loss(0.0, event.reason.value, beneficiary, event.num_blocks, event.num_lost_tokens)
        if life.phase == "returning":
            life.enter("preempted", "behind", reading)
        life.preempted(loss, reading)
        if event.reason is PreemptReason.RUNNER:
            self._landing.clear()  # no step in flight was ever made

    def _obeyed(self, command: Command, reading: Reading) -> None:
        if not isinstance(command, Park | Unpark):
            return
        life = self._alive.get(command.request_id)
        if life is None:
            return
        if isinstance(command, Park) and life.phase != "parked":
            if life.is_seated:
                life.is_seated, life.holds_blocks = False, True
            self._unseat(life)
            life.enter("parked", life.parking, reading)
        elif isinstance(command, Unpark) and life.phase == "parked":
            if life.holds_blocks:
                life.enter("returning", "behind", reading)
                self._watched[life.request_id] = life
            else:
                life.enter("preempted" if life.has_started else "queued", "behind", reading)

    def _end(self, life: Life, how: str, usage: Usage, reading: Reading) -> None:
        self._unseat(life)
        life.ended(how, usage, reading)
        del self._alive[life.request_id]
        self._ended[life.request_id] = life
        while len(self._ended) > self._max_ended:
            _, oldest = self._ended.popitem(last=False)
            by_tenant = self._by_client_id.get(oldest.client_id, {})
            if by_tenant.get(oldest.tenant) == oldest.request_id:
                del by_tenant[oldest.tenant]
                if not by_tenant:
                    del self._by_client_id[oldest.client_id]


def _several(by_tenant: Mapping[str, RequestId]) -> str:
    """The rule that an id breaks which several tenants used; names the first of them."""
    named = [f"{tenant!r} ({by_tenant[tenant]})" for tenant in sorted(by_tenant)]
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return f"must be the server's id, as tenants {', '.join(named[:_MAX_NAMED])}{more} used this one"


def _first(lives: Iterable[Life], number: int) -> list[Life]:
    found: list[Life] = []
    for life in lives:
        if len(found) == number:
            break
        found.append(life)
    return found


def _ends(events: tuple[SchedulerEvent, ...]) -> list[SchedulerEvent]:
    """Failures, which come before the tokens of a step, and ends, which come after them."""
    found: list[SchedulerEvent] = []
    for event in events:
        if type(event) is TokensSampled:
            break
        found.append(event)
    else:
        return found
    last: list[SchedulerEvent] = []
    for event in reversed(events):
        if type(event) is TokensSampled:
            break
        last.append(event)
    return found + last[::-1]
