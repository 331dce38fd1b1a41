"""What each operation reads, writes and computes on a card, and how near to the card's limits it comes.

The cases are those of a decoder layer at the batches that serving meets. Limits are
measured in the same run: a copy of memory, and matrix products of the size that
torch's library is best at. Works on any device, with any implementation of
``kernels.ops`` and any clock.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import ops
from kernels.ops import SamplingInputs, WeightType

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of the decoder whose operations are measured.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the gated activation.
        num_q_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: elements of a head.
        vocab: rows of the LM head.
        num_layers: decoder layers.
        block_size: tokens of a KV block.
    """

    hidden: int
    intermediate: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_layers: int
    block_size: int = 16

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads."""
        return self.num_kv_heads * self.head_dim


#: Llama 3.1 8B, by its config.json.
EIGHT_BILLION = Shape(4096, 14336, 32, 8, 128, 128256, 32)


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one size.

    Attributes:
        name: operation and size.
        work: does it once.
        num_bytes: memory it must read and write, each once.
        num_flops: additions and multiplications it must do.
        per_step: how often a decode step of the whole model does it.
    """

    name: str
    work: Work
    num_bytes: int
    num_flops: int
    per_step: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does at its best, measured.

    Attributes:
        copy_bytes_per_s: bytes read and written by a copy.
        matmul_flops: additions and multiplications a second in a matrix product.
    """

    copy_bytes_per_s: float
    matmul_flops: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A case and what it took.

    Attributes:
        case: which.
        seconds: median.
        ceilings: the device's.
    """

    case: Case
    seconds: float
    ceilings: Ceilings

    @property
    def bandwidth_share(self) -> float:
        """Of the copy's bandwidth."""
        return self.case.num_bytes / self.seconds / self.ceilings.copy_bytes_per_s

    @property
    def flops_share(self) -> float:
        """Of the matrix product's rate."""
        return self.case.num_flops / self.seconds / self.ceilings.matmul_flops

    @property
    def roofline_share(self) -> float:
        """How near the time is to what the nearer of both limits allows; 1 = there."""
        return max(self.bandwidth_share, self.flops_share)


class Timer(Protocol):
    """Times work on a device."""

    def seconds(self, work: Work) -> float:
        """Of one run, from an idle device to an idle device."""
        ...


class HostTimer:
    """The clock of the host; for a CPU, where work has ended when its call returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def seconds(self, work: Work) -> float:
        """See ``Timer``."""
        begin = self._clock()
        work()
        return self._clock() - begin


class CudaTimer:
    """Events of the card. Clears its cache before each run, which weights would not be in either.

    Never run on a card yet.
    """

    def __init__(self, cache_bytes: int = 256 * 2**20) -> None:
        self._flush = torch.empty(cache_bytes, dtype=torch.uint8, device="cuda")

    def seconds(self, work: Work) -> float:
        """See ``Timer``."""
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        self._flush.zero_()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def median_seconds(work: Work, timer: Timer, repeats: int) -> float:
    """Median of ``repeats`` runs, after one that compiles and warms."""
    work()
    return statistics.median(timer.seconds(work) for _ in range(repeats))


def ceilings(
    device: torch.device, dtype: torch.dtype, timer: Timer, repeats: int, *, copy_bytes: int, matmul_size: int
) -> Ceilings:
    """Measure the limits."""
    source = torch.ones(copy_bytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    left = torch.randn(matmul_size, matmul_size, device=device, dtype=dtype)
    right = torch.randn(matmul_size, matmul_size, device=device, dtype=dtype)
    copy_s = median_seconds(lambda: target.copy_(source), timer, repeats)
    matmul_s = median_seconds(lambda: torch.mm(left, right), timer, repeats)
    return Ceilings(2 * source.nbytes / copy_s, 2 * matmul_size**3 / matmul_s)


def decode_cases(
    shape: Shape, num_requests: int, context: int, device: torch.device, weight_type: WeightType
) -> Iterator[Case]:
    """The operations of a decode step of ``num_requests``, with ``context`` tokens each."""
    inputs = _Inputs(shape, device, weight_type)
    yield from inputs.rows(num_requests)
    yield from inputs.attention(
        [1] * num_requests, [context] * num_requests, f"decode {num_requests}x{context}"
    )
    yield from inputs.sampling(num_requests)


def prefill_cases(
    shape: Shape, num_tokens: int, context: int, device: torch.device, weight_type: WeightType
) -> Iterator[Case]:
    """The operations of a chunk of ``num_tokens`` at the end of ``context``."""
    inputs = _Inputs(shape, device, weight_type)
    yield from inputs.rows(num_tokens)
    yield from inputs.attention([num_tokens], [context], f"prefill {num_tokens} of {context}")


class _Inputs:
    """Random operands of every operation."""

    def __init__(self, shape: Shape, device: torch.device, weight_type: WeightType) -> None:
        self._shape = shape
        self._device = device
        self._weight_type = weight_type
        embedding = ops.pack_linear(self._randn(16, shape.hidden), weight_type)
        one = ops.embed(torch.zeros(1, dtype=torch.int64, device=device), embedding)
        self.dtype = one.dtype  # of activations: the implementation's choice

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self._device).mul_(0.05)

    def _activations(self, *size: int) -> Tensor:
        return self._randn(*size).to(self.dtype)

    def rows(self, num_rows: int) -> Iterator[Case]:
        """Norm, activation and the four matrix products of a layer."""
        shape, element = self._shape, self.dtype.itemsize
        x, residual = self._activations(num_rows, shape.hidden), self._activations(num_rows, shape.hidden)
        weight = torch.ones(shape.hidden, device=self._device)
        yield Case(
            f"add_rms_norm {num_rows}",
            lambda: ops.add_rms_norm(x, residual, weight, 1e-5),
            4 * num_rows * shape.hidden * element,
            6 * num_rows * shape.hidden,
            2 * shape.num_layers,
        )
        gate_up = self._activations(num_rows, 2 * shape.intermediate)
        yield Case(
            f"silu_mul {num_rows}",
            lambda: ops.silu_mul(gate_up),
            3 * num_rows * shape.intermediate * element,
            4 * num_rows * shape.intermediate,
            shape.num_layers,
        )
        for name, num_inputs, num_outputs in (
            ("qkv", shape.hidden, shape.q_size + 2 * shape.kv_size),
            ("attention_out", shape.q_size, shape.hidden),
            ("gate_up", shape.hidden, 2 * shape.intermediate),
            ("down", shape.intermediate, shape.hidden),
        ):
            yield self._linear(name, num_rows, num_inputs, num_outputs, shape.num_layers)

    def _linear(self, name: str, num_rows: int, num_inputs: int, num_outputs: int, per_step: int) -> Case:
        x = self._activations(num_rows, num_inputs)
        packed = ops.pack_linear(self._randn(num_outputs, num_inputs), self._weight_type)
        return Case(
            f"linear {name} {num_rows}",
            lambda: ops.linear(x, packed),
            packed.num_bytes + num_rows * (num_inputs + num_outputs) * self.dtype.itemsize,
            2 * num_rows * num_inputs * num_outputs,
            per_step,
        )

    def attention(self, queries: Sequence[int], contexts: Sequence[int], name: str) -> Iterator[Case]:
        """Rotary positions with the writing of KV, and attention, of requests with so many new tokens."""
        shape, device, element = self._shape, self._device, self.dtype.itemsize
        widths = [-(-context // shape.block_size) for context in contexts]
        num_blocks, num_tokens = sum(widths), sum(queries)
        cache_shapes = ops.kv_cache_shapes(num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        keys, values = (self._activations(*size) for size in cache_shapes)
        order = torch.randperm(num_blocks)  # as in a pool that has been used for a while
        tables = torch.zeros(len(contexts), -(-max(widths) // 16) * 16, dtype=torch.int64)
        first = 0
        for row, width in enumerate(widths):
            tables[row, :width] = order[first : first + width]
            first += width
        starts = torch.tensor([0, *queries]).cumsum(0)
        positions = torch.cat(
            [torch.arange(context - new, context) for new, context in zip(queries, contexts, strict=True)]
        )
        owners = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries))
        slots = (
            tables[owners, positions // shape.block_size] * shape.block_size + positions % shape.block_size
        )
        tables, starts, positions, slots = (each.to(device) for each in (tables, starts, positions, slots))
        lens = torch.tensor(contexts, device=device)
        rope = torch.randn(max(contexts), shape.head_dim, device=device)
        qkv = self._activations(num_tokens, shape.num_q_heads + 2 * shape.num_kv_heads, shape.head_dim)
        yield Case(
            f"rotary_write_kv {name}",
            lambda: ops.rotary_write_kv(qkv, rope, positions, slots, keys, values),
            2 * num_tokens * (shape.q_size + 2 * shape.kv_size) * element,
            6 * num_tokens * (shape.q_size + shape.kv_size),
            shape.num_layers,
        )
        q = self._activations(num_tokens, shape.num_q_heads, shape.head_dim)
        num_bytes, num_flops = attention_cost(shape, queries, contexts, element)
        yield Case(
            f"paged_attention {name}",
            lambda: ops.paged_attention(q, keys, values, tables, starts, lens, shape.head_dim**-0.5),
            num_bytes,
            num_flops,
            shape.num_layers,
        )

    def sampling(self, num_rows: int) -> Iterator[Case]:
        """LM head, and what chooses: greedily, or by draws."""
        shape = self._shape
        x = self._activations(num_rows, shape.hidden)
        head = ops.pack_linear(self._randn(shape.vocab, shape.hidden), self._weight_type)
        yield Case(
            f"logits {num_rows}",
            lambda: ops.logits(x, head),
            head.num_bytes + x.nbytes + num_rows * shape.vocab * 4,
            2 * num_rows * shape.hidden * shape.vocab,
            1,
        )
        logits = torch.randn(num_rows, shape.vocab, device=self._device)
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            inputs = sampling_inputs(num_rows, temperature, self._device)
            yield Case(
                f"sample {name} {num_rows}",
                lambda inputs=inputs: ops.sample(logits, inputs),  # type: ignore[misc]
                logits.nbytes,
                0,
                1 if name == "greedy" else 0,
            )


def attention_cost(
    shape: Shape, queries: Sequence[int], contexts: Sequence[int], element_bytes: int
) -> tuple[int, int]:
    """Bytes and operations of causal attention: KV read once for each request, nothing masked computed."""
    num_bytes = 2 * sum(queries) * shape.q_size * element_bytes
    num_flops = 0
    for new, context in zip(queries, contexts, strict=True):
        num_bytes += 2 * context * shape.kv_size * element_bytes
        seen = new * context - new * (new - 1) // 2  # the last query sees all of the context
        num_flops += 4 * seen * shape.q_size
    return num_bytes, num_flops


def sampling_inputs(num_rows: int, temperature: float, device: torch.device) -> SamplingInputs:
    """The same for every row: greedy, or top-k 40 and top-p 0.9."""
    draws = temperature > 0

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return SamplingInputs(
        temperature=full(temperature, torch.float64),
        top_k=full(40 if draws else 0, torch.int64),
        top_p=full(0.9 if draws else 1.0, torch.float64),
        min_p=full(0.0, torch.float64),
        seed=torch.arange(num_rows, device=device),
        output_index=full(0, torch.int64),
        banned_rows=nothing,
        banned_ids=nothing,
    )
