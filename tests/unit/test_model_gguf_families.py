"""GGUF files of every family and quantisation, written with the names of the ``gguf`` package."""

import contextlib
import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from engine.models import gguf as conversion
from engine.models.config import DecoderConfig
from engine.models.tokenizer import HfTokenizer
from tests.support.models import SPECIAL_TOKENS, TINY_VOCAB_SIZE, tiny

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 20}
GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 24}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 3.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}
#: Name in GGUF, stem of the classes in transformers, fields of the config, whether rows are permuted.
FAMILIES = [
    ("qwen2", "Qwen2", {}, False),
    ("qwen3", "Qwen3", {"head_dim": 20}, False),
    ("qwen3moe", "Qwen3Moe", MOE | {"norm_topk_prob": True}, False),
    ("phi3", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, False),
    ("granite", "Granite", GRANITE, True),
    ("olmo2", "Olmo2", {}, False),
    ("gemma2", "Gemma2", GEMMA, False),
    ("gemma3", "Gemma3", GEMMA, False),
]


def _metadata(kind, config):
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or 12,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "rope.freq_base": (config.rope_parameters.get("full_attention") or config.rope_parameters)[
            "rope_theta"
        ],
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "rope.scaling.original_context_length": getattr(config, "original_max_position_embeddings", None),
    }
    return {f"{kind}.{name}": value for name, value in values.items() if value is not None}


def _tensors(kind, config, weights, permuted):
    """The checkpoint's tensors as llama.cpp's converter leaves them."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found, experts = {}, {}
    for name, tensor in weights.items():
        value = tensor.numpy()
        if ".experts." in name:
            stem, _, rest = name.partition(".experts.")
            experts.setdefault(f"{stem}.experts.{rest.split('.')[1]}.weight", {})[int(rest.split(".")[0])] = (
                value
            )
            continue
        if permuted and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = value.reshape(heads, 2, -1, *value.shape[1:])
            value = np.stack((halves[:, 0], halves[:, 1]), axis=2).reshape(value.shape)
        if kind.startswith("gemma") and "norm" in name:
            value = value + 1
        found[names.get_name(name, (".weight", ".bias"))] = value
    for name, values in experts.items():
        stacked = np.stack([values[index] for index in sorted(values)])
        found[names.get_name(name, (".weight",))] = stacked
    return found


def _write(path, kind, metadata, tensors):
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    metadata = metadata | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 256,
        "tokenizer.ggml.merges": ["1 2", "a b"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    for index, merged in ((-1, "12"), (-2, "ab")):
        tokens[index] = merged
    with contextlib.closing(gguf.GGUFWriter(path, kind)) as writer:
        for name, value in metadata.items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            add.get(type(value), writer.add_array)(name, value)
        for name, value in tensors.items():
            raw = {"raw_dtype": value[1]} if isinstance(value, tuple) else {}
            writer.add_tensor(name, np.ascontiguousarray(value[0] if raw else value), **raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


@pytest.mark.parametrize(("kind", "stem", "options", "permuted"), FAMILIES, ids=[row[0] for row in FAMILIES])
def test_a_converted_checkpoint_is_the_one_the_file_was_made_from(kind, stem, options, permuted, tmp_path):
    original = tmp_path / "original"
    config = tiny(stem, original, **options).config
    weights = load_file(original / "model.safetensors")
    tensors = _tensors(kind, config, weights, permuted)
    if kind == "phi3":
        for which in ("short", "long"):
            factors = np.array(LONGROPE[f"{which}_factor"], np.float32)
            tensors[f"rope_factors_{which}.weight"] = factors
    _write(tmp_path / "tiny.gguf", kind, _metadata(kind, config), tensors)

    folder = conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path)

    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(converted[name], tensor, rtol=0, atol=2e-7 if "norm" in name else 0)
    assert DecoderConfig.from_folder(folder) == DecoderConfig.from_folder(original)


def _halves(data, at):
    return np.frombuffer(data[:, at : at + 2].tobytes(), np.float16).astype(np.float32).reshape(-1, 1)


def _q4_k(data):
    """256 numbers: d, dmin, 8 scales and minima of 6 bits, 128 bytes of nibbles (ggml's block_q4_K)."""
    d, dmin, packed, nibbles = _halves(data, 0), _halves(data, 2), data[:, 4:16], data[:, 16:]
    scales, minima = np.empty((len(data), 8)), np.empty((len(data), 8))
    for j in range(4):
        scales[:, j], minima[:, j] = packed[:, j] & 63, packed[:, j + 4] & 63
        scales[:, j + 4] = (packed[:, j + 8] & 15) | ((packed[:, j] >> 6) << 4)
        minima[:, j + 4] = (packed[:, j + 8] >> 4) | ((packed[:, j + 4] >> 6) << 4)
    parts = []
    for j in range(8):
        quants = nibbles[:, j // 2 * 32 : j // 2 * 32 + 32] >> (4 * (j % 2)) & 15
        parts.append(d * scales[:, j : j + 1] * quants - dmin * minima[:, j : j + 1])
    return np.concatenate(parts, axis=1)


def _q6_k(data):
    """256 numbers: low nibbles, high pairs of bits, 16 scales of 8 bits, d (ggml's block_q6_K)."""
    low, high = data[:, :128], data[:, 128:192]
    scales, d = data[:, 192:208].astype(np.int8), _halves(data, 208)
    out = np.empty((len(data), 256))
    for half in range(2):
        for part in range(4):
            nibble = low[:, half * 64 + part % 2 * 32 :][:, :32] >> (4 * (part // 2)) & 15
            pair = high[:, half * 32 :][:, :32] >> (2 * part) & 3
            at = half * 128 + part * 32
            scale = np.repeat(scales[:, half * 8 + part * 2 :][:, :2].astype(np.float32), 16, axis=1)
            out[:, at : at + 32] = d * scale * ((nibble | pair << 4).astype(np.int8) - 32)
    return out


def _q4(data, *, has_minimum):
    """32 numbers: d, the minimum where there is one, 16 bytes of nibbles (ggml's block_q4_0, block_q4_1)."""
    nibbles = data[:, 4 if has_minimum else 2 :]
    quants = np.concatenate((nibbles & 15, nibbles >> 4), axis=1).astype(np.float32)
    return _halves(data, 0) * quants + _halves(data, 2) if has_minimum else _halves(data, 0) * (quants - 8)


BY_HAND = {
    "Q4_0": (lambda data: _q4(data, has_minimum=False), 18),
    "Q4_1": (lambda data: _q4(data, has_minimum=True), 20),
    "Q8_0": (lambda data: _halves(data, 0) * data[:, 2:].astype(np.int8), 34),
    "Q4_K": (_q4_k, 144),
    "Q6_K": (_q6_k, 210),
}


@pytest.mark.parametrize("name", [*BY_HAND, "F16", "BF16"])
def test_every_quantisation_is_read_as_its_blocks_say(name, tmp_path):
    config = tiny("Llama", tmp_path / "original", hidden_size=256, num_hidden_layers=1).config
    tensors = _tensors("llama", config, load_file(tmp_path / "original" / "model.safetensors"), True)
    kind, up = gguf.GGMLQuantizationType[name], "blk.0.ffn_up.weight"
    if name in BY_HAND:
        by_hand, block_bytes = BY_HAND[name]
        size = 256 if name.endswith("K") else 32
        generator = np.random.default_rng(0)
        data = generator.integers(0, 256, (88 * 256 // size, block_bytes), dtype=np.uint8)
        scale = np.frombuffer(np.array([0.01], np.float16).tobytes(), np.uint8)
        for at in {"Q6_K": (208,), "Q4_K": (0, 2), "Q4_1": (0, 2)}.get(name, (0,)):
            data[:, at : at + 2] = scale  # any bytes are quants, but not any are a sensible scale
        wanted = by_hand(data).reshape(88, 256)
        tensors[up] = (data.reshape(88, -1), kind)
    elif name == "F16":
        wanted = tensors[up].astype(np.float16)
        tensors[up] = wanted
    else:
        bits = torch.from_numpy(tensors[up]).bfloat16()
        wanted = bits.float().numpy()
        tensors[up] = (bits.view(torch.uint8).numpy(), kind)
    _write(tmp_path / "tiny.gguf", "llama", _metadata("llama", config), tensors)

    folder = conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path)

    found = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].numpy()
    np.testing.assert_allclose(found, wanted.astype(np.float32), rtol=1e-6, atol=1e-7)


def test_factors_of_llama_3_become_a_rope_of_their_own(tmp_path):
    config = tiny("Llama", tmp_path / "original").config
    tensors = _tensors("llama", config, load_file(tmp_path / "original" / "model.safetensors"), True)
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0]
    tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    _write(tmp_path / "tiny.gguf", "llama", _metadata("llama", config), tensors)

    rope = DecoderConfig.from_folder(conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path)).rope

    assert (list(rope.long_factors), list(rope.short_factors), rope.scale) == (factors, factors, 1.0)


def test_text_is_split_by_the_rules_the_file_names(tmp_path):
    config = tiny("Qwen2", tmp_path / "original").config
    tensors = _tensors("qwen2", config, load_file(tmp_path / "original" / "model.safetensors"), False)
    _write(tmp_path / "tiny.gguf", "qwen2", _metadata("qwen2", config), tensors)

    tokenizer = HfTokenizer(conversion.converted_folder(tmp_path / "tiny.gguf", tmp_path))

    assert len(tokenizer.encode("ab12<|im_end|>")) == 4  # Qwen splits digits: ab, 1, 2, end
    assert tokenizer.decode(tokenizer.encode("ab 12"), skip_special_tokens=False) == "ab 12"


def test_sentencepiece_vocabularies_are_read(tmp_path):
    config = tiny("Llama", tmp_path / "original").config
    tensors = _tensors("llama", config, load_file(tmp_path / "original" / "model.safetensors"), True)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(253))]
    tokens += ["\u2581", "a", "\u2581a"]
    metadata = _metadata("llama", config)
    path = tmp_path / "tiny.gguf"
    _write(path, "llama", metadata, tensors)
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 256 + [-3.0, -2.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 253, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    conversion.write_tokenizer(fields, tmp_path, max_tokens=64)

    tokenizer = HfTokenizer(tmp_path)

    assert len(tokens) == TINY_VOCAB_SIZE
    assert tokenizer.encode("a") == [1, 258]  # it begins with <s>, and the word with a space
    assert tokenizer.decode([258, 257]) == "aa"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
