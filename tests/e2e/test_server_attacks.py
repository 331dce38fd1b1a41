"""Clients that mean harm, over raw HTTP/2 from an address of their own, against a server process.

Each attack must leave the server alive, let another client's requests complete while
it goes on, and give its memory back. Small versions run always, the long ones with
``make test-deep``; docs/SECURITY.md has their numbers (``pytest -rP`` prints them).
"""

import asyncio
import contextlib
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import grpc.aio
import hpack
import hyperframe.frame as frames
import psutil
import pytest

from tests.support.http2 import Http2
from tests.support.process import ServerProcess, server_process
from tests.support.wire import spec, stub
from vorrang.v1 import generation_pb2 as gen

ATTACKER = "127.0.0.2"
SESSION = "/vorrang.v1.GenerationService/Session"
#: Resident memory a server may keep after an attack, in MiB; allocators and caches keep some.
KEPT_MIB_MAX = 40.0
_MIB = 2**20
_CONFIG = """
[admission]
handshake_timeout_s = 2.0
max_peer_starts_per_s = 50.0  # so that a slow machine's flood is one, too
peer_start_burst = 500
[metrics]
listen = "127.0.0.1:0"
"""

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("attacks")
    (folder / "vorrang.toml").write_text(_CONFIG)
    with server_process("--config", str(folder / "vorrang.toml"), log=folder / "log") as process:
        yield process


@contextlib.asynccontextmanager
async def attacker(server: ServerProcess, *, begin: bool = True) -> AsyncIterator[Http2]:
    """A connection from the attacker's address."""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(ATTACKER, 0))
    client = Http2(reader, writer)
    try:
        if begin:
            await client.begin()
        yield client
    finally:
        await client.close()


async def attacked(server: ServerProcess, attack: Callable[[], Awaitable[None]]) -> None:
    """Attack while another client works, then see that nothing is left."""
    process = psutil.Process(server.process.pid)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:

        async def work() -> float:
            began = time.perf_counter()
            request = gen.GenerateRequest(spec=spec("hello", max_tokens=16))
            answer = await stub(channel).Generate(request, timeout=60)
            assert len(answer.token_ids) == 16
            return time.perf_counter() - began

        for _ in range(20):
            await work()
        before, cpu_before = process.memory_info().rss, sum(process.cpu_times()[:2])
        fds_before = process.num_fds()
        began = time.perf_counter()
        attacking = asyncio.ensure_future(attack())
        times, peak = [await work()], before
        while not attacking.done():
            times.append(await work())
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(0.05)
        await attacking
        wall_s, cpu_s = time.perf_counter() - began, sum(process.cpu_times()[:2]) - cpu_before
        async with asyncio.timeout(30):
            while (  # noqa: ASYNC110  # another process has no event for us
                process.memory_info().rss > before + KEPT_MIB_MAX * _MIB or process.num_fds() > fds_before
            ):
                await asyncio.sleep(0.05)
        after = process.memory_info().rss
        await work()
    assert server.process.poll() is None
    print(
        f"{wall_s:.1f} s, server CPU {cpu_s:.2f} s, memory {before / _MIB:.0f} MiB,"
        f" peak +{(peak - before) / _MIB:.1f}, after +{(after - before) / _MIB:.1f};"
        f" {len(times)} requests of another client, slowest {max(times) * 1000:.0f} ms"
    )


def headers(encoder: hpack.Encoder, stream_id: int, *more: tuple[str, str], end: bool = True) -> bytes:
    """The frame that begins a session."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", SESSION),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *more,
    ]
    frame = frames.HeadersFrame(stream_id, encoder.encode(fields))
    if end:
        frame.flags.add("END_HEADERS")
    return bytes(frame.serialize())


async def refusals(server: ServerProcess) -> float:
    """Calls refused for being too many, so far."""
    address = server.ready_line.rpartition("metrics on ")[2].strip()

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
            return response.read().decode()

    match = re.search(r'refusals_total\{reason="CALL_LIMIT",tenant=""\} (\S+)', await asyncio.to_thread(read))
    return float(match[1]) if match else 0.0


DEEP = pytest.mark.deep


@pytest.mark.parametrize("num_streams", [1000, pytest.param(20_000, marks=DEEP)])
async def test_rapid_reset(server: ServerProcess, num_streams: int) -> None:
    """Streams are opened and reset at once, as in CVE-2023-44487."""

    async def attack() -> None:
        async with attacker(server) as client:
            encoder = hpack.Encoder()
            for number in range(num_streams):
                stream_id = 2 * number + 1
                reset = bytes(frames.RstStreamFrame(stream_id, error_code=8).serialize())
                await client.send(headers(encoder, stream_id) + reset)
                if number % 50 == 0:
                    await asyncio.sleep(0)
                if client.closed:
                    return

    await attacked(server, attack)


@pytest.mark.parametrize("num_streams", [2000, pytest.param(20_000, marks=DEEP)])
async def test_a_flood_of_starts_is_refused_for_its_peer_alone(
    server: ServerProcess, num_streams: int
) -> None:
    """The same, with time for the handlers to begin: they are counted and refused."""
    before = await refusals(server)

    async def attack() -> None:
        async with attacker(server) as client:
            encoder = hpack.Encoder()
            for number in range(num_streams):
                stream_id = 2 * number + 1
                ended = frames.DataFrame(stream_id, b"", flags=["END_STREAM"])
                await client.send(headers(encoder, stream_id) + bytes(ended.serialize()))
                if number % 50 == 0:
                    await asyncio.sleep(0.001)
            async with asyncio.timeout(20):
                while await refusals(server) < before + num_streams // 10:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    await attacked(server, attack)


@pytest.mark.parametrize("num_mib", [4, pytest.param(200, marks=DEEP)])
async def test_continuation_flood(server: ServerProcess, num_mib: int) -> None:
    """A header block that never ends."""

    async def attack() -> None:
        async with attacker(server) as client:
            await client.send(headers(hpack.Encoder(), 1, end=False))
            # A literal field without indexing: a name and value of 8 kB.
            field = b"\x00\x03x-a" + b"\x7f" + b"\x81\x3e" + b"v" * 8064
            block = bytes(frames.ContinuationFrame(1, field * 2).serialize())
            for _ in range(num_mib * _MIB // len(block)):
                await client.send(block)
                if client.closed:
                    return

    await attacked(server, attack)


@pytest.mark.parametrize("num_pings", [1000, pytest.param(500_000, marks=DEEP)])
async def test_ping_flood(server: ServerProcess, num_pings: int) -> None:
    """The connection is ended soon."""

    async def attack() -> None:
        async with attacker(server) as client:
            ping = bytes(frames.PingFrame(0, b"12345678").serialize())
            for _ in range(num_pings // 100):
                await client.send(ping * 100)
                if client.closed:
                    return
            async with asyncio.timeout(20):
                await client.until_closed()

    await attacked(server, attack)


@pytest.mark.parametrize("num_settings", [1000, pytest.param(200_000, marks=DEEP)])
async def test_settings_flood(server: ServerProcess, num_settings: int) -> None:
    """Every one wants an acknowledgement, and nobody reads them."""

    async def attack() -> None:
        async with attacker(server) as client:
            raw = bytes(frames.SettingsFrame(0, settings={4: 65535}).serialize())
            for _ in range(num_settings // 100):
                await client.send(raw * 100)
                if client.closed:
                    return

    await attacked(server, attack)


@pytest.mark.parametrize("num_calls", [20, pytest.param(2000, marks=DEEP)])
async def test_oversized_messages_and_metadata(server: ServerProcess, num_calls: int) -> None:
    """Messages of 5 MiB where 4 may be, metadata of 1 MiB where 16 KiB may be."""
    encoder, value = hpack.Encoder(), "v" * 8000
    blocks = [encoder.encode([(f"x-{number}", value)]) for number in range(130)]
    large_metadata = headers(hpack.Encoder(), 1, ("x-big", value), end=False)
    large_metadata += b"".join(bytes(frames.ContinuationFrame(1, block).serialize()) for block in blocks)

    async def attack() -> None:
        async with attacker(server) as client:
            encoder = hpack.Encoder()
            for number in range(num_calls):
                stream_id = 2 * number + 1
                length = (5 * _MIB).to_bytes(4, "big")
                body = frames.DataFrame(stream_id, b"\x00" + length + b"x" * 1000)
                await client.send(headers(encoder, stream_id) + bytes(body.serialize()))
                await asyncio.sleep(0)
        for _ in range(max(2, num_calls // 100)):
            async with attacker(server) as client:
                await client.send(large_metadata)

    await attacked(server, attack)


@pytest.mark.slow
@pytest.mark.parametrize("num_connections", [100, pytest.param(1000, marks=DEEP)])
async def test_half_open_connections(server: ServerProcess, num_connections: int) -> None:
    """Half of them say nothing, half a part of the preface, byte by byte; all are closed in time."""

    async def attack() -> None:
        host, _, port = server.address.rpartition(":")
        streams = [
            await asyncio.open_connection(host, int(port), local_addr=(ATTACKER, 0))
            for _ in range(num_connections)
        ]
        for byte in b"PRI *":
            for _, writer in streams[::2]:
                with contextlib.suppress(ConnectionError):
                    writer.write(bytes([byte]))
            await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            await asyncio.gather(*(_until_closed(reader) for reader, _ in streams))
        for _, writer in streams:
            writer.transport.abort()

    await attacked(server, attack)


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass
