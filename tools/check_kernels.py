"""Compile every configuration of every GPU kernel for every target; no card needed. Fails when one is bad.

Bad is what spills registers, needs more shared memory than the card has, lacks
warp-group matrix instructions where they are required, or does not compile.
What was compiled before is looked up in ``build/kernels``, keyed by the
kernel's source, the entry and the version of triton. ``--write`` puts the table
into ``docs/kernels.md``; without it the rows there must be those of the code
(registers and bytes may differ: they belong to the compiler).

    python tools/check_kernels.py [--write] [--no-cache] [--only WORD] [--workers 2]
"""

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kernels.gpu import aot  # noqa: E402
from kernels.gpu.aot import AotEntry, AotResult  # noqa: E402
from kernels.gpu.device import INTERPRETING, TARGETS, TargetName  # noqa: E402

TABLE = ROOT / "docs/kernels.md"
CACHE = ROOT / "build/kernels"

Job = tuple[AotEntry, TargetName]

INTRODUCTION = """\
# GPU kernels, configuration by configuration

Written by `make check-kernels WRITE=1`; do not edit. Each line is what a launcher of `kernels/gpu` can pick,
compiled ahead of time: warps and pipeline stages, then registers of a thread and KiB of shared memory of a
program. Nothing here spills registers. Entries with `wgmma` hold warp-group matrix instructions on sm_90.
The table says nothing about speed.
"""


def jobs_of(entries: Iterable[AotEntry]) -> list[Job]:
    """One for each entry and target."""
    return [(entry, target) for entry in entries for target in entry.targets]


def compile_all(jobs: Sequence[Job], workers: int, cache: Path | None) -> dict[Job, AotResult]:
    """Results by job: from the cache where it has them, else from worker processes, which fill it."""
    results: dict[Job, AotResult] = {}
    files: dict[Job, Path] = {}
    missing = []
    for job in jobs:
        if cache is not None:
            files[job] = cache / f"{aot.fingerprint(*job)}.json"
            if files[job].exists():
                results[job] = AotResult(**json.loads(files[job].read_text()))
                continue
        missing.append(job)
    if not missing:
        return results
    print(f"{len(missing)} of {len(jobs)} to compile", flush=True)
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(workers, context, initializer=aot.keep_artifacts_in, initargs=(scratch,)) as pool,
    ):
        running = {pool.submit(aot.compile_entry, *job): job for job in missing}
        for done, future in enumerate(as_completed(running), start=1):
            job = running[future]
            results[job] = future.result()
            if cache is not None:
                cache.mkdir(parents=True, exist_ok=True)
                files[job].write_text(json.dumps(asdict(results[job])))
            if done % 50 == 0:
                print(f"{done} compiled", flush=True)
    return results


def failures(results: dict[Job, AotResult]) -> list[str]:
    """One line for each thing that is wrong."""
    return [
        f"{entry.kernel} ({entry.case}) on {target}: {problem}"
        for (entry, target), result in results.items()
        for problem in aot.problems(entry, target, result)
    ]


def table(results: dict[Job, AotResult]) -> str:
    """The document: one section a kernel, one line a case, one column a target."""
    cells: dict[str, dict[str, dict[TargetName, str]]] = {}
    for (entry, target), result in results.items():
        words = f"{entry.num_warps}w {entry.num_stages}s"
        words += f" {result.registers} r {result.shared_bytes / 1024:.1f} K"
        words += " wgmma" if entry.needs_wgmma and target == "sm_90" else ""
        cells.setdefault(entry.kernel, {}).setdefault(entry.case, {})[target] = words
    lines = [INTRODUCTION]
    for kernel, cases in sorted(cells.items()):
        lines += [f"## {kernel.removeprefix('kernels.gpu.')}", ""]
        lines += [f"| case | {' | '.join(TARGETS)} |", "|---" * (len(TARGETS) + 1) + "|"]
        for case, by_target in cases.items():
            lines.append(f"| {case} | {' | '.join(by_target.get(target, '-') for target in TARGETS)} |")
        lines.append("")
    return "\n".join(lines)


def rows(text: str) -> list[str]:
    """The table without the numbers that belong to the compiler."""
    return [re.sub(r" \d+ r [\d.]+ K", "", line) for line in text.splitlines() if line.startswith(("|", "#"))]


def main() -> int:
    """Compile, complain, and write or compare the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/kernels.md")
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    parser.add_argument("--only", default="", help="entries whose kernel or case holds this")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile")
    parser.add_argument("--verbose", action="store_true", help="print every result")
    arguments = parser.parse_args()
    if INTERPRETING:
        print("TRITON_INTERPRET must not be set: it turns the compiler off")
        return 2
    jobs = jobs_of(aot.select(aot.entries(), arguments.only))
    begin = time.perf_counter()
    found = compile_all(jobs, arguments.workers, None if arguments.no_cache else CACHE)
    results = {job: found[job] for job in jobs}
    if arguments.verbose:
        for (entry, target), result in results.items():
            print(f"{entry.kernel} ({entry.case}) {target}: {result}")
    wrong = failures(results)
    text = table(results)
    if arguments.write and not arguments.only and not wrong:
        TABLE.write_text(text)
    elif not arguments.only and (not TABLE.exists() or rows(TABLE.read_text()) != rows(text)):
        wrong.append(f"{TABLE.relative_to(ROOT)} is stale: run `make check-kernels WRITE=1`")
    for line in wrong:
        print(line)
    print(f"{len(jobs)} compiled kernels, {len(wrong)} problems, {time.perf_counter() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
