"""What one other busy process costs the default model, with one thread and with two.

    PYTHONPATH=.:protos python bench/neighbour.py [--rounds 4] [--loops 1] [--folder build]

Two servers, one of each thread count, get the demo's kind of load by turns: four batch streams, and
an urgent request every 0.8 s. Each round does so quietly and beside a process that does nothing but
compute. Order alternates, and ratios are taken within a round, so that what else the machine does
meets both sides; what is printed are medians over rounds.

Two threads beside the neighbour should give at least what one thread gives beside it, and an urgent
request's TTFT should stay within three times of the quiet one.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.serving import serving
from clients.python import VorrangClient
from clients.python.events import Delta
from clients.python.request_stream import RequestStream
from clients.python.session import Session

BATCH_STREAMS, BATCH_PROMPT_TOKENS = 4, 64
URGENT_EVERY_S, URGENT_PROMPT_TOKENS, URGENT_TOKENS = 0.8, 64, 8
#: Seconds that are measured; what comes before fills batches and shows the runner its neighbour.
WINDOW_S, LEAD_S = 4.0, 0.8
URGENT, BATCH = -100, 50
THREADS = (1, 2)


@dataclass(frozen=True, slots=True)
class Observed:
    """One load on one server.

    Attributes:
        tokens_per_s: of all streams.
        ttft_s: median of urgent requests.
        stall_s: longest time that a batch stream was without a token.
    """

    tokens_per_s: float
    ttft_s: float
    stall_s: float


Round = dict[str, Observed]


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """Processes that do nothing but compute, until the context is left."""
    with ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def prompt(length: int) -> list[int]:
    """Tokens that no prefix cache knows."""
    return [random.randrange(100, 40_000) for _ in range(length)]


async def arrivals(stream: RequestStream, into: list[tuple[float, int]]) -> None:
    """Note when tokens come, and how many."""
    async for event in stream:
        if not isinstance(event, Delta):
            continue
        into.append((time.perf_counter(), len(event.token_ids)))


async def urgent(session: Session, into: list[tuple[float, int]]) -> float:
    """One urgent request; its TTFT in seconds."""
    begin = time.perf_counter()
    got: list[tuple[float, int]] = []
    stream = await session.start(
        token_ids=prompt(URGENT_PROMPT_TOKENS), max_tokens=URGENT_TOKENS, priority=URGENT, ignore_eos=True
    )
    await arrivals(stream, got)
    into.extend(got)
    return got[0][0] - begin


def stall(times: list[float], begin: float, end: float) -> float:
    """Longest gap of a stream within a window, its edges included."""
    inside = [begin, *(at for at in times if begin <= at <= end), end]
    return max(after - before for before, after in pairwise(inside))


async def observe(address: str) -> Observed:
    """The load, for a window."""
    async with VorrangClient(address) as client, client.session() as session, asyncio.TaskGroup() as group:
        batch: list[list[tuple[float, int]]] = [[] for _ in range(BATCH_STREAMS)]
        streams = []
        for into in batch:
            stream = await session.start(
                token_ids=prompt(BATCH_PROMPT_TOKENS), max_tokens=1500, priority=BATCH, ignore_eos=True
            )
            streams.append(stream)
            group.create_task(arrivals(stream, into))
        await asyncio.sleep(LEAD_S)
        begin = time.perf_counter()
        end, asked = begin + WINDOW_S, []
        tokens: list[tuple[float, int]] = []
        for number in range(int(WINDOW_S / URGENT_EVERY_S)):
            await asyncio.sleep(begin + number * URGENT_EVERY_S - time.perf_counter())
            asked.append(group.create_task(urgent(session, tokens)))
        await asyncio.sleep(end - time.perf_counter())
        ttfts = [await task for task in asked]
        for stream in streams:
            await stream.cancel()
    counted = [*tokens, *(token for stream in batch for token in stream)]
    return Observed(
        sum(number for at, number in counted if begin <= at <= end) / WINDOW_S,
        statistics.median(ttfts),
        max(stall([at for at, _ in stream], begin, end) for stream in batch),
    )


def measure_round(addresses: dict[int, str], loops: int, turn: int) -> Round:
    """Each thread count, quiet and beside neighbours; what comes first alternates."""
    found: Round = {}
    order = THREADS if turn % 2 else THREADS[::-1]
    for state, number in (("quiet", 0), ("busy", loops)):
        with neighbours(number):
            for threads in order:
                found[f"{threads} {state}"] = asyncio.run(observe(addresses[threads]))
    return found


def ratio(rounds: list[Round], field: str, over: str, under: str) -> float:
    """Median over rounds of one observation over another."""
    seen = [(getattr(found[over], field), getattr(found[under], field)) for found in rounds]
    return float(statistics.median(above / max(1e-9, below) for above, below in seen))


def figures_of(rounds: list[Round], loops: int) -> dict[str, Any]:
    """Medians, and ratios within rounds."""
    medians = {
        name: {
            field: statistics.median(getattr(found[name], field) for found in rounds)
            for field in Observed.__slots__
        }
        for name in sorted(rounds[0], key=lambda name: (name.endswith("busy"), name))
    }
    return {
        "loops": loops,
        "rounds": [{name: asdict(seen) for name, seen in found.items()} for found in rounds],
        "medians": medians,
        "tokens_per_s_two_over_one_quiet": ratio(rounds, "tokens_per_s", "2 quiet", "1 quiet"),
        "tokens_per_s_two_over_one_busy": ratio(rounds, "tokens_per_s", "2 busy", "1 busy"),
        "ttft_two_busy_over_quiet": ratio(rounds, "ttft_s", "2 busy", "2 quiet"),
        "ttft_one_busy_over_quiet": ratio(rounds, "ttft_s", "1 busy", "1 quiet"),
    }


def report(console: Console, figures: dict[str, Any]) -> None:
    """Print what was measured."""
    table = Table("threads", "tokens/s", "urgent TTFT", "longest stall of a batch stream")
    for name, seen in figures["medians"].items():
        shown = (f"{seen['tokens_per_s']:.0f}", f"{seen['ttft_s']:.2f} s", f"{seen['stall_s']:.2f} s")
        table.add_row(name, *shown)
    console.print(table)
    console.print(
        f"tokens/s, two threads / one: quiet {figures['tokens_per_s_two_over_one_quiet']:.2f}, "
        f"busy {figures['tokens_per_s_two_over_one_busy']:.2f} (at least 1 wanted)"
    )
    console.print(
        f"urgent TTFT, busy / quiet: two threads {figures['ttft_two_busy_over_quiet']:.2f} (at most 3 "
        f"wanted), one thread {figures['ttft_one_busy_over_quiet']:.2f}"
    )


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--loops", type=int, default=1, help="busy processes")
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        addresses = {
            threads: stack.enter_context(serving("--threads", str(threads))).address for threads in THREADS
        }
        for address in addresses.values():  # a first load fills caches
            asyncio.run(observe(address))
        rounds = [measure_round(addresses, options.loops, turn) for turn in range(options.rounds)]
    figures = figures_of(rounds, options.loops)
    console = Console()
    report(console, figures)
    console.print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "bench-neighbour.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
