"""What a caller makes dear costs nobody else: not another's stream, not the health, not their books.

Beside a neighbour that keeps a processor busy, an interactive stream and a health probe are watched
while calls of each kind come from several connections at level 100. Their longest gap must
stay below three times the longest of the same run without those calls, or below
``GAP_S``, which is what two shared processors make of it by themselves now and then.
``VORRANG_ISOLATION_TABLE=file`` has the table of docs/SECURITY.md written there.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.dear import Dear, cases
from tests.support.models import default_model_folder, tiny_llama
from tests.support.process import HANGS_S, ROOT, ServerProcess, environment, server_process
from tests.support.wire import open_session, spec
from vorrang.v1 import types_pb2 as types

# Its busy neighbour would spoil the timing of whatever runs beside it: `make test-isolation` runs it alone.
pytestmark = [pytest.mark.asyncio, pytest.mark.model, pytest.mark.deep, pytest.mark.timeout(3 * HANGS_S)]

#: Seconds that a stream and a probe may wait whatever the run without calls says, on a quiet machine (four
#: connections' messages of 4 MB, received and parsed, take 0.1 s of two processors); and on any machine.
GAP_S, GAP_ANYWHERE_S = 0.2, 0.6
WINDOW_S, PAUSE_S = 0.6, 0.25
CASES = cases()
#: One or two of each kind; the others are deep.
QUICK = (
    "generate digits", "session digits", "chat most messages", "bad words", "stop strings",
    "prompt logprobs", "bomb empty messages",
)  # fmt: skip


@dataclass
class Gaps:
    """What was watched: longest gaps in seconds."""

    stream_s: float = 0.0
    health_s: float = 0.0

    def __str__(self) -> str:
        return f"stream {self.stream_s * 1000:.0f} ms, health {self.health_s * 1000:.0f} ms"


@dataclass
class Arena:
    """A server, a caller of dear calls, and what was measured."""

    server: ServerProcess
    caller: "subprocess.Popen[str]"
    quiet: Gaps = field(default_factory=Gaps)
    rows: list[tuple[Dear, Gaps, Gaps, dict[str, int]]] = field(default_factory=list)

    def say(self, line: str) -> None:
        assert self.caller.stdin is not None
        self.caller.stdin.write(line + "\n")
        self.caller.stdin.flush()

    async def hear(self) -> str:
        assert self.caller.stdout is not None
        return await asyncio.to_thread(self.caller.stdout.readline)


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """The default model's tokenizer and template over a model that costs little."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocab_size=49152, max_position_embeddings=8192, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model_folder() / name, folder / name)
    config = folder / "settings.toml"
    config.write_text("[scheduler]\nmax_context_tokens = 8192\nmax_running_requests = 8\n")
    settings = ("--threads", "1", "--kv-blocks", "4096", "--config", str(config))
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with server_process(*settings, model=str(folder), log=folder / "log") as server:
            caller = subprocess.Popen(
                [sys.executable, "-m", "tests.support.dear", server.address],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT,
            )  # fmt: skip
            try:
                assert caller.stdout is not None
                assert caller.stdout.readline() == "ready\n"
                yield Arena(server, caller)
            finally:
                caller.kill()
                caller.communicate()
    finally:
        neighbour.kill()
        neighbour.wait()


class Watch:
    """An interactive stream and a health probe, watched for their gaps until told to stop."""

    def __init__(self, channel: grpc.aio.Channel, session: Any) -> None:
        self._health = health_pb2_grpc.HealthStub(channel)
        self._session = session
        self._stopped = False
        self.gaps = Gaps()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read())
            group.create_task(self._probe())

    async def _read(self) -> None:
        last = time.perf_counter()
        while not self._stopped:
            frame = await self._session.next()
            now = time.perf_counter()
            if frame.HasField("delta"):
                self.gaps.stream_s = max(self.gaps.stream_s, now - last)
                last = now

    async def _probe(self) -> None:
        while not self._stopped:
            began = time.perf_counter()
            answer = await self._health.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            self.gaps.health_s = max(self.gaps.health_s, time.perf_counter() - began)
            await asyncio.sleep(0.005)

    def take(self) -> Gaps:
        gaps, self.gaps = self.gaps, Gaps()
        return gaps

    def stop(self) -> None:
        self._stopped = True


async def disturbed(arena: Arena, name: str, window_s: float, gap_s: float) -> list[str]:
    """What went wrong while these calls came, beside an innocent stream."""
    dear, wrong = CASES[name], []
    own_connection = (("grpc.use_local_subchannel_pool", 1),)
    async with (
        grpc.aio.insecure_channel(arena.server.address) as channel,
        grpc.aio.insecure_channel(arena.server.address, options=own_connection) as probing,
        open_session(channel, default_credit_tokens=100_000) as session,
    ):
        await session.start("innocent", spec("Hello", level=-100, max_tokens=8000, ignore_eos=True))
        await session.event("delta", "innocent")
        watch = Watch(probing, session)
        watching = asyncio.create_task(watch.run())
        await asyncio.sleep(PAUSE_S)
        quiet = watch.take()
        arena.say(name)
        await asyncio.sleep(window_s)
        arena.say("stop")
        codes = json.loads(await arena.hear())
        gaps = watch.take()
        watch.stop()
        await watching
        await session.cancel("innocent")
        end = await session.end_of("innocent")
    longest = arena.quiet = Gaps(
        max(arena.quiet.stream_s, quiet.stream_s), max(arena.quiet.health_s, quiet.health_s)
    )
    began = codes.pop("begun", 0)
    arena.rows.append((dear, quiet, gaps, codes))
    print(f"{name}: {gaps}; without: {quiet}, at most {longest}; {codes}")
    if not began or set(codes) - set(dear.codes):
        wrong.append(f"{name}: ended with {codes}")
    for what in ("stream_s", "health_s"):
        bound = max(gap_s, 3 * getattr(longest, what))
        if getattr(gaps, what) > bound:
            wrong.append(f"{name}: {what} {getattr(gaps, what):.3f}, more than {bound:.3f}")
    assert end.finished.reason == types.FINISH_REASON_CANCELLED
    usage = end.finished.usage
    assert (usage.prompt_tokens, usage.preemptions, usage.recomputed_tokens) == (1, 0, 0)
    assert usage.output_tokens == sum(len(f.delta.token_ids) for f in session.of("innocent"))
    return wrong


async def check(arena: Arena, names: tuple[str, ...], window_s: float, gap_s: float) -> None:
    """Whatever is wrong must be wrong twice: the machine is shared."""
    for name in names:
        first = await disturbed(arena, name, window_s, gap_s)
        if first:
            print("once more:", *first, sep="\n  ")
            second = await disturbed(arena, name, window_s, gap_s)
            assert not second, "\n".join(["the first time:", *first, "the second time:", *second])


async def test_what_one_caller_makes_dear_no_other_waits_for(arena: Arena) -> None:
    await check(arena, QUICK, WINDOW_S, GAP_ANYWHERE_S)


@pytest.mark.parametrize("name", ["grammar nested stars", "grammar nested arrays"])
async def test_a_dear_grammar_costs_its_request_alone(arena: Arena, name: str) -> None:
    await check(arena, (name,), WINDOW_S, GAP_ANYWHERE_S)


@pytest.mark.deep
@pytest.mark.parametrize("kind", dict.fromkeys(dear.kind for dear in CASES.values()))
async def test_every_dear_call_for_longer(arena: Arena, kind: str) -> None:
    await check(arena, tuple(name for name, dear in CASES.items() if dear.kind == kind), 2.0, GAP_S)
    write(arena)


def write(arena: Arena) -> None:
    """The table so far, where it is asked for."""
    if path := os.environ.get("VORRANG_ISOLATION_TABLE"):
        Path(path).write_text(table(arena))


def table(arena: Arena) -> str:
    """What was measured, as docs/SECURITY.md has it."""
    lines = [
        "| kind | input | calls ended | stream: longest gap, ms (without) | health: longest, ms (without) |",
        "|---|---|---|---|---|",
    ]
    for dear, quiet, gaps, codes in arena.rows:
        ended = ", ".join(f"{count} {code}" for code, count in codes.items())
        times = (
            f"{during * 1000:.0f} ({without * 1000:.0f})"
            for during, without in ((gaps.stream_s, quiet.stream_s), (gaps.health_s, quiet.health_s))
        )
        lines.append(f"| {' | '.join((dear.kind, dear.what, ended, *times))} |")
    return "\n".join(lines) + "\n"
