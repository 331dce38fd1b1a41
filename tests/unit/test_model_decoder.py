"""The decoder against transformers on tiny random checkpoints, whole, chunked, batched and preempted."""

import pytest
import torch

from engine.models.errors import InvalidCheckpoint
from engine.models.registry import load
from engine.request import RequestId
from engine.runner.batch import build_batch
from engine.sampling import SamplingParams
from engine.scheduler.plan import Plan
from tests.support.grants import grant
from tests.support.models import default_model, reference_generate, reference_model, tiny_llama, tiny_qwen3

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "sharded": {"tie_word_embeddings": False, "shard_size": "60KB"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one head for all": {"num_key_value_heads": 1},
    "head size of its own": {"head_dim": 20},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "bfloat16": {"dtype": torch.bfloat16},
    "qwen3": {"tiny": tiny_qwen3},
    "qwen3 with biases, tied": {"tiny": tiny_qwen3, "attention_bias": True, "tie_word_embeddings": True},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def _load(folder, **options):
    return load(str(folder), num_threads=1, **({"num_blocks": 64, "block_size": 16} | options))


def _prompt(length, seed=0):
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _grant(name, tokens, start, table, index, sampling=GREEDY):
    return grant(name, start, len(tokens), index, token_ids=tokens, block_table=table, sampling=sampling)


def _all_logits(loaded, tokens, cuts=()):
    """Logits of every token of one request, computed in chunks that end at ``cuts``."""
    model, table = loaded.model, list(range(40, 40 - -(-len(tokens) // loaded.model.pool.block_size), -1))
    rows, begin = [], 0
    with torch.inference_mode():
        for end in (*cuts, len(tokens)):
            plan = Plan(1, (_grant("a", tokens[begin:end], begin, table, 0),))
            batch = build_batch(plan, model.pool.block_size)
            hidden = model._decoder.forward(
                batch.token_ids, batch.attention, model._kv.keys, model._kv.values
            )
            rows.append(model._decoder.logits(hidden, torch.arange(end - begin)))
            begin = end
    return torch.cat(rows)


def _relative_error(logits, wanted):
    return ((logits - wanted).abs().max() / wanted.abs().max()).item()


def _generate(loaded, tokens, max_tokens, table):
    """Greedy decoding of one request, step by step."""
    tokens, start, output = list(tokens), 0, []
    for index in range(max_tokens):
        result = loaded.model.run(Plan(index + 1, (_grant("a", tokens[start:], start, table, index),)))
        start = len(tokens)
        output.append(result.sampled[RequestId("a")])
        tokens.append(output[-1])
    return output


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name, tmp_path):
    options = dict(CHECKPOINTS[name])
    reference = options.pop("tiny", tiny_llama)(tmp_path, **options)
    loaded = _load(tmp_path)
    tokens = _prompt(123)
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]

    assert wanted.std() > 0.5
    assert _relative_error(_all_logits(loaded, tokens), wanted) <= 2e-5

    prompt = tokens[:20]
    ours = _generate(loaded, prompt, 24, [3, 50, 9, 11, 12, 60])
    for _ in ours:  # greedy decoding of transformers without its generate, so that an end token ends nothing
        with torch.inference_mode():
            prompt = [*prompt, int(reference(torch.tensor([prompt])).logits[0, -1].argmax())]
    assert ours == prompt[20:]


@pytest.mark.parametrize("cuts", [(1,), (8, 16), (5, 6, 7, 50), tuple(range(1, 61))])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(cuts, tmp_path):  # vLLM 69: to rounding
    tiny_llama(tmp_path)
    loaded = _load(tmp_path)
    tokens = _prompt(61)

    whole = _all_logits(loaded, tokens)

    assert _relative_error(_all_logits(loaded, tokens, cuts), whole) <= 2e-5


def test_a_mixed_batch_samples_what_each_request_would_alone(tmp_path):  # vLLM 69: in tokens
    tiny_llama(tmp_path)
    loaded = _load(tmp_path)
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    prompts = {"decode": _prompt(17, 1), "whole": _prompt(30, 2), "chunk": _prompt(40, 3)}
    tables = {"decode": [5, 6, 7], "whole": [30, 2, 31, 3], "chunk": [10, 20, 11, 21, 12]}
    samplings = {"decode": drawn, "whole": GREEDY, "chunk": drawn}
    alone = {
        name: loaded.model.run(Plan(1, (_grant(name, prompts[name], 0, tables[name], 4, samplings[name]),)))
        for name in prompts
    }
    for block in range(64):  # nothing of the runs above may be needed below
        for cache in (*loaded.model._kv.keys, *loaded.model._kv.values):
            cache[block] = float("nan")

    loaded.model.run(
        Plan(
            2,
            (
                _grant("decode", prompts["decode"][:16], 0, tables["decode"], None),
                _grant("chunk", prompts["chunk"][:33], 0, tables["chunk"], None),
            ),
        )
    )
    result = loaded.model.run(
        Plan(
            3,
            (
                _grant("decode", prompts["decode"][16:], 16, tables["decode"], 4, drawn),
                _grant("whole", prompts["whole"], 0, tables["whole"], 4),
                _grant("chunk", prompts["chunk"][33:], 33, tables["chunk"], 4, drawn),
            ),
        )
    )

    assert not result.failures
    assert result.sampled == {name: alone[name].sampled[name] for name in prompts}


def test_a_grant_without_output_index_samples_nothing(tmp_path):
    tiny_llama(tmp_path)
    loaded = _load(tmp_path)

    result = loaded.model.run(Plan(1, (_grant("a", [5, 6], 0, [1], None), _grant("b", [7], 0, [2], 0))))

    assert result.sampled.keys() == {"b"}
    assert loaded.model.run(Plan(2, (_grant("a", [8], 2, [1], None),))).sampled == {}
    assert loaded.model.run(Plan(3, ())).sampled == {}


def test_banned_ids_of_a_grant_are_not_sampled(tmp_path):
    tiny_llama(tmp_path)
    loaded = _load(tmp_path)
    first = loaded.model.run(Plan(1, (_grant("a", [5, 6], 0, [1], 0),))).sampled["a"]

    not_yet = SamplingParams(temperature=0.0, max_tokens=64, min_tokens=1, stop_token_ids=(first,))
    other = loaded.model.run(Plan(2, (_grant("a", [5, 6], 0, [1], 0, not_yet),))).sampled["a"]

    assert other != first


@pytest.mark.parametrize("cause", ["its KV is broken", "its ids are unknown", "negative id"])
def test_a_poisoned_request_fails_alone(cause, tmp_path):
    tiny_llama(tmp_path)
    loaded = _load(tmp_path)
    good, bad = _prompt(9, 1), _prompt(9, 2)
    wanted = loaded.model.run(Plan(1, (_grant("good", good, 0, [1, 2], 0),))).sampled["good"]
    if cause == "its KV is broken":
        loaded.model.run(Plan(2, (_grant("bad", bad[:8], 0, [4, 5], None),)))
        loaded.model._kv.values[0][4] = float("nan")
    else:
        bad[8] = 259 if cause == "its ids are unknown" else -1
        loaded.model.run(Plan(2, (_grant("bad", bad[:8], 0, [4, 5], None),)))

    result = loaded.model.run(
        Plan(3, (_grant("bad", bad[8:], 8, [4, 5], 0), _grant("good", good, 0, [1, 2], 0)))
    )

    assert result.sampled == {"good": wanted}
    assert result.failures.keys() == {"bad"}
    assert "incident" in str(result.failures["bad"])


@pytest.mark.parametrize("cause", ["its KV is broken", "its ids are unknown"])
def test_a_poisoned_chunk_that_does_not_sample_fails_too(cause, tmp_path):
    tiny_llama(tmp_path)
    loaded = _load(tmp_path)
    loaded.model.run(Plan(1, (_grant("bad", _prompt(8), 0, [4, 5], None),)))
    chunk = [5, 999, 6] if cause == "its ids are unknown" else [5, 6, 7]
    if cause == "its KV is broken":
        loaded.model._kv.keys[1][4] = float("nan")

    result = loaded.model.run(
        Plan(2, (_grant("bad", chunk, 8, [4, 5], None), _grant("good", [5], 0, [1], 0)))
    )

    assert result.failures.keys() == {"bad"}
    assert result.sampled.keys() == {"good"}


def test_max_context_shortens_what_is_served(tmp_path):
    tiny_llama(tmp_path)

    assert _load(tmp_path).info.context_tokens == 512
    assert _load(tmp_path, max_context=100).info.context_tokens == 100
    assert _load(tmp_path, max_context=10_000).info.context_tokens == 512


def test_the_pool_is_sized_in_bytes_or_in_blocks(tmp_path):
    tiny_llama(tmp_path)
    block_bytes = 2 * 3 * 2 * 12 * 4 * 16  # K and V, layers, heads, head size, float32, tokens

    assert _load(tmp_path, num_blocks=None, kv_bytes=10 * block_bytes + 1).model.pool.num_blocks == 10
    assert _load(tmp_path, num_blocks=7, kv_bytes=10 * block_bytes).model.pool.num_blocks == 7


def test_damage_shows_itself_at_load(tmp_path):
    tiny_llama(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(InvalidCheckpoint, match=r"tokenizer\.json"):
        _load(tmp_path)


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_ends_with_im_end_and_speaks():
    loaded = default_model()
    prompt = loaded.tokenizer.encode("The capital of France is")

    assert loaded.info.eos_token_ids == {2}
    assert loaded.info.context_tokens == 8192
    assert loaded.tokenizer.decode(_generate(loaded, prompt, 2, [4, 5])) == " Paris."


@pytest.mark.model
def test_the_default_model_gives_the_greedy_tokens_of_transformers():
    loaded = default_model()
    prompt = loaded.tokenizer.encode(
        "<|im_start|>user\nCount from 1 to 5.<|im_end|>\n<|im_start|>assistant\n"
    )

    ours = _generate(loaded, prompt, 16, [9, 8, 7, 6])

    wanted = reference_generate(loaded.folder, prompt, 16)
    assert ours[: len(wanted)] == wanted
    with torch.inference_mode():
        logits = reference_model(loaded.folder)(torch.tensor([prompt])).logits[0]
    assert _relative_error(_all_logits(loaded, prompt), logits) <= 2e-5
