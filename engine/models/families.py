"""What the name of an architecture implies beyond the values in its ``config.json``. Data alone.

A family says how its checkpoints differ from Llama's: which projections have
biases, what is normed, which layers see a window, and under which names the tensors
lie. The values are those of the classes of the same names in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

#: Queries and keys are normed head by head, or all heads of a token together.
QkNorm = Literal["head", "all"]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a layer's tensors, relative to the layer; without ``.weight``.

    Attributes:
        attention_norm: before attention; None = there is none.
        attention_post_norm: of what attention adds; None = there is none.
        mlp_norm: before the MLP; likewise.
        mlp_post_norm: of what the MLP adds; likewise.
        qkv: query, key and value projections, or the one that holds all three.
        gate_up: gate and up projections, or the one that holds both.
        router: scores of the experts.
        experts: with ``{}`` for an expert's number.
        expert_gate_up: as ``gate_up``, relative to an expert.
        expert_down: likewise.
    """

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"


Settings = Mapping[str, Any]


def _never(config: Settings, layer: int) -> bool:
    return False


def _always(config: Settings, layer: int) -> bool:
    return config.get("sliding_window") is not None


def _upper_layers(config: Settings, layer: int) -> bool:
    return bool(config.get("use_sliding_window")) and layer >= config.get("max_window_layers", 28)


def _if_used(config: Settings, layer: int) -> bool:
    return bool(config.get("use_sliding_window"))


def _pattern(config: Settings, layer: int) -> bool:
    """All but every n-th."""
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 2))
    return bool((layer + 1) % pattern)


@dataclass(frozen=True, slots=True)
class Family:
    """How the checkpoints of an architecture differ from Llama's.

    Attributes:
        defaults: values of fields that ``config.json`` leaves out.
        qkv_bias: query, key and value projections have a bias; None = as ``attention_bias`` says.
        out_bias: likewise, attention's output projection.
        qk_norm: whether queries and keys are normed, and how.
        norm_offset: added to the weights of all norms.
        scales_embedding: embeddings are multiplied by the root of the hidden size.
        has_window: whether a layer sees a window only, where ``layer_types`` does not say.
        has_experts: the MLP of a layer is a mixture of experts, unless ``config.json`` says otherwise.
        names: of tensors.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: QkNorm | None = None
    norm_offset: float = 0.0
    scales_embedding: bool = False
    has_window: Callable[[Settings, int], bool] = _never
    has_experts: bool = False
    names: TensorNames = field(default_factory=TensorNames)

    @property
    def may_have_windows(self) -> bool:
        """Whether any layer of such a model may see a window only."""
        return self.has_window is not _never


_NO_BIAS: dict[str, Any] = {"qkv_bias": False, "out_bias": False}
_FOUR_NORMS = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_GEMMA2 = Family(
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    norm_offset=1.0,
    scales_embedding=True,
    has_window=_pattern,
    names=_FOUR_NORMS,
)
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_QWEN3 = Family(defaults={"head_dim": 128}, qk_norm="head", has_window=_upper_layers)

#: By the class name in ``architectures``.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(defaults={"sliding_window": 4096}, has_window=_always, **_NO_BIAS),
    "Qwen2ForCausalLM": Family(qkv_bias=True, out_bias=False, has_window=_upper_layers),
    "Qwen3ForCausalLM": _QWEN3,
    "Phi3ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        has_window=_always,
        names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        **_NO_BIAS,
    ),
    "GraniteForCausalLM": Family(defaults={"attention_multiplier": 1.0}),
    "Olmo2ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5},
        qk_norm="all",
        names=TensorNames(
            attention_norm=None,
            attention_post_norm="post_attention_layernorm",
            mlp_norm=None,
            mlp_post_norm="post_feedforward_layernorm",
        ),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        defaults={**_GEMMA2.defaults, **_GEMMA3_DEFAULTS, "sliding_window_pattern": 6},
        qk_norm="head",
    ),
    "MixtralForCausalLM": Family(
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        has_window=_always,
        has_experts=True,
        names=TensorNames(
            router="block_sparse_moe.gate",
            experts="block_sparse_moe.experts.{}",
            expert_gate_up=("w1", "w3"),
            expert_down="w2",
        ),
        **_NO_BIAS,
    ),
    "Qwen3MoeForCausalLM": replace(
        _QWEN3,
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        has_window=_if_used,
        has_experts=True,
    ),
}
