"""One rank of a model on a device: its weights, then its peers, then its KV pool. The only rank, too.

Rank 0 drives these steps here and, by messages, in the processes of the others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.errors import ModelLoadError, UnsupportedModel
from engine.models.loader import load_weights
from engine.models.sharding import Peers, Shard
from engine.runner.cores import default_threads
from engine.runner.executor import StepExecutor
from engine.runner.graphs import CudaGraphs
from engine.runner.memory import DeviceMemory
from engine.runner.packing import decode_buckets
from kernels import ops, registry
from kv.pool import KvLayout, KvPool, default_bytes, num_blocks_for

if TYPE_CHECKING:
    from engine.models.checkpoint import Auto
    from kernels.ops import WeightType


class DeviceUnavailable(ModelLoadError):
    """There is no such device here.

    Args:
        rule: what was asked for, by setting.
        found: what there is.
    """

    def __init__(self, rule: str, found: str) -> None:
        super().__init__(f"{rule}, but {found}")


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What every rank of a model needs to know. Picklable.

    Attributes:
        folder: with config and safetensors.
        context_tokens: longest prompt + output.
        weights: how matrices are kept.
        kernels: implementation of the operations; None = the process's choice.
        batch_invariant: a row's bits must not depend on its neighbours.
        device: ``cpu`` or ``cuda``.
        num_threads: threads of one operation, on a CPU; None = as many as may run at once, by ranks.
        block_size: tokens of a block.
        kv_bytes: KV pool of one rank; None = chosen here.
        kv_share: of the device's memory that weights and the largest step leave, what the pool gets.
        max_step_tokens: tokens of the largest step.
        max_requests: seats.
        step_s_max: seconds to wait for the other ranks.
    """

    folder: Path
    context_tokens: int
    weights: "WeightType | Auto"
    kernels: str | None
    batch_invariant: bool
    device: str
    num_threads: int | None
    block_size: int
    kv_bytes: int | None
    kv_share: float
    max_step_tokens: int
    max_requests: int
    step_s_max: float


class Rank:
    """Loads its share of the weights when it is made. ``join``, then ``allocate``, then it computes.

    Args:
        options: what to load, and how.
        shard: whose share.

    Attributes:
        executor: computes steps, once there is a pool.

    Raises:
        ModelLoadError: the model can't be read or cut, or the device is not there.
    """

    executor: StepExecutor

    def __init__(self, options: RankOptions, shard: Shard) -> None:
        self._options = options
        self._shard = shard
        self.device = _device(options.device, shard)
        if options.kernels is not None:
            registry.use(options.kernels)
        ops.set_batch_invariant(options.batch_invariant)
        #: Threads of one operation, on a CPU.
        self.num_threads = options.num_threads or max(1, default_threads() // shard.size)
        whole = DecoderConfig.from_folder(options.folder)
        if whole.moe is not None and self.device.type == "cuda":  # graphs can't hold what rows choose
            raise UnsupportedModel("architecture on a card", "without experts", whole.architecture)
        self._config = shard.config(whole)
        self._weights = load_weights(options.folder, whole, options.weights, shard=shard, device=self.device)
        with torch.inference_mode():
            one = ops.embed(torch.zeros(1, dtype=torch.int64, device=self.device), self._weights.embedding)
        config = self._config
        # Activations have the dtype that the kernels give them, and KV is made of activations.
        self._layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, one.dtype)

    @property
    def weight_type(self) -> str:
        """How the layers' matrices are kept."""
        return self._weights.layers[0].qkv.weight.weight_type

    def join(self, peers: Peers | None) -> None:
        """Make the decoder, which can talk to the other ranks from now on."""
        self._decoder = Decoder(self._config, self._weights, self._options.context_tokens, peers)

    def allocate(self, num_blocks: int) -> None:
        """Make a KV pool of ``num_blocks`` blocks and a scratch block, in the place of an earlier one.

        Raises:
            PoolAllocationError: it does not fit.
        """
        if hasattr(self, "executor"):
            del self.executor
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)  # packing weights needs more than any step
        options = self._options
        pool = KvPool(self._layout, num_blocks + 1, options.block_size, self.device)
        self.executor = StepExecutor(
            self._decoder,
            pool,
            self.device,
            max_requests=options.max_requests,
            is_first=self._shard.rank == 0,
            num_threads=self.num_threads,
        )

    def num_blocks_wanted(self) -> int:
        """Blocks for requests that this rank has memory for; on a card, after its largest step.

        Raises:
            PoolAllocationError: not even one.
        """
        options = self._options
        num_bytes = options.kv_bytes
        if num_bytes is None and self.device.type == "cuda":
            num_bytes = self._memory().pool_bytes(options.kv_share)
        elif num_bytes is None:
            num_bytes = default_bytes() // self._shard.size  # they share this machine
        scratch_bytes = self._layout.token_bytes * options.block_size
        return num_blocks_for(max(0, num_bytes - scratch_bytes), self._layout, options.block_size)

    def capture_graphs(self) -> tuple[int, ...]:
        """Capture decodes of all sizes up to the number of seats, on a card; which sizes."""
        if self.device.type != "cuda":
            return ()
        options = self._options
        buckets = decode_buckets(options.max_requests)
        width = -(-options.context_tokens // options.block_size)
        self.executor.capture_graphs(CudaGraphs(), buckets, -(-width // 16) * 16)
        return buckets

    def _memory(self) -> DeviceMemory:
        """As it stands after the largest step, whose pool counts as free. Never run on a card yet."""
        torch.cuda.synchronize(self.device)
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - self.executor.pool.num_bytes
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(free_bytes, torch.cuda.memory_reserved(self.device), peak_bytes)


def device_for(device: str, kernels: str) -> str:
    """``cpu`` or ``cuda``: what ``auto`` means with the kernels of this name.

    Raises:
        DeviceUnavailable: ``cuda`` was asked for, and there is none, or the kernels can't use it.
    """
    if device == "cuda" and kernels == "cpu":
        raise DeviceUnavailable("engine.device is cuda", "the kernels are those for a CPU")
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable("engine.device is cuda", "torch sees no card")
    if device != "auto":
        return device
    return "cuda" if kernels != "cpu" and torch.cuda.is_available() else "cpu"


def _device(kind: str, shard: Shard) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() < shard.size:
        raise DeviceUnavailable(
            f"engine.tensor_parallel is {shard.size}", f"torch sees {torch.cuda.device_count()} cards"
        )
    torch.cuda.set_device(shard.rank)
    return torch.device("cuda", shard.rank)
