"""``DeviceModel`` on CPU tensors, with graphs that are captured by remembering the work."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.loader import load_weights
from engine.models.sharding import Alone, Peers
from engine.runner.base import ModelInfo, PoolShape, StepModel
from engine.runner.device_runner import DeviceModel, Launched
from engine.runner.executor import StepExecutor
from engine.runner.grammars.model_masks import masks_of
from engine.runner.packing import decode_buckets
from engine.runner.sources import TorchSource
from engine.scheduler.plan import Plan, StepResult
from kv.pool import KvLayout, KvPool


class Remembered:
    """A ``GraphBackend`` for any device: replaying does the work again. Counts both."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        work()

        def replay() -> None:
            self.num_replayed += 1
            with torch.inference_mode():
                work()

        return replay


def device_executor(
    folder: Path, peers: Peers, *, num_blocks: int = 64, block_size: int = 16, max_requests: int = 8
) -> StepExecutor:
    """What a rank computes with, on the CPU."""
    whole, shard = DecoderConfig.from_folder(folder), peers.shard
    config = shard.config(whole)
    pool = KvPool(
        KvLayout(config.num_layers, config.num_kv_heads, config.head_dim), num_blocks + 1, block_size
    )
    for cache in (*pool.keys, *pool.values):
        cache.fill_(float("nan"))  # nothing may read what nobody wrote
    decoder = Decoder(config, load_weights(folder, whole, shard=shard), 512, peers)
    return StepExecutor(
        decoder,
        pool,
        torch.device("cpu"),
        max_requests=max_requests,
        is_first=shard.rank == 0,
        num_threads=1,
    )


def device_model(
    folder: Path,
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_requests: int = 8,
    backend: Remembered | None = None,
) -> DeviceModel:
    """A model on the CPU; with a ``backend``, decodes are padded and replayed."""
    config = DecoderConfig.from_folder(folder)
    info = ModelInfo("tiny", config.architecture, config.vocab_size, 512, config.eos_token_ids)
    executor = device_executor(
        folder, Alone(), num_blocks=num_blocks, block_size=block_size, max_requests=max_requests
    )
    buckets = decode_buckets(max_requests) if backend is not None else ()
    if backend is not None:
        executor.capture_graphs(backend, buckets, 512 // block_size)
    return DeviceModel(info, executor, buckets=buckets, masks=masks_of(info, folder))


@dataclass(frozen=True, slots=True)
class SlowDeviceSource:
    """A ``ModelSource`` whose steps count as computed only when nothing follows them for a while."""

    folder: str
    num_blocks: int
    num_ranks: int = 1

    def load(self, pool: PoolShape | None) -> StepModel:
        if self.num_ranks == 1:
            return SlowDevice(device_model(Path(self.folder), num_blocks=self.num_blocks))
        arguments = {"num_threads": 1, "num_blocks": self.num_blocks, "kernels": "reference"}
        model = TorchSource({"model": self.folder, "tensor_parallel": self.num_ranks, **arguments}).load(pool)
        assert isinstance(model, DeviceModel)
        return SlowDevice(model)


class SlowDevice:
    """A ``DeviceModel`` on the CPU behaves as one on a card does that takes its time.

    Writes a log line for each plan that is launched with tokens which nobody knows yet.
    """

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self.info = model.info
        self.pool = model.pool
        self.masks = model.masks

    def run(self, plan: Plan) -> StepResult:
        return self._model.run(plan)

    def launch(self, plan: Plan) -> "SlowTicket":
        if any(grant.has_unknown_token for grant in plan.grants):
            structlog.get_logger("test").info("launched.ahead", step=plan.step)
        return SlowTicket(self._model.launch(plan))

    def collect(self, ticket: "SlowTicket") -> StepResult:
        return self._model.collect(ticket.launched)


class SlowTicket:
    """Computed when it has been asked after a hundred times."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self._num_looks = 0

    @property
    def is_computed(self) -> bool:
        self._num_looks += 1
        return self._num_looks > 100
