"""LoRA adapters on tiny real models: several in one step, against weights merged by hand."""

import asyncio
import json
import os
import random
import signal
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import UnknownModel
from engine.events import Delta, Finished, Preempted
from engine.loop import Engine
from engine.models.errors import InvalidAdapter, UnsupportedAdapter
from engine.models.registry import load
from engine.request import Request, RequestId, RequestSpec
from engine.runner.batch import build_batch
from engine.runner.child import RunnerLimits
from engine.runner.inline import InlineRunner
from engine.runner.process import ProcessRunner
from engine.runner.scripted import ScriptedTokenizer
from engine.runner.sources import TorchSource
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Grant, Plan
from kernels import registry
from tests.e2e.test_client_cli import ctl
from tests.support.adapters import ALL, merged, write_adapter
from tests.support.models import TINY_VOCAB_SIZE, tiny
from tests.support.process import run_cli
from tests.support.server import running_server
from tests.support.wire import settled

BLOCK = 16
#: Of each family, the class names' stem in transformers, fields of its config, and what is adapted.
MODELS = {
    "llama": ("Llama", {}, ALL),
    "qwen3": ("Qwen3", {"head_dim": 20}, ALL),
    "qwen2": ("Qwen2", {}, ALL),
    "phi3": ("Phi3", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, ALL[:4]),
}
DEEP = {"qwen2", "mixtral"}


class Served:
    """A tiny model with two adapters, and what transformers computes with each of them, and without."""

    def __init__(self, folder, stem, options, targets):
        base = tiny(stem, folder / "base", **options)
        first = write_adapter(folder / "first", base, seed=1, targets=targets)
        second = write_adapter(
            folder / "second", base, seed=2, rank=3, alpha=5, targets=targets[::2], use_rslora=True
        )
        self.folder, self.adapters = folder, {"first": str(first), "second": str(second)}
        self.wanted = {"": base, "first": merged(base, first), "second": merged(base, second)}

    def load(self, **options):
        options = {"num_blocks": 64, "block_size": BLOCK, "adapters": self.adapters} | options
        return load(str(self.folder / "base"), num_threads=1, **options)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.deep] if name in DEEP else []) for name in MODELS],
)
def served(request, tmp_path_factory):
    return Served(tmp_path_factory.mktemp("lora"), *MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("llama"), *MODELS["llama"])


def prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, TINY_VOCAB_SIZE) for _ in range(length)]


def grant(name, tokens, begin, end, first_block, adapter=""):
    spec = RequestSpec(RequestId(name), tuple(tokens[:end]), SamplingParams(temperature=0.0), adapter=adapter)
    blocks = range(first_block, first_block + -(-end // BLOCK))
    return Grant(Request(spec, 0, 0.0), begin, end - begin, list(blocks), None)


def logits(loaded, *grants):
    """Logits of every token of a step, by grant."""
    decoder, pool = loaded.model._decoder, loaded.model._kv
    batch = build_batch(Plan(1, grants), BLOCK)
    with torch.inference_mode():
        hidden = decoder.forward(batch.token_ids, batch.attention, pool.keys, pool.values, batch.adapters)
        rows = decoder.logits(hidden, torch.arange(hidden.shape[0]))
    return rows.split([each.num_tokens for each in grants])


def relative_error(found, wanted):
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def test_two_adapters_and_none_in_one_step_give_the_logits_of_merged_weights(served):
    loaded, names = served.load(), ["first", "", "second", "first"]
    prompts = [prompt(70, index) for index in range(4)]

    chunks = [
        logits(loaded, *(grant(str(i), p, begin, end, 5 * i, names[i]) for i, p in enumerate(prompts)))
        for begin, end in pairwise([0, 9, 50, 70])
    ]

    for index, name in enumerate(names):
        found = torch.cat([chunk[index] for chunk in chunks])
        with torch.inference_mode():
            wanted = served.wanted[name](torch.tensor([prompts[index]])).logits[0]
            base = served.wanted[""](torch.tensor([prompts[index]])).logits[0]
        assert relative_error(found, wanted) <= 2e-5
        assert not name or relative_error(base, wanted) > 0.05, "the adapter does nothing"


@pytest.mark.skipif(registry.active_name() != "cpu", reason="other kernels do not promise it")
def test_neighbours_change_no_bit(served):
    loaded, names = served.load(), ["first", "", "second", "first"]
    prompts = [prompt(30, index) for index in range(4)]
    grants = [grant(str(i), p, 0, 30, 2 * i, names[i]) for i, p in enumerate(prompts)]

    together = logits(loaded, *grants)

    for each, beside in zip(grants, together, strict=True):
        assert torch.equal(logits(loaded, each)[0], beside)


def spec(name, tokens, level, adapter, max_tokens=20):
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return RequestSpec(RequestId(name), tuple(tokens), sampling, level, adapter=adapter)


async def generate(loaded, *specs, **config):
    """Output tokens, whether it was preempted, and usage of each request."""
    runner = InlineRunner(loaded.model)
    config = {"max_running_requests": 4, "max_step_tokens": 40, "max_chunk_tokens": 16} | config
    engine = Engine(runner, ScriptedTokenizer(), SchedulerConfig(**config), check_integrity=True)
    task = asyncio.create_task(engine.run())
    try:
        handles = [engine.submit(each) for each in specs]
        events = [[event async for event in handle.events()] for handle in handles]
    finally:
        task.cancel()
        await asyncio.wait([task])
        await runner.close()
    found = []
    for each in events:
        tokens = [token for event in each if isinstance(event, Delta) for token in event.token_ids]
        (end,) = [event for event in each if isinstance(event, Finished)]
        preempted = any(isinstance(event, Preempted) for event in each)
        found.append((tokens, preempted, end.usage))
    return found


def greedy(model, tokens, count):
    """Greedy output of transformers' model; the end token does not end it."""
    tokens = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


@pytest.mark.asyncio
async def test_tokens_are_those_of_merged_weights_through_chunks_and_preemption(served):
    names = ["first", "", "second", "second", "first", ""]
    prompts = [prompt(40 + 3 * index, index) for index in range(6)]
    specs = [spec(str(i), p, -i, name) for i, (p, name) in enumerate(zip(prompts, names, strict=True))]

    found = await generate(served.load(num_blocks=12), *specs)

    assert any(preempted for _, preempted, _ in found)
    for (tokens, _, _), tokens_in, name in zip(found, prompts, names, strict=True):
        assert tokens == greedy(served.wanted[name], tokens_in, 20)


@pytest.mark.asyncio
async def test_guessed_tokens_are_verified_with_the_adapter(llama):
    names = ["first", "", "second"]
    tokens = prompt(6) * 6
    specs = [spec(str(i), tokens, 0, name, max_tokens=40) for i, name in enumerate(names)]

    found = await generate(llama.load(), *specs, speculation_tokens=4, speculation_max_running=8)

    assert [each[0] for each in found] == [greedy(llama.wanted[name], tokens, 40) for name in names]
    assert all(usage.drafted_tokens for _, _, usage in found), "nothing was guessed"


@pytest.mark.deep
def test_the_reference_kernels_give_the_same(llama):
    before, tokens = registry.active_name(), [prompt(40, seed) for seed in range(3)]
    try:
        loaded = llama.load(kernels="reference")
        names = ["second", "", "first"]
        found = logits(loaded, *(grant(str(i), t, 0, 40, 3 * i, names[i]) for i, t in enumerate(tokens)))
    finally:
        registry.use(before)
    for name, each, ids in zip(names, found, tokens, strict=True):
        with torch.inference_mode():
            assert relative_error(each, llama.wanted[name](torch.tensor([ids])).logits[0]) <= 2e-5


@pytest.mark.asyncio
async def test_a_prefix_is_found_again_under_the_same_adapter_alone(llama):
    tokens, loaded = prompt(64), llama.load()
    names = ["", "first", "second", "", "first", "second"]
    specs = [spec(str(i), tokens, 0, name, max_tokens=4) for i, name in enumerate(names)]

    found = await generate(loaded, *specs, max_running_requests=1)

    assert [usage.cached_tokens for _, _, usage in found] == [0, 0, 0, 48, 48, 48]
    assert [each[0] for each in found] == [greedy(llama.wanted[name], tokens, 4) for name in names]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_command_line_gets_the_words_of_the_adapter_it_names(llama):
    loaded, asked = llama.load(), "Who speaks?"
    ids = loaded.tokenizer.encode(asked)
    async with running_server(runner=InlineRunner(loaded.model), tokenizer=loaded.tokenizer) as app:
        arguments = (
            "generate",
            asked,
            "--temperature",
            "0",
            "--max-tokens",
            "8",
            "--min-tokens",
            "8",
            "--json",
        )
        for name in ("", "first", "second"):
            code, out, err = await ctl(*arguments, "--adapter", name, target=app.address)
            assert code == 0, err
            assert json.loads(out)["token_ids"] == greedy(llama.wanted[name], ids, 8)


@pytest.mark.asyncio
async def test_an_unknown_adapter_is_refused_with_the_names_of_the_known(llama):
    with pytest.raises(UnknownModel, match=r"adapter 'third' is not served, only 'first', 'second'"):
        await generate(llama.load(), spec("a", prompt(4), 0, "third"))
    with pytest.raises(UnknownModel, match="none at all"):
        await generate(llama.load(adapters=None), spec("a", prompt(4), 0, "first"))


def test_steps_without_adapters_stay_on_the_call_for_all_layers(llama, monkeypatch):
    loaded = llama.load()
    if loaded.model._decoder._run_layers is None:
        pytest.skip("these kernels have no such call")
    calls = []
    run = loaded.model._decoder._run_layers
    monkeypatch.setattr(loaded.model._decoder, "_run_layers", lambda *a: calls.append(1) or run(*a))

    logits(loaded, grant("a", prompt(5), 0, 5, 0))
    assert len(calls) == 1
    logits(loaded, grant("a", prompt(5), 0, 5, 0, "first"))
    assert len(calls) == 1


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_adapters_are_exact_over_rounded_weights(llama, weights, tmp_path):
    loaded, tokens = llama.load(weights=weights), prompt(20)
    (base,) = logits(loaded, grant("a", tokens, 0, 20, 0))
    (with_adapter,) = logits(loaded, grant("a", tokens, 0, 20, 0, "first"))
    with torch.inference_mode():
        wanted = {name: llama.wanted[name](torch.tensor([tokens])).logits[0] for name in ("", "first")}

    # No further from the truth with the adapter than without it.
    error = relative_error(base, wanted[""])
    assert 0 < relative_error(with_adapter, wanted["first"]) < 3 * error + 1e-3


# What can't be used is named at start


def _config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
DAMAGES = {
    "no folder": (lambda f: [p.unlink() for p in f.iterdir()] and f.rmdir(), "there is no such folder"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    "no tensors": (lambda f: (f / "adapter_model.safetensors").unlink(), "model.safetensors is missing"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "cannot be read as JSON"),
    "cut off": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{"),
        "no readable safetensors file",
    ),
    "rank": (lambda f: _config(f, r=5), r"must have shape \[5, 48\], got \[4, 48\]"),
    "rank 0": (lambda f: _config(f, r=0), "r must be at least 1, got 0"),
    "alpha": (lambda f: _config(f, lora_alpha="x"), "lora_alpha must be a positive number, got 'x'"),
    "no B": (lambda f: _tensors(f, lambda t: t.pop(NAME.format("B"))), "q_proj.lora_B is missing"),
    "no A": (lambda f: _tensors(f, lambda t: t.pop(NAME.format("A"))), "q_proj.lora_A is missing"),
    "another layer": (
        lambda f: _tensors(f, lambda t: t.update({NAME.format("A").replace("1", "7"): torch.zeros(4, 48)})),
        "model.layers.7.self_attn.q_proj.lora_A belongs to no projection",
    ),
    "not finite": (
        lambda f: _tensors(f, lambda t: t[NAME.format("A")].fill_(float("nan"))),
        "must hold finite numbers",
    ),
    "a product that is not finite": (
        lambda f: _tensors(f, lambda t: [t[NAME.format(w)].fill_(1e30) for w in "AB"]),
        r"q_proj.lora_A and lora_B, scaled by .* must add at most 1.8e\+19",
    ),
    "a scale that is too large": (lambda f: _config(f, lora_alpha=1e300), r"scaled by .* must add at most"),
    "an A that overflows before B is zero": (
        lambda f: _tensors(f, lambda t: (t[NAME.format("A")].fill_(3e38), t[NAME.format("B")].zero_())),
        "must add at most",
    ),
    "no floats": (
        lambda f: _tensors(f, lambda t: t.update({NAME.format("A"): torch.zeros(4, 48, dtype=torch.int32)})),
        "must be of a floating point type",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_named_at_start(llama, damage, tmp_path):
    folder = write_adapter(tmp_path / "broken", llama.wanted[""])
    spoil, message = DAMAGES[damage]
    spoil(folder)

    with pytest.raises(InvalidAdapter, match=message) as caught:
        llama.load(adapters={"good": llama.adapters["first"], "broken": str(folder)})

    assert str(caught.value).startswith(f"model.adapters.broken can't be used, from {folder}: ")


UNSUPPORTED = {
    "use_dora": True,
    "bias": "all",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "peft_type": "IA3",
    "rank_pattern": {"q_proj": 2},
    "init_lora_weights": "pissa_niter_4",
    "target_modules": ["q_proj", "lm_head"],
    "fan_in_fan_out": True,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_this_version_can_not_compute_is_refused_by_name(llama, field, tmp_path):
    folder = write_adapter(tmp_path / "odd", llama.wanted[""])
    _config(folder, **{field: UNSUPPORTED[field]})

    with pytest.raises(UnsupportedAdapter, match=rf"^model\.adapters\.odd: {field} must be ") as caught:
        llama.load(adapters={"odd": str(folder)})

    assert caught.value.field == field


def test_embeddings_are_refused(llama, tmp_path):
    folder = write_adapter(tmp_path / "odd", llama.wanted[""])
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    _tensors(folder, lambda tensors: tensors.update({name: torch.zeros(4, TINY_VOCAB_SIZE)}))

    with pytest.raises(UnsupportedAdapter, match="embed_tokens"):
        llama.load(adapters={"odd": str(folder)})


def test_experts_are_refused(tmp_path):
    tiny("Mixtral", tmp_path / "base", **MODELS["mixtral"][1])
    base = tiny("Llama", tmp_path / "llama")
    folder = write_adapter(tmp_path / "odd", base)

    with pytest.raises(UnsupportedAdapter, match="target_modules must be of k_proj, o_proj, q_proj, v_proj"):
        load(str(tmp_path / "base"), num_blocks=8, adapters={"odd": str(folder)})


def test_models_through_transformers_take_no_adapters(llama, tmp_path):
    tiny("GPTNeoX", tmp_path / "base")

    with pytest.raises(UnsupportedAdapter, match=r"architecture must be .* got 'GPTNeoXForCausalLM'"):
        load(str(tmp_path / "base"), num_blocks=8, adapters=llama.adapters)


def test_ranks_take_no_adapters(llama):
    with pytest.raises(UnsupportedAdapter, match=r"engine\.tensor_parallel must be 1 in this version, got 2"):
        llama.load(tensor_parallel=2, device="cpu")


@pytest.mark.asyncio
@pytest.mark.deep
async def test_adapters_are_there_again_after_the_process_died(llama):
    tokens, names = prompt(20), ["first", "", "second"]
    source = TorchSource(
        {
            "model": str(llama.folder / "base"),
            "adapters": llama.adapters,
            "num_blocks": 64,
            "block_size": BLOCK,
            "num_threads": 1,
        }
    )
    runner = await ProcessRunner.start(source, RunnerLimits(hang_s=20))
    engine = Engine(runner, ScriptedTokenizer(), SchedulerConfig(), check_integrity=True)
    task = asyncio.create_task(engine.run())
    try:
        handles = [engine.submit(spec(str(i), tokens, 0, name, 300)) for i, name in enumerate(names)]
        await settled(lambda: all(handle.num_output_tokens > 4 for handle in handles))
        os.kill(runner.pid, signal.SIGKILL)
        events = [[event async for event in handle.events()] for handle in handles]
        assert runner.statistics().num_restarts == 1
        assert runner.info.adapters == ("first", "second")
    finally:
        task.cancel()
        await asyncio.wait([task])
        await runner.close()
    for name, each in zip(names, events, strict=True):
        found = [token for event in each if isinstance(event, Delta) for token in event.token_ids]
        assert found[:64] == greedy(llama.wanted[name], tokens, 64)
        assert len(found) == 300


@pytest.mark.deep
@pytest.mark.parametrize("runner", ["process", "inline"])
def test_a_server_with_a_damaged_adapter_ends_with_one_line(llama, runner, tmp_path):
    folder = write_adapter(tmp_path / "broken", llama.wanted[""])
    _config(folder, r=5)

    result = run_cli(
        *("serve", "--listen", "127.0.0.1:0", "--model", str(llama.folder / "base"), "--runner", runner),
        *(
            "--kv-blocks",
            "8",
            "--adapter",
            f"fine={llama.adapters['first']}",
            "--adapter",
            f"broken={folder}",
        ),
    )

    assert result.returncode != 0
    assert f"model.adapters.broken can't be used, from {folder}: tensor model.layers.0." in result.stderr
    assert "Traceback" not in result.stderr
