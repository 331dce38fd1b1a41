"""The contract is tested against a server in this process, one of its own, or VORRANG_TEST_TARGET."""

import os
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
import pytest_asyncio

from tests.support.process import server_process
from tests.support.server import running_server

EXTERNAL = os.environ.get("VORRANG_TEST_TARGET")
NUM_BLOCKS = 64
#: The scripted model reads no folder.
ADAPTERS = ("--adapter", "x=any", "--adapter", "y=any")


@pytest.fixture(scope="module")  # gone before tests that count the children of their process
def server_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("contract") / "log"
    with server_process("--kv-blocks", str(NUM_BLOCKS), *ADAPTERS, log=log) as server:
        yield server.address


@pytest_asyncio.fixture(params=["external"] if EXTERNAL else ["in this process", "process"])
async def target(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    match request.param:
        case "external":
            assert EXTERNAL
            yield EXTERNAL
        case "process":
            yield request.getfixturevalue("server_of_its_own")
        case _:
            async with running_server(
                {"kv.num_blocks": NUM_BLOCKS, "model.adapters": {"x": "", "y": ""}}
            ) as app:
                yield app.address


@pytest_asyncio.fixture
async def channel(target: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield channel
