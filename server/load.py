"""Makes the runner and tokenizer that the settings ask for. The only place that imports a model."""

import structlog

from engine.errors import VorrangError
from server.app import Loaded
from server.settings import Settings

log = structlog.get_logger("vorrang.server")


class ModelUnavailable(VorrangError):
    """The model can't be served; the message is for an operator."""


def load(settings: Settings) -> Loaded:
    """Load the model and compute a warm-up step. Slow: call it off the event loop.

    Raises:
        ModelUnavailable: no model, a damaged one, one of an unknown kind, no memory for its KV, or
            kernels that can't be had here.
    """
    return _scripted(settings) if settings.engine.runner == "scripted" else _torch(settings)


def _scripted(settings: Settings) -> Loaded:
    from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer

    runner = ScriptedRunner(
        num_blocks=settings.kv.num_blocks or 256,
        block_size=settings.kv.block_size,
        context_tokens=settings.scheduler.max_context_tokens,
        step_s=settings.engine.scripted_step_s,
    )
    return Loaded(runner, ScriptedTokenizer())


def _torch(settings: Settings) -> Loaded:
    from engine.models import registry
    from engine.models.errors import ModelLoadError
    from engine.runner.inline import InlineRunner

    try:
        loaded = registry.load(
            settings.model.path,
            num_threads=settings.engine.threads,
            kv_bytes=settings.kv.bytes,
            num_blocks=settings.kv.num_blocks,
            block_size=settings.kv.block_size,
            max_context=settings.scheduler.max_context_tokens,
            weights=settings.model.weights,
            kernels=settings.engine.kernels,
        )
    except ModelLoadError as error:
        raise ModelUnavailable(str(error)) from error
    except Exception as error:
        # These import torch, which is to come after the tokenizer has begun.
        from kernels.cpu_build import CpuKernelsUnavailable
        from kv.pool import PoolAllocationError

        if isinstance(error, CpuKernelsUnavailable | PoolAllocationError):
            raise ModelUnavailable(str(error)) from error
        raise
    loaded.model.warm_up()
    chosen = loaded.kernels
    if settings.engine.kernels == "auto" and chosen.name == "reference":
        log.warning("kernels.slow", kernels=chosen.name, reason=chosen.reason)
    return Loaded(
        InlineRunner(loaded.model),
        loaded.tokenizer,
        after_ready=loaded.tokenizer.warm_up,
        computed_by=(
            f"{chosen.name} kernels with {chosen.weight_type} weights, threads {loaded.model.num_threads}"
        ),
    )
