"""Logits of whole models, bit by bit: neither what is computed beside a row nor by whom changes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.models.registry import load
from engine.runner.batch import build_batch
from engine.sampling import SamplingParams
from engine.scheduler.plan import Plan
from kernels import cpu, registry
from tests.support.grants import grant
from tests.support.models import tiny_llama

ROOT = Path(__file__).parents[2]
WEIGHTS = ["fp32", "bf16", "int8"]
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


@pytest.fixture(scope="module", autouse=True)
def _cpu(_reference):
    registry.use("cpu")
    yield
    cpu.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(path, hidden_size=72, num_attention_heads=6, num_key_value_heads=2, head_dim=20)
    return path


def _grant(name, tokens, start, table):
    return grant(name, start, len(tokens), 0, token_ids=tokens, block_table=table, sampling=GREEDY)


class Machine:
    """A model whose logits are asked for row by row; each request has blocks of its own."""

    def __init__(self, folder, weights, num_blocks=700):
        loaded = load(
            folder and str(folder), num_threads=1, num_blocks=num_blocks, weights=weights, kernels="cpu"
        )
        self.vocab = loaded.info.vocab_size
        self.decoder, self.kv = loaded.model._decoder, loaded.model._kv
        self.poison()

    def poison(self):
        """Nothing computed so far may be needed from here on."""
        for cache in (*self.kv.keys, *self.kv.values):
            cache.fill_(float("nan"))

    def step(self, *grants):
        """Logits of every token of (request, tokens, start), each request in blocks named by its number."""
        plan = Plan(
            1,
            tuple(_grant(str(r), tokens, start, self.table(r)) for r, tokens, start in grants),
        )
        batch = build_batch(plan, BLOCK)
        with torch.inference_mode():
            hidden = self.decoder.forward(batch.token_ids, batch.attention, self.kv.keys, self.kv.values)
            return self.decoder.logits(hidden, torch.arange(len(hidden)))

    def table(self, request):
        width = 10
        return [(request * width + i) * 13 % self.kv.num_blocks for i in range(width)]

    def prompt(self, length, seed):
        return torch.randint(3, self.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    def alone(self, request, tokens, chunk=None):
        chunk = chunk or len(tokens)
        return torch.cat(
            [self.step((request, tokens[at : at + chunk], at)) for at in range(0, len(tokens), chunk)]
        )


@pytest.fixture(scope="module", params=WEIGHTS)
def machine(request, folder):
    return Machine(folder, request.param)


def check_everything(machine, num_tokens):
    """Chunks, companions, threads and prefixes, against one whole prompt alone on one thread."""
    tokens = machine.prompt(num_tokens, 1)
    wanted = machine.alone(0, tokens)
    assert wanted.isfinite().all()

    for threads, chunk in ((1, 1), (1, 7), (2, 7), (2, 16), (1, 64), (2, num_tokens)):
        cpu.set_num_threads(threads)
        machine.poison()
        assert torch.equal(machine.alone(3, tokens, chunk), wanted), (threads, chunk)
    cpu.set_num_threads(2)

    for size in (8, 32):
        machine.poison()
        others = {r: machine.prompt(5 + r * 3 % 40, r) for r in range(1, size)}
        machine.step((0, tokens[:-1], 0), *((r, prompt[:-1], 0) for r, prompt in others.items()))
        together = machine.step(
            *((r, prompt[-1:], len(prompt) - 1) for r, prompt in others.items()),
            (0, tokens[-1:], num_tokens - 1),
        )
        assert torch.equal(together[-1], wanted[-1]), size
        mixed = machine.step((50, tokens, 0), *((r, [7], len(prompt)) for r, prompt in others.items()))
        assert torch.equal(mixed[:num_tokens], wanted), size
    cpu.set_num_threads(1)

    # A warm prefix: the first two blocks are another request's, which computed them in another way.
    machine.poison()
    cold, warm = machine.table(0), machine.table(9)
    machine.alone(9, tokens[: 2 * BLOCK], 5)
    for cache in (*machine.kv.keys, *machine.kv.values):
        cache[cold[:2]] = cache[warm[:2]]
    assert torch.equal(machine.step((0, tokens[2 * BLOCK :], 2 * BLOCK)), wanted[2 * BLOCK :])


def test_logits_of_a_tiny_model_depend_on_the_row_alone(machine):
    check_everything(machine, 77)


def test_all_layers_in_one_call_give_the_bits_of_the_operations_one_by_one(machine):
    tokens = machine.prompt(21, 4)
    fused = machine.alone(1, tokens, 6)
    machine.poison()
    run_layers, machine.decoder._run_layers = machine.decoder._run_layers, None
    try:
        assert torch.equal(machine.alone(1, tokens, 6), fused)
    finally:
        machine.decoder._run_layers = run_layers


def test_a_pool_of_another_size_is_noticed(folder):
    first = Machine(folder, "fp32", num_blocks=80)
    tokens = first.prompt(20, 5)
    wanted = first.alone(0, tokens)
    second = Machine(folder, "fp32", num_blocks=90)
    first.kv = second.kv

    assert torch.equal(first.alone(0, tokens), wanted)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", 512),
        ("positions", -1),
        ("slots", 80 * BLOCK),
        ("slots", -1),
        ("block_tables", 80),
        ("block_tables", -1),
        ("context_lens", 2),
        ("context_lens", 3 * BLOCK),
        ("query_start", 1),
    ],
)
def test_a_step_that_names_what_does_not_exist_is_refused_before_anything_is_touched(folder, field, value):
    machine = Machine(folder, "fp32", num_blocks=80)
    batch = build_batch(Plan(1, (_grant("0", [5, 6, 7], 0, [3]),)), BLOCK)
    getattr(batch.attention, field).view(-1)[0] = value
    hidden = torch.zeros(3, 72)

    with pytest.raises(IndexError, match="position, slot or block"):
        machine.decoder._run_layers(hidden, batch.attention, machine.kv.keys, machine.kv.values)
    assert all(cache.isnan().all() for cache in machine.kv.keys)


_SIGNATURE = """
import sys, torch
sys.path[:0] = [{root!r}, {root!r} + "/protos"]
from kernels import cpu
from tests.kernels.test_cpu_attention import BATCHES, OPTIONS, Problem
g = torch.Generator().manual_seed(0)
x, out = torch.randn(13, 75, generator=g), []
for kind in ("fp32", "bf16", "fp16", "int8"):
    weight, bias = torch.randn(50, 75, generator=g), torch.randn(50, generator=g)
    out.append(cpu.linear(x, cpu.pack_linear(weight, kind), bias))
out += [cpu.rms_norm(x, torch.randn(75, generator=g), 1e-5), cpu.silu_mul(x[:, :74].contiguous())]
out += [cpu.gelu_mul(x[:, :74].contiguous(), tanh=True), cpu.log_sum_exp(x * 9)]
for window, softcap in OPTIONS.values():
    out.append(Problem(BATCHES["decodes and chunks"], 6, 2, 24).run(cpu, window, softcap))
torch.save([torch.backends.cpu.get_cpu_capability(), *out], sys.argv[1])
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs both instruction sets")
def test_the_builds_for_avx2_and_avx512_compute_the_same_bits(tmp_path):
    results = {}
    for capability in ("avx2", "avx512"):
        path = tmp_path / capability
        subprocess.run(
            [sys.executable, "-c", _SIGNATURE.format(root=str(ROOT)), str(path)],
            check=True,
            env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        results[capability] = torch.load(path)
    assert results["avx2"][0] == "AVX2"
    for left, right in zip(results["avx2"][1:], results["avx512"][1:], strict=True):
        assert torch.equal(left, right)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_logits_of_the_real_model_depend_on_the_row_alone(weights):
    check_everything(Machine(None, weights), 77)
