"""What a model's configuration says: what is read of it, what is refused, and how the error names it."""

import pytest

from engine.models.config import DecoderConfig
from engine.models.errors import InvalidCheckpoint, UnsupportedModel

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
