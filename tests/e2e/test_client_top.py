"""``vorrangctl top`` against a real server whose steps are held, driven by textual's pilot."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from clients.python import Session, VorrangClient
from clients.python.admin_client import ControlClient
from clients.python.auth import hash_token
from clients.python.errors import AccessDenied
from clients.python.top_app import TopApp
from clients.python.top_dialogs import AskPriority, ConfirmCancel
from server.app import App
from tests.support import canaries
from tests.support.server import HeldRunner, running_server
from tests.support.wire import settled

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
SIZE = (120, 40)
#: The pilot waits, for a second at most, until the process rests: not too short.
INTERVAL_S = 0.15


def text_of(app: TopApp, selector: str) -> str:
    file = io.StringIO()
    Console(width=SIZE[0], file=file).print(app.query_one(selector, Static).content)
    return file.getvalue()


def rows(app: TopApp) -> dict[str, list[str]]:
    """The cells of each row, by the client's id of its request, in order."""
    table = app.query_one(DataTable)
    cells = [[str(cell) for cell in table.get_row_at(row)] for row in range(table.row_count)]
    return {row[3]: row for row in cells}


@asynccontextmanager
async def watched(
    *requests: tuple[str, str],
) -> AsyncIterator[tuple[App, HeldRunner, Session, TopApp, Pilot[Any]]]:
    """A server with two seats, requests (id, priority) that it holds, and the screen."""
    runner = HeldRunner(64, 16)
    async with (
        running_server({"scheduler.max_running_requests": 2}, runner=runner) as server,
        VorrangClient(server.address) as client,
        client.session() as session,
        ControlClient(server.address) as control,
    ):
        runner.hold()
        for name, priority in requests:
            await session.start("abc", request_id=name, priority=priority, max_tokens=50, label=f"of {name}")
            await settled(lambda: server.statistics().num_requests > 0)
        await settled(lambda: server.statistics().num_requests == len(requests))
        app = TopApp(control, await control.info(), interval_s=INTERVAL_S)
        async with app.run_test(size=SIZE) as pilot:
            yield server, runner, session, app, pilot
            runner.release()


async def test_it_shows_seats_queue_and_requests() -> None:
    async with watched(("a", "interactive"), ("b", "standard"), ("c", "batch")) as (
        _,
        _runner,
        _s,
        app,
        _pilot,
    ):
        await settled(lambda: len(rows(app)) == 3)
        assert list(rows(app)) == ["a", "b", "c"]
        assert [row[0] for row in rows(app).values()] == ["-10", "0", "10"]
        assert rows(app)["c"][1] == "waiting"
        assert rows(app)["c"][6] == "0/50"
        assert rows(app)["c"][10] == "of c"
        head = text_of(app, "#head")
        assert "scripted at" in head
        assert "live" in head
        assert "policy priority" in head
        assert "/64 blocks" in head
        classes = text_of(app, "#classes")
        assert [line.split()[0] for line in classes.splitlines()[1:4]] == ["interactive", "standard", "batch"]


async def test_tokens_and_steps_are_counted_as_they_are_made() -> None:
    async with watched(("a", "interactive")) as (_, runner, session, app, _):
        await settled(lambda: len(rows(app)) == 1)
        runner.release()
        await settled(lambda: session.alive == 0)
        await settled(lambda: not rows(app) and " 50 tokens" in text_of(app, "#head"))
        assert app.board.rates().output_tokens > 0


async def test_a_request_is_cancelled_only_when_that_is_confirmed() -> None:
    async with watched(("a", "interactive"), ("b", "batch")) as (server, runner, _session, app, pilot):
        await settled(lambda: len(rows(app)) == 2)
        await pilot.press("down")
        assert app.selected_id == rows(app)["b"][2]
        await pilot.press("c")
        await settled(lambda: isinstance(app.screen, ConfirmCancel))
        await pilot.press("n")
        await settled(lambda: not isinstance(app.screen, ConfirmCancel))
        assert server.statistics().num_requests == 2
        await pilot.press("c")
        await settled(lambda: isinstance(app.screen, ConfirmCancel))
        await pilot.press("y")
        runner.release()
        runner.hold()
        await settled(lambda: "b" not in rows(app))


@pytest.mark.slow
async def test_a_priority_is_changed_by_level_or_name_and_a_wrong_one_is_told() -> None:
    async with watched(("a", "standard")) as (_, _runner, _session, app, pilot):
        await settled(lambda: len(rows(app)) == 1)
        told: list[str] = []
        app.notify = lambda message, **_: told.append(message)  # type: ignore[method-assign,assignment]

        async def ask(key: str, text: str = "") -> None:
            await pilot.press("p")
            await settled(lambda: isinstance(app.screen.focused, Input))
            assert isinstance(app.screen, AskPriority)
            app.screen.query_one(Input).value = text
            await pilot.press(key)
            await settled(lambda: not isinstance(app.screen, AskPriority))

        await ask("enter", "-7")
        await settled(lambda: len(told) == 1)
        assert told == [f"{rows(app)['a'][2]} has level -7"]
        await ask("enter", "urgent")
        await settled(lambda: len(told) == 2)
        assert "interactive, standard, batch" in told[1]
        await ask("escape")
        assert len(told) == 2


async def test_a_look_that_comes_back_while_the_screen_is_taken_down_is_no_error() -> None:
    async with watched(("a", "standard")) as (_, _runner, _session, app, _pilot):
        await settled(lambda: len(rows(app)) == 1)
        for name in ("#head", "#classes"):
            await app.query_one(name).remove()
            await app._look()
        assert app.is_running


async def test_rows_are_sorted_filtered_and_the_cursor_stays_on_its_request() -> None:
    async with watched(("a", "interactive"), ("b", "batch"), ("c", "standard")) as (_, _r, _s, app, pilot):
        await settled(lambda: list(rows(app)) == ["a", "c", "b"])
        await pilot.press("down")
        selected = app.selected_id
        assert selected == rows(app)["c"][2]
        await pilot.press("r")
        await settled(lambda: list(rows(app)) == ["b", "c", "a"])
        assert app.selected_id == selected
        await pilot.press("s", "s", "s")
        assert app.board.sort_column == 3
        await settled(lambda: list(rows(app)) == ["a", "b", "c"])
        assert app.selected_id == selected
        await pilot.press("f")
        await settled(lambda: list(rows(app)) == ["a"])
        await pilot.press("f", "f", "f")
        await settled(lambda: len(rows(app)) == 3)


async def test_a_frozen_screen_stands_still() -> None:
    async with watched(("a", "interactive")) as (_, runner, session, app, pilot):
        await settled(lambda: len(rows(app)) == 1)
        await pilot.press("space")
        runner.release()
        await settled(lambda: session.alive == 0)
        await settled(lambda: app.board.latest is not None and not app.board.latest.requests)
        assert len(rows(app)) == 1
        await pilot.press("space")
        await settled(lambda: not rows(app))


async def test_it_survives_a_server_that_starts_again() -> None:
    async with running_server() as server:
        address = server.address
        control = await ControlClient(address).__aenter__()
        app = TopApp(control, await control.info(), interval_s=INTERVAL_S)
        screen = app.run_test(size=SIZE)
        pilot = await screen.__aenter__()
        await settled(lambda: "live" in text_of(app, "#head"))
    await settled(lambda: "reconnecting" in text_of(app, "#head"))
    assert app.board.latest is not None
    async with running_server({"server.listen": address, "scheduler.max_running_requests": 3}):
        await settled(lambda: "live" in text_of(app, "#head"))
        assert "/3 " in text_of(app, "#head")
        await pilot.press("q")
        await screen.__aexit__(None, None, None)
        await control.__aexit__(None, None, None)


async def test_who_is_no_operator_is_sent_away() -> None:
    guarded: dict[str, object] = {
        "tenants": {"ops": {"token_hashes": [hash_token(canaries.OPERATOR_TOKEN)], "operator": True}}
    }
    async with (
        running_server(guarded) as server,
        ControlClient(
            server.address, metadata=[("authorization", "Bearer " + canaries.OPERATOR_TOKEN)]
        ) as operator,
        ControlClient(server.address) as nobody,
    ):
        app = TopApp(nobody, await operator.info(), interval_s=INTERVAL_S)
        async with app.run_test(size=SIZE):
            await settled(lambda: app.return_value is not None)
        assert isinstance(app.return_value, AccessDenied)
