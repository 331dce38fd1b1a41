"""What adapters cost a step of the default model: none, one for all rows, several mixed.

    PYTHONPATH=.:protos python bench/lora.py [--rounds 15] [--rank 16] [--folder build]

Adapters are random and adapt all seven projections of every layer. Turns alternate, so that
other load on the machine disturbs all alike; medians in milliseconds, and their ratio to a step
without adapters turn by turn.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from engine.models.config import DecoderConfig
from engine.models.registry import LoadedStepModel, find_model, load_model
from engine.request import Request, RequestId, RequestSpec
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan

NAMES = ("a", "b", "c", "d")
CONTEXT_TOKENS = 128
#: Of each kind of step: requests, and tokens of each.
STEPS = {
    "decode, batch 1": (1, 1),
    "decode, batch 8": (8, 1),
    "decode, batch 32": (32, 1),
    "prefill": (1, 256),
}
#: Whose adapter the n-th request has.
MIXES = {
    "none": lambda n: "",
    "one for all": lambda n: "a",
    "every other": lambda n: "a" if n % 2 else "",
    "four": lambda n: NAMES[n % 4],
}


def write_adapter(folder: Path, config: DecoderConfig, rank: int, seed: int) -> None:
    """A random adapter in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    tensors = {}
    for layer in range(config.num_layers):
        for name, (n_out, n_in) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(rank, n_in, generator=generator) / n_in
            tensors[f"{prefix}B.weight"] = torch.randn(n_out, rank, generator=generator) / rank
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.partition(".")[2] for name in shapes]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def plan(num_requests: int, num_tokens: int, mix: str) -> Plan:
    """A step of requests that have ``CONTEXT_TOKENS`` already, or prefill from their beginning."""
    start = CONTEXT_TOKENS if num_tokens == 1 else 0
    blocks = -(-(start + num_tokens) // 16)
    grants = []
    for n in range(num_requests):
        token_ids = tuple((n * 31 + i * 7) % 1000 + 3 for i in range(start + num_tokens))
        sampling = SamplingParams(temperature=0.0)
        spec = RequestSpec(RequestId(str(n)), token_ids, sampling, adapter=MIXES[mix](n))
        table = list(range(n * blocks, (n + 1) * blocks))
        grants.append(Grant(Request(spec, 0, 0.0), start, num_tokens, table, 0))
    return Plan(1, tuple(grants))


def measure(loaded: LoadedStepModel, step: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every turn, by mix."""
    plans = {mix: plan(*STEPS[step], mix) for mix in MIXES}
    found: dict[str, list[float]] = {mix: [] for mix in MIXES}
    for turn in range(rounds + 2):
        for mix, each in plans.items():
            begin = time.perf_counter()
            loaded.model.run(each)
            if turn >= 2:
                found[mix].append(time.perf_counter() - begin)
    return found


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = DecoderConfig.from_folder(find_model(None)[1])
        for seed, adapter in enumerate(NAMES):
            write_adapter(Path(name) / adapter, config, options.rank, seed)
        adapters = {adapter: str(Path(name) / adapter) for adapter in NAMES}
        loaded = load_model(None, num_threads=options.threads, num_blocks=600, adapters=adapters)
    table = Table(title=f"ms a step, rank {options.rank}; ratio to a step without adapters")
    for column in ("step", *MIXES):
        table.add_column(column, justify="left" if column == "step" else "right")
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    for step in STEPS:
        found, row = measure(loaded, step, options.rounds), [step]
        figures[step] = {}
        for mix, seconds in found.items():
            ratio = statistics.median(b / a for a, b in zip(found["none"], seconds, strict=True))
            figures[step][mix] = (statistics.median(seconds) * 1e3, ratio)
            row.append("{:.1f} ({:.2f}x)".format(*figures[step][mix]))
        table.add_row(*row)
    Console().print(table)
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "bench-lora.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
