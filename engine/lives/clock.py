"""Sums over all steps, by which the time of a single request is divided without looking at it in each."""

from typing import NamedTuple

from engine.scheduler.draft import Gate

_GATES = tuple(Gate)
#: Less than this is what adding up floating point numbers leaves over.
_ROUNDING_S = 1e-9
_NOTHING = (0.0,) * len(_GATES)


class Reading(NamedTuple):
    """How far the sums were at some time.

    Attributes:
        now: that time.
        num_steps: steps planned.
        beside_prefill_s: seconds of steps that computed tokens that were known.
        gates_s: seconds in which each gate kept out the first request of the queue.
    """

    now: float
    num_steps: int
    beside_prefill_s: float
    gates_s: tuple[float, ...]


class StepClock:
    """Adds up what steps have in common. A step lasts until the next one is planned."""

    def __init__(self) -> None:
        self._last = Reading(0.0, 0, 0.0, _NOTHING)
        self._gate: int | None = None
        self._has_prefill = False

    def planned(self, now: float, *, grants: bool, gate: Gate | None, has_prefill: bool) -> None:
        """A step was planned.

        Args:
            now: when.
            grants: whether it computes anything.
            gate: what kept out the first request of the queue.
            has_prefill: whether it computes tokens that were known.
        """
        last = self.read(now)
        self._last = last._replace(num_steps=last.num_steps + grants)
        self._gate = None if gate is None else _GATES.index(gate)
        self._has_prefill = has_prefill

    def read(self, now: float) -> Reading:
        """The sums at a time that is not before the last plan."""
        last, gate = self._last, self._gate
        passed_s = now - last.now
        if gate is None and not self._has_prefill:
            return last._replace(now=now)
        gates_s = last.gates_s
        if gate is not None:
            gates_s = (*gates_s[:gate], gates_s[gate] + passed_s, *gates_s[gate + 1 :])
        return Reading(now, last.num_steps, last.beside_prefill_s + passed_s * self._has_prefill, gates_s)


def gates_between(begin: Reading, end: Reading) -> dict[str, float]:
    """Seconds by gate from one reading to the other; an empty name stands for none."""
    found = {
        gate.value: one - other
        for gate, one, other in zip(_GATES, end.gates_s, begin.gates_s, strict=True)
        if one != other
    }
    rest = end.now - begin.now - sum(found.values())
    return found | {"": rest} if rest > _ROUNDING_S else found
