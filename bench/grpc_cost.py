"""What a token costs the server's process on its way out, beside a bare grpc.aio server.

    PYTHONPATH=.:protos python bench/grpc_cost.py [--rounds 3] [--event-loop asyncio]

64 requests produce tokens at the same time, 1, 4 or 16 to a message: as 64 server
streams, and as one session. *Ours* is the whole server but for the engine, whose
place takes a loop that puts ready deltas into the requests' buffers and waits until
they are written. *Bare* is a handler of grpc.aio that builds the same messages and
writes them. Both run in processes of their own, one after the other in every round,
with the same event loop; the figure is CPU time (user and system) of the process per
token. *Engine* is ours with the real loop, scheduler and the scripted model on top: one
token a step, and more to a message when the writer lags.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from rich.console import Console
from rich.table import Table

import server.app
from engine.events import Delta, Finished, RequestEvent, Started
from engine.handle import RequestHandle
from engine.loop import Engine
from engine.request import FinishReason, RequestSpec, Usage
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from server import event_loop
from server import log as logs
from server.app import App, Loaded
from server.settings import load
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

ROOT = Path(__file__).resolve().parents[1]
NUM_STREAMS = 64
SIZES = (1, 4, 16)
#: Messages of one request, by tokens in a message.
NUM_MESSAGES = {1: 400, 4: 400, 16: 400}
TEXT = " tok"
STREAM, SESSION = "GenerateStream", "Session"
SERVICE = "vorrang.v1.GenerationService"


# The servers


class ReadyHandle(RequestHandle):
    """Tells when what it held was taken."""

    def __init__(
        self, spec: RequestSpec, on_ready: Callable[[RequestHandle], None] | None, taken: Callable[[], None]
    ) -> None:
        super().__init__(spec, 0, lambda command: None, on_ready)
        self._taken = taken

    def take(self) -> list[RequestEvent]:
        """As ever."""
        had_tokens = self.num_buffered_tokens > 0
        events = super().take()
        if had_tokens:
            self._taken()
        return events


class ReadyEngine(Engine):
    """Hands out deltas of ``label`` tokens as soon as the last ones are written."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._handles: list[RequestHandle] = []
        self._new = asyncio.Event()
        self._num_held = 0
        self._all_taken = asyncio.Event()

    def submit(
        self, spec: RequestSpec, on_ready: Callable[[RequestHandle], None] | None = None
    ) -> RequestHandle:
        """Take a request."""
        handle = ReadyHandle(spec, on_ready, self._one_taken)
        self._handles.append(handle)
        self._new.set()
        return handle

    async def run(self) -> None:
        """Produce once all requests of a measurement are there."""
        while True:
            while len(self._handles) < NUM_STREAMS:
                self._new.clear()
                await self._new.wait()
            handles, self._handles = self._handles, []
            await self._produce(handles)

    def _one_taken(self) -> None:
        self._num_held -= 1
        if self._num_held == 0:
            self._all_taken.set()

    async def _produce(self, handles: list[RequestHandle]) -> None:
        size = int(handles[0].spec.label)
        for handle in handles:
            handle.put(Started(handle.request_id, 1, 0))
        ids, text = tuple(range(100, 100 + size)), TEXT * size
        for number in range(NUM_MESSAGES[size]):
            self._num_held = len(handles)
            self._all_taken.clear()
            for handle in handles:
                handle.put(Delta(handle.request_id, number * size, ids, text))
            await self._all_taken.wait()
        for handle in handles:
            usage = Usage(output_tokens=NUM_MESSAGES[size] * size)
            handle.put(Finished(handle.request_id, FinishReason.LENGTH, usage))


async def serve_ours(*, real_engine: bool) -> None:
    """The server, until it is killed."""
    if not real_engine:
        server.app.Engine = ReadyEngine  # type: ignore[misc]
    values = {
        "server.listen": "127.0.0.1:0",
        "model.path": "scripted",
        "scheduler.max_running_requests": NUM_STREAMS,
    }
    model = Loaded(ScriptedRunner(4096, 16, 2048), ScriptedTokenizer())
    app = App(load(None, values).settings, lambda: model)
    await app.run(lambda ready: print(ready.address, flush=True))  # noqa: T201


async def serve_bare() -> None:
    """The least that sends the same messages."""

    def messages(kind: Any, size: int) -> Iterator[bytes]:
        ids, text = list(range(100, 100 + size)), TEXT * size
        for number in range(NUM_MESSAGES[size]):
            frame = kind(sequence=number + 3)
            if kind is gen.SessionResponse:
                frame.request_id = "r1"
            frame.delta.first_token_index = number * size
            frame.delta.token_ids.extend(ids)
            frame.delta.text = text
            yield frame.SerializeToString()

    async def stream(request: gen.GenerateStreamRequest, context: Any) -> None:
        for raw in messages(gen.GenerateStreamResponse, int(request.spec.label)):
            await context.write(raw)

    async def session(_: Any, context: Any) -> None:
        frames = [gen.SessionRequest.FromString(await context.read()) for _ in range(NUM_STREAMS + 1)]
        size = int(frames[-1].start.spec.label)
        for raws in zip(*(messages(gen.SessionResponse, size) for _ in range(NUM_STREAMS)), strict=True):
            for raw in raws:
                await context.write(raw)

    bare = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {
        STREAM: grpc.unary_stream_rpc_method_handler(stream, gen.GenerateStreamRequest.FromString),
        SESSION: grpc.stream_stream_rpc_method_handler(session),
    }
    bare.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    print(f"127.0.0.1:{port}", flush=True)  # noqa: T201
    await bare.wait_for_termination()


@contextmanager
def process(kind: str, loop: str) -> Iterator[tuple[psutil.Process, str]]:
    """A server in a process of its own, and its address."""
    command = [sys.executable, __file__, "--serve", kind, "--event-loop", loop]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603
        try:
            assert child.stdout is not None
            yield psutil.Process(child.pid), child.stdout.readline().strip()
        finally:
            child.kill()


# The client


def spec(size: int, max_tokens: int) -> types.GenerationSpec:
    """A request for the server that the label tells how many tokens a message has."""
    sampling = types.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    message = types.GenerationSpec(sampling=sampling, label=str(size))
    message.prompt.tokens.ids.append(1)
    return message


async def run_streams(channel: grpc.aio.Channel, size: int, max_tokens: int) -> None:
    """64 server streams, read as bytes."""
    call = channel.unary_stream(f"/{SERVICE}/{STREAM}", gen.GenerateStreamRequest.SerializeToString)

    async def one() -> None:
        async for _ in call(gen.GenerateStreamRequest(spec=spec(size, max_tokens))):
            pass

    await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))


async def run_session(channel: grpc.aio.Channel, size: int, max_tokens: int) -> None:
    """One session, read as bytes."""
    run_id, num_frames = secrets.token_hex(4), 0  # ids are remembered for a while
    call = channel.stream_stream(f"/{SERVICE}/{SESSION}")()
    await call.write(gen.SessionRequest(open=gen.OpenCommand()).SerializeToString())
    for number in range(NUM_STREAMS):
        start = gen.StartCommand(request_id=f"{run_id}-{number}", spec=spec(size, max_tokens))
        await call.write(gen.SessionRequest(start=start).SerializeToString())
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        num_frames += 1
    assert num_frames > 3 * NUM_STREAMS, "the requests were refused"  # deltas may be merged


async def cost_us(child: psutil.Process, address: str, way: str, size: int) -> float:
    """CPU microseconds of the server per token."""
    run = run_streams if way == STREAM else run_session
    num_tokens = NUM_MESSAGES[size] * size
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        before = sum(child.cpu_times()[:2])
        await run(channel, size, min(num_tokens, 1024))
        spent_s = sum(child.cpu_times()[:2]) - before
    return spent_s * 1e6 / (NUM_STREAMS * num_tokens)


def measure(rounds: int, loop: str) -> dict[str, dict[str, list[float]]]:
    """Figures by way and size, then by kind of server, one a round."""
    figures: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for kind in ("bare", "ours", "engine"):
            with process(kind, loop) as (child, address):
                for way in (STREAM, SESSION):
                    for size in SIZES if kind != "engine" else (1,):
                        cost = asyncio.run(cost_us(child, address, way, size))
                        if turn > 0:  # the first warms up
                            figures.setdefault(f"{way} {size}", {}).setdefault(kind, []).append(cost)
    return figures


def main() -> None:
    """Measure, print, and write JSON; or be one of the servers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--event-loop", default="asyncio", choices=["asyncio", "uvloop"])
    parser.add_argument("--folder", type=Path, default=Path("build"))
    parser.add_argument("--serve", choices=["bare", "ours", "engine"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        logs.set_up("error")
        serving = (
            serve_bare() if options.serve == "bare" else serve_ours(real_engine=options.serve == "engine")
        )
        with asyncio.Runner(loop_factory=event_loop.factory(options.event_loop)) as runner:
            runner.run(serving)
        return
    figures = measure(options.rounds, options.event_loop)
    table = Table(title=f"CPU of the server, us per token, median of {options.rounds}; {options.event_loop}")
    for column in ("way out", "tokens a message", "bare", "ours", "ours / bare", "with the engine"):
        table.add_column(column, justify="right")
    for name, kinds in figures.items():
        way, size = name.split()
        bare, ours = statistics.median(kinds["bare"]), statistics.median(kinds["ours"])
        ratio = statistics.median(o / b for o, b in zip(kinds["ours"], kinds["bare"], strict=True))
        engine = f"{statistics.median(kinds['engine']):.1f}" if "engine" in kinds else ""
        shown = "64 streams" if way == STREAM else "one session"
        table.add_row(shown, size, f"{bare:.1f}", f"{ours:.1f}", f"{ratio:.2f}", engine)
    Console(width=100).print(table)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"bench-grpc-{options.event_loop}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
