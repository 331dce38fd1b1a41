"""What operators see: typed values of ControlService. Their decoders are in ``admin_client``."""

from dataclasses import dataclass

from clients.python.events import Limits, Usage


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is.

    Attributes:
        version: of the server program.
        model: name of the served model.
        policy: scheduling policy in force.
        discipline: way a step is filled.
        limits: what it accepts.
        max_running_requests: seats.
        max_step_tokens: tokens one step may process.
        block_size: tokens per KV block.
        num_blocks: KV blocks in the pool.
        started_at: when it started, as RFC 3339.
    """

    version: str
    model: str
    policy: str
    discipline: str
    limits: Limits
    max_running_requests: int
    max_step_tokens: int
    block_size: int
    num_blocks: int
    started_at: str


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """How many requests of a class are where."""

    class_name: str
    num_waiting: int = 0
    num_running: int = 0
    num_preempted: int = 0
    num_parked: int = 0

    @property
    def num_queued(self) -> int:
        """Requests without a seat that want one."""
        return self.num_waiting + self.num_preempted


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """How much there is to do. Counts of tokens, steps and preemptions are from the server's start on.

    Attributes:
        classes: most urgent first.
        num_seats: places in the running batch; 0 = a server of an older version, which does not say.
        num_free_seats: those nobody holds.
        num_blocks: KV blocks in the pool.
        num_free_blocks: those free, or held by the prefix cache alone.
        last_step_s: duration of the last step.
        num_steps: steps made.
        num_computed_tokens: tokens computed, again after preemptions included.
        num_output_tokens: output tokens produced.
        num_preemptions: preemptions.
        num_runner_losses: times the runner was lost.
        draining: no new requests are taken.
    """

    classes: tuple[ClassLoad, ...]
    num_seats: int
    num_free_seats: int
    num_blocks: int
    num_free_blocks: int
    last_step_s: float
    num_steps: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_runner_losses: int
    draining: bool

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks that requests hold, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that is alive, as operators see it.

    Attributes:
        server_request_id: made by the server; what commands name.
        request_id: the client's.
        tenant: whose.
        level: in force.
        state: "WAITING", "PREFILL", "DECODE", "PREEMPTED" or "PARKED".
        usage: what it has cost so far.
        age_s: seconds since it arrived.
        num_blocks: KV blocks it holds.
        label: the client's.
        max_output_tokens: longest output it may have; 0 = an older server does not say.
        num_computed_tokens: tokens whose KV it holds.
        num_known_tokens: prompt and output so far.
        starved: it waited longer than its class may, and is served before its level says.
    """

    server_request_id: str
    request_id: str
    tenant: str
    level: int
    state: str
    usage: Usage
    age_s: float
    num_blocks: int
    label: str
    max_output_tokens: int
    num_computed_tokens: int
    num_known_tokens: int
    starved: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """What was there when draining began."""

    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Tokens granted to a request in a step."""

    server_request_id: str
    num_computed_tokens: int
    num_tokens: int
    level: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """A preemption in a step; ``beneficiary_id`` is empty where it was for nobody in particular."""

    server_request_id: str
    reason: str
    beneficiary_id: str
    num_blocks: int
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What the scheduler decided for a step; see ``WatchDecisionsResponse``.

    Attributes:
        step: its number, from 1.
        planned_at: when, as RFC 3339.
        grants: most urgent first.
        preemptions: who lost a seat.
        bound_gate: what kept the most urgent waiting request out; empty = nothing waits.
        num_waiting: requests waiting after it was planned.
        num_free_blocks: KV blocks free then.
        num_lost_steps: steps left out before this one, because we read too slowly.
    """

    step: int
    planned_at: str
    grants: tuple[Grant, ...]
    preemptions: tuple[Preemption, ...]
    bound_gate: str
    num_waiting: int
    num_free_blocks: int
    num_lost_steps: int
