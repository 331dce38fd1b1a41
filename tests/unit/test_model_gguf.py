"""GGUF conversion: weights, configuration, tokenizer, and the cache they land in."""

import contextlib
import json
import os
import threading

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from engine.models import gguf as conversion
from engine.models.config import DecoderConfig
from engine.models.errors import CacheUnusable, InvalidCheckpoint, ModelNotFound, UnsupportedModel
from engine.models.loader import load_weights
from engine.models.registry import load
from engine.models.tokenizer import HfTokenizer
from kernels import registry
from tests.support.models import CHAT_TEMPLATE, SPECIAL_TOKENS, reference_model, tiny_llama

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _interleaved(weight, num_heads):
    """As llama.cpp stores queries and keys: the two halves of a head take turns."""
    head = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.stack((head[:, 0], head[:, 1]), axis=2).reshape(weight.shape)


def write_gguf(path, model, *, edit_metadata=None, edit_tensors=None):
    """A GGUF file of transformers' Llama ``model``, float32, with a byte tokenizer."""
    config = model.config
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    metadata = {
        "llama.context_length": 512,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 256,
        "tokenizer.ggml.merges": ["1 2", "a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    # Merges make tokens; they take the places of bytes that valid text never has.
    for index, merged in zip((-1, -2, -3), ("12", "ab", "abc"), strict=True):
        tokens[index] = merged
    tensors = {_gguf_name(name): value.numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    for name in tensors:
        if "attn_q" in name:
            tensors[name] = _interleaved(tensors[name], config.num_attention_heads)
        elif "attn_k" in name:
            tensors[name] = _interleaved(tensors[name], config.num_key_value_heads)
    architecture = "llama"
    if edit_metadata:
        architecture = edit_metadata(metadata) or architecture
    if edit_tensors:
        edit_tensors(tensors)
    with contextlib.closing(gguf.GGUFWriter(path, architecture)) as writer:
        for name, value in metadata.items():
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_array(name, value)
        for name, value in tensors.items():
            if isinstance(value, tuple):
                writer.add_tensor(name, value[0], raw_dtype=value[1])
            else:
                writer.add_tensor(name, np.ascontiguousarray(value))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("reference"), rms_norm_eps=1e-5)


@pytest.fixture
def path(reference, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", reference)
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_what_the_original_does(tied, tmp_path):
    original = tiny_llama(tmp_path / "original", tie_word_embeddings=tied, rms_norm_eps=1e-5)
    write_gguf(tmp_path / "tiny.gguf", original)

    loaded = load(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache", num_blocks=8, num_threads=1)

    assert loaded.info.name == "tiny"
    assert loaded.info.eos_token_ids == {2}
    converted = reference_model(loaded.folder)
    for name, tensor in original.state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor), name
    tokens = torch.tensor([[5, 9, 100, 42, 7]])
    with torch.inference_mode():
        assert torch.equal(converted(tokens).logits, original(tokens).logits)


@pytest.fixture
def plain_weights():
    """The reference kernels, which leave weights as they are in the file."""
    before = registry.active_name()
    registry.use("reference")
    yield
    registry.use(before)


def test_quantised_tensors_become_floats(reference, plain_weights, tmp_path):
    wide = tiny_llama(tmp_path / "original", hidden_size=64)
    exact = wide.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    kind = gguf.GGMLQuantizationType.Q8_0

    def quantise(tensors):
        tensors["blk.0.ffn_up.weight"] = (gguf.quants.quantize(exact, kind), kind)

    write_gguf(tmp_path / "tiny.gguf", wide, edit_tensors=quantise)
    folder = conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path)

    weights = load_weights(folder, DecoderConfig.from_folder(folder))

    up = weights.layers[0].gate_up.weight.data[88:].numpy()
    assert not np.array_equal(up, exact)
    assert np.abs(up - exact).max() <= np.abs(exact).max() / 127


def test_fused_weights_stay_in_the_mapped_file_for_kernels_that_leave_them(path, plain_weights, tmp_path):
    folder = conversion.converted_folder(path, tmp_path)

    weights = load_weights(folder, DecoderConfig.from_folder(folder))

    storages = {
        projection.weight.data.untyped_storage().data_ptr()
        for layer in weights.layers
        for projection in (layer.qkv, layer.gate_up, layer.down)
    }
    assert len(storages) == 1


def test_numbers_that_were_rounded_to_float32_are_restored(path, tmp_path):
    config = json.loads((conversion.converted_folder(path, tmp_path) / "config.json").read_text())

    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 10000.0


def test_the_tokenizer_splits_digits_and_knows_its_merges(path, tmp_path):
    tokenizer = HfTokenizer(conversion.converted_folder(path, tmp_path))

    ids = tokenizer.encode("abc12<|im_end|>")

    assert len(ids) == 4  # abc, 1, 2, end: the merge "1 2" must not join single digits
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == "abc12<|im_end|>"
    assert tokenizer.has_chat_template


def test_a_beginning_of_text_is_added_where_the_file_says_so(reference, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, edit_metadata=lambda m: m.update({"tokenizer.ggml.add_bos_token": True}))

    tokenizer = HfTokenizer(conversion.converted_folder(path, tmp_path))

    assert tokenizer.encode("x")[0] == 1
    assert tokenizer.encode("") == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "unheard-of"}, r"tokenizer\.ggml\.pre must be gpt-2 or .*'unheard-of'"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model must be gpt2 or llama.*'bert'"),
        ({"llama.rope.scaling.type": "dca"}, r"rope\.scaling\.type must be none, linear or yarn.*'dca'"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change, message, reference, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", reference, edit_metadata=lambda metadata: metadata.update(change))

    with pytest.raises(UnsupportedModel, match=message):
        conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path)
    assert not list((tmp_path / "models").glob("tiny-*[!k]"))  # nothing but the lock


def test_another_architecture_is_refused_by_name(reference, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", reference, edit_metadata=lambda metadata: "mamba")

    with pytest.raises(UnsupportedModel, match=r"general\.architecture must be llama.*'mamba'"):
        conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), r"tensor blk\.1\.ffn_up\.weight is missing"),
        (
            lambda t: t.update({"blk.0.attn_q_norm.weight": np.ones(6, np.float32)}),
            r"attn_q_norm\.weight is not part",
        ),
        (
            lambda t: t.update({"output_norm.weight": np.ones(3, np.float32)}),
            r"output_norm\.weight must have shape \[48\], got \[3\]",
        ),
    ],
)
def test_a_wrong_tensor_is_named(edit, message, reference, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", reference, edit_tensors=edit)

    with pytest.raises(InvalidCheckpoint, match=message):
        conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path)


def test_missing_metadata_are_named(reference, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", reference, edit_metadata=lambda m: m.pop("llama.block_count") and None)

    with pytest.raises(InvalidCheckpoint, match=r"llama\.block_count is missing"):
        conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path)


@pytest.mark.parametrize("kept", [0, 3, 200, 5000, -100])
def test_a_truncated_file_is_named(kept, path, tmp_path):
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(InvalidCheckpoint, match=r"tiny\.gguf is no readable GGUF file"):
        conversion.converted_folder(path, tmp_path)


def test_no_file_is_not_found(tmp_path):
    with pytest.raises(ModelNotFound, match=r"nothing\.gguf"):
        conversion.converted_folder(tmp_path / "nothing.gguf", tmp_path)


def test_a_file_is_converted_once_and_again_when_it_changed(path, tmp_path, monkeypatch, capsys):
    calls = []
    convert = conversion.convert
    monkeypatch.setattr(conversion, "convert", lambda *args: (calls.append(args), convert(*args)))

    first = conversion.converted_folder(path, tmp_path)
    assert conversion.converted_folder(path, tmp_path) == first
    assert len(calls) == 1
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert conversion.converted_folder(path, tmp_path) != first
    monkeypatch.setattr(conversion, "FORMAT_VERSION", 10**6)
    conversion.converted_folder(path, tmp_path)
    assert len(calls) == 3
    assert capsys.readouterr() == ("", "")  # quick, so silent


def test_those_who_come_while_it_converts_wait_and_share(path, tmp_path, monkeypatch):
    calls = []
    convert = conversion.convert
    monkeypatch.setattr(conversion, "convert", lambda *args: (calls.append(args), convert(*args)))
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(conversion.converted_folder(path, tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(calls) == 1
    assert len(set(folders)) == 1
    assert len(folders) == 4


def test_a_conversion_that_died_leaves_nothing_that_is_taken_for_whole(path, tmp_path, monkeypatch):
    def die(source, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "convert", die)
        with pytest.raises(KeyboardInterrupt):
            conversion.converted_folder(path, tmp_path)

    folder = conversion.converted_folder(path, tmp_path)

    assert DecoderConfig.from_folder(folder).num_layers == 3
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_a_cache_that_cannot_be_written_is_a_typed_error(path, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(CacheUnusable, match="file"):
        conversion.converted_folder(path, tmp_path / "file")


def test_progress_shows_itself_on_stderr_only_when_it_takes_long(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.models.progress._AFTER_S", -1.0)

    conversion.converted_folder(path, tmp_path)

    out, err = capsys.readouterr()
    assert out == ""
    assert "Converting model" in err
