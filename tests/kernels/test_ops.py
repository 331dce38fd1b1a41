"""Every small operation against a formulation of its own, at odd sizes."""

import pytest
import torch

from kernels import ops, reference, registry

ROWS = [1, 2, 5, 96, 97, 123]


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_outputs", [6, 33, 64])
@pytest.mark.parametrize("rows", ROWS)
def test_linear_is_the_matrix_product(rows, num_outputs, bias, num_threads):
    x, weight = _random(rows, 40, seed=1), _random(num_outputs, 40, seed=2)
    offset = _random(num_outputs, seed=3) if bias else None

    out = ops.linear(x, ops.pack_linear(weight, "fp32"), offset)

    wanted = torch.einsum("tk,nk->tn", x.double(), weight.double()) + (offset.double() if bias else 0)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()


def test_linear_takes_a_weight_that_is_a_window_of_a_larger_one():
    x, weight = _random(3, 8), _random(10, 16)[:, 4:12]

    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight, "fp32")), x @ weight.T)


ROUNDING = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize("weight_type", ROUNDING)
def test_a_rounded_weight_is_near_the_exact_one(weight_type):
    weight = _random(9, 31)

    kept = ops.embed(torch.arange(9), ops.pack_linear(weight, weight_type))

    assert ((kept - weight).abs() <= weight.abs() * ROUNDING[weight_type]).all()


def test_an_int8_weight_is_within_half_a_step_of_its_row():
    weight = _random(9, 31)
    weight[4] = 0.0

    kept = ops.embed(torch.arange(9), ops.pack_linear(weight, "int8"))

    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((kept - weight).abs() <= step * 0.5001).all()
    assert torch.equal(kept[4], weight[4])
    assert len(kept[0].unique()) <= 255


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_mul_gates_by_the_normal_distribution(tanh):
    gate_up = _random(5, 2 * 19) * 4

    out = ops.gelu_mul(gate_up, tanh=tanh)

    gate, up = gate_up[:, :19].double(), gate_up[:, 19:].double()
    weight = torch.special.ndtr(gate)
    if tanh:
        weight = (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) / 2
    torch.testing.assert_close(out.double(), gate * weight * up, rtol=1e-5, atol=1e-5)


def test_argmax_and_log_sum_exp():
    logits = _random(5, 77) * 10
    logits[2, [3, 70]] = 99.0

    assert ops.argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    torch.testing.assert_close(ops.log_sum_exp(logits).double(), logits.double().exp().sum(-1).log())


@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_divides_by_the_root_mean_square(rows):
    x, weight = _random(rows, 37) * 3, _random(37, seed=1)
    before = x.clone()

    out = ops.rms_norm(x, weight, 1e-5)

    length = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True) / 37**0.5
    wanted = x.double() / torch.hypot(length, torch.tensor(1e-5).double().sqrt()) * weight.double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


def test_rms_norm_of_zeros_is_zero_thanks_to_eps():
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum(rows):
    x, residual, weight = _random(rows, 24), _random(rows, 24, seed=1), _random(24, seed=2)
    total = x + residual

    normed, carried = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)

    assert torch.equal(carried, total)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul_gates_the_second_half_by_the_first(rows):
    gate_up = _random(rows, 2 * 19) * 4

    out = ops.silu_mul(gate_up)

    gate, up = gate_up[:, :19].double(), gate_up[:, 19:].double()
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6)


def test_embed_and_gather_last_pick_rows():
    table = _random(7, 3)
    packed = ops.pack_linear(table, "fp32")

    assert torch.equal(
        ops.embed(torch.tensor([6, 0, 6]), packed), torch.stack([table[6], table[0], table[6]])
    )
    assert torch.equal(ops.gather_last(table, torch.tensor([4])), table[4:5])
    assert ops.gather_last(table, torch.tensor([], dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (9, 3), (2, 1)])
@pytest.mark.parametrize("num_tokens", [1, 5, 123])
def test_rotary_turns_pairs_as_complex_numbers_and_writes_only_the_slots(
    num_tokens, num_q_heads, num_kv_heads
):
    head_dim, block_size, num_blocks = 6, 4, 40
    qkv = _random(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    generator = torch.Generator().manual_seed(1)
    angles = _random(500, head_dim // 2, seed=2) * 3
    positions = torch.randint(0, 500, (num_tokens,), generator=generator)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    shapes = ops.kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan")) for shape in shapes)

    q = ops.rotary_write_kv(
        qkv.clone(), torch.cat((angles.cos(), angles.sin()), -1), positions, slots, k_cache, v_cache
    )

    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[positions][:, None]
    pairs = torch.complex(qkv[..., :3].double(), qkv[..., 3:].double()) * turn
    turned = torch.cat((pairs.real, pairs.imag), -1).float()
    torch.testing.assert_close(q, turned[:, :num_q_heads], rtol=1e-5, atol=1e-5)
    keys = k_cache.reshape(-1, num_kv_heads, head_dim)
    values = v_cache.reshape(-1, num_kv_heads, head_dim)
    torch.testing.assert_close(
        keys[slots], turned[:, num_q_heads : num_q_heads + num_kv_heads], rtol=1e-5, atol=1e-5
    )
    assert torch.equal(values[slots], qkv[:, num_q_heads + num_kv_heads :])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool)
    untouched[slots] = False
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()


def test_an_unknown_implementation_is_refused_by_name():
    with pytest.raises(
        registry.UnknownImplementation, match=r"must be one of auto, triton, cpu, reference.*got 'abacus'"
    ):
        registry.use("abacus")
    assert registry.active() is reference


def test_a_registered_implementation_takes_over_and_gives_back(monkeypatch):
    monkeypatch.setattr(registry, "_MODULES", dict(registry._MODULES))
    registry.register("echo", "json")
    try:
        registry.use("echo")
        assert registry.active_name() == "echo"
        assert registry.active().__name__ == "json"
    finally:
        registry.use("reference")
    assert registry.active() is reference
