"""A soak with books: everything that callers do, for minutes, and nothing may be lost, repeated or leak.

    PYTHONPATH=.:protos python bench/soak.py [--minutes 15] [--seed n] [--model scripted]

Sessions start requests of all classes and kinds (several outputs, grammars, log probabilities, stop strings,
adapters, time limits, refusals), cancel, reprioritise, pause, drop their stream and take it up again, while
the process that computes is killed once a minute. ``bench/books.py`` counts on the wire: every accepted
request has exactly one end, no event is missing or repeated, and equal questions have equal outputs
whatever happened on the way. One more session asks something urgent every second: its latencies are printed
for each minute, with memory, descriptors and tasks of the server. Those are compared, at rest, between the
end of the first minute and the end. Exit status 1 when something was wrong. Only for Linux.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from bench.books import Books
from bench.serving import Serving, free_port, serving
from bench.soak_session import SoakSession, Urgent

#: What may be added between two moments at rest: resident memory of the server, open files, tasks.
GROWTH_MIB_MAX, GROWTH_KIB_PER_REQUEST_MAX, GROWTH_FILES_MAX, GROWTH_TASKS_MAX = 16.0, 0.5, 4, 0
#: Seconds for all that is alive to end.
REST_S_MAX = 180.0
_MIB = 2**20


@dataclass(slots=True)
class Standing:
    """How much the server holds."""

    rss_mib: float
    runner_rss_mib: float
    num_files: int
    num_tasks: int
    num_free_blocks: int
    num_blocks: int
    num_alive: int


@dataclass(slots=True)
class Minute:
    """Latencies of what was urgent in one minute, in seconds."""

    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


def standing(server: Serving, metrics: str) -> Standing:
    """Look at the server's metrics and processes."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    values = {name: sum(sample.value for sample in family.samples) for name, family in families.items()}
    children = psutil.Process(server.pid).children(recursive=True)
    return Standing(
        rss_mib=psutil.Process(server.pid).memory_info().rss / _MIB,
        runner_rss_mib=sum(child.memory_info().rss for child in children) / _MIB,
        num_files=psutil.Process(server.pid).num_fds(),
        num_tasks=int(values["vorrang_tasks"]),
        num_free_blocks=int(values["vorrang_kv_blocks_free"]),
        num_blocks=int(values["vorrang_kv_blocks"]),
        num_alive=int(values["vorrang_requests"]),
    )


async def kill_runners(server: Serving, every_s: float, killed: list[int]) -> None:
    """Kill the process that computes, again and again."""
    while True:
        await asyncio.sleep(every_s)
        for child in psutil.Process(server.pid).children():
            child.send_signal(signal.SIGKILL)
            killed.append(child.pid)


def quantile(values: list[float], share: float) -> float:
    """A quantile; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class Soak:
    """One run against one server."""

    def __init__(self, options: argparse.Namespace, server: Serving, metrics: str, console: Console) -> None:
        self._options, self._server, self._metrics, self._console = options, server, metrics, console
        self.books = Books()
        self.killed: list[int] = []
        self.minutes: list[dict[str, Any]] = []
        self.actions: Counter[str] = Counter()
        self._dice = random.Random(options.seed)
        self._adapter = "" if options.model == "scripted" else "soak"
        self._minute = Minute()

    async def run(self) -> None:
        """All of it; what was wrong is in the books."""
        options = self._options
        self._console.print(f"seed {options.seed}, {options.minutes:g} minutes, {options.sessions} sessions")
        self._console.print(
            "minute  urgent TTFT ms p50/p95/max   gap ms p50/max   ended refused alive   "
            "MiB server/runner   files tasks  kills",
            style="bold",
        )
        warm_s = min(60.0, options.minutes * 20)
        await self._busy(warm_s, 0)
        before = await self._at_rest()
        await self._busy(options.minutes * 60 - warm_s, 1)
        after = await self._at_rest()
        self.books.close()
        self._compare(before, after)

    async def _busy(self, seconds: float, number: int) -> None:
        """Traffic for some time, a row for each minute from ``number`` on; then all that is alive ends."""
        async with asyncio.TaskGroup() as group:
            killer = group.create_task(kill_runners(self._server, self._options.kill_every_s, self.killed))
            sessions = [
                SoakSession(
                    f"{number}.{index}", self._server.address, self.books, self.actions,
                    random.Random(self._dice.random()), self._adapter, self._options.alive,
                )
                for index in range(self._options.sessions)
            ]  # fmt: skip
            urgent = Urgent(f"{number}.urgent", self._server.address, self.books, self._latest)
            for session in (*sessions, urgent):
                group.create_task(session.play(seconds))
            while seconds > 0:
                self._minute, ended = Minute(), self.books.ends.copy()
                await asyncio.sleep(min(60.0, seconds))
                now = await asyncio.to_thread(standing, self._server, self._metrics)
                self._row(number, now, self.books.ends - ended)
                seconds, number = seconds - 60.0, number + 1
            killer.cancel()

    def _latest(self) -> Minute:
        return self._minute

    async def _at_rest(self) -> Standing:
        """Wait until nothing is alive and what ended long ago is forgotten, then look."""
        end_s = time.monotonic() + REST_S_MAX
        while True:
            found = await asyncio.to_thread(standing, self._server, self._metrics)
            if found.num_alive == 0 and found.num_free_blocks == found.num_blocks:
                break
            if time.monotonic() > end_s:
                self.books.wrong("server", f"at rest {found.num_alive} requests are alive, "
                                 f"{found.num_blocks - found.num_free_blocks} blocks are held")  # fmt: skip
                break
            await asyncio.sleep(0.5)
        await asyncio.sleep(2 * self._options.retention_s)
        return await asyncio.to_thread(standing, self._server, self._metrics)

    def _row(self, number: int, now: Standing, ended: Counter[str]) -> None:
        ttfts, gaps = self._minute.ttfts_s, self._minute.gaps_s
        num_refused = sum(count for end, count in ended.items() if end.startswith("failed"))
        row = {
            "minute": number,
            "ttft_ms": [round(1000 * quantile(ttfts, share), 1) for share in (0.5, 0.95, 1.0)],
            "gap_ms": [round(1000 * quantile(gaps, share), 1) for share in (0.5, 1.0)],
            "ended": sum(ended.values()),
            "failed": num_refused,
            "alive": len(self.books.alive),
            "server_mib": round(now.rss_mib, 1),
            "runner_mib": round(now.runner_rss_mib, 1),
            "files": now.num_files,
            "tasks": now.num_tasks,
            "kills": len(self.killed),
        }
        self.minutes.append(row)
        ttft, gap = row["ttft_ms"], row["gap_ms"]
        self._console.print(
            f"{number:6}  {ttft[0]:9.0f} / {ttft[1]:5.0f} / {ttft[2]:6.0f}   {gap[0]:6.0f} / {gap[1]:6.0f}   "
            f"{row['ended']:5} {row['failed']:7} {row['alive']:5}   {row['server_mib']:8.1f} / "
            f"{row['runner_mib']:7.1f}   {row['files']:5} {row['tasks']:5}  {row['kills']:5}"
        )

    def _compare(self, before: Standing, after: Standing) -> None:
        num_ended = sum(self.books.ends.values())
        memory_max = GROWTH_MIB_MAX + GROWTH_KIB_PER_REQUEST_MAX * num_ended / 1024
        for what, grown, most in (
            ("MiB of memory", after.rss_mib - before.rss_mib, memory_max),
            ("open files", after.num_files - before.num_files, GROWTH_FILES_MAX),
            ("tasks", after.num_tasks - before.num_tasks, GROWTH_TASKS_MAX),
        ):
            self._console.print(f"at rest: {grown:+.1f} {what} since the first minute (at most {most:.1f})")
            if grown > most:
                self.books.wrong("server", f"{grown:+.1f} {what} at rest, at most {most:.1f} may be")


def settings_of(options: argparse.Namespace, metrics: str, adapter: Path | None) -> Mapping[str, object]:
    """A server that is always short of something."""
    found: dict[str, object] = {
        "metrics.listen": metrics,
        "session.retention_s": options.retention_s,
        "scheduler.max_waiting_requests": 64,
        "scheduler.max_running_requests": 8,
        "scheduler.max_context_tokens": 512,
        "kv.num_blocks": 96,
        "engine.runner_max_restarts": 1000,
    }
    if adapter is not None:
        found["model.adapters"] = json.dumps({"soak": str(adapter)})
    return found


def random_adapter(folder: Path) -> Path:
    """A LoRA adapter of the default model with random numbers, in PEFT's format."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from engine.models.registry import find_model

    _, model = find_model(None)
    generator, tensors = torch.Generator().manual_seed(1), {}
    with safe_open(next(model.glob("*.safetensors")), "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - no mapping
            if not name.endswith(("q_proj.weight", "v_proj.weight")):
                continue
            rows, columns = weights.get_slice(name).get_shape()
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.02
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none",
              "target_modules": ["q_proj", "v_proj"], "use_dora": False, "use_rslora": False,
              "modules_to_save": None, "base_model_name_or_path": ""}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model", choices=("default", "scripted"), default="default")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--alive", type=int, default=5, help="requests alive in each session, at most")
    parser.add_argument("--kill-every-s", type=float, default=50.0)
    parser.add_argument("--retention-s", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, default=Path("build"))
    options = parser.parse_args()
    options.seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    return options


def main() -> int:
    """Soak, and say what was wrong."""
    options, console = arguments(), Console(width=140, highlight=False)
    with tempfile.TemporaryDirectory() as scratch:
        metrics = f"127.0.0.1:{free_port()}"
        scripted = options.model == "scripted"
        adapter = None if scripted else random_adapter(Path(scratch) / "soak")
        flags = ("--model", "scripted", "--scripted-step-ms", "2") if scripted else ()
        with serving(*flags, settings=settings_of(options, metrics, adapter)) as server:
            soak = Soak(options, server, metrics, console)
            asyncio.run(soak.run())
    books = soak.books
    console.print(f"{books.num_accepted} accepted, {books.num_accepted_ended} of them ended; "
                  f"{len(soak.killed)} kills")  # fmt: skip
    console.print("ends:", dict(books.ends.most_common()))
    console.print("events:", dict(books.events.most_common()))
    console.print("done:", dict(soak.actions.most_common()))
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "soak.json").write_text(json.dumps({
        "seed": options.seed, "model": options.model, "minutes": soak.minutes, "ends": books.ends,
        "events": books.events, "actions": soak.actions, "accepted": books.num_accepted,
        "kills": len(soak.killed), "num_problems": books.num_problems, "problems": books.problems,
    }, indent=1))  # fmt: skip
    for problem in books.problems:
        console.print(problem, style="red", markup=False)
    console.print(f"{books.num_problems} problems")
    return 1 if books.num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
