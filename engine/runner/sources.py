"""What a runner's process is to compute with: picklable descriptions of models."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.runner.base import ModelInfo, PoolShape, StepModel
from engine.runner.scripted import ScriptedRunner
from engine.scheduler.plan import Plan, StepResult


class ModelSource(Protocol):
    """Loads a model where it is to compute. Must be picklable, and its class importable there."""

    def load(self, pool: PoolShape | None) -> StepModel:
        """Load the model and compute a warm-up step. Slow.

        Args:
            pool: what the KV pool must be, since the scheduler knows it by now; None = as configured.

        Raises:
            Exception: it can't be loaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class TorchSource:
    """A real model.

    Attributes:
        arguments: those of ``engine.models.registry.load_model``.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)

    def load(self, pool: PoolShape | None) -> StepModel:
        """See ``ModelSource``.

        Raises:
            ModelLoadError, PoolAllocationError: see ``engine.models.registry.load_model``.
        """
        from engine.models import registry

        arguments = dict(self.arguments)
        if pool is not None:  # what is free by now must not decide again
            arguments |= {"num_blocks": pool.num_blocks, "block_size": pool.block_size, "kv_bytes": None}
        model = registry.load_model(**arguments).model
        if model.masks is not None:
            model.masks.start()  # loaded beside the warm-up, and whatever comes after
        model.warm_up()
        return model


@dataclass(frozen=True, slots=True)
class ScriptedSource:
    """The scripted model, whose steps take ``step_s`` seconds."""

    num_blocks: int = 256
    block_size: int = 16
    context_tokens: int = 2048
    step_s: float = 0.0
    adapters: tuple[str, ...] = ()

    def load(self, pool: PoolShape | None) -> StepModel:
        """See ``ModelSource``."""
        return ScriptedModel(self)


class ScriptedModel:
    """A ``StepModel`` that computes what ``ScriptedRunner`` does, and blocks its thread meanwhile."""

    def __init__(self, source: ScriptedSource) -> None:
        self.runner = ScriptedRunner(
            source.num_blocks, source.block_size, source.context_tokens, adapters=source.adapters
        )
        self._step_s = source.step_s
        self.masks = self.runner.masks

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self.runner.info

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        return self.runner.pool

    def run(self, plan: Plan) -> StepResult:
        """Compute a plan."""
        if self._step_s:
            time.sleep(self._step_s)
        return self.runner.run(plan)
