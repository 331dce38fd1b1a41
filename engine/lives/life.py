"""One request's life as a row of intervals. Knows neither steps nor decisions."""

from copy import copy
from dataclasses import dataclass, replace

from engine.lives.clock import Reading, gates_between
from engine.priority import class_of
from engine.request import RequestId, RequestSpec, Usage
from timeline.account import WAITING, Account, Interval, Loss, Neighbour, Part, in_order

#: Intervals and preemptions of a life that are kept one by one; sums are of all of them.
MAX_INTERVALS, MAX_LOSSES = 256, 64
#: Other requests that are kept by name.
MAX_NEIGHBOURS = 8
_COMPUTING = ("prefill", "recompute", "held")


@dataclass(slots=True)
class _OpenLoss:
    """A preemption, since when, since when it was resumed, and whether its cost is known."""

    loss: Loss
    since: float
    resumed_at: float | None = None
    is_over: bool = False


class Life:
    """From arrival to end.

    Args:
        spec: what was asked for; it is not kept.
        arrival: order of arrival.
        reading: of the clock, when it came.

    Attributes:
        phase: where it is now, one of ``timeline.account.PHASES``.
        level: in force.
        is_seated: whether it has a seat.
        holds_blocks: whether it kept its blocks when it was parked.
        has_started: whether it ever had a seat.
        recompute_until: tokens it had computed when it was last preempted.
        parking: why it will be parked, if it will.
        end: why it ended; empty while it lives.
        num_drafted_tokens: guessed for its output; of these, ``num_accepted_tokens`` were right.
    """

    __slots__ = (
        "_began", "_beside_prefill_s", "_client_id", "_delivered", "_ended_at",
        "_first_token_at", "_gate", "_holders", "_intervals", "_is_named", "_label", "_losses",
        "_num_cached_tokens",
        "_num_decode_steps", "_num_holders", "_num_intervals", "_num_losses", "_num_prompt_tokens",
        "_num_seated", "_parts", "_seated", "_since", "_tenant", "arrival", "end", "has_started",
        "holds_blocks", "is_seated", "level", "num_accepted_tokens", "num_ahead", "num_drafted_tokens",
        "num_output_tokens", "num_prefill_steps", "num_seatings_before", "parking", "phase",
        "recompute_until", "request_id",
    )  # fmt: skip

    def __init__(self, spec: RequestSpec, arrival: int, reading: Reading) -> None:
        self.request_id: RequestId = spec.request_id
        self.arrival = arrival
        self.level = spec.level
        self.phase, self._gate = "queued", "arrival"
        self.is_seated = self.holds_blocks = self.has_started = False
        self.recompute_until = 0
        self.parking = self.end = ""
        self.num_ahead: int | None = None
        self.num_output_tokens = self.num_prefill_steps = self.num_seatings_before = 0
        self.num_drafted_tokens = self.num_accepted_tokens = 0
        self._client_id, self._tenant, self._label = "", spec.tenant, spec.label
        self._num_prompt_tokens, self._num_cached_tokens = len(spec.prompt_token_ids), 0
        self._began, self._since = reading.now, reading
        self._first_token_at: float | None = None
        self._ended_at: float | None = None
        self._delivered = self._is_named = False
        self._intervals: list[Interval] = []
        self._num_intervals = 0
        self._parts: dict[tuple[str, str], list[float]] = {}
        self._losses: list[_OpenLoss] = []
        self._num_losses = 0
        self._num_decode_steps, self._beside_prefill_s = 0, 0.0
        self._seated: tuple[Neighbour, ...] = ()
        self._holders: tuple[Neighbour, ...] = ()
        self._num_seated = self._num_holders = 0

    # What happens to it.

    def named(self, client_id: str, num_ahead: int, received_at: float) -> None:
        """What the server knows: the client's id, its place in the queue, and when its frame came."""
        self._client_id, self.num_ahead, self._is_named = client_id, num_ahead, True
        if received_at < self._began:
            shift = self._began - received_at
            self._intervals = [Interval("intake", "", 0.0, shift)]
            self._num_intervals = 1
            self._parts["intake", ""] = [shift, 0.0]
            self._began = received_at

    def enter(self, phase: str, gate: str, reading: Reading) -> None:
        """From now on its time is spent otherwise."""
        if phase != self.phase or gate != self._gate:
            self._book(reading)
            self.phase, self._gate = phase, gate

    def kept_out(self, gate: str, reading: Reading) -> None:
        """What keeps it out from now on; harmless when it does not wait."""
        if self.phase in WAITING:
            self.enter(self.phase, gate, reading)

    def started(self, num_cached_tokens: int) -> None:
        """It has its first seat."""
        self.has_started = True
        self._num_cached_tokens = num_cached_tokens

    def passed(self, num_seated: int, seated: tuple[Neighbour, ...]) -> None:
        """Who was given a seat while it waited for its first."""
        self._num_seated, self._seated = num_seated, seated

    def waits_behind(self, num_holders: int, holders: tuple[Neighbour, ...]) -> None:
        """Who held the seats when it was first kept waiting."""
        self._num_holders, self._holders = num_holders, holders

    def preempted(self, loss: Loss, reading: Reading) -> None:
        """It lost blocks, and its seat if it had one."""
        self._close_loss(reading.now)
        self._num_losses += 1
        at_s = reading.now - self._began
        if len(self._losses) < MAX_LOSSES:
            self._losses.append(_OpenLoss(replace(loss, at_s=at_s), reading.now))
        self.recompute_until = max(self.recompute_until, loss.num_lost_tokens)
        self.holds_blocks = False
        if self.is_seated:
            self.is_seated = False
            self.enter("preempted", "behind", reading)

    def resumed(self, num_recomputed_tokens: int, reading: Reading) -> None:
        """It has a seat again, after a preemption."""
        if (open_loss := self._open_loss()) is not None and open_loss.resumed_at is None:
            open_loss.resumed_at = reading.now
            open_loss.loss = replace(
                open_loss.loss,
                num_recomputed_tokens=num_recomputed_tokens,
                waited_s=reading.now - open_loss.since,
                resumed=True,
            )

    def caught_up(self, now: float) -> None:
        """It stands where it was when it was last preempted, or has got past it."""
        self._close_loss(now)
        self.recompute_until = 0

    def sampled(self, reading: Reading) -> None:
        """A step that computed known tokens has given it an output token."""
        if self._first_token_at is None:
            self._book(reading)
            self._first_token_at = reading.now
        if self.is_seated:
            self.caught_up(reading.now)
            if self.phase in _COMPUTING:
                self.enter("decode", "", reading)

    def guessed(self, num_drafted: int, num_accepted: int) -> None:
        """So many tokens were guessed in a step, so many of them right."""
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted

    def ended(self, end: str, usage: Usage, reading: Reading) -> None:
        """The engine is done with it; its counts of tokens are those of its ``usage``."""
        self._book(reading)
        self._close_loss(reading.now)
        self._ended_at = reading.now
        self.end, self.num_output_tokens = end, usage.output_tokens
        self.num_drafted_tokens, self.num_accepted_tokens = usage.drafted_tokens, usage.accepted_tokens
        self.is_seated = False
        self.phase, self._gate = "delivery", ""

    def delivered(self, now: float) -> None:
        """Its last event was written; once."""
        if self._ended_at is not None and not self._delivered:
            self._delivered = True
            self._book(self._since._replace(now=max(now, self._ended_at)))

    # What came of it.

    def neighbour(self) -> Neighbour:
        """How others name it."""
        return Neighbour(self.request_id, self._client_id, self.level)

    @property
    def has_output(self) -> bool:
        """Whether it has an output token."""
        return self._first_token_at is not None

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self._tenant

    @property
    def client_id(self) -> str:
        """The id its client chose; may be empty."""
        return self._client_id

    def account(self, reading: Reading) -> Account:
        """All there is to tell, up to now."""
        twin = self._copy()
        if self._ended_at is None:
            twin._book(reading)
            twin._close_loss(reading.now)
        total_s = twin._since.now - self._began
        first = self._first_token_at
        parts = (Part(phase, gate, before, after) for (phase, gate), (before, after) in twin._parts.items())
        return Account(
            server_request_id=self.request_id,
            request_id=self._client_id,
            tenant=self._tenant,
            label=self._label,
            level=self.level,
            class_name=class_of(self.level).name,
            phase="" if self.end else self.phase,
            end=self.end,
            delivered=self._delivered if self._is_named else None,
            total_s=total_s,
            ttft_s=None if first is None else first - self._began,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_ahead=self.num_ahead,
            num_seated=self._num_seated,
            seated=self._seated,
            num_holders=self._num_holders,
            holders=self._holders,
            num_prefill_steps=self.num_prefill_steps,
            num_decode_steps=twin._num_decode_steps,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            beside_prefill_s=twin._beside_prefill_s,
            losses=tuple(open_loss.loss for open_loss in twin._losses),
            num_losses=self._num_losses,
            parts=in_order(parts),
            intervals=tuple(twin._intervals),
            num_intervals=twin._num_intervals,
        )

    def _copy(self) -> "Life":
        twin = copy(self)
        twin._intervals = list(self._intervals)
        twin._parts = {key: list(times) for key, times in self._parts.items()}
        twin._losses = [replace(open_loss) for open_loss in self._losses]
        return twin

    def _book(self, reading: Reading) -> None:
        """Book the time since the last call on the phase it is in."""
        since, self._since = self._since, reading
        begin_s, end_s = since.now - self._began, reading.now - self._began
        if end_s <= begin_s:
            return
        phase, gate = self.phase, self._gate
        if phase == "decode":
            self._num_decode_steps += reading.num_steps - since.num_steps
            self._beside_prefill_s += reading.beside_prefill_s - since.beside_prefill_s
        self._keep(Interval(phase, gate, begin_s, end_s))
        is_after = self._first_token_at is not None
        if gate != "behind":
            self._add(phase, gate, end_s - begin_s, is_after)
            return
        for first_gate, seconds in gates_between(since, reading).items():
            self._add(phase, f"behind:{first_gate}" if first_gate else "behind", seconds, is_after)

    def _add(self, phase: str, gate: str, seconds: float, is_after: bool) -> None:
        if seconds:
            self._parts.setdefault((phase, gate), [0.0, 0.0])[is_after] += seconds

    def _keep(self, interval: Interval) -> None:
        last = self._intervals[-1] if self._intervals else None
        is_listed = len(self._intervals) == self._num_intervals
        if last is not None and is_listed and (last.phase, last.gate) == (interval.phase, interval.gate):
            self._intervals[-1] = replace(last, end_s=interval.end_s)
            return
        self._num_intervals += 1
        if len(self._intervals) < MAX_INTERVALS:
            self._intervals.append(interval)

    def _open_loss(self) -> _OpenLoss | None:
        """The last preemption, if it is listed."""
        return self._losses[-1] if self._losses and len(self._losses) == self._num_losses else None

    def _close_loss(self, now: float) -> None:
        """The last preemption has cost what it has cost."""
        open_loss = self._open_loss()
        if open_loss is None or open_loss.is_over:
            return
        open_loss.is_over = True
        if open_loss.resumed_at is None:
            open_loss.loss = replace(open_loss.loss, waited_s=now - open_loss.since)
        else:
            open_loss.loss = replace(open_loss.loss, recompute_s=now - open_loss.resumed_at)
