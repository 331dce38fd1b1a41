"""The Python client's sessions when their connection is cut: nothing is lost, nothing comes twice."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from clients.python import CommandRejected, Delta, RequestStream, ResumeOutOfRange, Session, VorrangClient
from engine.runner.scripted import expected_output
from tests.support.cutting_proxy import CuttingProxy
from tests.support.server import HeldRunner, running_server
from tests.support.wire import settled

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


@contextlib.asynccontextmanager
async def through_a_proxy(
    settings: dict[str, object] | None = None, **options: Any
) -> AsyncIterator[tuple[CuttingProxy, VorrangClient, Session]]:
    """A session with a real server whose connection can be cut."""
    async with (
        running_server(settings) as app,
        CuttingProxy(app.address) as proxy,
        VorrangClient(proxy.address) as client,
        client.session(**options) as session,
    ):
        yield proxy, client, session


class Reader:
    """Reads a request, and knows how far it is."""

    def __init__(self, stream: RequestStream) -> None:
        self.stream = stream
        self.token_ids: list[int] = []
        self.text = ""

    async def read(self) -> None:
        """Read to the end; nothing may be missing or come twice."""
        async for event in self.stream:
            if isinstance(event, Delta):
                assert event.first_token_index == len(self.token_ids)
                self.token_ids.extend(event.token_ids)
                self.text += event.text


async def test_a_hundred_streams_survive_the_death_of_their_connection() -> None:
    settings: dict[str, object] = {"scheduler.max_running_requests": 16, "engine.scripted_step_s": 0.001}
    async with through_a_proxy(settings) as (proxy, client, session):
        readers = [
            Reader(await session.start(token_ids=[n + 1], temperature=0.0, max_tokens=40, credit_tokens=16))
            for n in range(100)
        ]
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(reader.read())
            for num_tokens in (300, 1200, 2500):
                await settled(lambda least=num_tokens: sum(len(r.token_ids) for r in readers) >= least)
                proxy.cut()
        assert proxy.num_connections >= 4
        for n, reader in enumerate(readers):
            assert reader.token_ids == expected_output([n + 1], 40)
            assert reader.text == await client.detokenize(reader.token_ids)
            assert (await reader.stream.result()).text == reader.text


async def test_a_server_that_is_started_again_has_lost_what_had_begun_and_takes_what_waits() -> None:
    runner = HeldRunner(64, 16, 512)
    async with contextlib.AsyncExitStack() as servers:
        first = await servers.enter_async_context(running_server(runner=runner))
        async with (
            CuttingProxy(first.address) as proxy,
            VorrangClient(proxy.address) as client,
            client.session() as session,
        ):
            begun = await session.start(token_ids=[1], temperature=0.0, max_tokens=300, credit_tokens=4)
            for _ in range(3):
                await anext(begun)
            proxy.refuse()
            await servers.aclose()  # as if it had died: nobody hears its farewell
            waiting = asyncio.ensure_future(session.start(token_ids=[2], temperature=0.0, max_tokens=5))
            async with running_server() as second:
                proxy.lead_to(second.address)
                proxy.refuse(False)
                assert list((await (await waiting).result()).token_ids) == expected_output([2], 5)
                with pytest.raises(ResumeOutOfRange, match="started anew"):
                    await begun.result()


async def test_cancel_and_priority_reach_the_server_after_the_gap() -> None:
    settings: dict[str, object] = {"engine.scripted_step_s": 0.002}
    async with through_a_proxy(settings) as (proxy, _, session):
        streams = [await session.start(token_ids=[n + 1], max_tokens=400, priority="batch") for n in range(3)]
        for stream in streams:
            await anext(stream)
        proxy.refuse()
        await settled(lambda: not session.connected)
        change = asyncio.ensure_future(streams[0].reprioritize("interactive"))
        await streams[1].cancel()
        await asyncio.sleep(0)
        proxy.refuse(False)
        assert (await change).level == -10
        assert (await streams[1].result()).finish_reason == "CANCELLED"
        for stream in (streams[0], streams[2]):
            await stream.cancel()


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(8))
async def test_cuts_at_any_time_change_no_output(seed: int) -> None:
    chance = random.Random(seed)
    settings: dict[str, object] = {"scheduler.max_running_requests": 4, "engine.scripted_step_s": 0.0005}
    async with through_a_proxy(settings) as (proxy, _, session):

        async def one(number: int) -> None:
            await asyncio.sleep(chance.random())
            length = chance.randint(1, 80)
            stream = await session.start(
                token_ids=[number + 1],
                temperature=0.0,
                max_tokens=length,
                credit_tokens=chance.randint(1, 40),
            )
            reader = Reader(stream)
            reading = asyncio.ensure_future(reader.read())
            if chance.random() < 0.5:
                level = chance.choice([-10, 0, 10])
                with contextlib.suppress(CommandRejected):  # it may have ended
                    assert (await stream.reprioritize(level)).level == level
            if chance.random() < 0.2:
                await stream.cancel()
            await reading
            assert reader.token_ids == expected_output([number + 1], length)[: len(reader.token_ids)]
            result = await stream.result()
            assert result.finish_reason in ("CANCELLED", "LENGTH")
            assert result.finish_reason == "CANCELLED" or len(reader.token_ids) == length

        async def cut() -> None:
            for _ in range(20):
                await asyncio.sleep(chance.random() / 10)
                proxy.cut()

        async with asyncio.TaskGroup() as group:
            group.create_task(cut())
            for number in range(60):
                group.create_task(one(number))
