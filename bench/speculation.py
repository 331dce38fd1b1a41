"""Tokens a second at batch 1, with guessed tokens and without, on the default model.

    PYTHONPATH=.:protos python bench/speculation.py [--rounds 5] [--folder build]

Three texts: one that the model continues with repetitions, one in between (code), and one
that never repeats itself, where guessing can only cost. Turns alternate, so that other load
on the machine disturbs all alike; medians, and their ratio turn by turn. Outputs are compared.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.models import registry
from engine.request import RequestId, RequestSpec
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager

NUM_TOKENS, GUESSES = 96, (0, 4)
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n"
TEXTS = {
    "repetitive": "Row, row, row your boat. " * 8,
    "code": CODE * 2,
    "prose": "The lighthouse keeper had not seen a ship for a year when, one evening,",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run has brought."""

    seconds: float
    steps: int
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int


def run(loaded: registry.LoadedModel, prompt: list[int], guesses: int) -> Outcome:
    """Decode alone; the time is from the first output token to the last."""
    pool = loaded.model.pool
    config = SchedulerConfig(speculation_tokens=guesses)
    scheduler = Scheduler(config, BlockManager(pool.num_blocks, pool.block_size, enable_prefix_cache=False))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request_id = RequestId("r")
    scheduler.submit(RequestSpec(request_id, tuple(prompt), sampling), 0.0)
    request = scheduler.find(request_id)
    assert request is not None
    begin, steps = 0.0, 0
    while scheduler.has_requests:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, loaded.model.run(plan), 0.0)
        if not begin and request.num_output_tokens:
            begin = time.perf_counter()
        else:
            steps += 1
    seconds = time.perf_counter() - begin
    output = tuple(request.output_token_ids)
    return Outcome(seconds, steps, output, request.num_drafted_tokens, request.num_accepted_tokens)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    loaded = registry.load(None, num_threads=options.threads, num_blocks=64)
    table = Table(title=f"batch 1, {NUM_TOKENS} output tokens, at most {GUESSES[1]} guesses a step")
    for column in ("text", "steps", "with guesses", "right", "tokens/s", "with guesses", "times faster"):
        table.add_column(column, justify="left" if column == "text" else "right")
    figures = {}
    for name, text in TEXTS.items():
        prompt = loaded.tokenizer.encode(text)
        turns = [[run(loaded, prompt, guesses) for guesses in GUESSES] for _ in range(options.rounds + 1)][1:]
        plain, guessed = turns[0]
        assert all(outcome.token_ids == plain.token_ids for turn in turns for outcome in turn)
        rates = [statistics.median((NUM_TOKENS - 1) / turn[i].seconds for turn in turns) for i in (0, 1)]
        faster = statistics.median(turn[0].seconds / turn[1].seconds for turn in turns)
        right = guessed.accepted / guessed.drafted if guessed.drafted else 0.0
        figures[name] = {
            "steps": plain.steps,
            "steps_with_guesses": guessed.steps,
            "accepted_share": right,
            "tokens_per_s": rates[0],
            "tokens_per_s_with_guesses": rates[1],
            "times_faster": faster,
        }
        table.add_row(
            name,
            f"{plain.steps}",
            f"{guessed.steps}",
            f"{right:.0%}",
            f"{rates[0]:.1f}",
            f"{rates[1]:.1f}",
            f"{faster:.2f}",
        )
    Console().print(table)
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "bench-speculation.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
