"""What the scheduler is told once, at its start."""

import math
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.priority import CLASSES


class InvalidSetting(InvalidRequest):
    """A setting breaks a rule; the message names setting, rule and value."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of the scheduler.

    Attributes:
        policy: ``priority`` or ``fcfs``.
        max_running_requests: seats in the running batch.
        max_step_tokens: tokens one step may process; at least one per seat, so
            that decodes never crowd out a more urgent request.
        max_chunk_tokens: most prompt tokens one request computes in one step.
        max_context_tokens: longest prompt + output.
        max_waiting_requests: longest queue of requests that were never admitted.
        preempt_level_gap: levels by which a request must be more urgent to preempt on arrival.
        watermark: share of the blocks that an ordinary admission leaves free.
        watermark_exempt_level: requests at this level or a more urgent one ignore the watermark.

    Raises:
        InvalidSetting: a value is out of range.
    """

    policy: str = "priority"
    max_running_requests: int = 16
    max_step_tokens: int = 512
    max_chunk_tokens: int = 256
    max_context_tokens: int = 2048
    max_waiting_requests: int = 1024
    preempt_level_gap: int = 1
    watermark: float = 0.02
    watermark_exempt_level: int = CLASSES[0].least_urgent_level

    def __post_init__(self) -> None:
        for name in (
            "max_running_requests", "max_chunk_tokens", "max_waiting_requests", "preempt_level_gap",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidSetting(f"scheduler.{name}", "must be at least 1", getattr(self, name))
        if self.max_step_tokens < self.max_running_requests:
            raise InvalidSetting(
                "scheduler.max_step_tokens",
                f"must be at least max_running_requests ({self.max_running_requests})",
                self.max_step_tokens,
            )
        if self.max_context_tokens < 2:
            raise InvalidSetting(
                "scheduler.max_context_tokens", "must be at least 2", self.max_context_tokens
            )
        if not 0 <= self.watermark < 1:
            raise InvalidSetting("scheduler.watermark", "must be at least 0 and below 1", self.watermark)

    def watermark_blocks(self, num_blocks: int) -> int:
        """The watermark in blocks of a pool of ``num_blocks``."""
        return math.ceil(self.watermark * num_blocks)
