"""``vorrangctl load`` against a real server: what ends badly is counted, and nothing is left behind."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from clients.python.auth import hash_token
from clients.python.errors import AccessDenied, ConnectionLost
from clients.python.load import LoadOptions, run_load
from clients.python.load_report import summarise
from clients.python.load_state import LoadState
from clients.python.load_workload import Wish, workload_of
from server.app import App
from tests.support import canaries
from tests.support.process import environment
from tests.support.server import HeldRunner, running_server
from tests.support.wire import settled
from workloads.arrivals import Arrival, Workload
from workloads.records import read_runs

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

#: Whoever runs the tests in the background may have told their children to ignore SIGINT.
AS_A_USER = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "runpy.run_module('clients.python.cli', run_name='__main__', alter_sys=True)"
)


def constant(num_requests: int, rate_rps: float = 200.0, output_tokens: str = "3") -> Workload:
    wish = Wish(rate_rps, num_requests=num_requests, arrivals="constant", output_tokens=output_tokens)
    return workload_of(None, wish)


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AS_A_USER, "load", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )


async def test_every_request_is_sent_over_all_sessions_and_recorded() -> None:
    async with running_server() as app:
        state = LoadState()
        options = LoadOptions(num_connections=2, num_sessions=3, sample_s=0.02)
        running = asyncio.create_task(run_load(app.address, constant(40), options, state=state))
        await settled(lambda: app.statistics().num_sessions == 6)
        run = await running
        assert app.statistics().num_sessions == 0
    assert [r.request.index for r in run.records] == list(range(40))
    for record in run.records:
        assert record.reason == "length"
        assert record.num_output_tokens == len(record.token_times_s) == 3
        times_s = [record.request.arrival_s, record.sent_s, record.accepted_s, *record.token_times_s]
        times_s.append(record.ended_s)
        assert times_s == sorted(times_s)  # type: ignore[type-var]  # none of them is None
    assert state.num_finished == state.num_sent == 40
    assert state.num_in_flight == 0
    assert len(run.samples) > 2
    assert run.server == f"scripted at {app.address}"
    assert run.end_s > 0.19


async def test_what_the_server_refuses_is_counted_by_reason() -> None:
    runner = HeldRunner(64, 16)
    settings: dict[str, object] = {"scheduler.max_running_requests": 1, "scheduler.max_waiting_requests": 4}
    async with running_server(settings, runner=runner) as app:
        runner.hold()
        state = LoadState()
        running = asyncio.create_task(run_load(app.address, constant(20), state=state))
        await settled(lambda: state.errors.total() >= 15)
        runner.release()
        run = await running
    summary = summarise(run)
    assert summary.errors == {"QUEUE_FULL": state.errors["QUEUE_FULL"]}
    assert summary.total.num_served + summary.total.num_failed == 20
    assert summary.messages["QUEUE_FULL"]


async def test_requests_name_adapters_in_turn() -> None:
    async with running_server({"model.adapters": {"a": ""}}) as app:
        run = await run_load(app.address, constant(9), LoadOptions(adapters=("a", "", "nobody's")))
    ends = [record.error or record.reason for record in run.records]
    assert ends == ["length", "length", "UNKNOWN_MODEL"] * 3


async def test_no_more_than_may_are_alive() -> None:
    runner = HeldRunner(64, 16)
    async with running_server(runner=runner) as app:
        runner.hold()
        state, options = LoadState(), LoadOptions(max_in_flight=5, drain_s=0.0)
        run = await run_load(app.address, constant(20), options, state=state)
        assert summarise(run).errors == {"NOT_SENT": 15, "UNFINISHED": 5}
        await settled(lambda: app.statistics().num_sessions == 0)
        runner.release()
        await settled(lambda: app.statistics().num_requests == 0)  # cancelled, not left behind


@pytest.mark.deep
async def test_unanswered_requests_are_given_up_in_the_end_and_count_with_their_wait() -> None:
    runner = HeldRunner(64, 16)
    async with running_server(runner=runner) as app:
        runner.hold()
        run = await run_load(app.address, constant(4), LoadOptions(drain_s=0.3))
        runner.release()
        total = summarise(run).total
        assert (total.num_unfinished, total.ttft_s.count) == (4, 4)
        assert total.ttft_s.p50 is not None
        assert total.ttft_s.p50 >= 0.3


@pytest.mark.deep
async def test_a_server_that_dies_and_comes_back_costs_the_requests_meanwhile() -> None:
    async with running_server() as app:
        address = app.address
        state = LoadState()
        running = asyncio.create_task(run_load(address, constant(600, 200.0), state=state))
        await settled(lambda: state.num_finished > 20)
    num_before = state.num_finished
    await settled(lambda: state.errors.total() > 20)
    async with running_server({"server.listen": address}):
        run = await running
    errors = summarise(run).errors
    assert set(errors) <= {"CONNECTION_LOST", "DRAINING", "UNAVAILABLE"}
    assert state.num_finished > num_before + 20
    assert sum(errors.values()) + state.num_finished == 600


async def test_no_server_and_no_right_are_errors_at_the_start() -> None:
    with pytest.raises(ConnectionLost):
        await run_load("127.0.0.1:1", constant(1))
    guarded: dict[str, object] = {"tenants.a.token_hashes": [hash_token(canaries.TOKEN)]}
    async with running_server(guarded) as app:
        with pytest.raises(AccessDenied):
            await run_load(app.address, constant(1))


async def test_each_tenant_has_an_identity_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: dict[str, object] = {
        "tenants.a.token_hashes": [hash_token(canaries.TOKEN)],
        "tenants.b.token_hashes": [hash_token(canaries.OPERATOR_TOKEN)],
        "tenants.b.max_running_requests": 1,
    }
    monkeypatch.setenv("VORRANG_TOKEN", canaries.TOKEN)
    runner = HeldRunner(64, 16)
    workload = Workload("two", tuple(Arrival(n, n / 100, 5, 3, tenant="ab"[n % 2]) for n in range(6)))
    seen: set[str] = set()
    async with running_server(guarded, runner=runner) as app:
        runner.hold()
        options = LoadOptions(tokens={"b": canaries.OPERATOR_TOKEN})
        running = asyncio.create_task(run_load(app.address, workload, options))
        await settled(lambda: app.statistics().num_requests == 6)
        seen = tenants_of(app)
        runner.release()
        run = await running
    assert seen == {"a", "b"}
    assert [record.error for record in run.records] == [None] * 6


def tenants_of(app: App) -> set[str]:
    return {look.tenant for look in app.backend.engine.look()}


async def test_the_command_writes_figures_and_records(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    async with running_server() as app:
        process = await start(
            *("--target", app.address, "--rate", "100", "--requests", "12", "--output-tokens", "2-5"),
            *("--classes", "interactive=1,batch=1"),
            *("--json", "-", "--records", str(records), "--target-latency", "batch=5/1"),
        )
        out, err = await process.communicate()
    figures = json.loads(out)
    assert (process.returncode, figures["errors"]) == (0, {}), err.decode()
    assert figures["total"]["num_served"] == figures["num_due"] == 12
    assert figures["total"]["ttft_s"]["p99"] > 0
    assert figures["command"].startswith("vorrangctl load --target")
    (run,) = read_runs(records)
    assert len(run.records) == 12
    assert all(len(r.token_times_s) == r.request.num_output_tokens for r in run.records)
    assert {r.request.level for r in run.records} == {-10, 10}


@pytest.mark.slow
async def test_interrupting_it_ends_cleanly_with_what_was_measured() -> None:
    async with running_server() as app:
        process = await start("--target", app.address, "--rate", "100", "--duration", "60")
        await settled(lambda: app.statistics().num_sessions == 1)
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert process.returncode == 130, err.decode()
        text = out.decode()
        assert "(interrupted)" in text
        assert "TTFT" in text
        assert "the generator itself: sent" in text
        assert "Traceback" not in err.decode()
        await settled(lambda: app.statistics().num_requests == 0)


@pytest.mark.deep
async def test_failed_requests_are_exit_code_1_unless_that_many_may_fail() -> None:
    async with running_server({"scheduler.max_context_tokens": 64}) as app:
        arguments = ("--target", app.address, "--requests", "4", "--rate", "100", "--prompt-tokens", "100")
        failing, allowed = await asyncio.gather(start(*arguments), start(*arguments, "--max-failed", "1"))
        out, _ = await failing.communicate()
        await allowed.communicate()
    assert (failing.returncode, allowed.returncode) == (1, 0)
    assert "4x CONTEXT_EXCEEDED" in out.decode()
