"""Several servers behind one name: what docs/KUBERNETES.md says about calls, sessions and resuming."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from clients.python import VorrangClient
from tests.support.server import running_server
from tests.support.wire import WireSession, open_session, reason_in
from vorrang.v1 import generation_pb2 as gen

pytestmark = pytest.mark.asyncio

ROUND_ROBIN = [("grpc.lb_policy_name", "round_robin"), ("grpc.use_local_subchannel_pool", 1)]


@contextlib.asynccontextmanager
async def two_servers() -> AsyncIterator[tuple[Any, Any, str]]:
    """Both of them, and a name for both, as a headless Service makes one."""
    async with (
        running_server({"model.name": "one"}) as one,
        running_server({"model.name": "two"}) as two,
    ):
        yield one, two, f"ipv4:{one.address},{two.address}"


async def answered_by(client: VorrangClient, num_calls: int) -> Counter[str]:
    return Counter([(await client.get_model()).name for _ in range(num_calls)])


async def test_one_connection_stays_where_it_is_and_round_robin_spreads() -> None:
    async with two_servers() as (_, _, target):
        async with VorrangClient(target) as client:
            assert len(await answered_by(client, 10)) == 1
        async with VorrangClient(target, channel_options=ROUND_ROBIN) as client:
            ends = asyncio.get_running_loop().time() + 20  # until both connections are made
            while len(await answered_by(client, 2)) < 2 and asyncio.get_running_loop().time() < ends:
                pass
            assert await answered_by(client, 10) == {"one": 5, "two": 5}


async def test_a_lost_session_is_found_on_its_own_server_alone() -> None:
    async with (
        two_servers() as (one, two, _),
        grpc.aio.insecure_channel(one.address) as own,
        grpc.aio.insecure_channel(two.address) as other,
    ):
        async with open_session(own, default_credit_tokens=1) as session:
            token = session.frames[0].opened.session_token
            await session.start("r1", max_tokens=4)
            await session.event("delta", "r1")
        async with WireSession(other, scope=session.scope) as elsewhere:
            await elsewhere.send(open=gen.OpenCommand(resume_session_token=token))
            rejected = await elsewhere.event("command_rejected")
            assert reason_in(rejected.status) == "RESUME_OUT_OF_RANGE"
            # What a client does then: the same start again, from the first token.
            await elsewhere.open()
            await elsewhere.start("r1", max_tokens=4)
            await elsewhere.end_of("r1")
            elsewhere.check("r1")
        async with WireSession(own, scope=session.scope) as back:
            await back.open(resume_session_token=token)
            await back.resume("r1", after=0)
            await back.credit("r1", 10)
            await back.end_of("r1")
        assert back.tokens("r1") == elsewhere.tokens("r1")
