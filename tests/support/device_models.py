"""``DeviceModel`` on CPU tensors, with graphs that are captured by remembering the work."""

from collections.abc import Callable
from pathlib import Path

import torch

from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.loader import load_weights
from engine.runner.base import ModelInfo
from engine.runner.device_runner import DeviceModel
from engine.runner.executor import StepExecutor
from engine.runner.packing import decode_buckets
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
    pool = KvPool(
        KvLayout(config.num_layers, config.num_kv_heads, config.head_dim), num_blocks + 1, block_size
    )
    for cache in (*pool.keys, *pool.values):
        cache.fill_(float("nan"))  # nothing may read what nobody wrote
    decoder = Decoder(config, load_weights(folder, config), 512)
    executor = StepExecutor(decoder, pool, torch.device("cpu"), max_requests=max_requests, num_threads=1)
    buckets = decode_buckets(max_requests) if backend is not None else ()
    if backend is not None:
        executor.capture_graphs(backend, buckets, 512 // block_size)
    return DeviceModel(info, executor, buckets=buckets)
