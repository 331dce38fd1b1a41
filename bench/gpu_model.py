"""A random model of a real one's shape on a device: decode steps, graphs, and exactness."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_kernels import Shape, Timer, median_seconds
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder, DecoderWeights
from engine.request import Request, RequestId, RequestSpec
from engine.runner.base import ModelInfo
from engine.runner.batch import build_batch
from engine.runner.device_runner import DeviceModel
from engine.runner.executor import StepExecutor
from engine.runner.graphs import GraphBackend
from engine.runner.packing import num_words, pack, shape_of
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan
from kernels import ops
from kernels.ops import LayerWeights, PackedWeight, Projection, WeightType
from kv.pool import KvLayout, KvPool

GREEDY = SamplingParams(temperature=0.0)


class RandomModel:
    """A decoder with random weights, its pool, and plans for it.

    Args:
        shape: widths.
        num_requests: most requests of a step.
        context: tokens of each of them.
        device: where.
        weight_type: how matrices are kept.
    """

    def __init__(
        self, shape: Shape, num_requests: int, context: int, device: torch.device, weight_type: WeightType
    ) -> None:
        self.shape = shape
        self._context = context
        self._blocks = -(-(context + 1) // shape.block_size)
        weights = random_weights(shape, device, weight_type)
        with torch.inference_mode():
            one = ops.embed(torch.zeros(1, dtype=torch.int64, device=device), weights.embedding)
        decoder = Decoder(config_of(shape, context + shape.block_size), weights, context + shape.block_size)
        layout = KvLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, one.dtype)
        pool = KvPool(layout, num_requests * self._blocks + 1, shape.block_size, device)
        for cache in (*pool.keys, *pool.values):
            cache.normal_(std=0.05)
        self.executor = StepExecutor(decoder, pool, device, max_requests=num_requests)
        self._info = ModelInfo("random", "LlamaForCausalLM", shape.vocab, context, frozenset())

    @property
    def num_parameters(self) -> int:
        """Of all matrices, the embedding counted once more where it is not the LM head."""
        shape = self.shape
        layer = shape.hidden * (2 * shape.q_size + 2 * shape.kv_size + 3 * shape.intermediate)
        return shape.num_layers * layer + 2 * shape.vocab * shape.hidden

    def model(self, buckets: Sequence[int] = ()) -> DeviceModel:
        """As the engine sees it; ``buckets`` must have been captured."""
        return DeviceModel(self._info, self.executor, buckets=buckets)

    def capture(self, backend: GraphBackend, buckets: Sequence[int]) -> None:
        """Capture decodes of these sizes."""
        self.executor.capture_graphs(backend, buckets, -(-self._blocks // 16) * 16)

    def table(self, request: int) -> list[int]:
        """Blocks of a request."""
        return list(range(request * self._blocks, (request + 1) * self._blocks))

    def decode(self, num_requests: int, step: int = 1) -> Plan:
        """One token for each of so many requests, after ``context`` tokens of nonsense."""
        return Plan(
            step, tuple(self.grant(row, [row + 3], self._context, step) for row in range(num_requests))
        )

    def grant(self, request: int, token_ids: list[int], start: int, index: int | None) -> Grant:
        """Tokens of a request at ``start``."""
        spec = RequestSpec(RequestId(f"r{request}"), (*[0] * start, *token_ids), GREEDY)
        return Grant(Request(spec, 0, 0.0), start, len(token_ids), self.table(request), index)

    def logits(self, *grants: Grant) -> Tensor:
        """What the grants that sample would sample from, ``[R, vocab]``, on the CPU."""
        batch = build_batch(Plan(1, grants), self.shape.block_size)
        words = torch.empty(num_words(shape_of(batch)), dtype=torch.int64)
        pack(batch, words)
        _, outputs = self.executor.compute(shape_of(batch), words)
        assert outputs.logits is not None
        return outputs.logits.cpu().clone()


def config_of(shape: Shape, max_positions: int) -> DecoderConfig:
    """The configuration of a Llama of this shape."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_layers=shape.num_layers,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        norm_eps=1e-5,
        max_positions=max_positions,
        tie_embeddings=False,
    )


def random_weights(shape: Shape, device: torch.device, weight_type: WeightType) -> DecoderWeights:
    """Weights of a size that keeps activations near one, made on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def matrix(num_outputs: int, num_inputs: int) -> PackedWeight:
        weight = torch.randn(num_outputs, num_inputs, device=device, generator=generator)
        return ops.pack_linear(weight.mul_(num_inputs**-0.5), weight_type)

    def norm() -> Tensor:
        return torch.ones(shape.hidden, device=device)

    decoder_layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=Projection(matrix(shape.q_size + 2 * shape.kv_size, shape.hidden)),
            attention_out=Projection(matrix(shape.hidden, shape.q_size)),
            mlp_norm=norm(),
            gate_up=Projection(matrix(2 * shape.intermediate, shape.hidden)),
            down=Projection(matrix(shape.hidden, shape.intermediate)),
        )
        for _ in range(shape.num_layers)
    )
    return DecoderWeights(
        matrix(shape.vocab, shape.hidden), decoder_layers, norm(), matrix(shape.vocab, shape.hidden)
    )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A decode step of one batch.

    Attributes:
        num_requests: rows.
        eager_s: from plan to sampled tokens, operation by operation.
        graph_s: likewise, as a graph; None where there are none.
    """

    num_requests: int
    eager_s: float
    graph_s: float | None

    @property
    def tokens_per_s(self) -> float:
        """Of the quicker way."""
        return self.num_requests / self.best_s

    @property
    def best_s(self) -> float:
        """Seconds of the quicker way."""
        return self.eager_s if self.graph_s is None else min(self.eager_s, self.graph_s)


def decode_times(
    random: RandomModel, batches: Sequence[int], timer: Timer, repeats: int, backend: GraphBackend | None
) -> list[StepTimes]:
    """Whole steps at each batch, eager first, then as graphs."""
    eager = random.model()
    eager_s = {batch: _step_s(eager, random.decode(batch), timer, repeats) for batch in batches}
    graph_s: dict[int, float] = {}
    if backend is not None:
        random.capture(backend, batches)
        graphs = random.model(batches)
        graph_s = {batch: _step_s(graphs, random.decode(batch), timer, repeats) for batch in batches}
    return [StepTimes(batch, eager_s[batch], graph_s.get(batch)) for batch in batches]


def _step_s(model: DeviceModel, plan: Plan, timer: Timer, repeats: int) -> float:
    return median_seconds(lambda: model.run(plan), timer, repeats)


def exactness(random: RandomModel, backend: GraphBackend | None) -> dict[str, bool]:
    """Whether a request's logits are the same bits, whatever it is computed beside, and in whatever chunks.

    What is promised in batch-invariant mode on a card, and always by the CPU's own kernels.
    """
    prompt = [(7 * place) % (random.shape.vocab - 3) + 3 for place in range(40)]
    alone = random.logits(random.grant(0, prompt, 0, 0))
    others = [random.grant(row, prompt[row:], 0, 0) for row in (1, 2)]
    found = {"batched": torch.equal(random.logits(*others, random.grant(0, prompt, 0, 0))[-1:], alone)}
    random.logits(random.grant(1, prompt[:17], 0, 0))
    found["chunked"] = torch.equal(random.logits(random.grant(1, prompt[17:], 17, 0)), alone)
    random.logits(random.grant(2, prompt[:-1], 0, 0))
    decoded = random.logits(random.grant(2, prompt[-1:], len(prompt) - 1, 0))
    found["decoded"] = torch.equal(decoded, alone)
    if backend is not None:
        random.capture(backend, (1, 4))
        found["graph"] = torch.equal(random.logits(random.grant(2, prompt[-1:], len(prompt) - 1, 0)), decoded)
        random.executor.graphs = None
    return found
