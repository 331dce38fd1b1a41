"""Every operation of the C++ file against the reference, and bit by bit against itself in other company."""

import pytest
import torch

from kernels import cpu, reference

ROWS = [1, 2, 5, 12, 13, 97, 123]
WEIGHT_TYPES = ["fp32", "bf16", "fp16", "int8"]
#: Both sides compute with the same rounded weights in float32, so one tolerance serves every type.
RTOL, ATOL = 1e-5, 2e-5


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def num_threads(request):
    cpu.set_num_threads(request.param)
    yield request.param
    cpu.set_num_threads(1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 16), (33, 40), (70, 37), (576, 192), (1, 1)])
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_linear_is_the_matrix_product(weight_type, num_outputs, num_inputs, bias, num_threads):
    weight = _random(num_outputs, num_inputs, seed=2) / num_inputs**0.5
    offset = _random(num_outputs, seed=3) if bias else None
    packed, wanted_weight = cpu.pack_linear(weight, weight_type), reference.pack_linear(weight, weight_type)

    for rows in ROWS:
        x = _random(rows, num_inputs, seed=rows)
        out = cpu.linear(x, packed, offset)
        assert out.shape == (rows, num_outputs)
        torch.testing.assert_close(out, reference.linear(x, wanted_weight, offset), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_a_row_of_linear_does_not_depend_on_its_neighbours_or_the_threads(weight_type):
    packed = cpu.pack_linear(_random(203, 77), weight_type)
    x = _random(123, 77, seed=1)
    whole = cpu.linear(x, packed, None)

    for threads in (1, 2):
        cpu.set_num_threads(threads)
        for rows in (1, 2, 3, 4, 7, 8, 12, 16, 32, 64):
            parts = [cpu.linear(part.contiguous(), packed, None) for part in x.split(rows)]
            assert torch.equal(torch.cat(parts), whole), (threads, rows)
    cpu.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_a_weight_in_its_own_type_loses_nothing(dtype):
    weight_type = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    weight = _random(37, 21).to(dtype)
    packed = cpu.pack_linear(weight, weight_type)

    assert torch.equal(cpu.embed(torch.arange(37), packed), weight.float())
    # Every output is the sum of one product, so that it shows the weight as the product sees it.
    assert torch.equal(cpu.linear(torch.eye(21), packed, None), weight.float().T)


def test_packed_weights_take_the_bytes_of_their_type():
    sizes = [cpu.pack_linear(torch.ones(160, 32), name).num_bytes for name in WEIGHT_TYPES]

    assert sizes == [160 * 32 * 4, 160 * 32 * 2, 160 * 32 * 2, 160 * 32 + 160 * 4]


def test_a_weight_that_is_a_window_of_a_larger_one_is_packed_as_it_stands():
    window = _random(50, 16)[:, 4:12]

    torch.testing.assert_close(
        cpu.linear(_random(3, 8), cpu.pack_linear(window, "fp32"), None), _random(3, 8) @ window.T
    )


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_a_transposed_weight_is_packed_as_its_copy_would_be(weight_type):
    weight = _random(21, 37)

    packed, wanted = (cpu.pack_linear(w, weight_type) for w in (weight.t(), weight.t().contiguous()))

    assert torch.equal(packed.data, wanted.data)


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_embed_picks_the_rows_of_a_packed_weight(weight_type):
    table = _random(53, 23)
    ids = torch.tensor([52, 0, 16, 15, 52])

    out = cpu.embed(ids, cpu.pack_linear(table, weight_type))

    assert torch.equal(out, reference.embed(ids, reference.pack_linear(table, weight_type)))


@pytest.mark.parametrize("width", [8, 16, 37, 576])
@pytest.mark.parametrize("rows", [1, 5, 123])
def test_norms(rows, width, num_threads):
    x, residual, weight = _random(rows, width) * 3, _random(rows, width, seed=1), _random(width, seed=2)

    torch.testing.assert_close(
        cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=RTOL, atol=1e-6
    )
    normed, total = cpu.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, cpu.rms_norm(total, weight, 1e-5))
    assert torch.equal(normed[-1:], cpu.rms_norm(total[-1:].clone(), weight, 1e-5))


def test_the_norm_of_zeros_is_zero_thanks_to_eps():
    assert torch.equal(cpu.rms_norm(torch.zeros(2, 24), torch.ones(24), 1e-6), torch.zeros(2, 24))


ACTIVATIONS = {
    "silu": (cpu.silu_mul, reference.silu_mul),
    "gelu": (lambda x: cpu.gelu_mul(x, tanh=False), lambda x: reference.gelu_mul(x, tanh=False)),
    "gelu tanh": (lambda x: cpu.gelu_mul(x, tanh=True), lambda x: reference.gelu_mul(x, tanh=True)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 19, 1536])
@pytest.mark.parametrize("rows", [1, 5, 123])
def test_gated_activations(rows, width, name, num_threads):
    ours, theirs = ACTIVATIONS[name]
    x = _random(rows, 2 * width) * 6
    x[0, 0], x[-1, width - 1] = 200.0, -200.0  # far beyond what exp can take

    out = ours(x)

    torch.testing.assert_close(out, theirs(x), rtol=RTOL, atol=2e-5)
    assert torch.equal(out[-1:], ours(x[-1:].clone()))


def test_not_a_number_stays_visible_in_every_operation():
    x = torch.full((1, 32), 0.5)
    x[0, 3] = float("nan")

    assert cpu.rms_norm(x, torch.ones(32), 1e-5).isnan().all()
    assert cpu.silu_mul(x)[0, 3].isnan()
    assert cpu.gelu_mul(x, tanh=True)[0, 3].isnan()
    assert cpu.gelu_mul(x, tanh=False)[0, 3].isnan()
    assert cpu.linear(x, cpu.pack_linear(torch.ones(5, 32), "bf16"), None).isnan().all()
    assert cpu.log_sum_exp(x).isnan().all()


@pytest.mark.parametrize("vocab", [1, 7, 64, 49152])
@pytest.mark.parametrize("rows", [1, 5])
def test_argmax_and_log_sum_exp(rows, vocab):
    logits = _random(rows, vocab) * 10

    assert torch.equal(cpu.argmax(logits), logits.argmax(-1))
    torch.testing.assert_close(cpu.log_sum_exp(logits), logits.logsumexp(-1), rtol=1e-6, atol=1e-5)


def test_argmax_takes_the_lowest_id_on_ties_and_passes_over_minus_infinity():
    logits = torch.zeros(4, 100)
    logits[0, [40, 99]] = 3.0
    logits[1] = float("-inf")
    logits[1, 98] = -5.0
    logits[2, [15, 16]] = 1.0

    assert cpu.argmax(logits).tolist() == [40, 98, 15, 0]


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (9, 3), (2, 1)])
@pytest.mark.parametrize("head_dim", [6, 20, 64, 80])
@pytest.mark.parametrize("num_tokens", [1, 5, 123])
def test_rotary_turns_as_the_reference_does_and_writes_only_the_slots(
    num_tokens, head_dim, num_q_heads, num_kv_heads, num_threads
):
    block_size, num_blocks = 32, 5
    qkv = _random(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    generator = torch.Generator().manual_seed(1)
    angles = _random(500, head_dim // 2, seed=2) * 3
    rope = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 500, (num_tokens,), generator=generator)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    caches, wanted = (
        [torch.full(s, float("nan")) for s in module.kv_cache_shapes(5, 32, num_kv_heads, head_dim)]
        for module in (cpu, reference)
    )

    q = cpu.rotary_write_kv(qkv.clone(), rope, positions, slots, *caches)

    wanted_q = reference.rotary_write_kv(qkv.clone(), rope, positions, slots, *wanted)
    torch.testing.assert_close(q, wanted_q, rtol=RTOL, atol=ATOL)
    keys = caches[0].permute(0, 1, 4, 2, 3).reshape(wanted[0].shape)
    values = caches[1].transpose(2, 3).reshape(wanted[1].shape)
    torch.testing.assert_close(keys, wanted[0], rtol=RTOL, atol=ATOL, equal_nan=True)
    torch.testing.assert_close(values, wanted[1], rtol=0, atol=0, equal_nan=True)


def test_blocks_are_made_of_pages_of_sixteen():
    keys, values = cpu.kv_cache_shapes(7, 32, 3, 24)

    assert keys == (7, 2, 3, 24, 16)
    assert values == (7, 2, 3, 16, 24)
    with pytest.raises(ValueError, match="block_size must be a multiple of 16, got 8"):
        cpu.kv_cache_shapes(7, 8, 3, 24)


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 16), (7, 259)])
def test_softcap_bounds_logits_as_the_reference_does_and_a_row_alone_is_the_same(rows, width, num_threads):
    logits = _random(rows, width) * 100
    wanted = reference.softcap(logits.clone(), 30.0)

    out = cpu.softcap(logits.clone(), 30.0)

    torch.testing.assert_close(out, wanted, rtol=RTOL, atol=ATOL)
    assert out.abs().max() <= 30.0
    assert torch.equal(cpu.softcap(logits[-1:].clone(), 30.0), out[-1:])


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (8, 2), (128, 8), (5, 5)])
def test_route_takes_the_likeliest_experts_and_their_shares(num_experts, num_chosen, normalised, num_threads):
    scores = _random(37, num_experts) * 3
    wanted_ids, wanted_shares = reference.route(scores, num_chosen, normalised=normalised)

    ids, shares = cpu.route(scores, num_chosen, normalised=normalised)

    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(shares, wanted_shares, rtol=RTOL, atol=1e-7)
    whole = scores.softmax(-1)
    top = whole.gather(1, ids)
    torch.testing.assert_close(shares, top / top.sum(-1, keepdim=True) if normalised else top)
    alone = cpu.route(scores[-1:], num_chosen, normalised=normalised)
    assert torch.equal(alone[0], ids[-1:])
    assert torch.equal(alone[1], shares[-1:])


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_of_equal_experts_the_first_ones_compute(kernels):
    ids, shares = kernels.route(torch.zeros(2, 6), 3, normalised=True)

    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(shares, torch.full((2, 3), 1 / 3))


def test_scores_that_are_no_numbers_choose_experts_that_exist_and_shares_that_show_it():
    scores = _random(3, 6)
    scores[1, 2] = float("nan")

    ids, shares = cpu.route(scores, 2, normalised=False)

    assert ((ids >= 0) & (ids < 6)).all()
    assert shares[1].isnan().all()
    assert shares[[0, 2]].isfinite().all()
