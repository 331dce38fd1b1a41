"""``vorrangctl trace``: a live timeline, beside the one of the server's own decision log."""

import asyncio

import grpc.aio
import pytest

from clients.python import VorrangClient
from clients.python import watch as watch_module
from clients.python.errors import RequestFailed
from clients.python.watch import class_name, watch, write_trace
from engine.priority import LEVEL_MAX, LEVEL_MIN, class_of
from server.trace import RunSink, _replayed
from tests.support.server import HeldRunner, running_server
from tests.support.trace_events import checked
from tests.support.wire import TERMINAL, open_session, settled, spec

pytestmark = pytest.mark.asyncio

FOR_LONG_S = 3600.0


def outline(run):
    """What must be the same however a run was watched."""
    stays = [(s.seat, s.request_id, s.class_name, s.left, s.is_resume) for s in run.stays]
    pieces = [[(p.kind, p.num_tokens, p.num_steps) for p in s.pieces] for s in run.stays]
    waits = [(w.request_id, w.class_name, w.kind) for w in run.waits]
    cuts = [(c.victim, c.beneficiary, c.reason, c.num_lost_tokens, c.seat) for c in run.cuts]
    most = max(s.used_blocks for s in run.samples), max(sum(s.waiting.values()) for s in run.samples)
    gates = {s.gate for s in run.samples}  # plans of an idle server are not watched, so not all samples
    return stays, pieces, waits, cuts, most, gates


@pytest.fixture
def has_asked(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once who watches has asked who waits already."""
    ask, has_asked = watch_module._waiting, asyncio.Event()

    async def ask_and_tell(client):
        waiting = await ask(client)
        has_asked.set()
        return waiting

    monkeypatch.setattr(watch_module, "_waiting", ask_and_tell)
    return has_asked


async def test_what_is_watched_is_what_the_log_says(tmp_path, has_asked) -> None:
    log, output = tmp_path / "decisions.log", tmp_path / "trace.json"
    runner = HeldRunner(64, 16)
    settings = {"scheduler.max_running_requests": 1, "engine.record_decisions": log}
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
        VorrangClient(app.address) as client,
    ):
        watching = asyncio.create_task(watch(client, FOR_LONG_S))
        await has_asked.wait()
        await settled(lambda: app.feed.num_watchers == 1)
        runner.hold()
        for name in ("a", "b", "c"):
            await session.start(name, spec([ord(name)] * 20, max_tokens=12, level=10))
        await runner.held.wait()
        await session.start("urgent", spec([7] * 8, max_tokens=4, level=-10))
        await settled(lambda: app.statistics().num_requests == 4)
        await session.pause("c")
        await session.reprioritize("b", 3)
        runner.release()
        ended = set()
        while len(ended) < 4:
            frame = await session.next()
            if frame.WhichOneof("event") in TERMINAL:
                ended.add(frame.request_id)
                if frame.request_id == "urgent":
                    await session.unpause("c")
        app.feed.close()  # which ends the watch
        run, num_lost = await watching
    assert num_lost == 0
    recorded = _replayed(log, RunSink).finish()
    assert outline(run) == outline(recorded)
    assert [cut.reason for cut in run.cuts] == ["seats"]
    for one, other in zip(run.stays, recorded.stays, strict=True):
        assert one.end_s - one.begin_s == pytest.approx(other.end_s - other.begin_s, abs=0.01)
    with output.open("w") as file:
        from timeline.chrome import write

        write(run, file)
    checked(output.read_text())


async def test_a_late_watcher_sees_who_waits_and_one_that_reads_too_slowly_loses_no_end(has_asked) -> None:
    runner = HeldRunner(64, 16)
    settings = {"scheduler.max_running_requests": 1, "control.max_watcher_steps": 2}
    async with (
        running_server(settings, runner=runner) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        open_session(channel) as session,
        VorrangClient(app.address) as client,
    ):
        runner.hold()
        await session.start("runs", level=0)
        await runner.held.wait()
        await session.start("waits", level=0)
        await settled(lambda: app.statistics().num_requests == 2)
        slow = app.feed.watch(0, wants_between=True)
        watching = asyncio.create_task(watch(client, FOR_LONG_S))
        await has_asked.wait()
        runner.release()
        await session.end_of("waits")
        app.feed.close()
        run, _ = await watching
        assert [wait.kind for wait in run.waits] == ["queued"]
        assert [stay.left for stay in run.stays] == ["length", "length"]
        app.feed.leave(slow)
        told = []
        slow.end()
        async for watched in slow:
            told += [type(event).__name__ for record in watched.between for event in record.events]
        assert told.count("Finished") == 2


async def test_wrong_usage_is_refused_and_too_many_watchers_are(tmp_path) -> None:
    for level in range(LEVEL_MIN, LEVEL_MAX + 1):
        assert class_name(level) == class_of(level).name
    with pytest.raises(ValueError, match="--output must be given"):
        await write_trace("127.0.0.1:1", 1.0, None, None, every_step=False)
    async with running_server() as app:
        with pytest.raises(ValueError, match=r"t\.json can't be written: No such file"):
            await write_trace(app.address, 0.1, tmp_path / "no" / "t.json", None, every_step=False)
    async with running_server({"control.max_watchers": 1}) as app, VorrangClient(app.address) as client:
        first = asyncio.create_task(watch(client, 0.5))
        await settled(lambda: app.feed.num_watchers == 1)
        with pytest.raises(RequestFailed) as failed:
            await watch(client, 0.5)
        assert failed.value.reason == "CALL_LIMIT"
        run, _ = await first
        assert not run.stays
