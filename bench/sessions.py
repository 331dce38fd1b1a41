"""What sessions cost the server: memory per idle stream and per request, and a stalled reader.

    PYTHONPATH=.:protos python bench/sessions.py [--requests 1000] [--step-ms 200]
    PYTHONPATH=.:protos python bench/sessions.py --requests 256 --stall-s 60

A server of its own computes the scripted model, so that nearly all the cost is the
session's. Frames are read as bytes and parsed; the client shares the machine with the
server, which the gaps show: compare them with each other, not with other machines.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc.aio
import psutil
from rich.console import Console
from rich.table import Table

from bench.serving import serving
from vorrang.v1 import generation_pb2 as gen
from workloads.statistics import percentile

METHOD = "/vorrang.v1.GenerationService/Session"
NUM_TOKENS, NUM_CHANNELS, STALLED_CREDIT, STALL_S = 32, 10, 8, 4.0


@dataclass
class Server:
    """A server process."""

    process: psutil.Process
    address: str

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the server itself; its runner is a process of its own."""
        return int(self.process.memory_info().rss)

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def server_for(num_requests: int, step_ms: float, num_tokens: int = 96) -> Iterator[Server]:
    """A server of the scripted model with a seat for every request."""
    settings = {
        "scheduler.max_running_requests": num_requests,
        "scheduler.max_step_tokens": 8 * num_requests,
        "server.max_session_requests": num_requests,
        "engine.scripted_step_s": step_ms / 1000,
        "kv.num_blocks": num_requests * (2 + num_tokens // 16),
        "session.slow_client_timeout_s": 300,
    }
    with serving("--model", "scripted", settings=settings) as started:
        yield Server(psutil.Process(started.pid), started.address)


@dataclass
class Seen:
    """What a session's client has seen, in seconds and tokens."""

    last_at: dict[str, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: dict[str, int] = field(default_factory=dict)
    num_messages: int = 0
    num_ended: int = 0


class Client:
    """One session, open."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = channel.stream_stream(METHOD)()
        self.seen = Seen()

    async def open(self) -> "Client":
        """Open it."""
        await self._send(open=gen.OpenCommand())
        await self.call.read()
        return self

    async def start(
        self, request_id: str, credit_tokens: int | None = None, num_tokens: int = NUM_TOKENS
    ) -> None:
        """Start a request."""
        command = gen.StartCommand(request_id=request_id)
        command.spec.prompt.tokens.ids.extend((1, 2, 3, 4))
        command.spec.sampling.max_tokens = num_tokens
        if credit_tokens is not None:
            command.spec.credit_tokens = credit_tokens
        self.seen.num_tokens[request_id] = 0
        await self._send(start=command)

    async def read(self, until: int) -> None:
        """Read until so many requests have ended, or all their tokens are here."""
        seen = self.seen
        while seen.num_ended < until:
            frame = gen.SessionResponse.FromString(await self.call.read())
            seen.num_messages += 1
            if frame.HasField("finished"):
                seen.num_ended += 1
            elif frame.delta.token_ids:
                now = time.perf_counter()
                if frame.request_id in seen.last_at:
                    seen.gaps_s.append(now - seen.last_at[frame.request_id])
                seen.last_at[frame.request_id] = now
                seen.num_tokens[frame.request_id] += len(frame.delta.token_ids)

    async def read_tokens(self, num_tokens: int) -> None:
        """Read until every request has so many tokens."""
        while min(self.seen.num_tokens.values()) < num_tokens:
            frame = gen.SessionResponse.FromString(await self.call.read())
            if frame.request_id in self.seen.num_tokens:
                self.seen.num_tokens[frame.request_id] += len(frame.delta.token_ids)

    async def _send(self, **command: object) -> None:
        await self.call.write(gen.SessionRequest(**command).SerializeToString())  # type: ignore[arg-type]


async def idle(server: Server, num_streams: int) -> str:
    """Memory of an open session that does nothing."""
    channels = [channel_to(server) for _ in range(NUM_CHANNELS)]
    warm = await Client(channels[0]).open()
    before = server.rss_bytes
    clients = [await Client(channels[n % NUM_CHANNELS]).open() for n in range(num_streams)]
    cost = (server.rss_bytes - before) / num_streams / 1024
    cpu_before = server.cpu_s
    await asyncio.sleep(2)
    cpu = (server.cpu_s - cpu_before) / 2
    for client in (warm, *clients):
        client.call.cancel()
    for channel in channels:
        await channel.close()
    return f"{cost:.1f} KiB per idle stream ({num_streams} of them), {100 * cpu:.1f} % of a core for all"


async def busy(server: Server, num_sessions: int, num_requests: int) -> list[str]:
    """All requests at once, evenly over the sessions."""
    channels = [channel_to(server) for _ in range(NUM_CHANNELS)]
    clients = [await Client(channels[n % NUM_CHANNELS]).open() for n in range(num_sessions)]
    before, cpu_before, begun = server.rss_bytes, server.cpu_s, time.perf_counter()
    each = num_requests // num_sessions
    name = f"{num_sessions}-{begun}"
    async with asyncio.TaskGroup() as group:
        for number, client in enumerate(clients):
            for index in range(each):
                await client.start(f"{name}-{number}-{index}")
            group.create_task(client.read(each))
    took_s, used = time.perf_counter() - begun, server.rss_bytes - before
    cpu_s = server.cpu_s - cpu_before
    gaps = sorted(gap for client in clients for gap in client.seen.gaps_s)
    num_messages = sum(client.seen.num_messages for client in clients)
    for client in clients:
        client.call.cancel()
    for channel in channels:
        await channel.close()
    return [
        f"{num_requests} over {num_sessions}",
        f"{took_s:.1f}",
        f"{used / num_requests / 1024:.1f}",
        f"{1000 * percentile(gaps, 0.5):.0f}",
        f"{1000 * percentile(gaps, 0.99):.0f}",
        f"{1e6 * cpu_s / (num_requests * NUM_TOKENS):.0f}",
        f"{num_requests * NUM_TOKENS / num_messages:.2f}",
    ]


async def stalled(
    server: Server, num_requests: int, *, stalls: bool, num_tokens: int = NUM_TOKENS
) -> tuple[float, float, int]:
    """A session of a quarter of the requests reads nothing while the others read all; what they see of it.

    Returns:
        Median and 99th percentile of the others' gaps in seconds; most tokens of a stalled request.
    """
    channels = [channel_to(server) for _ in range(4)]
    clients = [await Client(channel).open() for channel in channels]
    each = num_requests // 4
    name = f"stall-{time.perf_counter()}"
    credit_tokens = STALLED_CREDIT if stalls else None
    for index in range(each):
        await clients[0].start(f"{name}-0-{index}", credit_tokens, num_tokens)
    async with asyncio.TaskGroup() as group:
        for number, client in enumerate(clients[1:], 1):
            for index in range(each):
                await client.start(f"{name}-{number}-{index}", num_tokens=num_tokens)
            group.create_task(client.read(each))
        if not stalls:
            group.create_task(clients[0].read(each))
    if stalls:
        await asyncio.sleep(STALL_S)
        await clients[0].read_tokens(STALLED_CREDIT)
    gaps = sorted(gap for client in clients[1:] for gap in client.seen.gaps_s)
    most = max(clients[0].seen.num_tokens.values())
    for client in clients:
        client.call.cancel()
    for channel in channels:
        await channel.close()
    return percentile(gaps, 0.5), percentile(gaps, 0.99), most


def channel_to(server: Server) -> grpc.aio.Channel:
    """A connection of its own."""
    return grpc.aio.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])


async def measure(num_requests: int, step_ms: float) -> None:
    """Measure all and print it."""
    console = Console(width=110)
    with server_for(num_requests, step_ms) as server:
        console.print(await idle(server, num_requests))
    table = Table(
        "requests over sessions", "s", "KiB/request", "gap p50 ms", "p99 ms", "CPU us/token", "tokens/msg"
    )
    for num_sessions in (10, num_requests):
        with server_for(num_requests, step_ms) as server:
            table.add_row(*await busy(server, num_sessions, num_requests))
    console.print(table)
    with server_for(num_requests, step_ms) as server:
        for stalls in (False, True, False, True):
            p50, p99, most = await stalled(server, num_requests // 2, stalls=stalls)
            what = f"stalled for {STALL_S:g} s and more, holds at most {most} tokens" if stalls else "reads"
            console.print(
                f"a quarter {what}: the others' gaps {1000 * p50:.0f} / {1000 * p99:.0f} ms (p50 / p99)"
            )


async def measure_stall(num_requests: int, step_ms: float, stall_s: float) -> None:
    """One reader in four stops for so long, while the others read; alternately it does not."""
    num_tokens = round(stall_s * 1000 / step_ms)
    with server_for(num_requests, step_ms, num_tokens) as server:
        for stalls in (False, True, False, True):
            began = time.perf_counter()
            p50, p99, most = await stalled(server, num_requests, stalls=stalls, num_tokens=num_tokens)
            took_s = time.perf_counter() - began
            what = f"reads nothing for {took_s:.0f} s, holds at most {most} tokens" if stalls else "reads"
            Console(width=110).print(
                f"a quarter {what}: the others' gaps {1000 * p50:.1f} / {1000 * p99:.1f} ms (p50 / p99)"
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--stall-s", type=float, help="measure only readers that stop for so long")
    arguments = parser.parse_args()
    if arguments.stall_s is not None:
        asyncio.run(measure_stall(arguments.requests, arguments.step_ms, arguments.stall_s))
        return
    asyncio.run(measure(arguments.requests, arguments.step_ms))


if __name__ == "__main__":
    main()
