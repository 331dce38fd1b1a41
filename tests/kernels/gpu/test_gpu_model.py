"""A whole decoder on the Triton kernels beside the reference: prefill, chunks and decodes in one run."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder, DecoderWeights
from kernels import ops, registry
from kernels.ops import AttentionInputs, LayerWeights, Projection

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=88,
    num_layers=2,
    num_q_heads=3,
    num_kv_heads=1,
    head_dim=64,
    norm_eps=1e-5,
    max_positions=64,
    tie_embeddings=False,
    attention_bias=True,
)
BLOCK_SIZE, NUM_BLOCKS = 16, 8

#: Steps, each with its requests: which, from which token to which. Prefill, chunks and decodes side by side.
STEPS = (
    (("a", 0, 18), ("b", 0, 5)),
    (("a", 18, 19), ("b", 5, 11), ("c", 0, 1)),
    (("c", 1, 2), ("a", 19, 20), ("b", 11, 12)),
)
TABLES = {"a": [6, 1], "b": [3], "c": [0]}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = registry.active_name()
    yield
    if registry.active_name() == "triton":
        ops.set_batch_invariant(False)
    registry.use(before)


def _tensors():
    """Weights by name; large enough that logits are far from uniform."""
    generator = torch.Generator().manual_seed(7)

    def matrix(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    q_size = CONFIG.num_q_heads * CONFIG.head_dim
    layers = [
        {
            "attention_norm": 1 + matrix(hidden),
            "qkv": (matrix(CONFIG.qkv_size, hidden), matrix(CONFIG.qkv_size)),
            "attention_out": (matrix(hidden, q_size), matrix(hidden)),
            "mlp_norm": 1 + matrix(hidden),
            "gate_up": (matrix(2 * inner, hidden), None),
            "down": (matrix(hidden, inner), None),
        }
        for _ in range(CONFIG.num_layers)
    ]
    return (
        matrix(CONFIG.vocab_size, hidden) * 5,
        layers,
        1 + matrix(hidden),
        matrix(CONFIG.vocab_size, hidden),
    )


def _decoder(weight_type, device):
    embedding, layers, norm, lm_head = _tensors()

    def pack(matrix):
        return ops.pack_linear(matrix.to(device), weight_type)

    def part(value):
        if isinstance(value, torch.Tensor):
            return value.to(device)
        matrix, bias = value
        return Projection(pack(matrix), None if bias is None else bias.to(device))

    packed = tuple(LayerWeights(**{name: part(value) for name, value in layer.items()}) for layer in layers)
    weights = DecoderWeights(pack(embedding), packed, norm.to(device), pack(lm_head))
    return Decoder(replace(CONFIG), weights, CONFIG.max_positions)


def _inputs(step, device):
    starts, contexts, positions, slots = [0], [], [], []
    for name, begin, end in step:
        starts.append(starts[-1] + end - begin)
        contexts.append(end)
        positions += range(begin, end)
        slots += [TABLES[name][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(begin, end)]
    tables = [(TABLES[name] + [0])[:2] for name, _, _ in step]
    return AttentionInputs(
        *(torch.tensor(values, device=device) for values in (positions, slots, tables, starts, contexts))
    )


def _logits(kernels, weight_type, device, *, batch_invariant=False, steps=STEPS):
    """Logits of every token of every step."""
    registry.use(kernels)
    if batch_invariant:
        ops.set_batch_invariant(True)
    decoder = _decoder(weight_type, device)
    tokens = {
        name: torch.randint(128, (20,), generator=torch.Generator().manual_seed(ord(name))) for name in "abc"
    }
    dtype = ops.embed(torch.zeros(1, dtype=torch.int64, device=device), decoder.weights.embedding).dtype
    shapes = ops.kv_cache_shapes(NUM_BLOCKS, BLOCK_SIZE, CONFIG.num_kv_heads, CONFIG.head_dim)
    keys, values = (
        [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(CONFIG.num_layers)]
        for shape in shapes
    )
    found = []
    for step in steps:
        ids = torch.cat([tokens[name][begin:end] for name, begin, end in step]).to(device)
        hidden = decoder.forward(ids, _inputs(step, device), keys, values)
        assert hidden.dtype is dtype
        logits = decoder.logits(hidden, torch.arange(len(ids), device=device))
        assert logits.dtype is torch.float32
        found.append(logits.cpu())
    return torch.cat(found)


#: Of the largest logit. Activations of the reference are float32 whatever its weights are; the
#: interpreter cuts bfloat16 off instead of rounding it, which doubles its error.
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 4e-2, "int8": 5e-2, "fp8": 5e-2}


@pytest.mark.parametrize(
    "weight_type",
    [
        pytest.param(
            name,
            marks=pytest.mark.deep if name in ("fp16", "bf16") else [pytest.mark.slow] * (name != "fp32"),
        )
        for name in TOLERANCE
    ],
)
def test_logits_are_the_references(weight_type, device):
    if weight_type == "fp32" and device.type != "cpu":
        pytest.skip("activations of a card are at most 16 bits wide")
    wanted = _logits("reference", weight_type, "cpu")

    got = _logits("triton", weight_type, device)

    assert wanted.abs().max() > 4
    assert (got - wanted).abs().max() <= TOLERANCE[weight_type] * wanted.abs().max()


@pytest.mark.slow
def test_logits_are_the_references_in_batch_invariant_mode(device):
    wanted = _logits("reference", "fp16", "cpu")

    got = _logits("triton", "fp16", device, batch_invariant=True)

    assert (got - wanted).abs().max() <= TOLERANCE["fp16"] * wanted.abs().max()


@pytest.mark.slow
@pytest.mark.usefixtures("rows_of_products_stand_alone")
def test_batch_invariant_logits_have_the_same_bits_whatever_is_computed_beside_them(device):
    """Request a whole and alone, against its parts beside other requests: a chunk, then decodes."""
    # In so small a model rounding to 16 bits would hide most differences of order.
    weight_type = "fp32" if device.type == "cpu" else "fp16"
    mixed = _logits("triton", weight_type, device, batch_invariant=True)

    alone = _logits("triton", weight_type, device, batch_invariant=True, steps=((("a", 0, 20),),))

    rows = [*range(18), 23, 23 + 8 + 1]  # the first step has 23 rows, the second 8
    assert torch.equal(mixed[rows], alone)


def test_the_reason_names_what_runs_the_kernels(device):
    registry.use("triton")
    assert registry.active_name() == "triton"
    assert registry.active_reason() == "asked for by name"


def test_the_switch_reaches_attention_whose_two_kernels_add_in_different_orders(monkeypatch):
    from kernels.gpu import implementation

    told = []
    monkeypatch.setattr(
        implementation.attention, "paged_attention", lambda *_, batch_invariant: told.append(batch_invariant)
    )
    registry.use("triton")
    nothing = torch.empty(0)
    for enabled in (False, True):
        ops.set_batch_invariant(enabled)
        ops.paged_attention(*[nothing] * 6, 1.0)

    assert told == [False, True]
