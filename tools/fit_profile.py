"""Fits the constants of ``engine.sim.profiles.HardwareProfile`` to a card's kernel timings.

    python tools/fit_profile.py ../shared/traces/calibration/rtx4090_llama31_8b [W,c0,c1,kappa]

reads PREFIX_dense.csv.gz, PREFIX_per_sequence.csv.gz and PREFIX_attention.csv.gz
(LLMServingSim's profiles of Llama-3.1-8B: microseconds per kernel, one layer) and
prints the constants, the first four as given if they are. Nothing is fitted to the
time of a whole step or a request, so a measured serving run remains a test of the
model. docs/SIMULATOR.md has the definitions.
"""

import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

NUM_LAYERS = 32
PER_LAYER = (
    "qkv_proj",
    "rotary_emb",
    "o_proj",
    "gate_up_proj",
    "act_fn",
    "down_proj",
    "layernorm",
    "layernorm",
)
ONCE = ("embedding", "final_layernorm")
#: Decodes a step may hold; between them h(S) is interpolated.
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)


def rows(path: str) -> Iterable[dict[str, str]]:
    """Rows of a gzipped csv file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def through_origin(pairs: list[tuple[float, float]]) -> float:
    """Slope of the least-squares line through the origin."""
    x, y = np.array(pairs).T
    return float((x @ y) / (x @ x))


def main(prefix: str, given: str = "") -> None:
    """Fit and print."""
    dense_us: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows(f"{prefix}_dense.csv.gz"):
        dense_us[row["layer"]][int(row["tokens"])] = float(row["time_us"])
    per_sequence_us: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows(f"{prefix}_per_sequence.csv.gz"):
        per_sequence_us[row["layer"]][int(row["sequences"])] = float(row["time_us"])
    attention_ms: dict[tuple[int, int, int, int], float] = {}
    for row in rows(f"{prefix}_attention.csv.gz"):
        key = tuple(int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
        attention_ms[key] = float(row["time_us"]) * NUM_LAYERS / 1e3  # type: ignore[index]

    def head_ms(num_sequences: int) -> float:
        return sum(per_sequence_us[name][num_sequences] for name in ("lm_head", "sampler")) / 1e3

    def dense_ms(num_tokens: int) -> float:
        layers_us = NUM_LAYERS * sum(dense_us[name][num_tokens] for name in PER_LAYER)
        return (layers_us + sum(dense_us[name][num_tokens] for name in ONCE)) / 1e3

    few = [t for t in dense_us["qkv_proj"] if t <= 16]
    many = [t for t in dense_us["qkv_proj"] if t >= 256]
    weights = float(np.mean([dense_ms(t) + head_ms(1) for t in few]))
    token, base = np.polyfit(many, [dense_ms(t) + head_ms(1) for t in many], 1)
    if given:
        weights, base, token, kappa_us = map(float, given.split(","))
    print(f"weights_ms={weights:.1f} base_ms={base:.1f} token_ms={token:.4f}")

    decode = {
        (n, kv): t for (c, _, n, kv), t in attention_ms.items() if c == 0 and n > 0 and n * kv <= 65_536
    }
    long = [(n, kv, t) for (n, kv), t in decode.items() if n >= 8 and kv >= 256]
    kappa = float(np.polyfit([n * kv for n, kv, _ in long], [t for *_, t in long], 1)[0])
    if given:
        kappa = kappa_us / 1e3
    print(f"kv_token_us={kappa * 1e3:.3f}")

    points = []
    for n in SEQUENCES:
        floor = float(np.mean([t - kappa * n * kv for (m, kv), t in decode.items() if m == n and kv >= 256]))
        step = dense_ms(n) + head_ms(n) + floor
        points.append((n, round(float(step - max(weights, base + token * n)), 2)))
    print(f"sequences_ms={tuple(points)}")

    prefill = {(c, kv): t for (c, kv, n, _), t in attention_ms.items() if c >= 64 and n == 0 and kv <= 4096}
    pairs = [(c * kv + c * (c + 1) / 2, t - kappa * (c + kv)) for (c, kv), t in prefill.items()]
    print(f"attention_pair_ns={through_origin(pairs) * 1e6:.2f}")

    extra = [
        (n * kv, t - attention_ms[c, past, 0, 0] - decode[n, kv])
        for (c, past, n, kv), t in attention_ms.items()
        if c >= 16 and kv >= 256 and (n, kv) in decode and n >= 8 and past == 0 and n * kv <= 65_536
    ]
    print(f"mixed_kv_token_us={through_origin(extra) * 1e3:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
