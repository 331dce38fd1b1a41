"""Cutting a model for tensor parallelism: who gets what, what is refused, and that nothing changes."""

import functools
import operator

import pytest
import torch

from engine.models.config import DecoderConfig, MoeConfig
from engine.models.decoder import Decoder
from engine.models.errors import ModelLoadError
from engine.models.loader import load_weights
from engine.models.sharding import Alone, Shard, UnsuitableTensorParallel
from engine.runner.batch import build_batch
from engine.sampling import SamplingParams
from engine.scheduler.plan import Plan
from kernels import ops, registry
from kv.pool import KvLayout, KvPool
from tests.support.grants import grant
from tests.support.models import tiny, tiny_llama, tiny_qwen3
from tests.support.peers_in_threads import on_every_rank

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(params=["reference", "auto"], autouse=True)
def _kernels(request):
    before = registry.active_name()
    registry.use(request.param)
    ops.set_num_threads(1)
    yield
    registry.use(before)


def config(**fields):
    values = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 259,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_layers": 3,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "norm_eps": 1e-6,
        "max_positions": 512,
        "tie_embeddings": False,
    }
    return DecoderConfig(**(values | fields))


@pytest.mark.parametrize(("count", "size"), [(4, 1), (4, 2), (259, 2), (7, 3), (5, 5)])
def test_parts_cover_everything_once_and_are_as_equal_as_can_be(count, size):
    parts = [range(count)[Shard(rank, size).part(count)] for rank in range(size)]

    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("num_q", "num_kv", "size"), [(8, 8, 2), (8, 4, 4), (8, 2, 4), (8, 1, 8), (6, 2, 2)])
def test_every_rank_holds_the_kv_heads_that_its_query_heads_read(num_q, num_kv, size):
    whole = config(num_q_heads=num_q, num_kv_heads=num_kv, intermediate_size=64)
    for rank in range(size):
        shard = Shard(rank, size)
        q_heads = range(num_q)[shard.q_heads(whole)]
        kv_heads = range(num_kv)[shard.kv_heads(whole)]
        own = shard.config(whole)

        assert (own.num_q_heads, own.num_kv_heads) == (len(q_heads), len(kv_heads))
        group, own_group = num_q // num_kv, own.num_q_heads // own.num_kv_heads
        for place, head in enumerate(q_heads):
            assert kv_heads[place // own_group] == head // group


@pytest.mark.parametrize(
    ("fields", "size", "field"),
    [
        ({"num_q_heads": 6, "num_kv_heads": 2}, 4, "num_q_heads"),
        ({"intermediate_size": 90, "num_q_heads": 8}, 4, "intermediate_size"),
        ({"num_q_heads": 12, "num_kv_heads": 3, "intermediate_size": 96}, 4, "num_kv_heads"),
        ({"vocab_size": 3, "num_q_heads": 8, "num_kv_heads": 4}, 4, "vocab_size"),
        ({"qk_norm": "all"}, 2, "qk_norm"),
        ({"moe": MoeConfig(4, 2, 30, True)}, 4, "moe.intermediate_size"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_field_rule_and_value(fields, size, field):
    whole = config(**fields)

    with pytest.raises(UnsuitableTensorParallel) as refused:
        Shard(0, size).config(whole)

    assert isinstance(refused.value, ModelLoadError)
    assert refused.value.field == field
    assert f"engine.tensor_parallel {size} " in str(refused.value)
    assert f"{field} " in str(refused.value)
    assert str(operator.attrgetter(field)(whole)) in str(refused.value)


def test_a_single_rank_holds_everything():
    whole = config()

    assert Shard().config(whole) is whole
    x = torch.ones(2, 3)
    assert Alone().add(x) is x
    assert Alone().gather(x, 3) is x


def _grant(tokens, start, index):
    return grant("a", start, len(tokens), index, token_ids=tokens, block_table=[3, 1], sampling=GREEDY)


def _logits(folder, peers=None):
    """Logits of a prompt and a decode, computed by one rank."""
    whole = DecoderConfig.from_folder(folder)
    shard = Shard() if peers is None else peers.shard
    decoder = Decoder(shard.config(whole), load_weights(folder, whole, shard=shard), 64, peers)
    layout = KvLayout(whole.num_layers, decoder.config.num_kv_heads, whole.head_dim)
    pool = KvPool(layout, 4, 16)
    rows = []
    for tokens, start in ((list(range(3, 23)), 0), ([200], 20)):
        batch = build_batch(Plan(1, (_grant(tokens, start, 0),)), 16)
        with torch.inference_mode():
            hidden = decoder.forward(batch.token_ids, batch.attention, pool.keys, pool.values)
            rows.append(decoder.logits(hidden, torch.arange(len(tokens))))
    return torch.cat(rows), decoder


PARTIAL = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.7,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
CHECKPOINTS = {
    "llama": functools.partial(tiny_llama, tie_word_embeddings=False),
    "llama, tied": functools.partial(tiny_llama, tie_word_embeddings=True, dtype=torch.bfloat16),
    "llama with biases": functools.partial(tiny_llama, attention_bias=True, mlp_bias=True),
    "qwen3": functools.partial(tiny_qwen3, attention_bias=True),
    "phi3": functools.partial(
        tiny, "Phi3", rope_parameters=PARTIAL, original_max_position_embeddings=16, pad_token_id=0
    ),
    "gemma2": functools.partial(tiny, "Gemma2", head_dim=20, sliding_window=8, final_logit_softcapping=4.0),
    "granite": functools.partial(tiny, "Granite", residual_multiplier=0.4, logits_scaling=3.0),
    "mixtral": functools.partial(tiny, "Mixtral", num_local_experts=4),
}


@pytest.mark.parametrize("size", [2, 4])  # of four ranks, two hold the same KV head
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_ranks_together_compute_the_logits_of_the_whole_model(checkpoint, size, tmp_path):
    CHECKPOINTS[checkpoint](tmp_path)
    wanted, whole = _logits(tmp_path)

    (found, first), *others = on_every_rank(size, functools.partial(_logits, tmp_path))

    assert found.shape == wanted.shape
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() <= 2e-5
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    total = sum(decoder.weights.num_bytes for decoder in (first, *(other for _, other in others)))
    assert first.weights.num_bytes < whole.weights.num_bytes * 1.4 / size, "a rank holds more than its share"
    assert total >= whole.weights.num_bytes
