"""One rank, from its weights to its pool, where it is the only one; and which device it takes."""

import pytest
import torch

from engine.models.errors import ModelLoadError
from engine.models.registry import load
from engine.models.sharding import Shard
from engine.runner import tensor_parallel
from engine.runner.base import ModelInfo
from engine.runner.rank import DeviceUnavailable, Rank, RankOptions, device_for
from kv.pool import KvLayout, PoolAllocationError

pytestmark = pytest.mark.usefixtures("kernels_restored")

BLOCK_BYTES = KvLayout(num_layers=3, num_kv_heads=2, head_dim=12).token_bytes * 16


def options(folder, **fields):
    values = {
        "folder": folder,
        "context_tokens": 64,
        "weights": "auto",
        "kernels": "reference",
        "batch_invariant": False,
        "device": "cpu",
        "num_threads": 1,
        "block_size": 16,
        "kv_bytes": None,
        "kv_share": 0.9,
        "max_step_tokens": 16,
        "max_requests": 4,
        "step_s_max": 5.0,
    }
    return RankOptions(**(values | fields))


def model(folder, num_blocks=None, **fields):
    info = ModelInfo("tiny", "LlamaForCausalLM", 259, 64, frozenset())
    return tensor_parallel.load(
        options(folder, **fields), 1, info, num_blocks=num_blocks, hang_s=5, start_s_max=5
    )


def test_a_single_rank_starts_no_process_and_computes(folder):
    found, weight_type = model(folder, num_blocks=8)
    plain = load(str(folder), num_blocks=8, num_threads=1, kernels="reference").model
    found.warm_up()

    assert weight_type == "fp32"
    assert found.pool == plain.pool
    assert found.info.computed_by == "own decoder, reference kernels with fp32 weights, threads 1"


def test_the_pool_of_so_many_bytes_has_the_scratch_block_inside(folder):
    found, _ = model(folder, kv_bytes=10 * BLOCK_BYTES + 1)

    assert found.pool.num_blocks == 9
    assert found._executor.pool.num_bytes == 10 * BLOCK_BYTES


def test_a_pool_without_room_for_a_request_is_refused(folder):
    with pytest.raises(PoolAllocationError, match="at least one block"):
        model(folder, kv_bytes=2 * BLOCK_BYTES - 1)


def test_ranks_of_a_cpu_share_its_memory_by_default(folder, monkeypatch):
    monkeypatch.setattr("engine.runner.rank.default_bytes", lambda: 40 * BLOCK_BYTES)

    wanted = {}
    for size in (1, 2):
        rank = Rank(options(folder), Shard(0, size))
        wanted[size] = rank.num_blocks_wanted()

    # A rank of two has half of the bytes, and its blocks need half.
    assert wanted == {1: 39, 2: 39}


def test_auto_takes_a_card_only_where_there_is_one_for_kernels_that_can_use_it(monkeypatch):
    for there_is_one in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there_is_one=there_is_one: there_is_one)
        assert device_for("auto", "cpu") == "cpu"
        assert device_for("cpu", "triton") == "cpu"
        assert device_for("auto", "triton") == ("cuda" if there_is_one else "cpu")
        with pytest.raises(DeviceUnavailable, match="kernels are those for a CPU"):
            device_for("cuda", "cpu")
    assert device_for("cuda", "reference") == "cuda"


def test_a_card_that_is_not_there_is_named(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match=r"engine\.device is cuda, but torch sees no card"):
        device_for("cuda", "triton")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceUnavailable, match=r"engine\.tensor_parallel is 2, but torch sees 1 cards"):
        Rank(options(folder, device="cuda"), Shard(1, 2))
