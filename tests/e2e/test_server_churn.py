"""Streams that are cancelled by the thousand: nothing of them may stay."""

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import Iterator

import grpc.aio
import psutil
import pytest
import structlog

from tests.support.server import running_server
from tests.support.wire import SESSION, settled, spec, stub
from vorrang.v1 import generation_pb2 as gen

#: Resident memory that may be added after the first tenth, client and server together: so much
#: in all, and so much by stream, which a bare grpc.aio server loses as well (docs/SECURITY.md).
GROWTH_MIB_MAX = 8.0
GROWTH_KIB_PER_STREAM_MAX = 0.4
_BATCH = 50
_MIB = 2**20

UNLIMITED: dict[str, object] = {
    "admission.max_peer_starts_per_s": 1e9,
    "admission.peer_start_burst": 10**9,
    # Sessions that may be taken up again, and ended requests that may be asked for, are kept on purpose.
    "session.resume_grace_s": 0.0,
    "session.retention_s": 0.0,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is logged is kept by pytest, and would be taken for a leak."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "num_streams",
    [500, pytest.param(100_000, marks=[pytest.mark.deep, pytest.mark.timeout(900)])],
)
async def test_cancelled_streams_leave_no_memory_no_task_and_no_handle(num_streams: int) -> None:
    """Half of them sessions with a request, half single requests; client and server share this process."""
    process = psutil.Process()
    async with (
        # A recount after every step goes through all that ended in the last two minutes.
        running_server(UNLIMITED, check_integrity=False) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        numbers = itertools.count()

        async def session() -> None:
            call = channel.stream_stream(SESSION, None, gen.SessionResponse.FromString)()
            try:
                await call.write(gen.SessionRequest(open=gen.OpenCommand()).SerializeToString())
                start = gen.StartCommand(request_id=f"a{next(numbers)}", spec=spec([1], max_tokens=500))
                await call.write(gen.SessionRequest(start=start).SerializeToString())
                await call.read()
            finally:
                call.cancel()

        async def single() -> None:
            request = gen.GenerateStreamRequest(spec=spec([1], max_tokens=500))
            call = stub(channel).GenerateStream(request)
            try:
                await call.read()
            finally:
                call.cancel()

        async def batch() -> None:
            await asyncio.gather(*(session() if n % 2 else single() for n in range(_BATCH)))
            await settled(lambda: app.statistics().num_calls == app.statistics().num_requests == 0)

        async def standing() -> tuple[float, int, int]:
            await settled(lambda: app.backend.engine.statistics().num_alive == 0)
            gc.collect()
            return process.memory_info().rss / _MIB, process.num_fds(), len(asyncio.all_tasks())

        for _ in range(num_streams // 10 // _BATCH):
            await batch()
        rss, num_fds, num_tasks = await standing()
        began = time.perf_counter()
        for number in range(num_streams * 9 // 10 // _BATCH):
            await batch()
            if number % 200 == 199:
                per_stream_ms = (time.perf_counter() - began) * 1000 / (number + 1) / _BATCH
                print(f"{number + 1} batches, {per_stream_ms:.1f} ms a stream", flush=True)
        await settled(lambda: len(asyncio.all_tasks()) <= num_tasks)  # the transport's may need a moment
        now_rss, now_num_fds, _ = await standing()
    print(f"{num_streams} streams: {rss:.1f} MiB after a tenth, {now_rss - rss:+.1f} MiB at the end")
    assert now_num_fds <= num_fds
    assert now_rss - rss < GROWTH_MIB_MAX + GROWTH_KIB_PER_STREAM_MAX * num_streams * 0.9 / 1024
