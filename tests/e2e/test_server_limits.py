"""Every limit of the transport by its effect: grpc silently ignores an option it does not know."""

import asyncio

import grpc.aio
import h2.events
import h2.settings
import hyperframe.frame
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clients.python import VorrangClient
from tests.support.http2 import http2
from tests.support.server import HeldRunner, running_server
from tests.support.wire import open_session, reason_in, refused, settled, spec, stub
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio

PING = bytes(hyperframe.frame.PingFrame(0, b"12345678").serialize())
SESSION = "/vorrang.v1.GenerationService/Session"


async def works(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        # It may take the server a while to see that others have left.
        calling = stub(channel).Generate(gen.GenerateRequest(spec=spec()), timeout=30, wait_for_ready=True)
        assert len((await calling).token_ids) == 8


async def test_streams_of_one_connection_are_announced() -> None:
    async with running_server({"server.max_concurrent_streams": 7}) as app, http2(app.address) as client:
        changed = (await client.until(lambda c: c.of(h2.events.RemoteSettingsChanged)))[0].changed_settings
        assert changed[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS].new_value == 7


async def test_times_and_rates_of_sessions_are_announced_as_they_are_set() -> None:
    settings = {
        "session.slow_client_timeout_s": 12.5,
        "session.resume_grace_s": 3.0,
        "session.retention_s": 7.0,
        "session.reprioritize_burst": 4,
        "session.reprioritize_per_s": 1.5,
    }
    async with running_server(settings) as app, VorrangClient(app.address) as client:
        limits = (await client.get_model()).limits
        assert (limits.slow_client_timeout_s, limits.resume_grace_s, limits.retention_s) == (12.5, 3.0, 7.0)
        assert (limits.reprioritize_burst, limits.reprioritize_per_s) == (4, 1.5)
        assert limits.max_request_time_s == 3600
        async with client.session() as session:
            assert session.info.limits == limits


async def test_a_message_that_is_too_large_is_refused_and_the_connection_lives_on() -> None:
    settings = {"server.max_frame_bytes": 2000}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        large = gen.TokenizeRequest(prompt=types.Prompt(text="x" * 2001))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(channel).Tokenize(large)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub(channel).Tokenize(gen.TokenizeRequest(prompt=types.Prompt(text="x" * 1900)))


async def test_metadata_that_is_too_large_is_refused_always() -> None:
    settings = {"admission.max_metadata_bytes": 4096}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        for _ in range(3):  # between grpc's two limits it would refuse at random
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(channel).GetModel(gen.GetModelRequest(), metadata=(("x-a", "y" * 4200),))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for _ in range(5):
            await stub(channel).GetModel(gen.GetModelRequest(), metadata=(("x-a", "y" * 3500),))


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with running_server({"admission.max_connections": 3}) as app:
        host, _, port = app.address.rpartition(":")
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        raws = await asyncio.gather(*(_first_bytes(reader) for reader, _ in streams))
        assert sum(raw == b"" for raw in raws) == 2
        for _, writer in streams:
            writer.transport.abort()
        await works(app.address)


async def _first_bytes(reader: asyncio.StreamReader) -> bytes:
    """A server that takes a connection says so at once."""
    try:
        return await reader.read(1)
    except ConnectionError:
        return b""


async def test_a_connection_that_says_nothing_is_closed_in_time() -> None:
    settings = {"admission.handshake_timeout_s": 0.3}
    async with running_server(settings) as app, http2(app.address, begin=False) as client:
        async with asyncio.timeout(10):
            await client.until_closed()
        await works(app.address)


@pytest.mark.slow
async def test_a_silent_connection_is_probed_without_calls_and_closed_without_an_answer() -> None:
    settings = {"admission.keepalive_s": 1.0, "admission.keepalive_timeout_s": 1.0}
    async with (
        running_server(settings) as app,
        http2(app.address) as alive,
        http2(app.address, acks=False) as dead,
    ):
        async with asyncio.timeout(20):
            await dead.until(lambda c: c.of(h2.events.PingReceived))
            await dead.until_closed()
            await alive.until(lambda c: len(c.of(h2.events.PingReceived)) >= 2)
        assert not alive.closed


async def test_pings_that_come_too_quickly_end_the_connection() -> None:
    async with running_server() as app, http2(app.address) as client:
        await client.send(PING * 10)
        async with asyncio.timeout(10):
            gone = (await client.until(lambda c: c.of(h2.events.ConnectionTerminated)))[0]
        assert gone.additional_data == b"too_many_pings"


async def test_pings_as_often_as_the_settings_allow_are_answered() -> None:
    settings = {"admission.min_ping_interval_s": 0.02}
    async with running_server(settings) as app, http2(app.address) as client:
        for number in range(8):  # grpc's default, 300 s, would end it after the third
            await client.send(PING)
            async with asyncio.timeout(10):
                await client.until(lambda c, n=number: len(c.of(h2.events.PingAckReceived)) > n)
            await asyncio.sleep(0.04)
        assert not client.of(h2.events.ConnectionTerminated)


async def test_sessions_and_calls_beyond_the_limits_are_refused_and_health_is_not() -> None:
    settings = {"admission.max_sessions": 1, "admission.max_calls": 2}
    runner = HeldRunner(64, 16)
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        async with open_session(channel):
            second = channel.stream_stream(SESSION, None, gen.SessionResponse.FromString)()
            status = await refused(second.read())
            assert reason_in(status) == "CALL_LIMIT"
            assert "open sessions" in status.message
            runner.hold()
            held = stub(channel).Generate(gen.GenerateRequest(spec=spec()))
            await runner.held.wait()
            status = await refused(stub(channel).GetModel(gen.GetModelRequest()))
            assert (status.code, "open calls" in status.message) == (8, True)
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            runner.release()
            await held
        await settled(lambda: app.statistics().num_calls == 0)
        await works(app.address)
        assert app.metrics.refusals()["", "CALL_LIMIT"] == 2


async def test_starts_beyond_the_rate_of_a_peer_are_refused() -> None:
    settings = {"admission.max_peer_starts_per_s": 0.001, "admission.peer_start_burst": 5}
    async with running_server(settings) as app, grpc.aio.insecure_channel(app.address) as channel:
        for _ in range(5):
            await stub(channel).GetModel(gen.GetModelRequest())
        assert reason_in(await refused(stub(channel).GetModel(gen.GetModelRequest()))) == "CALL_LIMIT"


async def test_a_full_queue_refuses_equals_and_gives_way_to_the_urgent() -> None:
    runner = HeldRunner(64, 16)
    settings = {"scheduler.max_running_requests": 1, "scheduler.max_waiting_requests": 1}
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
    ):
        runner.hold()
        calls = [stub(channel).Generate(gen.GenerateRequest(spec=spec(level=-10)))]
        await runner.held.wait()
        queued = stub(channel).Generate(gen.GenerateRequest(spec=spec(level=10)))
        await settled(lambda: app.statistics().num_requests == 2)
        status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=spec(level=10))))
        assert reason_in(status) == "QUEUE_FULL"
        calls.append(stub(channel).Generate(gen.GenerateRequest(spec=spec(level=0))))
        status = await refused(queued)
        assert reason_in(status) == "DISPLACED"
        usage = types.Usage()
        assert status.details[-1].Unpack(usage)
        assert usage.prompt_tokens == 5
        runner.release()
        for call in calls:
            assert len((await call).token_ids) == 8


async def test_classes_have_token_limits_over_the_wire() -> None:
    runner = HeldRunner(64, 16)
    settings = {"scheduler.max_running_requests": 1, "scheduler.batch.max_waiting_tokens": 10}
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("runs", level=0)
        await runner.held.wait()
        await session.start("fits", spec([1] * 8, level=10))
        await session.event("accepted", "fits")
        await session.start("too much", spec([1] * 3, level=10))
        failed = (await session.end_of("too much")).failed
        assert (reason_in(failed.status), failed.retryable) == ("QUEUE_FULL", True)
        assert "class batch" in failed.status.message
        runner.release()
        await session.end_of("runs")


async def test_a_priority_that_the_queue_of_its_class_has_no_room_for_is_rejected() -> None:
    runner = HeldRunner(64, 16)
    settings = {
        "scheduler.max_running_requests": 1,
        "scheduler.interactive.max_waiting_requests": 1,
        "scheduler.interactive.max_waiting_tokens": 20,
    }
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("runs", level=-50)
        await runner.held.wait()
        for name, size in (("one", 5), ("two", 5), ("large", 21)):
            await session.start(name, spec([1] * size, level=10))
            await session.event("accepted", name)
        await session.reprioritize("one", -10)
        assert (await session.event("priority_changed", "one")).level == -10
        await session.reprioritize("two", -10)
        rejected = await session.event("command_rejected", "two")
        assert (reason_in(rejected.status), rejected.command) == ("QUEUE_FULL", "reprioritize")
        await session.reprioritize("large", -10)
        rejected = await session.event("command_rejected", "large")
        assert reason_in(rejected.status) == "INVALID_REQUEST"
        assert "at most 20 tokens" in rejected.status.message
        await session.start("early", level=10)  # it is asked for before it is submitted
        await session.reprioritize("early", -10)
        assert reason_in((await session.event("command_rejected", "early")).status) == "QUEUE_FULL"
        runner.release()
        for name in ("runs", "one", "two", "large", "early"):
            assert (await session.end_of(name)).HasField("finished"), name
        assert app.metrics.refusals() == {("", "QUEUE_FULL"): 2, ("", "INVALID_REQUEST"): 1}


async def test_outputs_that_can_not_all_wait_displace_nobody_and_count_nowhere() -> None:
    runner = HeldRunner(64, 16)
    settings = {"scheduler.max_running_requests": 1, "scheduler.max_waiting_requests": 4}
    three = spec(level=-10, temperature=1.0, seed=1)
    three.num_outputs = 3
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        runner.hold()
        await session.start("runs", level=-50)
        await runner.held.wait()
        for name, level in (("i0", -10), ("i1", -10), ("b0", 10), ("b1", 10)):
            await session.start(name, level=level)
            await session.event("accepted", name)
        assert (
            reason_in(await refused(stub(channel).Generate(gen.GenerateRequest(spec=three)))) == "QUEUE_FULL"
        )
        three.num_outputs = 5
        status = await refused(stub(channel).Generate(gen.GenerateRequest(spec=three)))
        assert (reason_in(status), "must be at most 4" in status.message) == ("INVALID_REQUEST", True)
        runner.release()
        for name in ("runs", "i0", "i1", "b0", "b1"):
            assert (await session.end_of(name)).HasField("finished"), name


async def test_a_step_that_does_not_end_turns_health_within_its_watchdogs_time() -> None:
    """The event loop is alive all the while: it answers the probes."""
    runner = HeldRunner(64, 16)
    async with (
        running_server({"server.stall_s": 0.3}, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
    ):
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        runner.hold()
        await session.start("a", spec([1]))
        await runner.held.wait()
        began = asyncio.get_running_loop().time()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert asyncio.get_running_loop().time() - began >= 0.25
        runner.release()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        await session.end_of("a")
        health.cancel()
