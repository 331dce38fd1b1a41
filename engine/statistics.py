"""What the engine says of itself between two steps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A look at the engine between two steps.

    Attributes:
        num_alive: requests alive, in the scheduler or in the inbox.
        num_running: requests holding a seat.
        num_waiting: requests waiting, preempted ones included.
        num_free_blocks: KV blocks nobody holds.
        num_blocks: KV blocks in the pool.
        num_steps: steps made.
        last_step_s: duration of the last step, in seconds.
        num_preemptions: preemptions so far.
        idle: whether the loop waits for work.
        heartbeat_age_s: seconds since the loop last came round; meaningless while idle.
        num_runner_losses: times the runner died and all KV with it.
        last_resume_s: seconds from the last of them to the end of the next step; 0 = none yet.
        num_computed_tokens: tokens computed so far, those of prompts and those computed again included.
        num_output_tokens: output tokens produced so far.
    """

    num_alive: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    last_step_s: float
    num_preemptions: int
    idle: bool
    heartbeat_age_s: float
    num_runner_losses: int = 0
    last_resume_s: float = 0.0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
