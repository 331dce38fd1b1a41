"""Rotation and the KV scatter of the GPU kernel against the reference."""

import pytest
import torch

from kernels import reference
from kernels.gpu import kv_layout
from kernels.gpu.device import INTERPRETING
from kernels.gpu.rotary_write_kv import rotary_write_kv

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
FLOAT32 = [torch.float32] if INTERPRETING else []


def case(num_tokens, num_q_heads, num_kv_heads, head_dim, block_size, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    num_blocks = -(-num_tokens // block_size) + 2
    qkv = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    rope = torch.randn(200, head_dim, generator=generator)
    positions = torch.randint(0, 200, (num_tokens,), generator=generator)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    shape, _ = kv_layout.kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    return tuple(tensor.to(device) for tensor in (qkv, rope, positions, slots, *caches))


def check(arguments, out, written):
    """Queries and both caches, NaN where nothing may have been written."""
    qkv, rope, positions, slots, k_cache, v_cache = (tensor.cpu() for tensor in arguments)
    caches = [
        torch.full_like(cache.transpose(1, 2), float("nan"), dtype=torch.float32).contiguous()
        for cache in (k_cache, v_cache)
    ]
    q = reference.rotary_write_kv(qkv.float(), rope, positions, slots.clamp(min=0), *caches)
    tolerance = TOLERANCES[qkv.dtype]
    torch.testing.assert_close(out.cpu().float(), q, rtol=tolerance, atol=tolerance)
    for wanted, cache in zip(caches, (k_cache, v_cache), strict=True):
        flat = wanted.view(-1, *wanted.shape[2:])
        keep = torch.full_like(flat, float("nan"))
        keep[slots[written]] = flat[slots[written]]
        found = cache.float().transpose(1, 2).reshape(flat.shape)
        torch.testing.assert_close(found, keep, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT32])
@pytest.mark.parametrize("head_dim", kv_layout.HEAD_DIMS)
@pytest.mark.usefixtures("nothing_is_written_past_the_end")
def test_every_head_size_and_data_type(head_dim, dtype, device):
    arguments = case(5, 3, 1, head_dim, 16, dtype, device)
    check(arguments, rotary_write_kv(*arguments), slice(None))


@pytest.mark.parametrize("block_size", kv_layout.BLOCK_SIZES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (6, 2), (20, 7)])
@pytest.mark.usefixtures("nothing_is_written_past_the_end")
def test_every_block_size_and_groups_of_heads(num_q_heads, num_kv_heads, block_size, device):
    arguments = case(5, num_q_heads, num_kv_heads, 64, block_size, torch.float16, device)
    check(arguments, rotary_write_kv(*arguments), slice(None))


@pytest.mark.parametrize("num_tokens", [1, 123])
@pytest.mark.usefixtures("nothing_is_written_past_the_end")
def test_odd_numbers_of_tokens(num_tokens, device):
    arguments = case(num_tokens, 2, 1, 64, 16, torch.float16, device)
    check(arguments, rotary_write_kv(*arguments), slice(None))


def test_a_negative_slot_writes_nothing(device):
    *rest, k_cache, v_cache = case(5, 2, 2, 64, 16, torch.float16, device)
    rest[3][[1, 4]] = -1
    # The block before the cache is where a slot of -1 would go.
    wider = [torch.cat([torch.zeros_like(cache[:1]), cache]) for cache in (k_cache, v_cache)]
    arguments = (*rest, *(cache[1:] for cache in wider))

    check(arguments, rotary_write_kv(*arguments), [0, 2, 3])
    assert not any(cache[0].any() for cache in wider)


def test_no_tokens_are_no_work(device):
    arguments = case(0, 2, 1, 64, 16, torch.float16, device)
    assert rotary_write_kv(*arguments).shape == (0, 2, 64)


def test_a_token_has_the_same_bits_alone(device):
    arguments = case(5, 2, 1, 80, 16, torch.float16, device)
    out = rotary_write_kv(*arguments)
    qkv, rope, positions, slots, k_cache, v_cache = arguments
    for token in range(5):
        one = slice(token, token + 1)
        alone = rotary_write_kv(
            qkv[one], rope, positions[one], slots[one], torch.empty_like(k_cache), torch.empty_like(v_cache)
        )
        assert torch.equal(alone, out[one])


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, torch.zeros(5, 2, 64), "qkv must be"),
        (0, torch.zeros(5, 4, 64, dtype=torch.float64), "qkv must be"),
        (1, torch.zeros(200, 80), "rope must be"),
        (2, torch.zeros(5, dtype=torch.int32), "positions must be int64"),
        (3, torch.zeros(4, dtype=torch.int64), "slots must be int64"),
    ],
)
def test_what_the_kernel_was_not_made_for_is_refused(number, change, message, device):
    arguments = list(case(5, 2, 1, 64, 16, torch.float16, device))
    arguments[number] = change.to(device)
    with pytest.raises(ValueError, match=message):
        rotary_write_kv(*arguments)
