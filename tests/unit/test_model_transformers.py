"""Models that run through transformers' own modules with our paged attention."""

import json

import pytest
import torch

from engine.models import transformers_decoder
from engine.models.errors import InvalidCheckpoint, UnsupportedModel
from engine.models.registry import load, load_model
from engine.request import RequestId
from engine.runner.batch import build_batch
from engine.sampling import SamplingParams
from engine.scheduler.plan import Plan
from kernels.ops import NotBatchInvariant
from tests.support.grants import grant
from tests.support.models import TINY_VOCAB_SIZE, tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
GPT2 = {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 256, "n_inner": 88}
STABLELM = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
#: Learnt positions, Conv1D and a tied head; parallel residuals and partial rotation; norms with a bias;
#: scaled logits; positions with an offset; a window.
MODELS = {
    "gpt2": ("GPT2", GPT2),
    "gpt neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "stablelm": ("StableLm", STABLELM),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
    "opt": ("OPT", {"ffn_dim": 88, "word_embed_proj_dim": 48}),
    "starcoder2, window": ("Starcoder2", {"sliding_window": 24}),
}


def _prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, TINY_VOCAB_SIZE, (length,), generator=generator).tolist()


def _load(folder, **options):
    return load(str(folder), num_threads=1, **({"num_blocks": 64, "block_size": 16} | options))


def _grant(name, tokens, start, table, index=None):
    return grant(name, start, len(tokens), index, token_ids=tokens, block_table=table, sampling=GREEDY)


def _logits(loaded, tokens, cuts):
    model, rows, begin = loaded.model, [], 0
    with torch.inference_mode():
        for end in (*cuts, len(tokens)):
            plan = Plan(1, (_grant("a", tokens[begin:end], begin, list(range(40, 30, -1))),))
            batch = build_batch(plan, 16)
            hidden = model._decoder.forward(
                batch.token_ids, batch.attention, model._kv.keys, model._kv.values
            )
            rows.append(model._decoder.logits(hidden, torch.arange(end - begin)))
            begin = end
    return torch.cat(rows)


def _wanted(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gpt neox", "stablelm"),
        *(pytest.param(name, marks=pytest.mark.deep) for name in ("cohere", "opt", "starcoder2, window")),
    ],
)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    stem, options = MODELS[name]
    reference = tiny(stem, tmp_path, **options)
    loaded, tokens = _load(tmp_path), _prompt(100)
    wanted = _wanted(reference, tokens)

    assert loaded.info.computed_by.startswith("transformers' modules, ")
    logits = _logits(loaded, tokens, (7, 8, 60))
    assert ((logits - wanted).abs().max() / wanted.abs().max()).item() <= 2e-5

    output, table, start = tokens[:50], [3, 50, 9, 11, 12, 60, 1, 30], 0
    for index in range(64):
        if index == 30:  # preempted
            for cache in (*loaded.model._kv.keys, *loaded.model._kv.values):
                cache.fill_(float("nan"))
            table, start = [8, 2, 40, 13, 7, 20, 21, 33], 0
        while len(output) - start > 40:
            loaded.model.run(Plan(1, (_grant("a", output[start : start + 33], start, table),)))
            start += 33
        result = loaded.model.run(Plan(2, (_grant("a", output[start:], start, table, index),)))
        start = len(output)
        output.append(result.sampled[RequestId("a")])
    assert _wanted(reference, output[:-1]).argmax(-1)[49:].tolist() == output[50:]


def test_requests_side_by_side_get_what_each_would_alone(tmp_path):
    tiny("GPTNeoX", tmp_path)
    loaded, prompts = _load(tmp_path), {"a": _prompt(30, 1), "b": _prompt(17, 2), "c": _prompt(1, 3)}
    tables = {"a": [5, 6], "b": [30, 2], "c": [9]}
    alone = {
        name: loaded.model.run(Plan(1, (_grant(name, prompts[name], 0, tables[name], 0),))).sampled[name]
        for name in prompts
    }

    grants = tuple(_grant(name, prompts[name], 0, tables[name], 0) for name in prompts)

    assert loaded.model.run(Plan(2, grants)).sampled == alone


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_weight_types_hold_for_linear_layers(weights, tmp_path):
    reference = tiny("GPT2", tmp_path, **GPT2)
    loaded, tokens = _load(tmp_path, weights=weights), _prompt(60)
    wanted = _wanted(reference, tokens)

    assert loaded.kernels.weight_type == weights
    errors = (_logits(loaded, tokens, ()) - wanted).abs().amax(1) / wanted.abs().max()
    assert 0 < errors.median() < 0.1


def test_a_bfloat16_checkpoint_is_kept_so_and_computed_in_float32(tmp_path):
    reference = tiny("StableLm", tmp_path, dtype=torch.bfloat16, **STABLELM)
    loaded, tokens = _load(tmp_path), _prompt(60)
    wanted = _wanted(reference, tokens)

    assert loaded.kernels.weight_type == "bf16"
    assert ((_logits(loaded, tokens, ()) - wanted).abs().max() / wanted.abs().max()).item() <= 2e-5


def test_attention_that_is_not_transformers_own_is_refused(tmp_path):
    tiny("Bloom", tmp_path, n_layer=2, n_head=4)  # ALiBi, by code of its own

    with pytest.raises(UnsupportedModel, match=r"architecture must be one that .* another attention"):
        _load(tmp_path)


def test_a_model_that_gives_something_else_with_paged_attention_is_refused(tmp_path, monkeypatch):
    tiny("GPTNeoX", tmp_path)
    attend = transformers_decoder._Step.attend
    monkeypatch.setattr(
        transformers_decoder._Step,
        "attend",
        lambda self, q, k, v, scale, window, softcap: attend(self, q, k, v, scale, 4, softcap),
    )

    with pytest.raises(UnsupportedModel, match=r"changes by 0\.001 at most.*GPTNeoXForCausalLM, 0\.\d"):
        _load(tmp_path)


def test_several_ranks_and_exact_bits_are_refused(tmp_path):
    tiny("GPTNeoX", tmp_path)

    with pytest.raises(UnsupportedModel, match="architecture for several ranks must be LlamaForCausalLM"):
        _load(tmp_path, tensor_parallel=2)
    with pytest.raises(NotBatchInvariant, match="transformers"):
        _load(tmp_path, batch_invariant=True)


def test_what_no_causal_language_model_is_keeps_our_own_message(tmp_path):
    tiny("GPTNeoX", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))

    with pytest.raises(UnsupportedModel, match=r"architecture must be LlamaForCausalLM.*'BertModel'"):
        _load(tmp_path)


def test_a_model_for_images_too_is_refused(tmp_path):
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModel, match=r"architecture must be .*'Gemma3ForConditionalGeneration'"):
        load_model(str(tmp_path))


def test_a_missing_tensor_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny("GPTNeoX", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(InvalidCheckpoint, match=r"layers\.1\.mlp\.dense_h_to_4h\.weight"):
        _load(tmp_path)
