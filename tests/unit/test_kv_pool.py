"""The KV pool's tensors: their size, and what is refused."""

import pytest

from kernels import ops, registry
from kv.pool import KvLayout, KvPool, PoolAllocationError, default_bytes, free_bytes, num_blocks_for

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8)


def test_blocks_for_a_number_of_bytes_are_rounded_down():
    block = 2 * 2 * 3 * 8 * 4 * 16

    assert LAYOUT.token_bytes * 16 == block
    assert num_blocks_for(block * 5 + block - 1, LAYOUT, 16) == 5
    with pytest.raises(
        PoolAllocationError, match=f"at least one block of 16 tokens, {block} bytes, got {block - 1}"
    ):
        num_blocks_for(block - 1, LAYOUT, 16)


def test_the_pool_has_one_pair_of_caches_a_layer():
    pool = KvPool(LAYOUT, num_blocks=4, block_size=16)

    shapes = ops.kv_cache_shapes(4, 16, 3, 8)
    assert [tuple(keys.shape) for keys in pool.keys] == [shapes[0]] * 2
    assert [tuple(values.shape) for values in pool.values] == [shapes[1]] * 2
    assert pool.num_bytes == sum(t.numel() * 4 for t in (*pool.keys, *pool.values))


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"),
    [(0, 16, "num_blocks must be at least 1, got 0"), (4, 0, "block_size must be at least 1, got 0")],
)
def test_an_empty_pool_is_refused(num_blocks, block_size, message):
    with pytest.raises(PoolAllocationError, match=message):
        KvPool(LAYOUT, num_blocks, block_size)


def test_a_pool_larger_than_the_memory_is_refused_at_once():
    with pytest.raises(PoolAllocationError, match=r"needs \d+ bytes, but \d+ are free"):
        KvPool(LAYOUT, num_blocks=10**12, block_size=16)


def test_a_pool_the_allocator_refuses_is_a_typed_error(monkeypatch):
    monkeypatch.setattr("kv.pool.free_bytes", lambda: 10**30)

    with pytest.raises(PoolAllocationError, match="cpu refused"):
        KvPool(LAYOUT, num_blocks=10**13, block_size=16)


def test_the_default_pool_is_half_of_what_is_free_up_to_four_gibibytes(monkeypatch):
    monkeypatch.setattr("kv.pool.free_bytes", lambda: 6 * 2**30)
    assert default_bytes() == 3 * 2**30
    monkeypatch.setattr("kv.pool.free_bytes", lambda: 100 * 2**30)
    assert default_bytes() == 4 * 2**30


def test_a_control_group_limits_the_free_memory(monkeypatch, tmp_path):
    monkeypatch.setattr("kv.pool._CGROUP", tmp_path)
    machine = free_bytes()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_bytes() == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes() == pytest.approx(machine, rel=0.2)


@pytest.mark.skipif(registry.active_name() != "cpu", reason="the reference has no layout of its own")
def test_a_block_size_without_a_layout_is_refused():
    with pytest.raises(PoolAllocationError, match="kv block_size must be a multiple of 16, got 8"):
        KvPool(LAYOUT, num_blocks=4, block_size=8)
