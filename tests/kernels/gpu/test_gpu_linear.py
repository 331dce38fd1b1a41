"""Matrix products in tiles: every kind of weight, odd sizes, poison around, and rows that stay the same."""

import pytest
import torch

from kernels.gpu import linear as tiles
from kernels.weights import quantised, quantised_fp8

#: Relative to the largest result: what rounding the result costs; sums are float32.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
DTYPES = list(TOLERANCE)
NAN = float("nan")


def _random(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _weight(kind, outputs, inputs, dtype, device):
    """Elements and scales as the kernel takes them, and their exact values."""
    weight = _random(outputs, inputs, seed=2, device=device)
    if kind == "float":
        return weight.to(dtype), None, weight.to(dtype).double()
    data, scales = quantised(weight) if kind == "int8" else quantised_fp8(weight)
    return (
        data if kind == "int8" else data.view(torch.uint8),
        scales,
        data.double() * scales.double().unsqueeze(1),
    )


def _surrounded(tensor, poison):
    """The same rows as a window of a larger tensor whose other rows hold ``poison``."""
    room = torch.full((len(tensor) + 2, *tensor.shape[1:]), poison, dtype=tensor.dtype, device=tensor.device)
    return room[1:-1].copy_(tensor)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", tiles.KINDS)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"),
    [(1, 33, 96), (5, 80, 40), pytest.param(123, 70, 72, marks=pytest.mark.slow)],
)
def test_linear_is_the_matrix_product(tokens, outputs, inputs, kind, dtype, fixed, device):
    x = _random(tokens, inputs, seed=1, dtype=dtype, device=device)
    data, scales, exact = _weight(kind, outputs, inputs, dtype, device)
    poison = {"float": NAN, "int8": 127, "fp8": 0x7F}[kind]

    out = tiles.linear(
        _surrounded(x, NAN),
        _surrounded(data, poison),
        None if scales is None else _surrounded(scales, NAN),
        None,
        out_dtype=dtype,
        fixed=fixed,
    )

    wanted = x.double() @ exact.T
    assert out.dtype is dtype
    error = (out.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", tiles.KINDS)
def test_results_may_be_float32_and_the_bias_is_added_before_rounding(kind, device):
    x = _random(5, 48, seed=1, dtype=torch.float16, device=device)
    data, scales, exact = _weight(kind, 33, 48, torch.float16, device)
    bias = _random(33, seed=3, device=device)

    out = tiles.linear(x, data, scales, _surrounded(bias, NAN), out_dtype=torch.float32, fixed=False)

    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), x.double() @ exact.T + bias.double(), rtol=1e-5, atol=1e-5)


def test_nothing_is_written_past_the_last_row_and_column(device, monkeypatch):
    room = torch.full((7, 33), 7.0, device=device)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: room[1:6])

    tiles.linear(
        _random(5, 48, device=device),
        _random(33, 48, device=device),
        None,
        None,
        out_dtype=torch.float32,
        fixed=False,
    )

    assert (room[[0, 6]] == 7.0).all()
    assert (room[1:6] != 7.0).all()


@pytest.mark.usefixtures("rows_of_products_stand_alone")
@pytest.mark.parametrize("kind", tiles.KINDS)
def test_with_the_fixed_tile_a_row_has_the_same_bits_in_any_batch(kind, device):
    x = _random(123, 72, seed=1, dtype=torch.float16, device=device)
    data, scales, _ = _weight(kind, 70, 72, torch.float16, device)

    def rows(part):
        return tiles.linear(x[part].clone(), data, scales, None, out_dtype=torch.float32, fixed=True)

    together = rows(slice(None))
    for begin, end in ((0, 1), (122, 123), (60, 65), (50, 115)):
        assert torch.equal(rows(slice(begin, end)), together[begin:end])


def test_without_the_fixed_tile_the_bits_of_a_row_may_change(device):
    """Or the test above would hold for any tile, and hold nothing."""
    x = _random(123, 144, seed=1, dtype=torch.float16, device=device)
    data = _random(70, 144, seed=2, dtype=torch.float16, device=device)
    one, all_ = (
        tiles.linear(part, data, None, None, out_dtype=torch.float32, fixed=False) for part in (x[:1], x)
    )
    assert not torch.equal(one, all_[:1])
    torch.testing.assert_close(one, all_[:1])


def test_the_fixed_tile_does_not_depend_on_how_many_tokens_there_are():
    for target, table in tiles.TABLES.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for unit in (16, 1):
                chosen = {
                    tiles.config_for(target, tokens, dtype, unit, fixed=True) for tokens in range(1, 400)
                }
                assert len(chosen) == 1
        assert len(
            {tiles.config_for(target, n, torch.float16, 16, fixed=False) for n in range(1, 400)}
        ) == len(table.by_tokens)


def test_every_e4m3_number_is_decoded_exactly(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    values = codes.view(torch.float8_e4m3fn).float()
    codes, values = codes[values.isfinite()], values[values.isfinite()]
    eye = torch.eye(16, device=device, dtype=torch.float16)
    weight = torch.zeros(len(codes), 16, dtype=torch.uint8, device=device)
    weight[:, 3] = codes

    out = tiles.linear(
        eye, weight, torch.ones(len(codes), device=device), None, out_dtype=torch.float32, fixed=False
    )

    assert torch.equal(out[3], values)
    assert not out[[0, 1, 2, 4]].any()


def test_no_tokens_give_no_rows(device):
    out = tiles.linear(
        torch.empty(0, 32, device=device),
        torch.ones(7, 32, device=device),
        None,
        None,
        out_dtype=torch.float32,
        fixed=True,
    )
    assert out.shape == (0, 7)
