"""``Peers`` over torch.distributed: gloo between processes on a CPU, NCCL between cards."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from engine.models.sharding import Shard

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class ProcessGroupPeers:
    """The other ranks, in processes of their own. One group a process.

    Args:
        shard: which rank this is.
        in_order: add in the order of the ranks, so that a row's sum does not depend on where in
            the batch it lies. Two ranks need nothing for that: addition is commutative.
    """

    def __init__(self, shard: Shard, *, in_order: bool) -> None:
        self.shard = shard
        self._in_order = in_order and shard.size > 2

    @classmethod
    def join(
        cls, shard: Shard, meeting_place: Path, device: torch.device, timeout_s: float, *, in_order: bool
    ) -> "ProcessGroupPeers":
        """Meet the other ranks.

        Args:
            shard: which rank this is.
            meeting_place: a file that is not there yet, the same for all ranks.
            device: where this rank computes.
            timeout_s: seconds to wait for the others, now and in each call.
            in_order: see the class.

        Raises:
            RuntimeError: they did not come.
        """
        if device.type == "cpu":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        dist.init_process_group(
            BACKENDS[device.type],
            init_method=f"file://{meeting_place}",
            rank=shard.rank,
            world_size=shard.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        return cls(shard, in_order=in_order)

    def add(self, x: Tensor) -> Tensor:
        """See ``Peers``."""
        if not self._in_order:
            dist.all_reduce(x)
            return x
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        dist.all_gather(parts, x)
        first, *others = parts
        for other in others:
            first.add_(other)
        return first

    def gather(self, x: Tensor, num_columns: int) -> Tensor:
        """See ``Peers``. The collective wants parts of one size, so the smaller ones are padded."""
        shard = self.shard
        parts = [Shard(rank, shard.size).part(num_columns) for rank in range(shard.size)]
        sizes = [part.stop - part.start for part in parts]
        widest = max(sizes)
        padded = F.pad(x, (0, widest - x.shape[1])).contiguous()
        if shard.rank:
            dist.gather(padded)
            return x
        received = [torch.empty_like(padded) for _ in sizes]
        dist.gather(padded, received)
        return torch.cat([each[:, :size] for each, size in zip(received, sizes, strict=True)], dim=1)
