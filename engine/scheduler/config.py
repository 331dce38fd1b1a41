"""What the scheduler is told once, at its start."""

import math
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.priority import class_of


class InvalidSetting(InvalidRequest):
    """A setting breaks a rule; the message names setting, rule and value."""


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """Rules for one class.

    Attributes:
        max_wait_s: seconds without a token after which a request is starved and served by the reserved share.
        watermark: share of the blocks that an admission leaves free.
        max_waiting_requests: longest queue of requests that were never admitted.
        max_waiting_tokens: most prompt tokens in that queue.
    """

    max_wait_s: float
    watermark: float
    max_waiting_requests: int = 100_000
    max_waiting_tokens: int = 100_000_000


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """Rules for one tenant.

    Attributes:
        name: of the tenant.
        max_running_requests: seats it may hold; None = as many as there are.
        max_running_tokens: prompt + output tokens, at their longest, of what is in seats; None = any number.
        max_waiting_requests: its longest queue; None = what holds for every tenant.
        max_waiting_tokens: most prompt tokens in that queue; None = what holds for every tenant.
        weight: its share relative to others under the policy ``fair``.
    """

    name: str
    max_running_requests: int | None = None
    max_running_tokens: int | None = None
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of the scheduler.

    Attributes:
        policy: ``priority``, ``fair`` or ``fcfs``.
        discipline: how a step is filled: ``unified``, ``prefill_first`` or ``static``.
        preempt_for_arrivals: whether a more urgent arrival may evict; off only to show what it brings.
        max_running_requests: seats in the running batch.
        max_step_tokens: tokens one step may process; at least one per seat, so
            that decodes never crowd out a more urgent request.
        max_chunk_tokens: most prompt tokens one request computes in one step.
        max_scored_tokens: most prompt tokens of a step whose log probabilities are told, of all requests
            together, one each at least: such a token takes a row as long as the vocabulary.
        max_context_tokens: longest prompt + output.
        max_waiting_requests: longest queue of requests that were never admitted.
        max_tenant_waiting_requests: the same for one tenant.
        max_tenant_waiting_tokens: most prompt tokens of one tenant in the queue.
        preempt_level_gap: levels by which a request must be more urgent to preempt on arrival.
        resume_quantum_tokens: output tokens a resumed request may produce before an arrival evicts it again.
        max_preemptions: preemptions after which a request is admitted for good.
        max_preemptions_per_step: preemptions for arrivals in one step; a single arrival may need more.
        prefix_wait_tokens: tokens of a prefix that somebody computes right now and that are worth
            waiting for. A step's fixed cost in tokens; 160 to 370 for an 8B model on today's cards.
        max_bypass: admissions of others that may pass a request that does not fit.
        speculation_tokens: most tokens of a request that are guessed and verified in one step; 0 = none.
            Not together with plans that are made ahead.
        speculation_max_running: guess only while at most so many decode; a batch fills the step by itself.
        starved_share: share of seats, blocks and prefill tokens kept for starved requests; at least
            one request's.
        interactive, standard, batch: rules by class.
        tenants: rules of the tenants that have any of their own.
        prefill_first_max_input_tokens: tokens a step of prefills may process, besides ``max_step_tokens``.
        prefill_first_max_chunk_tokens: the same again, as the size into which prompts are cut.
        prefill_first_max_requests: prefills in one step.
        prefill_first_conservativeness: greater keeps more room for outputs; below 1 retracts more often.
        prefill_first_max_decode_gap_ms: a decode that has waited longer goes before prefills; None = never.

    Raises:
        InvalidSetting: a value is out of range.
    """

    policy: str = "priority"
    discipline: str = "unified"
    preempt_for_arrivals: bool = True
    max_running_requests: int = 16
    max_step_tokens: int = 512
    max_chunk_tokens: int = 256
    max_scored_tokens: int = 32
    max_context_tokens: int = 2048
    max_waiting_requests: int = 1024
    max_tenant_waiting_requests: int = 100_000
    max_tenant_waiting_tokens: int = 100_000_000
    preempt_level_gap: int = 1
    resume_quantum_tokens: int = 16
    max_preemptions: int = 8
    max_preemptions_per_step: int = 8
    prefix_wait_tokens: int = 256
    max_bypass: int = 32
    speculation_tokens: int = 0
    speculation_max_running: int = 8
    starved_share: float = 0.1
    interactive: ClassConfig = ClassConfig(30.0, 0.0)
    standard: ClassConfig = ClassConfig(120.0, 0.02)
    batch: ClassConfig = ClassConfig(600.0, 0.02)
    tenants: tuple[TenantConfig, ...] = ()
    prefill_first_max_input_tokens: int = 16384
    prefill_first_max_chunk_tokens: int = 8192
    prefill_first_max_requests: int = 1024
    prefill_first_conservativeness: float = 1.0
    prefill_first_max_decode_gap_ms: float | None = None

    def __post_init__(self) -> None:
        at_least = {name: 1 for name in self.__slots__ if name.startswith(("max_", "prefill_first_max_"))}
        at_least |= {
            "preempt_level_gap": 1,
            "resume_quantum_tokens": 0,
            "prefix_wait_tokens": 1,
            "max_bypass": 0,
            "speculation_tokens": 0,
            "speculation_max_running": 1,
            "max_context_tokens": 2,
        }
        del at_least["prefill_first_max_decode_gap_ms"]
        for name, least in at_least.items():
            _check(
                f"scheduler.{name}",
                getattr(self, name) >= least,
                f"must be at least {least}",
                getattr(self, name),
            )
        _check(
            "scheduler.max_step_tokens",
            self.max_step_tokens >= self.max_running_requests,
            f"must be at least max_running_requests ({self.max_running_requests})",
            self.max_step_tokens,
        )
        _check(
            "scheduler.starved_share",
            0 < self.starved_share < 1,
            "must be between 0 and 1",
            self.starved_share,
        )
        for name in ("prefill_first_conservativeness", "prefill_first_max_decode_gap_ms"):
            value = getattr(self, name)
            _check(f"scheduler.{name}", value is None or value > 0, "must be greater than 0", value)
        for name in ("interactive", "standard", "batch"):
            self._check_class(name, getattr(self, name))
        names = [tenant.name for tenant in self.tenants]
        _check("tenants", len(set(names)) == len(names), "must have names of their own", names)
        for tenant in self.tenants:
            self._check_tenant(tenant)

    @staticmethod
    def _check_class(name: str, config: ClassConfig) -> None:
        where = f"scheduler.{name}"
        _check(f"{where}.max_wait_s", config.max_wait_s > 0, "must be greater than 0", config.max_wait_s)
        _check(
            f"{where}.watermark",
            0 <= config.watermark < 1,
            "must be at least 0 and below 1",
            config.watermark,
        )
        for limit in ("max_waiting_requests", "max_waiting_tokens"):
            value = getattr(config, limit)
            _check(f"{where}.{limit}", value >= 1, "must be at least 1", value)

    @staticmethod
    def _check_tenant(config: TenantConfig) -> None:
        where = f"tenants.{config.name}"
        for limit in (name for name in config.__slots__ if name.startswith("max_")):
            value = getattr(config, limit)
            _check(f"{where}.{limit}", value is None or value >= 1, "must be at least 1", value)
        _check(f"{where}.weight", config.weight > 0, "must be greater than 0", config.weight)

    def class_config(self, level: int) -> ClassConfig:
        """Rules for the class of a level."""
        rules: ClassConfig = getattr(self, class_of(level).name)
        return rules

    @property
    def num_reserved_seats(self) -> int:
        """Seats kept for starved requests while any waits."""
        return math.ceil(self.starved_share * self.max_running_requests)

    def num_reserved_blocks(self, num_blocks: int) -> int:
        """Of the blocks of the pool, those that starved requests may take from everybody else."""
        return math.ceil(self.starved_share * num_blocks)

    def num_reserved_tokens(self, budget_tokens: int) -> int:
        """Of the tokens left for prefill, those kept for starved requests."""
        return math.ceil(self.starved_share * budget_tokens)


def _check(field: str, holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise InvalidSetting(field, rule, value)
