"""The contract is tested against an address: a server in this process, or VORRANG_TEST_TARGET."""

import os
from collections.abc import AsyncIterator

import grpc.aio
import pytest_asyncio

from tests.support.server import running_server


@pytest_asyncio.fixture
async def target() -> AsyncIterator[str]:
    if external := os.environ.get("VORRANG_TEST_TARGET"):
        yield external
        return
    async with running_server({"kv.num_blocks": 64}) as app:
        yield app.address


@pytest_asyncio.fixture
async def channel(target: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield channel
