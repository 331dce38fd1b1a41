"""What a step of the default model costs, beside transformers on the same weights and threads.

Usage: ``make bench-model``. Ours and theirs take turns, so that whatever else the
machine does meets both. Medians of times and of ratios within a turn are printed and
written to ``build/bench-model.json``. Steps are whole ones, from plan to sampled
token, at 128 tokens of context. transformers computes in float32; with ``bf16`` and
``int8`` ours rounds the same weights.
"""

import argparse
import functools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.models.registry import LoadedModel, load
from engine.request import RequestId
from engine.runner.batch import build_batch
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan
from kernels import cpu_build, ops

ROOT = Path(__file__).parents[1]
TEXT = Path(__file__).with_name("text.txt")
CONTEXT_TOKENS = 128
PREFILL_TOKENS = 256
BATCHES = (1, 8, 32)
BLOCK_SIZE = 16
WEIGHTS = ("fp32", "bf16", "int8")
GREEDY = SamplingParams(temperature=0.0)
#: What the project has set itself; see the issue on the CPU path.
TARGETS = {"decode 1": 2.5, "decode 8": 3.5, "decode 32": 3.0, f"prefill {PREFILL_TOKENS}": 1.2}
BANDWIDTH_SHARE_TARGET = 0.6
INT8_TARGET = 1.3
READ_BYTES = 400_000_000


def grant(name: str, start: int, token_ids: list[int], block_table: list[int]) -> Grant:
    """One request's part of a step; its last token samples."""
    return Grant(RequestId(name), start, token_ids, block_table, 0, GREEDY)


class Ours:
    """The default model in one weight type, and the plans that are timed."""

    def __init__(self, weights: Any, text: list[int]) -> None:
        blocks = CONTEXT_TOKENS // BLOCK_SIZE + 1
        self.loaded: LoadedModel = load(
            None, num_blocks=max(BATCHES) * blocks, block_size=BLOCK_SIZE, weights=weights, kernels="cpu"
        )
        self.model = self.loaded.model
        tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(max(BATCHES))]
        self.model.run(Plan(1, (grant("0", 0, text[:CONTEXT_TOKENS], tables[0]),)))
        for cache in (*self.model._kv.keys, *self.model._kv.values):
            cache.view(max(BATCHES), -1)[:] = cache.view(max(BATCHES), -1)[:1].clone()
        self.plans = {
            f"decode {batch}": Plan(
                1,
                tuple(grant(f"{row}", CONTEXT_TOKENS, [text[row]], tables[row]) for row in range(batch)),
            )
            for batch in BATCHES
        }
        prompt = grant("prompt", 0, text[:PREFILL_TOKENS], [*tables[0], *tables[1]])
        self.plans[f"prefill {PREFILL_TOKENS}"] = Plan(1, (prompt,))

    def step(self, name: str) -> None:
        """Compute one plan. The prefill overwrites KV of the decodes, whose time does not depend on it."""
        self.model.run(self.plans[name])

    @property
    def step_bytes(self) -> int:
        """What a decode at batch 1 must read: all weights, and the KV of its context."""
        kv = self.model._kv
        return self.model._decoder.weights.num_bytes + kv.num_bytes // kv.num_blocks * (
            CONTEXT_TOKENS // BLOCK_SIZE
        )

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits of every token of one prompt."""
        table = list(range(-(-len(tokens) // BLOCK_SIZE)))
        plan = Plan(1, (grant("text", 0, tokens, table),))
        batch = build_batch(plan, BLOCK_SIZE)
        with torch.inference_mode():
            hidden = self.model._decoder.forward(
                batch.token_ids, batch.attention, self.model._kv.keys, self.model._kv.values
            )
            return self.model._decoder.logits(hidden, torch.arange(len(tokens)))


class Theirs:
    """transformers' own model, eager, float32, over the same folder."""

    def __init__(self, folder: Path, text: list[int]) -> None:
        from transformers import LlamaForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = LlamaForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
            ).eval()
        self.prompt = torch.tensor([text[:PREFILL_TOKENS]])
        self.caches: dict[str, Any] = {}
        self.tokens: dict[str, Tensor] = {}
        with torch.inference_mode():
            for batch in BATCHES:
                prompt = torch.tensor([text[:CONTEXT_TOKENS]] * batch)
                out = self.model(prompt, use_cache=True, logits_to_keep=1)
                self.caches[f"decode {batch}"] = out.past_key_values
                self.tokens[f"decode {batch}"] = torch.tensor(text[:batch]).unsqueeze(1)

    def step(self, name: str) -> None:
        """One forward pass and the argmax of its last logits."""
        with torch.inference_mode():
            if name.startswith("prefill"):
                out = self.model(self.prompt, use_cache=True, logits_to_keep=1)
            else:
                cache = self.caches[name]
                out = self.model(self.tokens[name], past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache.crop(-1)
            out.logits[:, -1].argmax(-1).tolist()


Times = dict[str, list[float]]


def take_turns(works: dict[str, Callable[[], object]], repeats: int) -> Times:
    """Seconds of each work in each turn."""
    times: Times = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            if turn:  # the first one warms caches
                times[name].append(time.perf_counter() - begin)
    return times


def medians(times: Times) -> dict[str, float]:
    """Of each work."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: Times, slow: str, quick: str) -> float:
    """How many times faster ``quick`` is: the median over turns, which share what else the machine does."""
    return statistics.median(s / q for s, q in zip(times[slow], times[quick], strict=True))


def limits() -> dict[str, Callable[[], object]]:
    """What shows the machine's limits: memory read, memory copied, a large product in float32."""
    source = torch.ones(READ_BYTES // 4)
    target = torch.empty_like(source)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return {
        "read": lambda: float(source.sum()),
        "copy": lambda: target.copy_(source),
        "gemm": lambda: torch.mm(left, right),
    }


def machine(times: Times) -> dict[str, float]:
    """The limits as rates."""
    seconds = medians(times)
    return {
        "read_bytes_per_s": READ_BYTES / seconds["read"],
        "copy_bytes_per_s": 2 * READ_BYTES / seconds["copy"],
        "gemm_flops": 2 * 1024**3 / seconds["gemm"],
    }


def bandwidth_share(times: Times, name: str, step_bytes: int) -> float:
    """Bytes/s of a decode over the quicker of read and copy in the same turn; the median over turns."""
    shares = []
    for step_s, read_s, copy_s in zip(times[name], times["read"], times["copy"], strict=True):
        limit = max(READ_BYTES / read_s, 2 * READ_BYTES / copy_s)
        shares.append(step_bytes / step_s / limit)
    return statistics.median(shares)


def quality(ours: dict[str, Ours], text: list[int]) -> dict[str, dict[str, float]]:
    """Each weight type on the text: perplexity, and how far its logits are from those of float32."""
    tokens = text[: PREFILL_TOKENS + 1]
    targets = torch.tensor(tokens[1:]).unsqueeze(1)
    exact = ours["fp32"].logits(tokens)[:-1]
    found = {}
    for name, model in ours.items():
        logits = model.logits(tokens)[:-1]
        loss = (ops.log_sum_exp(logits) - logits.gather(1, targets).squeeze(1)).mean()
        found[name] = {
            "perplexity": loss.exp().item(),
            "logit_error_rms": (logits - exact).square().mean().sqrt().item(),
            "logit_error_max": (logits - exact).abs().max().item(),
            "same_argmax_share": (logits.argmax(-1) == exact.argmax(-1)).float().mean().item(),
        }
    found["fp32"]["logit_std"] = exact.std().item()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every operation")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each step")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench-model.json")
    arguments = parser.parse_args()
    console = Console()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore", FutureWarning)  # of transformers, on a name that its older versions need

    with console.status("Loading"):
        tokenizer = load(None, num_blocks=1).tokenizer
        text = tokenizer.encode(TEXT.read_text())
        ours = {weights: Ours(weights, text) for weights in WEIGHTS}
        theirs = Theirs(ours["fp32"].loaded.folder, text)
    load_before = os.getloadavg()[0]
    steps: dict[str, Times] = {}
    with console.status("Measuring"):
        for step in TARGETS:
            works: dict[str, Callable[[], object]] = {
                name: functools.partial(model.step, step)
                for name, model in {"transformers": theirs, **ours}.items()
            }
            if step == "decode 1":
                works |= limits()
            steps[step] = take_turns(works, arguments.repeats)
        qualities = quality(ours, text)

    decodes = steps["decode 1"]
    result = {
        "threads": arguments.threads,
        "instructions": cpu_build.capability(),
        "load_average": [load_before, os.getloadavg()[0]],
        "machine": machine(decodes),
        "median_s": {step: medians(times) for step, times in steps.items()},
        "times_faster_than_transformers": {
            step: {name: ratio(times, "transformers", name) for name in WEIGHTS}
            for step, times in steps.items()
        },
        "bandwidth_share": {
            name: bandwidth_share(decodes, name, model.step_bytes) for name, model in ours.items()
        },
        "int8_over_bf16": ratio(decodes, "bf16", "int8"),
        "quality": qualities,
        "text": f"{TEXT.relative_to(ROOT)}, first {PREFILL_TOKENS} tokens",
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    report(console, result)
    console.print(f"written to {arguments.out}")


def report(console: Console, result: dict[str, Any]) -> None:
    """Print the tables."""
    rates = result["machine"]
    console.print(
        f"{result['instructions']}, threads {result['threads']}, load average "
        f"{result['load_average'][0]:.1f} to {result['load_average'][1]:.1f}; read "
        f"{rates['read_bytes_per_s'] / 1e9:.1f} GB/s, copy {rates['copy_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"GEMM {rates['gemm_flops'] / 1e9:.0f} GFLOP/s"
    )
    table = Table("step", "transformers", *WEIGHTS, "target", title="median ms (times faster)")
    for step, seconds in result["median_s"].items():
        faster = result["times_faster_than_transformers"][step]
        cells = [f"{seconds[name] * 1e3:.1f} ({faster[name]:.2f})" for name in WEIGHTS]
        table.add_row(step, f"{seconds['transformers'] * 1e3:.1f}", *cells, f"{TARGETS[step]}")
    shares = [f"{result['bandwidth_share'][name]:.0%}" for name in WEIGHTS]
    table.add_row("share of bandwidth, decode 1", "", *shares, f"{BANDWIDTH_SHARE_TARGET:.0%}")
    table.add_row("int8 over bf16, decode 1", "", "", "", f"{result['int8_over_bf16']:.2f}", f"{INT8_TARGET}")
    console.print(table)
    table = Table("weights", "perplexity", "logit error rms", "max", "same argmax", title=result["text"])
    for name, found in result["quality"].items():
        table.add_row(
            name,
            f"{found['perplexity']:.3f}",
            f"{found['logit_error_rms']:.4f}",
            f"{found['logit_error_max']:.3f}",
            f"{found['same_argmax_share']:.1%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
