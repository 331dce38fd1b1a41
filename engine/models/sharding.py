"""How a decoder is cut for tensor parallelism, and what its ranks need of each other. Pure.

Every rank holds whole heads and whole columns of the gated activation, so that
a layer needs two sums over ranks: after the attention's output projection and
after the MLP's last one. The vocabulary is cut, too, in the embedding and in
the LM head: the latter is a large part of the bytes that a decode reads, and a
replicated one would be read in full by every rank. Source: Shoeybi et al.,
"Megatron-LM", 2019, section 3. How ranks talk is not known here.
"""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.models.config import DecoderConfig
from engine.models.errors import ModelLoadError


class UnsuitableTensorParallel(ModelLoadError):
    """The model can't be cut for so many ranks.

    Args:
        field: what does not divide, is too small, or can't be cut.
        rule: what it must be.
        value: what it is.
        size: number of ranks.
    """

    def __init__(self, field: str, rule: str, value: int | str, size: int) -> None:
        super().__init__(f"engine.tensor_parallel {size} needs a model whose {field} {rule}, got {value}")
        self.field = field
        self.value = value


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of ``size``.

    Attributes:
        rank: 0..size-1; rank 0 samples.
        size: number of ranks; 1 = the whole model.
    """

    rank: int = 0
    size: int = 1

    def part(self, count: int) -> slice:
        """This rank's share of ``count`` things; shares differ by one at most, earlier ones are smaller."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def q_heads(self, config: DecoderConfig) -> slice:
        """This rank's query heads."""
        return self.part(config.num_q_heads)

    def kv_heads(self, config: DecoderConfig) -> slice:
        """The KV heads that this rank's query heads read; several ranks hold one where there are too few."""
        if self.size <= config.num_kv_heads:
            return self.part(config.num_kv_heads)
        head = self.rank * config.num_kv_heads // self.size
        return slice(head, head + 1)

    def config(self, config: DecoderConfig) -> DecoderConfig:
        """What this rank computes of the model ``config``: fewer heads, a narrower MLP.

        The vocabulary stays the whole one: ids are the same on every rank.

        Raises:
            UnsuitableTensorParallel: heads or columns don't divide by the number of ranks.
        """
        if self.size == 1:
            return config
        _check(config, self.size)
        kv_heads = self.kv_heads(config)
        return dataclasses.replace(
            config,
            num_q_heads=config.num_q_heads // self.size,
            num_kv_heads=kv_heads.stop - kv_heads.start,
            intermediate_size=config.intermediate_size // self.size,
            moe=config.moe
            and dataclasses.replace(config.moe, intermediate_size=config.moe.intermediate_size // self.size),
        )


def _check(config: DecoderConfig, size: int) -> None:
    for field in ("num_q_heads", "intermediate_size"):
        if getattr(config, field) % size:
            raise UnsuitableTensorParallel(field, f"divides by {size}", getattr(config, field), size)
    num_kv_heads = config.num_kv_heads
    if num_kv_heads % size and size % num_kv_heads:
        raise UnsuitableTensorParallel(
            "num_kv_heads", f"divides by {size}, or divides it", num_kv_heads, size
        )
    if config.qk_norm == "all":  # its mean goes over the heads of all ranks
        raise UnsuitableTensorParallel("qk_norm", "is by head, or none", config.qk_norm, size)
    if config.moe is not None and config.moe.intermediate_size % size:
        width = config.moe.intermediate_size
        raise UnsuitableTensorParallel("moe.intermediate_size", f"divides by {size}", width, size)
    if config.vocab_size < size:
        raise UnsuitableTensorParallel("vocab_size", f"is at least {size}", config.vocab_size, size)


class Peers(Protocol):
    """What a rank's decoder asks of the others. Every rank makes the same calls in the same order.

    Attributes:
        shard: which rank this is.
    """

    shard: Shard

    def add(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each of them; ``x`` may be overwritten.

        Raises:
            RuntimeError: a rank is gone, or too late.
        """
        ...

    def gather(self, x: Tensor, num_columns: int) -> Tensor:
        """Side by side, what every rank has of a matrix.

        Args:
            x: ``[rows, n]``, this rank's ``shard.part(num_columns)`` of the columns.
            num_columns: of the whole.

        Returns:
            On rank 0 ``[rows, num_columns]``, contiguous; elsewhere ``x``.

        Raises:
            RuntimeError: a rank is gone, or too late.
        """
        ...


class Alone:
    """``Peers`` of the only rank."""

    shard = Shard()

    def add(self, x: Tensor) -> Tensor:
        """``x``."""
        return x

    def gather(self, x: Tensor, num_columns: int) -> Tensor:
        """``x``."""
        return x
