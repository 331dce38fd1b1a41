"""``vorrangctl admin`` against a real server whose steps are held."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import structlog
from typer.testing import CliRunner, Result

from clients.python import Session, VorrangClient
from clients.python.admin_client import ControlClient
from clients.python.auth import hash_token
from clients.python.cli import main
from clients.python.load_lanes import LaneClient
from server.app import App
from tests.support import canaries
from tests.support.cutting_proxy import CuttingProxy
from tests.support.server import HeldRunner, running_server
from tests.support.wire import settled

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

PLAIN, OPERATOR = canaries.TOKENS
GUARDED: dict[str, object] = {
    "tenants": {
        "ops": {"token_hashes": [hash_token(OPERATOR)], "operator": True},
        "plain": {"token_hashes": [hash_token(PLAIN)]},
    }
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The server's log would stand between what a command prints: both are in this process."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)


async def ctl(app: App, *arguments: str, stdin: str = "", **environment: str) -> Result:
    """Run ``vorrangctl admin``; on a thread, because it has an event loop of its own."""
    env = {"VORRANG_TARGET": app.address, "COLUMNS": "200", **environment}
    return await asyncio.to_thread(CliRunner().invoke, main, ("admin", *arguments), stdin, env)


@asynccontextmanager
async def two_requests() -> AsyncIterator[tuple[App, HeldRunner, Session]]:
    """A server with one seat: ``runs`` holds it, ``waits`` doesn't."""
    runner = HeldRunner(64, 16)
    async with (
        running_server({"scheduler.max_running_requests": 1}, runner=runner) as app,
        VorrangClient(app.address) as client,
        client.session() as session,
    ):
        runner.hold()
        await session.start("abc", request_id="runs", priority="standard", max_tokens=5, label="mine")
        await runner.held.wait()
        await session.start("abc", request_id="waits", priority="batch", max_tokens=5)
        await settled(lambda: app.statistics().num_requests == 2)
        yield app, runner, session
        runner.release()


async def test_requests_and_load_are_tables_and_json() -> None:
    async with two_requests() as (app, _, _session):
        listed = json.loads((await ctl(app, "requests", "--json")).stdout)
        assert [(r["request_id"], r["state"], r["level"]) for r in listed] == [
            ("runs", "PREFILL", 0),
            ("waits", "WAITING", 10),
        ]
        assert [(r["max_output_tokens"], r["label"]) for r in listed] == [(5, "mine"), (5, "")]
        only = json.loads((await ctl(app, "requests", "--class", "batch", "--limit", "1", "--json")).stdout)
        assert [r["request_id"] for r in only] == ["waits"]
        table = (await ctl(app, "requests")).stdout
        assert all(word in table for word in ("runs", "waits", "prefill", "waiting", "0/5", "2 alive"))
        load = json.loads((await ctl(app, "load", "--json")).stdout)
        by_class = {c["class_name"]: (c["num_running"], c["num_waiting"]) for c in load["classes"]}
        assert by_class == {"interactive": (0, 0), "standard": (1, 0), "batch": (0, 1)}
        assert (load["num_seats"], load["num_free_seats"], load["draining"]) == (1, 0, False)
        assert "1 of 1 seats" in (await ctl(app, "load")).stdout
        info = json.loads((await ctl(app, "info", "--json")).stdout)
        assert (info["model"], info["max_running_requests"]) == ("scripted", 1)
        assert "scripted" in (await ctl(app, "info")).stdout


async def test_a_request_is_cancelled_and_reprioritised_by_either_id() -> None:
    async with two_requests() as (app, runner, session):
        listed = json.loads((await ctl(app, "requests", "--json")).stdout)
        ids = {r["request_id"]: r["server_request_id"] for r in listed}
        changed = await ctl(app, "priority", "--", "waits", "-7")
        assert (changed.exit_code, changed.stdout) == (0, "waits has level -7\n")
        by_server = await ctl(app, "priority", ids["runs"], "interactive")
        assert by_server.stdout == f"{ids['runs']} has level -10\n"
        assert (await ctl(app, "cancel", "waits")).stdout == "waits is cancelled\n"
        assert (await ctl(app, "cancel", ids["runs"])).exit_code == 0
        runner.release()
        await settled(lambda: session.alive == 0)
        gone = await ctl(app, "cancel", "waits")
        assert (gone.exit_code, gone.stderr) == (1, "vorrangctl: no request 'waits' is alive (NOT_FOUND)\n")


async def test_bad_values_are_named_and_exit_with_2() -> None:
    async with two_requests() as (app, _, _session):
        wrong = await ctl(app, "requests", "--class", "urgent")
        assert (wrong.exit_code, "class_name: must be one of" in wrong.stderr) == (2, True)
        wrong = await ctl(app, "priority", "runs", "urgent")
        assert (wrong.exit_code, "priority" in wrong.stderr) == (2, True)
        wrong = await ctl(app, "drain", "--yes", "--grace", "1e6")
        assert (wrong.exit_code, "grace: must be between" in wrong.stderr) == (2, True)


async def test_decisions_are_followed() -> None:
    async with running_server() as app, VorrangClient(app.address) as client:
        await client.generate("abc", max_tokens=4, ignore_eos=True)
        lines = (await ctl(app, "decisions", "--past", "3", "--steps", "3", "--json")).stdout.splitlines()
        steps = [json.loads(line) for line in lines]
        assert [step["step"] - steps[0]["step"] for step in steps] == [0, 1, 2]
        assert [step["grants"][0]["num_tokens"] for step in steps] == [1, 1, 1]
        assert "+1" in (await ctl(app, "decisions", "--past", "1", "--steps", "1")).stdout


async def test_drain_asks_first() -> None:
    async with running_server() as app:
        assert (await ctl(app, "drain", stdin="n\n")).exit_code == 1
        assert json.loads((await ctl(app, "load", "--json")).stdout)["draining"] is False
        drained = await ctl(app, "drain", "--yes", "--grace", "5", "--json")
        assert json.loads(drained.stdout) == {"num_running": 0, "num_waiting": 0}


async def test_who_is_no_operator_is_told_what_is_missing() -> None:
    async with running_server(GUARDED) as app:
        for environment in ({}, {"VORRANG_TOKEN": PLAIN}):
            refused = await ctl(app, "load", **environment)
            assert refused.exit_code == 1
            assert "must be an operator's" in refused.stderr
            assert len(refused.stderr.splitlines()) == 1
        assert (await ctl(app, "load", VORRANG_TOKEN=OPERATOR)).exit_code == 0


async def test_a_port_without_control_service_says_where_to_look() -> None:
    async with running_server({"control.listen": "127.0.0.1:0"}) as app:
        missing = await ctl(app, "load")
        assert missing.exit_code == 1
        assert "--control" in missing.stderr
        assert (await ctl(app, "load", "--control", app.control_address)).exit_code == 0


@pytest.mark.parametrize("kind", [ControlClient, LaneClient])
async def test_a_server_that_takes_its_time_to_answer_is_reached(kind: type[VorrangClient]) -> None:
    """``grpc.min_reconnect_backoff_ms`` is also the time that a connection may take."""
    async with running_server() as app, CuttingProxy(app.address) as proxy:
        proxy.delay_s = 0.5
        async with kind(proxy.address) as client:
            assert (await client.get_model()).name == "scripted"


async def test_several_requests_of_one_name_are_told_apart_by_the_servers_id() -> None:
    runner = HeldRunner(64, 16)
    async with (
        running_server({**GUARDED, "scheduler.max_running_requests": 1}, runner=runner) as app,
        VorrangClient(app.address, metadata=[("authorization", f"Bearer {OPERATOR}")]) as one,
        VorrangClient(app.address, metadata=[("authorization", f"Bearer {PLAIN}")]) as other,
        one.session() as of_one,
        other.session() as of_other,
    ):
        runner.hold()
        await of_one.start("abc", request_id="same", max_tokens=2)
        await of_other.start("abc", request_id="same", max_tokens=2)
        await settled(lambda: app.statistics().num_requests == 2)
        refused = await ctl(app, "priority", "same", "batch", VORRANG_TOKEN=OPERATOR)
        assert refused.exit_code == 1
        assert "several requests are called 'same'" in refused.stderr
        runner.release()


async def test_requests_are_listed_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.python.admin_client._PAGE_SIZE", 2)
    runner = HeldRunner(64, 16)
    async with (
        running_server({"scheduler.max_running_requests": 1}, runner=runner) as app,
        VorrangClient(app.address) as client,
        client.session() as session,
        ControlClient(app.address) as control,
    ):
        runner.hold()
        for number in range(5):
            await session.start("abc", request_id=f"q{number}", max_tokens=2)
        await settled(lambda: app.statistics().num_requests == 5)
        assert [r.request_id for r in await control.requests()] == [f"q{n}" for n in range(5)]
        assert [r.request_id for r in await control.requests(limit=3)] == ["q0", "q1", "q2"]
        assert (await control.find("q4")).request_id == "q4"
        runner.release()
