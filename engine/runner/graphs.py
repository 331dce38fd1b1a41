"""Decode steps as graphs: captured once for each padded size, replayed on inputs in fixed places.

What a graph costs to launch does not depend on how many kernels it holds, and a
decode of few rows is little more than launches. The books (which buffers, which
size, what is copied) are kept here for any device; what captures is a
``GraphBackend``, so that only ``CudaGraphs`` needs a card.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.runner.packing import StepInputs, StepShape, num_fixed_words, num_words, unpack
from kernels.ops import LogProbs


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """What every rank has of a step, on its device.

    Attributes:
        broken: ``[S]`` int64, how many of each request's tokens have hidden states that are not finite.
        logits: ``[R, vocab]`` float32; None on ranks other than 0, and where nothing samples.
        scores: of the N tokens of prompts that are scored; None on ranks other than 0, and without any.
    """

    broken: Tensor
    logits: Tensor | None
    scores: LogProbs | None = None


#: Computes a step on what its inputs hold at that time.
Compute = Callable[[StepInputs], StepOutputs]


class GraphBackend(Protocol):
    """Turns work into something that can be done again without its host code."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do ``work`` and return what does the same on the same tensors."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool: they are replayed one at a time. Never run on a card yet."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See ``GraphBackend``. The work is done twice first, aside: no capture may compile or set up."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class DecodeGraphs:
    """One graph for each bucket.

    Args:
        compute: what a step does.
        backend: captures it.
        buckets: sizes, ascending.
        table_width: entries of the widest row of block tables.
        fill: makes the words of a step of padding alone, for a shape; what is captured reads them.
        num_logits: columns of the logits; 0 where there are none to keep.
        device: where.
    """

    def __init__(
        self,
        compute: Compute,
        backend: GraphBackend,
        buckets: Sequence[int],
        table_width: int,
        fill: Callable[[StepShape], Tensor],
        num_logits: int,
        device: torch.device,
    ) -> None:
        self._compute = compute
        self._shapes = {size: StepShape(size, size, size, 0, table_width) for size in buckets}
        largest = self._shapes[max(buckets)]
        self._words = torch.zeros(num_words(largest), dtype=torch.int64, device=device)
        # One place for all sizes: results of each graph's own would add up to gigabytes of logits.
        self._broken = torch.zeros(largest.num_requests, dtype=torch.int64, device=device)
        self._logits = torch.zeros(largest.num_requests, num_logits, device=device) if num_logits else None
        self._replays: dict[int, Callable[[], None]] = {}
        for size in sorted(buckets, reverse=True):  # smaller ones then fit the memory of larger ones
            shape = self._shapes[size]
            self._words[: num_words(shape)] = fill(shape).to(device)
            self._replays[size] = backend.capture(lambda shape=shape: self._work(shape))  # type: ignore[misc]

    def covers(self, shape: StepShape) -> bool:
        """Whether there is a graph for a step; it must be a decode in which all requests sample."""
        own = self._shapes.get(shape.num_requests)
        return (
            own is not None
            and shape.num_tokens == shape.num_sampling == shape.num_requests
            and shape.table_width <= own.table_width
        )

    def run(self, shape: StepShape, words: Tensor) -> StepOutputs:
        """Compute the step in ``words``, which are on the device.

        Returns:
            Views that the next run overwrites.
        """
        own, size = self._shapes[shape.num_requests], shape.num_requests
        fixed = num_fixed_words(shape)
        self._words[:fixed].copy_(words[:fixed])
        tables = unpack(own, self._words[: num_words(own)]).attention.block_tables
        # What is right of the step's own tables is left from before: past the context, where nothing reads.
        tables[:, : shape.table_width].copy_(unpack(shape, words).attention.block_tables)
        self._replays[size]()
        return StepOutputs(self._broken[:size], None if self._logits is None else self._logits[:size])

    def _work(self, shape: StepShape) -> None:
        outputs = self._compute(unpack(shape, self._words[: num_words(shape)]))
        size = shape.num_requests
        self._broken[:size].copy_(outputs.broken)
        if self._logits is not None and outputs.logits is not None:
            self._logits[:size].copy_(outputs.logits)
