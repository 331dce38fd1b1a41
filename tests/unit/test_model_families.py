"""Every family of models against transformers' eager forward on tiny random checkpoints.

Prompts are longer than windows and original contexts; they are computed in chunks, and every
request is preempted on its way and computed again, in other blocks.
"""

import pytest
import torch

from engine.models.registry import load
from engine.request import RequestId
from engine.runner.batch import build_batch
from engine.sampling import SamplingParams
from engine.scheduler.plan import Plan
from kernels import registry
from tests.support.grants import grant
from tests.support.models import TINY_VOCAB_SIZE, tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
BLOCK = 16
WINDOW = 24
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}
PARTIAL = LONGROPE | {
    "partial_rotary_factor": 0.7,  # 8 of 12 elements
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
MOE = {"num_local_experts": 6, "num_experts_per_tok": 2}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 20}
#: Of each family, the class names' stem in transformers and fields of its config.
MODELS = {
    "llama": ("Llama", {}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral, window": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen2, window, tied": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "max_window_layers": 1,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 256}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "phi3": ("Phi3", {}),
    "phi3, window": ("Phi3", {"sliding_window": WINDOW}),
    "phi3, longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3, partial longrope": ("Phi3", {"rope_parameters": PARTIAL, "original_max_position_embeddings": 64}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 20,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "mixtral": ("Mixtral", MOE),
    "mixtral, window": ("Mixtral", MOE | {"sliding_window": WINDOW}),
    "qwen3 moe": ("Qwen3Moe", QWEN_MOE | {"norm_topk_prob": True}),
    "qwen3 moe, some dense": ("Qwen3Moe", QWEN_MOE | {"mlp_only_layers": [1]}),
}


#: Their families have another entry, whose options are theirs and more.
DEEP = {"smollm2", "mistral", "qwen2, yarn", "phi3", "phi3, window", "mixtral, window", "qwen3 moe"}


def _marked(names, deep):
    return [pytest.param(name, marks=[pytest.mark.deep] if name in deep else []) for name in names]


@pytest.fixture(scope="module", params=_marked(MODELS, DEEP))
def pair(request, tmp_path_factory):
    """A checkpoint's folder and transformers' model of it."""
    stem, options = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    return folder, tiny(stem, folder, **options)


def _load(folder, **options):
    return load(str(folder), num_threads=1, **({"num_blocks": 64, "block_size": BLOCK} | options))


def _prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, TINY_VOCAB_SIZE, (length,), generator=generator).tolist()


def _table(num_tokens, first=60, step=-1):
    return [first + step * index for index in range(-(-num_tokens // BLOCK))]


def _grant(name, tokens, start, table, index=None):
    return grant(name, start, len(tokens), index, token_ids=tokens, block_table=table, sampling=GREEDY)


def _hidden(loaded, *grants):
    model = loaded.model
    batch = build_batch(Plan(1, grants), BLOCK)
    return model._decoder.forward(batch.token_ids, batch.attention, model._kv.keys, model._kv.values)


def _logits(loaded, tokens, cuts=()):
    """Logits of every token of one request, computed in chunks that end at ``cuts``."""
    rows, begin = [], 0
    with torch.inference_mode():
        for end in (*cuts, len(tokens)):
            hidden = _hidden(loaded, _grant("a", tokens[begin:end], begin, _table(end)))
            rows.append(loaded.model._decoder.logits(hidden, torch.arange(end - begin)))
            begin = end
    return torch.cat(rows)


def _wanted(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def _relative_error(logits, wanted):
    return ((logits - wanted).abs().max() / wanted.abs().max()).item()


def test_logits_are_those_of_transformers(pair):
    folder, reference = pair
    tokens = _prompt(150)
    wanted = _wanted(reference, tokens)

    logits = _logits(_load(folder), tokens, (7, 8, 80))

    assert wanted.std() > 0.2
    assert _relative_error(logits, wanted) <= 2e-5


def test_greedy_tokens_are_those_of_transformers_through_chunks_and_preemption(pair):
    folder, reference = pair
    loaded, prompt = _load(folder), _prompt(90, seed=1)
    tokens, table, start = list(prompt), _table(160), 0
    for index in range(64):
        if index == 30:  # preempted: its blocks go to somebody else, and its tokens are computed again
            for cache in (*loaded.model._kv.keys, *loaded.model._kv.values):
                cache.fill_(float("nan"))
            table, start = _table(160, first=3, step=2), 0
        while len(tokens) - start > 40:
            loaded.model.run(Plan(1, (_grant("a", tokens[start : start + 33], start, table),)))
            start += 33
        result = loaded.model.run(Plan(2, (_grant("a", tokens[start:], start, table, index),)))
        start = len(tokens)
        tokens.append(result.sampled[RequestId("a")])

    # What follows each of these tokens, by one forward over all of them, is what greedy decoding takes.
    assert _wanted(reference, tokens[:-1]).argmax(-1)[len(prompt) - 1 :].tolist() == tokens[len(prompt) :]


@pytest.mark.skipif(registry.active_name() != "cpu", reason="other kernels do not promise it")
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "phi3, partial longrope", "granite", "mixtral"])
def test_neighbours_and_chunks_change_no_bit(name, tmp_path):
    stem, options = MODELS[name]
    tiny(stem, tmp_path, **options)
    loaded, tokens, other = _load(tmp_path), _prompt(70), _prompt(41, seed=2)
    alone = _logits(loaded, tokens)

    with torch.inference_mode():
        _hidden(loaded, _grant("a", tokens[:50], 0, _table(70)))
        hidden = _hidden(
            loaded,
            _grant("b", other, 0, _table(41, first=2, step=1)),
            _grant("a", tokens[50:], 50, _table(70)),
        )
        beside = loaded.model._decoder.logits(hidden, torch.arange(41, 61))

    assert torch.equal(beside, alone[50:])


@pytest.mark.parametrize(
    ("weights", "error"), [pytest.param("bf16", 0.02, marks=pytest.mark.deep), ("int8", 0.06)]
)
def test_rounded_weights_give_nearly_the_same(pair, weights, error):
    folder, reference = pair
    tokens = _prompt(80)
    wanted = _wanted(reference, tokens)

    loaded = _load(folder, weights=weights)

    assert loaded.kernels.weight_type == weights
    # Of a good row: where rounding makes a token choose another expert, little is the same after it.
    errors = (_logits(loaded, tokens) - wanted).abs().amax(1) / wanted.abs().max()
    assert 0 < errors.quantile(0.25) < error


@pytest.mark.deep
def test_the_reference_kernels_give_the_same(pair):
    folder, reference = pair
    tokens, before = _prompt(150), registry.active_name()
    try:
        logits = _logits(_load(folder, kernels="reference"), tokens, (7, 8, 80))
    finally:
        registry.use(before)

    assert _relative_error(logits, _wanted(reference, tokens)) <= 2e-5


def test_short_factors_hold_while_no_more_than_the_original_context_is_served(tmp_path):
    reference = tiny("Phi3", tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=64)
    tokens = _prompt(60)

    logits = _logits(_load(tmp_path, max_context=64), tokens)

    assert _relative_error(logits, _wanted(reference, tokens)) <= 2e-5
    assert _relative_error(_logits(_load(tmp_path), tokens), _wanted(reference, tokens)) > 1e-3


def test_a_window_that_hides_nothing_of_the_served_context_costs_nothing(tmp_path):
    reference = tiny("Mistral", tmp_path, sliding_window=WINDOW)
    tokens = _prompt(WINDOW)

    within, beyond = _load(tmp_path, max_context=WINDOW), _load(tmp_path, max_context=WINDOW + 1)

    assert (within.model._decoder.config.windows, beyond.model._decoder.config.windows) == ((), (WINDOW,) * 3)
    assert within.model._decoder.config.is_plain
    assert _relative_error(_logits(within, tokens), _wanted(reference, tokens)) <= 2e-5


def test_dynamic_rope_is_the_default_within_the_models_own_context(tmp_path):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    reference = tiny("Llama", tmp_path, rope_parameters=dynamic)
    tokens = _prompt(60)

    assert _relative_error(_logits(_load(tmp_path), tokens), _wanted(reference, tokens)) <= 2e-5
