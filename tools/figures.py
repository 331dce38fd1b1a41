"""Write the figures of the last ``make bench`` into README.md, docs/benchmarks.md and docs/SIMULATOR.md.

    python tools/figures.py build/bench.json   # keeps it as docs/benchmarks.json, writes the pages
    python tools/figures.py --check            # whether the pages say what docs/benchmarks.json says

These pages have blocks between two comments; nothing in them is written by hand, so every
figure there is a line of docs/benchmarks.json. The pictures made in the same run come along.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs/benchmarks.json"
#: What a run draws, and where the pages show it.
PICTURES = {
    "demo.svg": "docs/demo.svg",
    "bench-static.png": "docs/figures/static-batching.png",
    "bench-scheduler.png": "docs/figures/scheduler-cost.png",
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [
        " | ".join(head),
        " | ".join(["---"] + ["--:"] * (len(head) - 1)),
        *(" | ".join(r) for r in rows),
    ]
    return "".join(f"| {line} |\n" for line in lines)


def machine(bench: dict[str, Any]) -> str:
    """What it ran on, in a sentence."""
    made = bench["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items())
    memory_gib = made["memory_bytes"] / 2**30
    return (
        f"{bench['date']}: {made['processor']}, {made['cores']} cores, {memory_gib:.0f} GiB, "
        f"{made['system']}, Python {made['python']}, {packages}. All parts took {bench['seconds']:.0f} s."
    )


def classes(figures: dict[str, Any]) -> str:
    """Latency by class, policy beside policy."""
    rows = []
    for policy, found in figures["policies"].items():
        for name, report in found["classes"].items():
            ttft, tpot = report["ttft_s"], report["tpot_s"]["p50"]
            shown = ["-" if ttft[key] is None else f"{ttft[key]:.2f} s" for key in ("p50", "p90")]
            per_token = "-" if tpot is None else f"{tpot * 1e3:.0f} ms"
            counts = (str(report["num_requests"]), str(report["num_served"]))
            rows.append((f"{policy}, {name}", *counts, *shown, per_token, f"{found['tokens_per_s']:.0f}"))
    head = ("policy, class", "requests", "served", "TTFT p50", "p90", "TPOT p50", "tokens/s in all")
    return table(head, rows)


def static(figures: dict[str, Any]) -> str:
    """Static against continuous batches."""
    rows = [
        (
            f"{example}, {way}",
            f"{found['steps']:,}",
            f"{found['makespan_s']:.2f} s",
            f"{found['useful_share']:.0%}",
            f"{found['late_ttft_s']:.2f} s",
            f"{found['late_latency_s']:.2f} s",
        )
        for example, ways in figures.items()
        for way, found in ways.items()
    ]
    return table(("example, batching", "steps", "makespan", "useful", "late TTFT", "late latency"), rows)


def speculation(figures: dict[str, Any]) -> str:
    """Guessed tokens."""
    rows = [
        (
            text,
            f"{found['steps']} / {found['steps_with_guesses']}",
            f"{found['accepted_share']:.0%}",
            f"{found['tokens_per_s']:.1f} / {found['tokens_per_s_with_guesses']:.1f}",
            f"{found['times_faster']:.2f}",
        )
        for text, found in figures.items()
    ]
    return table(("text", "steps without / with", "guesses right", "tokens/s", "times faster"), rows)


def scheduler(figures: dict[str, Any]) -> str:
    """Plan + commit by running and waiting requests."""
    steady = figures["steady_us"]
    waiting = list(next(iter(steady.values())))
    rows = [(running, *(f"{row[n]:,.0f}" for n in waiting)) for running, row in steady.items()]
    return table(("running", *(f"{int(n):,} waiting" for n in waiting)), rows)


def simulator(figures: dict[str, Any]) -> str:
    """Steps a second."""
    rows = [(name, f"{rate:,.0f}") for name, rate in figures["steps_per_s"].items()]
    return table((f"{figures['num_running']} running", "steps/s"), rows)


def fairness(figures: dict[str, Any]) -> str:
    """Differences in service between tenants."""
    if "skipped" in figures:
        return f"Skipped: {figures['skipped']}.\n"
    rows = [
        (name, *(f"{value:,.0f}" for value in row.values()))
        for name, row in (figures["rows"] | figures["published"]).items()
    ]
    return table(("", "max", "mean", "variance", "tokens/s"), rows)


def model(figures: dict[str, Any]) -> str:
    """A step of the default model."""
    faster = figures["times_faster_than_transformers"]
    kinds = list(next(iter(faster.values())))
    rows = [
        (
            step,
            f"{figures['median_s'][step]['transformers'] * 1e3:.1f} ms",
            *(f"{figures['median_s'][step][kind] * 1e3:.1f} ms ({times[kind]:.1f}x)" for kind in kinds),
        )
        for step, times in faster.items()
    ]
    return table((f"{figures['threads']} threads", "transformers", *kinds), rows)


def serve(figures: dict[str, Any]) -> str:
    """Served against bare."""
    names = {
        "bare_tokens_per_s": "bare model, tokens/s",
        "served_tokens_per_s": "served, tokens/s",
        "served_to_bare": "served / bare, median of rounds",
        "ready_s": "ready after, s",
        "loaded_mb": "server and runner hold then, MB",
        "resident_mb": "and at the end, MB",
    }
    threads = sorted(int(key.rpartition("_")[2]) for key in figures if key.startswith("served_to_bare_"))
    rows = [
        (text, *(f"{figures[f'{key}_{n}']:,.{0 if key.endswith('mb') else 2}f}" for n in threads))
        for key, text in names.items()
    ]
    return table(("", *(f"{n} thread" + "s" * (n > 1) for n in threads)), rows)


def neighbour(figures: dict[str, Any]) -> str:
    """One thread and two, quiet and beside a busy process."""
    rows = [
        (
            f"{name.split()[0]}, {name.split()[1]}",
            f"{seen['tokens_per_s']:.0f}",
            f"{seen['ttft_s']:.2f} s",
            f"{seen['stall_s']:.2f} s",
        )
        for name, seen in figures["medians"].items()
    ]
    shown = table(("threads, machine", "tokens/s", "urgent TTFT", "longest stall of a batch stream"), rows)
    return (
        f"{shown}\nTokens/s of two threads over one's, median of rounds: quiet "
        f"{figures['tokens_per_s_two_over_one_quiet']:.2f}, "
        f"busy {figures['tokens_per_s_two_over_one_busy']:.2f}. "
        f"Urgent TTFT, busy over quiet: two threads {figures['ttft_two_busy_over_quiet']:.2f}, "
        f"one thread {figures['ttft_one_busy_over_quiet']:.2f}.\n"
    )


def grpc(figures: dict[str, Any]) -> str:
    """CPU of a token's way out."""
    rows = []
    for name, kinds in figures.items():
        way, size = name.split()
        shown = [f"{median(kinds[kind]):.1f}" if kind in kinds else "" for kind in ("bare", "ours", "engine")]
        rows.append((way, size, *shown))
    head = ("way out, us of CPU a token", "tokens a message", "bare grpc.aio", "ours", "with the engine")
    return table(head, rows)


def demo(figures: dict[str, Any]) -> str:
    """What the demo printed, without the frame of its table."""
    frame = str.maketrans({"┃": "│"})
    lines = [line.translate(frame) for line in figures["lines"] if line and line[0] not in "┏┡└"]
    return "```text\n" + "\n".join(lines[1:]) + "\n```\n"


TITLES = {
    "demo": ("The demo", demo),
    "model": ("A step of the default model beside transformers", model),
    "serve": ("Served against the bare model", serve),
    "neighbour": ("One thread and two beside a busy process", neighbour),
    "grpc": ("A token's way out", grpc),
    "classes": ("Latency by class through gRPC, the default model on four seats, overloaded", classes),
    "static": ("Continuous against static batches", static),
    "speculation": ("Guessed tokens at batch 1", speculation),
    "scheduler": ("Plan + commit, steady decode, microseconds", scheduler),
    "simulator": ("The simulator", simulator),
    "fairness": ("Difference in service between tenants on VTC's trace", fairness),
}


def page(bench: dict[str, Any]) -> str:
    """The block of docs/benchmarks.md."""
    parts = [machine(bench) + "\n"]
    for name, part in bench["parts"].items():
        load = " to ".join(f"{value:.1f}" for value in part["load_average"])
        said = f"`{part['command']}`, {part['seconds']:.0f} s, load average {load}"
        if "error" in part:
            parts.append(f"### {name}\n\n{said}: {part['error']}.\n")
        elif name in TITLES:
            title, show = TITLES[name]
            parts.append(f"### {title}\n\n{said}.\n\n{show(part['figures'])}")
        else:
            parts.append(f"### {name}\n\n{said}; figures in [benchmarks.json](benchmarks.json).\n")
    return "\n".join(parts)


def readme(bench: dict[str, Any]) -> str:
    """The block of README.md: what a reader asks first."""
    figures = {name: part.get("figures", {}) for name, part in bench["parts"].items()}
    policies = figures["classes"]["policies"]
    ttft = {name: found["classes"]["interactive"]["ttft_s"]["p50"] for name, found in policies.items()}
    rate = {name: found["tokens_per_s"] for name, found in policies.items()}
    classic = figures["static"]["classic"]
    late = {way: f"{found['late_latency_s']:.2f} s" for way, found in classic.items()}
    padding = 1 - classic["static"]["useful_share"]
    guessed = figures["speculation"]["repetitive"]
    waited = "none came" if ttft["fcfs"] is None else f"{ttft['fcfs']:.2f} s"
    rows = [
        (
            "interactive TTFT under overload, median: `priority` / `fcfs`",
            f"{ttft['priority']:.2f} s / {waited}, at {rate['priority']:.0f} / {rate['fcfs']:.0f} tokens/s",
        ),
        (
            "requests of 10, 50, 100 and 500 tokens, a fifth at step 20: it is done after",
            f"{late['continuous']}; {late['static']} with static batches, {padding:.0%} of which is padding",
        ),
        (
            "guessed tokens on a repetitive text, batch 1",
            f"{guessed['steps']} steps become {guessed['steps_with_guesses']}, "
            f"{guessed['times_faster']:.1f} times faster, the same output",
        ),
        ("plan + commit of 256 running requests", f"{figures['scheduler']['steady_us']['256']['0']:.0f} us"),
    ]
    return table(("`make bench`", "measured"), rows)


def with_block(text: str, name: str, block: str) -> str:
    """A page with a block replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    found, number = re.subn(pattern, lambda _: f"{begin}\n\n{block}\n{end}", text, flags=re.DOTALL)
    assert number == 1, f"a page has one block {name!r}"
    return found


def pages(bench: dict[str, Any]) -> dict[Path, str]:
    """What README, docs/benchmarks.md and docs/SIMULATOR.md have to say."""
    front, back, virtual = ROOT / "README.md", ROOT / "docs/benchmarks.md", ROOT / "docs/SIMULATOR.md"
    text = with_block(front.read_text(), "demo", demo(bench["parts"]["demo"]["figures"]))
    return {
        front: with_block(text, "figures", readme(bench)),
        back: with_block(back.read_text(), "figures", page(bench)),
        virtual: with_block(virtual.read_text(), "fairness", fairness(bench["parts"]["fairness"]["figures"])),
    }


def keep(path: Path) -> None:
    """Take a run's figures and pictures into the documents."""
    KEPT.write_text(path.read_text())
    for name, target in PICTURES.items():
        shutil.copyfile(path.parent / name, ROOT / target)


def main() -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", type=Path, nargs="?", help="what make bench wrote")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.bench is not None:
        keep(options.bench)
    stale = {
        path: new for path, new in pages(json.loads(KEPT.read_text())).items() if path.read_text() != new
    }
    if options.check and stale:
        names = ", ".join(path.name for path in stale)
        sys.exit(f"{names}: not what docs/benchmarks.json says; run python tools/figures.py")
    for path, new in stale.items():
        path.write_text(new)


if __name__ == "__main__":
    main()
