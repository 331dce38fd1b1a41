"""What every rank computes of a step: from its words to hidden states, logits and KV, on one device."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from engine.models.decoder import Decoder
from engine.runner.batch import build_batch
from engine.runner.graphs import DecodeGraphs, GraphBackend, StepOutputs
from engine.runner.logprobs import score
from engine.runner.packing import (
    StepInputs,
    StepShape,
    num_fixed_words,
    num_words,
    pack,
    padded,
    shape_of,
    unpack,
)
from engine.runner.torch_runner import warm_up_plan
from kernels import ops
from kernels.ops import LogProbs
from kv.pool import KvPool


class StepExecutor:
    """A decoder with its KV pool on one device.

    The pool holds one block more than requests are given: the last one is scratch,
    into which the rows write that pad a batch to the size of a graph.

    Args:
        decoder: the model, or a rank's share of it.
        pool: its KV pool, with the scratch block.
        device: where both are.
        max_requests: seats.
        is_first: whether logits are wanted: on rank 0.
        num_threads: threads of one operation, on a CPU; None leaves torch's choice.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        device: torch.device,
        *,
        max_requests: int,
        is_first: bool = True,
        num_threads: int | None = None,
    ) -> None:
        assert pool.num_blocks > 1, "no block but the scratch block"
        self.device = device
        self.pool = pool
        self.graphs: DecodeGraphs | None = None
        #: Ids of the last step, by the row that sampled them; ``-1 - row`` as an id means one of them.
        #: Ranks that do not sample have them where a step asks for them.
        self.last_ids = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._decoder = decoder
        self._is_first = is_first
        self._num_threads = num_threads

    @property
    def scratch_block(self) -> int:
        """The block that is nobody's."""
        return self.pool.num_blocks - 1

    def capture_graphs(self, backend: GraphBackend, buckets: Sequence[int], table_width: int) -> None:
        """Capture a decode of each size; all ranks must do so together."""
        with torch.inference_mode():
            self.graphs = DecodeGraphs(
                self._compute,
                backend,
                buckets,
                table_width,
                self._padding,
                self._decoder.config.vocab_size if self._is_first else 0,
                self.device,
            )

    def compute(self, shape: StepShape, words: Tensor) -> tuple[StepInputs, StepOutputs]:
        """Compute a step.

        Args:
            shape: what it holds.
            words: its inputs, on the CPU; pinned, where the device is another.

        Returns:
            The inputs on the device, and what came of them; the next step may overwrite the latter.
        """
        if self.device.type == "cpu" and self._num_threads is not None:
            ops.set_num_threads(self._num_threads)  # each time: torch keeps it per calling thread
        with torch.inference_mode():
            on_device = words.to(self.device, non_blocking=True)
            inputs = unpack(shape, on_device)
            if self._decoder.peers.shard.size > 1 and bool((unpack(shape, words).token_ids < 0).any()):
                self._share_last_ids()
            if self.graphs is not None and self.graphs.covers(shape):
                return inputs, self.graphs.run(shape, on_device)
            return inputs, self._compute(inputs)

    def _share_last_ids(self) -> None:
        """All ranks have the ids of the first; each of them sees in the step's words that it is time."""
        own = self.last_ids if self._is_first else torch.zeros_like(self.last_ids)
        self.last_ids.copy_(self._decoder.peers.add(own))

    def _compute(self, inputs: StepInputs) -> StepOutputs:
        token_ids = resolved(inputs.token_ids, self.last_ids)
        hidden = self._decoder.forward(token_ids, inputs.attention, self.pool.keys, self.pool.values)
        broken = count_broken(hidden, inputs.attention.query_start)
        scores: LogProbs | None = None
        if inputs.score_rows.shape[0]:
            scores = score(
                inputs.score_rows,
                inputs.score_ids,
                inputs.num_score_top,
                lambda rows: self._decoder.logits(hidden, rows),
                is_first=self._is_first,
            )
        if not inputs.sample_rows.shape[0]:
            return StepOutputs(broken, None, scores)
        logits = self._decoder.logits(hidden, inputs.sample_rows)
        return StepOutputs(broken, logits if self._is_first else None, scores)

    def _padding(self, shape: StepShape) -> Tensor:
        """The words of a decode of nothing but padding."""
        one = build_batch(warm_up_plan(), self.pool.block_size)
        one.attention.block_tables.fill_(self.scratch_block)
        one.attention.slots.fill_(self.scratch_block * self.pool.block_size)
        batch = padded(one, shape.num_requests, self.scratch_block, self.pool.block_size)
        narrow = torch.zeros(num_words(shape_of(batch)), dtype=torch.int64)
        pack(batch, narrow)
        words = torch.zeros(num_words(shape), dtype=torch.int64)
        own = unpack(shape_of(batch), narrow).attention.block_tables
        fixed = num_fixed_words(shape)
        words[:fixed] = narrow[:fixed]
        unpack(shape, words).attention.block_tables[:, : own.shape[1]] = own
        return words


def resolved(token_ids: Tensor, last_ids: Tensor) -> Tensor:
    """``token_ids`` with each ``-1 - row`` replaced by ``last_ids[row]``, without a look from the host."""
    rows = (-1 - token_ids).clamp_(min=0, max=last_ids.shape[0] - 1)
    return torch.where(token_ids < 0, last_ids.index_select(0, rows), token_ids)


def count_broken(hidden: Tensor, query_start: Tensor) -> Tensor:
    """How many of each request's tokens have hidden states that are not finite.

    Args:
        hidden: ``[T, hidden]``, any floating point type.
        query_start: ``[S + 1]`` int64.

    Returns:
        ``[S]`` int64.
    """
    # The sum is not finite when an element is not; in float32, so that sums of half floats don't overflow.
    is_broken = ~hidden.sum(dim=-1, dtype=torch.float32).isfinite()
    before = F.pad(is_broken.cumsum(0), (1, 0))
    return before.index_select(0, query_start[1:]) - before.index_select(0, query_start[:-1])
