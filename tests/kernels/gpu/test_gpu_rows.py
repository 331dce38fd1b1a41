"""Norms and gated activations against float64, at odd sizes, with poison around what they may read."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kernels.gpu import activation
from kernels.gpu.rms_norm import COLUMNS_MAX, add_rms_norm, rms_norm

#: Of the result's own magnitude: half a unit in the last place, and for bfloat16, which the interpreter cuts
#: off instead of rounding it, a whole one.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
DTYPES = list(TOLERANCE)

#: The sigmoid of a large negative number is zero by way of an infinity; numpy warns of it, a card does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def _random(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _poisoned(tensor):
    """The same values as a view, with NaN before and after every row and row of rows."""
    shape = [size + 2 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 16]
    room = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    view = room[tuple(slice(1, -1) for _ in tensor.shape[:-1])][..., 8:-8]
    return view.copy_(tensor)


def _normed(x, weight, eps=1e-5):
    wide = x.double()
    return wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 70), (123, 33), (5, 576), (1, 4096)])
def test_rms_norm_divides_by_the_root_mean_square(rows, columns, dtype, device):
    x = _random(rows, columns, dtype=dtype, device=device) * 3
    weight = _random(columns, seed=1, device=device)

    out = rms_norm(_poisoned(x), weight, 1e-5)

    assert out.dtype is dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), _normed(x, weight), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 64), (5, 3, 80), (41, 3, 128)])
def test_rms_norm_of_heads_reads_a_window_of_the_fused_projection(tokens, heads, head_dim, dtype, device):
    x = _random(tokens, heads, head_dim, dtype=dtype, device=device)
    fused = torch.full((tokens, heads + 4, head_dim), float("nan"), dtype=dtype, device=device)
    fused[:, 1 : 1 + heads] = x
    weight = _random(head_dim, seed=1, device=device)

    out = rms_norm(fused[:, 1 : 1 + heads], weight, 1e-5)

    torch.testing.assert_close(out.double(), _normed(x, weight), rtol=TOLERANCE[dtype], atol=1e-6)
    alone = rms_norm(x[-1:, -1].contiguous(), weight, 1e-5)
    assert torch.equal(out[-1:, -1], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 70), (123, 48)])
def test_add_rms_norm_returns_the_norm_of_the_rounded_sum_and_the_sum(rows, columns, dtype, device):
    x, residual = (_random(rows, columns, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
    weight = _random(columns, seed=3, device=device)
    wanted = x.double() + residual.double()

    normed, total = add_rms_norm(x, residual, weight, 1e-5)

    assert total is residual
    torch.testing.assert_close(total.double(), wanted, rtol=TOLERANCE[dtype], atol=1e-6)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


def test_a_row_of_a_norm_has_the_same_bits_alone_and_among_others(device):
    x, weight = _random(123, 70, device=device), _random(70, seed=1, device=device)
    together = rms_norm(x, weight, 1e-5)
    for row in (0, 60, 122):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5), together[row : row + 1])


def test_rows_wider_than_any_configuration_are_refused(device):
    wide = torch.zeros(1, COLUMNS_MAX + 16, device=device)
    with pytest.raises(ValueError, match=r"columns must be at most 16384, got 16400"):
        rms_norm(wide, wide[0], 1e-5)
    odd = torch.zeros(1, 8193, device=device)
    with pytest.raises(ValueError, match=r"multiple of 16 above 8192, got 8193"):
        rms_norm(odd, odd[0], 1e-5)


def _gated(kind, gate_up):
    gate, up = gate_up.double().chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", activation.KINDS)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1040), (5, 19), pytest.param(123, 16, marks=pytest.mark.slow)]
)
def test_gated_activations(rows, columns, kind, dtype, device):
    room = torch.full((rows + 2, 2 * columns), float("nan"), dtype=dtype, device=device)
    gate_up = room[1:-1].copy_(_random(rows, 2 * columns) * 4)

    gelu = {"gelu": False, "gelu_tanh": True}
    out = activation.silu_mul(gate_up) if kind == "silu" else activation.gelu_mul(gate_up, tanh=gelu[kind])

    assert out.dtype is dtype
    # Where the activation almost cancels, its float32 value has an absolute error.
    torch.testing.assert_close(out.double(), _gated(kind, gate_up), rtol=TOLERANCE[dtype] * 2, atol=2e-6)


def test_gated_activations_write_no_further_than_their_rows(device, monkeypatch):
    room = torch.full((3, 19), 7.0, device=device)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: room[:2])

    activation.silu_mul(_random(2, 38, device=device))

    assert torch.equal(room[2], torch.full((19,), 7.0, device=device))


@pytest.mark.parametrize("kind", activation.KINDS)
def test_a_gate_far_from_zero_is_open_or_closed(kind, device):
    gate_up = torch.tensor([[1000.0, -1000.0, 0.0, 2.0, 2.0, 2.0]], device=device)

    out = activation._gated(gate_up, kind)

    assert out.tolist() == [[2000.0, 0.0, 0.0]]


def test_nothing_gives_nothing(device):
    empty = torch.empty(0, 64, device=device)
    weight = torch.ones(64, device=device)
    assert rms_norm(empty, weight, 1e-5).shape == (0, 64)
    assert add_rms_norm(empty, empty.clone(), weight, 1e-5)[0].shape == (0, 64)
    assert activation.silu_mul(empty).shape == (0, 32)
