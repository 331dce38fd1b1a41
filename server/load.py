"""Makes the runner and tokenizer that the settings ask for. The only place that imports a model.

With the runner in a process of its own, torch and the weights stay out of this one.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from engine.descriptors import is_shortage
from engine.errors import VorrangError
from engine.runner.child import ChildDied, RunnerLimits
from engine.runner.grammars.limits import GrammarLimits
from engine.runner.inline import InlineRunner
from engine.runner.process import ProcessRunner
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.runner.sources import ModelSource, ScriptedSource, TorchSource
from engine.text import Tokenizer
from engine.text_work.worker import FolderTokenizer
from server.app import Loaded
from server.isolation import TextWork
from server.settings import SCRIPTED, Settings

#: Errors that an operator can do something about, by name: their modules bring torch.
_OF_THE_MACHINE = {
    "CpuKernelsUnavailable",
    "NotBatchInvariant",
    "PoolAllocationError",
    "TritonKernelsUnavailable",
    "UnsupportedWeightType",
}


class ModelUnavailable(VorrangError):
    """The model can't be served; the message is for an operator."""


async def load(settings: Settings) -> Loaded:
    """Load the model and compute a warm-up step.

    Raises:
        ModelUnavailable: no model, a damaged one, one of an unknown kind, no memory for its KV,
            kernels that can't be had here, or its process died.

    Cancellation: a process is ended; a thread ends by itself.
    """
    with _explained():
        if settings.engine.runner == "process":
            return await _process(settings)
        return await asyncio.to_thread(_inline, settings)


async def _process(settings: Settings) -> Loaded:
    """The model loads in its process while the tokenizer does here and in its own; a failure ends all."""
    loaded = False
    try:
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(ProcessRunner.start(_source(settings), runner_limits(settings)))
            tokenizing = group.create_task(_tokenizers(settings))
        loaded = True
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        if not loaded:
            if _has_result(tokenizing) and (text := tokenizing.result()[1]) is not None:
                await text.close()
            if _has_result(starting):
                await starting.result().close()
    tokenizer, text = tokenizing.result()
    return Loaded(starting.result(), tokenizer, text)


def _has_result(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _tokenizers(settings: Settings) -> tuple[Tokenizer, TextWork | None]:
    """The tokenizer that makes text of outputs here, and what works on callers' texts in processes."""
    tokenizer = await asyncio.to_thread(_tokenizer, settings)
    if settings.model.path == SCRIPTED:
        return tokenizer, None
    special_in_chat = settings.model.special_tokens_in_chat == "special"
    return tokenizer, await TextWork.in_processes(FolderTokenizer(tokenizer.folder, special_in_chat))


def _inline(settings: Settings) -> Loaded:
    if settings.model.path == SCRIPTED:
        source = _scripted(settings)
        runner = ScriptedRunner(
            source.num_blocks, source.block_size, source.context_tokens, source.step_s, source.adapters
        )
        return Loaded(runner, ScriptedTokenizer())
    from engine.models import registry
    from engine.models.tokenizer import HfTokenizer

    loaded = registry.load(**_arguments(settings))
    if loaded.model.masks is not None:
        loaded.model.masks.start()
    loaded.model.warm_up()
    special_in_chat = settings.model.special_tokens_in_chat == "special"
    tokenizer = HfTokenizer(loaded.folder, special_in_chat=True) if special_in_chat else loaded.tokenizer
    return Loaded(InlineRunner(loaded.model), tokenizer)


def _tokenizer(settings: Settings) -> Any:
    if settings.model.path == SCRIPTED:
        return ScriptedTokenizer()
    from engine.models.registry import find_model
    from engine.models.tokenizer import HfTokenizer

    model = settings.model
    _, folder = find_model(model.path, revision=model.revision, offline=model.offline, tokenizer_only=True)
    return HfTokenizer(folder)


def _source(settings: Settings) -> ModelSource:
    return _scripted(settings) if settings.model.path == SCRIPTED else TorchSource(_arguments(settings))


def _scripted(settings: Settings) -> ScriptedSource:
    return ScriptedSource(
        num_blocks=settings.kv.num_blocks or 256,
        block_size=settings.kv.block_size,
        context_tokens=settings.scheduler.max_context_tokens,
        step_s=settings.engine.scripted_step_s,
        adapters=tuple(settings.model.adapters),
    )


def _arguments(settings: Settings) -> dict[str, Any]:
    """Those of ``engine.models.registry.load``."""
    return {
        "model": settings.model.path,
        "revision": settings.model.revision,
        "offline": settings.model.offline,
        "adapters": {name: str(folder) for name, folder in settings.model.adapters.items()},
        "num_threads": settings.engine.threads,
        "kv_bytes": settings.kv.bytes,
        "num_blocks": settings.kv.num_blocks,
        "block_size": settings.kv.block_size,
        "max_context": settings.scheduler.max_context_tokens,
        "weights": settings.model.weights,
        "kernels": settings.engine.kernels,
        "batch_invariant": settings.engine.batch_invariant,
        "device": settings.engine.device,
        "kv_share": settings.kv.device_share,
        "tensor_parallel": settings.engine.tensor_parallel,
        "max_step_tokens": settings.scheduler.max_step_tokens,
        "max_requests": settings.scheduler.max_running_requests,
        "hang_s": settings.engine.runner_hang_s,
        "step_s_max": settings.engine.runner_step_s_max,
        "start_s_max": settings.engine.runner_start_s_max,
        "grammar_limits": GrammarLimits(
            compile_s_max=settings.engine.grammar_compile_s_max,
            mask_s_max=settings.engine.grammar_mask_s_max,
        ),
    }


def runner_limits(settings: Settings) -> RunnerLimits:
    """How long to wait for a process, and how often to start another one."""
    engine = settings.engine
    return RunnerLimits(
        start_s_max=engine.runner_start_s_max,
        hang_s=engine.runner_hang_s,
        step_s_max=engine.runner_step_s_max,
        max_restarts=engine.runner_max_restarts,
    )


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What an operator can do something about becomes ``ModelUnavailable``."""
    from engine.models.errors import ModelLoadError

    try:
        yield
    except ModelLoadError as error:
        raise ModelUnavailable(str(error)) from error
    except ChildDied as error:
        raise ModelUnavailable(f"the runner's process did not start: {error}") from error
    except OSError as error:
        if not is_shortage(error):
            raise
        raise ModelUnavailable(f"a process can't be started: {error.strerror}") from error
    except Exception as error:
        if type(error).__name__ in _OF_THE_MACHINE:
            raise ModelUnavailable(str(error)) from error
        raise
