"""The Python client's sessions against a real server: credit, pauses, lost streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from clients.python import Delta, ResumeOutOfRange, Session, VorrangClient
from engine.runner.scripted import expected_output
from server.app import App
from tests.support.server import running_server
from tests.support.wire import settled

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[App, VorrangClient]]:
    settings = {f"session.{name}": value for name, value in settings.items()}
    async with running_server(settings) as app, VorrangClient(app.address) as client:
        yield app, client


def num_output_tokens(app: App) -> int:
    (request,) = [request for request, _ in app.backend.registry._requests.values()]
    return request.ticket.handle.num_output_tokens if request.ticket else 0


async def lose(session: Session) -> None:
    """As when the network fails."""
    session._connection.cut()
    await session._connection.lost.wait()


async def test_credit_is_kept_up_while_a_stream_is_read() -> None:
    async with serving(slow_client_timeout_s=0.5) as (app, client), client.session() as session:
        stream = await session.start(token_ids=[1], temperature=0.0, max_tokens=300, credit_tokens=10)
        num_read = 0
        async for event in stream:
            if isinstance(event, Delta):
                num_read += len(event.token_ids)
                assert num_output_tokens(app) <= num_read + 10
        result = await stream.result()
    assert list(result.token_ids) == expected_output([1], 300)
    assert result.usage.parked_s > 0


async def test_a_stream_that_is_not_read_is_no_further_ahead_than_its_credit() -> None:
    async with serving() as (app, client), client.session(default_credit_tokens=7) as session:
        stream = await session.start(token_ids=[1], temperature=0.0, max_tokens=60)
        await settled(lambda: app.backend.registry.num_requests == 1 and num_output_tokens(app) == 7)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert num_output_tokens(app) == 7
        assert list((await stream.result()).token_ids) == expected_output([1], 60)


async def test_credit_can_be_granted_by_hand() -> None:
    async with (
        serving() as (app, client),
        client.session(default_credit_tokens=0, keep_credit=False) as session,
    ):
        stream = await session.start(token_ids=[1], temperature=0.0, max_tokens=6)
        await session.credit(stream.request_id, 4)
        await settled(lambda: app.backend.registry.num_requests == 1 and num_output_tokens(app) == 4)
        await session.credit(stream.request_id, 2, 1)
        assert list((await stream.result()).token_ids) == expected_output([1], 6)


async def test_a_paused_stream_goes_on_when_it_is_unpaused() -> None:
    async with serving() as (app, client), client.session() as session:
        stream = await session.start(token_ids=[1], temperature=0.0, max_tokens=500)
        await stream.pause()
        await (await session.start(token_ids=[2], max_tokens=3)).result()
        (paused, _) = [request for request, _ in app.backend.registry._requests.values()]
        assert paused.ticket is not None
        held = paused.ticket.handle.num_output_tokens
        await (await session.start(token_ids=[3], max_tokens=20)).result()
        assert paused.ticket.handle.num_output_tokens == held < 500
        await stream.unpause()
        assert list((await stream.result()).token_ids) == expected_output([1], 500)


async def test_a_lost_session_is_resumed_where_it_was_read_to() -> None:
    async with serving() as (_, client):
        tokens: list[int] = []
        async with client.session(reconnect_s=0) as session:
            stream = await session.start(token_ids=[1], temperature=0.0, max_tokens=80, credit_tokens=20)
            async for event in stream:
                if isinstance(event, Delta):
                    tokens.extend(event.token_ids)
                    if len(tokens) >= 30:
                        break
            await lose(session)
        async with client.session(resume_token=session.info.session_token) as again:
            assert again.info.session_token == session.info.session_token
            rest = await again.resume(stream.request_id, stream.last_sequence)
            tokens.extend((await rest.result()).token_ids)
            gone = await again.resume("never was")
            with pytest.raises(Exception, match="never was"):
                await gone.result()
    assert tokens == expected_output([1], 80)


async def test_a_session_that_is_not_held_can_not_be_resumed() -> None:
    async with serving() as (_, client):
        with pytest.raises(ResumeOutOfRange):
            async with client.session(resume_token="x"):
                raise AssertionError("it is open")


async def test_what_was_read_is_acknowledged_and_can_not_be_resumed_from() -> None:
    async with serving() as (_, client):
        async with client.session(reconnect_s=0) as session:
            stream = await session.start(token_ids=[1], temperature=0.0, max_tokens=80, credit_tokens=10)
            async for event in stream:
                if isinstance(event, Delta) and event.first_token_index >= 30:
                    break
            await lose(session)
        async with client.session(resume_token=session.info.session_token) as again:
            with pytest.raises(ResumeOutOfRange):
                await (await again.resume(stream.request_id, 1)).result()


async def test_leaving_with_an_exception_cancels_at_once() -> None:
    """Not after the grace, which is for who is lost against his will."""
    async with serving(resume_grace_s=60.0) as (app, client):

        async def fail() -> None:
            async with client.session() as session:
                for _ in range(3):
                    await session.start(token_ids=[1], max_tokens=500, credit_tokens=1)
                await settled(lambda: app.backend.engine.statistics().num_alive == 3)
                raise KeyError("x")

        with pytest.raises(KeyError):
            await fail()
        await settled(lambda: app.backend.engine.statistics().num_alive == 0)
