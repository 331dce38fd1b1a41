"""The border between the loop and the model.

A runner computes what a plan grants and decides nothing: no order, no
admission, no ending. ``StepModel`` is the synchronous half that a model
implements; ``Runner`` is what the loop awaits. This module knows no torch.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.scheduler.plan import Plan, StepResult


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served.

    Attributes:
        name: under which it is served.
        architecture: as in the model's config, such as ``LlamaForCausalLM``.
        vocab_size: number of token ids.
        context_tokens: longest prompt + output.
        eos_token_ids: ids that end an output.
    """

    name: str
    architecture: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Size of the KV pool: ``num_blocks`` blocks of ``block_size`` tokens."""

    num_blocks: int
    block_size: int


class StepModel(Protocol):
    """A model with its KV pool, computing one plan at a time on the calling thread."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        ...

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        ...

    def run(self, plan: Plan) -> StepResult:
        """Compute every grant of ``plan``; called by one thread at a time."""
        ...


class Runner(Protocol):
    """What the loop awaits."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        ...

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        ...

    async def execute(self, plan: Plan) -> StepResult:
        """Compute every grant of ``plan`` off the event loop.

        Raises:
            Exception: the whole step failed; the loop fails the granted requests and goes on.

        Cancellation: returns only after the computation in flight has ended.
        """
        ...

    async def close(self) -> None:
        """Release threads and memory; no ``execute`` afterwards."""
        ...
