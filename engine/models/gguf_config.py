"""What a GGUF file's metadata say of a model, as a ``config.json``; and where its tensors belong.

Names are those of llama.cpp: its ``gguf`` package, and the conversions it makes from
Hugging Face checkpoints, which are undone here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.models.config import DecoderConfig
from engine.models.errors import InvalidCheckpoint, UnsupportedModel

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How llama.cpp keeps the models of an architecture.

    Attributes:
        architecture: class name of the checkpoint that it was made from.
        model_type: as transformers calls it.
        permuted: rows of queries and keys lie as pairs side by side.
        more: fields of ``config.json`` beside those that all families have.
    """

    architecture: str
    model_type: str
    permuted: bool = False
    more: Callable[[Fields, str], dict[str, Any]] = lambda fields, kind: {}


def _gemma(fields: Fields, kind: str) -> dict[str, Any]:
    heads, layers = field(fields, f"{kind}.attention.head_count"), field(fields, f"{kind}.block_count")
    # Metadata do not name it; llama.cpp knows the one size of each that scales otherwise by its depth.
    is_largest = layers == {"gemma2": 46, "gemma3": 62}[kind]
    scaled = field(fields, f"{kind}.embedding_length") // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled if is_largest else field(fields, f"{kind}.attention.key_length"),
        "sliding_window": field(fields, f"{kind}.attention.sliding_window"),
    }


def _gemma2(fields: Fields, kind: str) -> dict[str, Any]:
    return _gemma(fields, kind) | {
        "attn_logit_softcapping": shortest(fields.get("gemma2.attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": shortest(fields.get("gemma2.final_logit_softcapping", 30.0)),
    }


def _gemma3(fields: Fields, kind: str) -> dict[str, Any]:
    return _gemma(fields, kind) | {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}


def _granite(fields: Fields, kind: str) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {
        ours: shortest(fields[f"granite.{theirs}"])
        for ours, theirs in names.items()
        if fields.get(f"granite.{theirs}")
    }


def _phi3(fields: Fields, kind: str) -> dict[str, Any]:
    return {"sliding_window": fields.get("phi3.attention.sliding_window") or None}


def _qwen3moe(fields: Fields, kind: str) -> dict[str, Any]:
    return {
        "num_experts": field(fields, "qwen3moe.expert_count"),
        "num_experts_per_tok": field(fields, "qwen3moe.expert_used_count"),
        "moe_intermediate_size": field(fields, "qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _mixtral(fields: Fields, kind: str) -> dict[str, Any]:
    return {
        "num_local_experts": field(fields, "llama.expert_count"),
        "num_experts_per_tok": field(fields, "llama.expert_used_count"),
    }


_MIXTRAL = GgufFamily("MixtralForCausalLM", "mixtral", permuted=True, more=_mixtral)
GGUF_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", more=_qwen3moe),
    "phi3": GgufFamily("Phi3ForCausalLM", "phi3", more=_phi3),
    "granite": GgufFamily("GraniteForCausalLM", "granite", permuted=True, more=_granite),
    "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2"),
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", more=_gemma2),
    "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", more=_gemma3),
}


def family_of(fields: Fields) -> GgufFamily:
    """The family of a file.

    Raises:
        InvalidCheckpoint: its architecture is missing.
        UnsupportedModel: another architecture.
    """
    kind = field(fields, "general.architecture")
    if kind not in GGUF_FAMILIES:
        raise UnsupportedModel("GGUF general.architecture", " or ".join(GGUF_FAMILIES), kind)
    return _MIXTRAL if fields.get(f"{kind}.expert_count") and kind == "llama" else GGUF_FAMILIES[kind]


def config_of(fields: Fields, factors: Mapping[str, list[float]], *, tied: bool) -> dict[str, Any]:
    """``config.json`` from the metadata.

    Args:
        fields: those metadata.
        factors: tensors that scale rotary positions, by name.
        tied: there is no LM head of its own.

    Raises:
        InvalidCheckpoint: something is missing.
        UnsupportedModel: another architecture or rope scaling.
    """
    family, kind = family_of(fields), field(fields, "general.architecture")
    heads = field(fields, f"{kind}.attention.head_count")
    hidden = field(fields, f"{kind}.embedding_length")
    head_dim = fields.get(f"{kind}.attention.key_length", hidden // heads)
    rotated = fields.get(f"{kind}.rope.dimension_count", head_dim)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": len(field(fields, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": field(fields, f"{kind}.feed_forward_length"),
        "num_hidden_layers": field(fields, f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": field(fields, f"{kind}.context_length"),
        "rms_norm_eps": shortest(field(fields, f"{kind}.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(fields.get(f"{kind}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields, kind, factors),
        "partial_rotary_factor": rotated / head_dim,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(fields, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
        **family.more(fields, kind),
    }


def _rope_scaling(fields: Fields, kind: str, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    context = field(fields, f"{kind}.context_length")
    original = fields.get(f"{kind}.rope.scaling.original_context_length", context)
    if "rope_factors_long.weight" in factors:
        found: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": factors["rope_factors_long.weight"],
            "short_factor": factors["rope_factors_short.weight"],
            "original_max_position_embeddings": original,
        }
        scale = fields.get(f"{kind}.rope.scaling.attn_factor")
        return found | ({"attention_factor": shortest(scale)} if scale else {})
    if "rope_freqs.weight" in factors:  # Llama 3's scaling, worked out when the file was made
        divisors = factors["rope_freqs.weight"]
        return {
            "rope_type": "longrope",
            "long_factor": divisors,
            "short_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if scaling == "none":
        return None
    if scaling not in ("linear", "yarn"):
        raise UnsupportedModel(f"GGUF {kind}.rope.scaling.type", "none, linear or yarn", scaling)
    factor = shortest(field(fields, f"{kind}.rope.scaling.factor"))
    if scaling == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file, or one expert's part of it, and where it belongs.

    Attributes:
        source: its name in the file.
        name: in a Hugging Face checkpoint.
        shape: there.
        num_heads: heads whose rows are to be unpermuted; 0 = none.
        expert: which part of the file's tensor; None = all of it.
        is_norm: it is the weight of a norm.
    """

    source: str
    name: str
    shape: tuple[int, ...]
    num_heads: int = 0
    expert: int | None = None
    is_norm: bool = False


def tensors_of(config: DecoderConfig, *, permuted: bool) -> Iterator[GgufTensor]:
    """Every tensor of a model, in the order in which they are to be written.

    Query, key and value of a layer are neighbours, and so are gate and up:
    fused, they are still one piece of the file.
    """
    hidden, vocab = config.hidden_size, (config.vocab_size, config.hidden_size)
    yield GgufTensor("token_embd.weight", "model.embed_tokens.weight", vocab)
    for layer in range(config.num_layers):
        yield from _layer(config, layer, permuted)
    yield GgufTensor("output_norm.weight", "model.norm.weight", (hidden,), is_norm=True)
    if not config.tie_embeddings:
        yield GgufTensor("output.weight", "lm_head.weight", vocab)


def _layer(config: DecoderConfig, layer: int, permuted: bool) -> Iterator[GgufTensor]:
    ours, theirs, names = f"blk.{layer}.", f"model.layers.{layer}.", config.names
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
    q_heads, kv_heads = (config.num_q_heads, config.num_kv_heads) if permuted else (0, 0)

    def norm(source: str, name: str | None, size: int = hidden) -> Iterator[GgufTensor]:
        if name is not None:
            yield GgufTensor(f"{ours}{source}.weight", f"{theirs}{name}.weight", (size,), is_norm=True)

    yield from norm("attn_norm", names.attention_norm)
    if len(names.qkv) == 1:
        rows = [("attn_qkv", config.qkv_size, 0)]
    else:
        rows = [("attn_q", q_size, q_heads), ("attn_k", kv_size, kv_heads), ("attn_v", kv_size, 0)]
    for (source, size, heads), name in zip(rows, names.qkv, strict=True):
        yield GgufTensor(f"{ours}{source}.weight", f"{theirs}{name}.weight", (size, hidden), heads)
    if config.attention_bias:
        for (source, size, heads), name in zip(rows, names.qkv, strict=True):
            yield GgufTensor(f"{ours}{source}.bias", f"{theirs}{name}.bias", (size,), heads)
    if config.qk_norm is not None:
        sizes = (q_size, kv_size) if config.qk_norm == "all" else (head_dim, head_dim)
        for which, size in zip("qk", sizes, strict=True):
            yield from norm(f"attn_{which}_norm", f"self_attn.{which}_norm", size)
    yield GgufTensor(f"{ours}attn_output.weight", f"{theirs}self_attn.o_proj.weight", (hidden, q_size))
    yield from norm("post_attention_norm", names.attention_post_norm)
    yield from norm("ffn_norm", names.mlp_norm)
    yield from _mlp(config, layer)
    yield from norm("post_ffw_norm", names.mlp_post_norm)


def _mlp(config: DecoderConfig, layer: int) -> Iterator[GgufTensor]:
    ours, theirs, names = f"blk.{layer}.", f"model.layers.{layer}.", config.names
    hidden, wide = config.hidden_size, config.intermediate_size
    if config.moe is not None and config.has_experts(layer):
        router = f"{theirs}{names.router}.weight"
        yield GgufTensor(f"{ours}ffn_gate_inp.weight", router, (config.moe.num_experts, hidden))
        wide = config.moe.intermediate_size
        for expert in range(config.moe.num_experts):
            prefix = f"{theirs}{names.experts.format(expert)}."
            for source, name, shape in (
                ("ffn_gate_exps", names.expert_gate_up[0], (wide, hidden)),
                ("ffn_up_exps", names.expert_gate_up[1], (wide, hidden)),
                ("ffn_down_exps", names.expert_down, (hidden, wide)),
            ):
                yield GgufTensor(f"{ours}{source}.weight", f"{prefix}{name}.weight", shape, expert=expert)
        return
    rows = [("ffn_up", 2 * wide)] if len(names.gate_up) == 1 else [("ffn_gate", wide), ("ffn_up", wide)]
    for (source, size), name in zip(rows, names.gate_up, strict=True):
        yield GgufTensor(f"{ours}{source}.weight", f"{theirs}{name}.weight", (size, hidden))
    yield GgufTensor(f"{ours}ffn_down.weight", f"{theirs}mlp.down_proj.weight", (hidden, wide))


def field(fields: Fields, name: str) -> Any:
    """A value that must be there.

    Raises:
        InvalidCheckpoint: it is not.
    """
    if name not in fields:
        raise InvalidCheckpoint(f"GGUF metadata {name} is missing")
    return fields[name]


def shortest(value: float) -> float:
    """The decimal number a float32 was rounded from: 9.99999975e-06 is 1e-05."""
    return float(str(np.float32(value)))
