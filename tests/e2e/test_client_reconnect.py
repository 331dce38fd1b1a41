"""The Python client's sessions when their connection is cut: nothing is lost, nothing comes twice."""

import asyncio
from typing import Any

import pytest

from clients.python import Delta, VorrangClient
from engine.runner.scripted import expected_output
from tests.support.cutting_proxy import CuttingProxy
from tests.support.server import running_server

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


async def test_a_hundred_streams_survive_the_death_of_their_connection() -> None:
    async with (
        running_server({"scheduler.max_running_requests": 16, "engine.scripted_step_s": 0.001}) as app,
        CuttingProxy(app.address) as proxy,
        VorrangClient(proxy.address) as client,
        client.session() as session,
    ):
        streams = [
            await session.start(token_ids=[n + 1], temperature=0.0, max_tokens=40, credit_tokens=16)
            for n in range(100)
        ]
        reading = [asyncio.ensure_future(read(stream)) for stream in streams]
        for num_tokens in (300, 1200, 2500):
            while sum(len(stream._collector._token_ids) for stream in streams) < num_tokens:
                await asyncio.sleep(0.001)
            proxy.cut()
        for n, work in enumerate(reading):
            tokens, text = await work
            assert tokens == expected_output([n + 1], 40)
            assert text == await client.detokenize(tokens)
        assert proxy.num_connections >= 4


async def read(stream: Any) -> tuple[list[int], str]:
    tokens: list[int] = []
    texts: list[str] = []
    async for event in stream:
        if isinstance(event, Delta):
            assert event.first_token_index == len(tokens)
            tokens.extend(event.token_ids)
            texts.append(event.text)
    return tokens, "".join(texts)
