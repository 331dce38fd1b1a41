"""Ranks of tensor parallelism as threads of one process, for tests of what each of them computes."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.models.sharding import Shard


class _Meeting:
    """Where the ranks lay down what they have; all of them see everything."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._held: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._held[rank] = x
        self._barrier.wait()
        seen = [tensor.clone() for tensor in self._held]
        self._barrier.wait()
        return seen

    def abort(self) -> None:
        self._barrier.abort()


class ThreadPeers:
    """``Peers`` that meet in memory; sums are in the order of the ranks."""

    def __init__(self, meeting: _Meeting, shard: Shard) -> None:
        self.shard = shard
        self._meeting = meeting

    def add(self, x: Tensor) -> Tensor:
        first, *others = self._meeting.exchange(self.shard.rank, x)
        for other in others:
            first += other
        return first

    def gather(self, x: Tensor, num_columns: int) -> Tensor:
        assert x.shape[1] == len(range(num_columns)[self.shard.part(num_columns)])
        parts = self._meeting.exchange(self.shard.rank, x)
        return torch.cat(parts, dim=1) if self.shard.rank == 0 else x


def on_every_rank(size: int, work: Callable[[ThreadPeers], Any]) -> list[Any]:
    """What ``work`` returns on each rank; raises what the first of them raised."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadPeers(meeting, Shard(rank, size)))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    return results
