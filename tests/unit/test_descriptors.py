"""Without descriptors, memory or processes to be had: nothing counts as a death, and all goes on later."""

import asyncio
import contextlib
import errno
import functools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine import descriptors
from engine.descriptors import Reserve, is_shortage
from engine.runner import process_life
from engine.runner.base import RunnerDead, RunnerLost
from engine.runner.child import RunnerLimits
from engine.runner.process import ProcessRunner
from engine.runner.scripted import expected_output
from engine.runner.sources import ScriptedSource
from engine.scheduler.plan import Plan
from engine.text import PromptLimit
from engine.text_work.jobs import EncodeText
from engine.text_work.process import TextProcess
from server.app import App
from server.errors import ProcessStarting, row_of
from server.isolation import TextWork
from server.load import ModelUnavailable, load
from server.ports import NUM_OTHER_DESCRIPTORS, Connections, connections_of_ports
from server.settings import SettingsError
from server.settings import load as load_settings
from server.slots import Turn
from tests.support.grants import grant
from tests.support.process import run_python
from tests.support.text_jobs import Scripted

LIMITS = RunnerLimits(hang_s=10.0, backoff_s=0.001, backoff_s_max=0.002, max_restarts=2)
SHORT = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN]


def failing(number: int, code: int, then: Callable[..., Any]) -> Callable[..., Any]:
    """Raises so many times before it does its work."""
    left = [number]

    def work(*arguments: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return then(*arguments, **named)

    return work


async def lost(runner: ProcessRunner) -> RunnerLost:
    """Its loss, once it has seen that its process is dead."""
    is_lost = asyncio.Event()
    runner.watch(is_lost.set)
    await is_lost.wait()
    loss = runner.take_loss()
    assert loss is not None
    return loss


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing; the test must open nothing in it that it had not before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("code", SHORT)
def test_a_shortage_is_known_by_its_number(code: int) -> None:
    assert is_shortage(OSError(code, "x"))


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "x"), OSError("x"), ValueError(errno.EMFILE)])
def test_what_will_not_pass_is_no_shortage(error: Exception) -> None:
    assert not is_shortage(error)


def test_the_reserve_is_there_when_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Reserve(descriptors.NUM_KEPT)
    reserve.take()
    try:
        with no_descriptor_left():
            with pytest.raises(OSError, match="Too many open files") as caught:
                process_life.spawn_connected("engine.text_work.worker")
            assert is_shortage(caught.value)
            monkeypatch.setattr(process_life, "RESERVE", reserve)
            process, connection = process_life.spawn_connected("engine.text_work.worker")
            process.kill()
            process.wait()
            assert 0 < reserve.num_held < descriptors.NUM_KEPT  # the connection's is one of them
            connection.close()
        with reserve.lent():
            assert reserve.num_held == 0
        assert reserve.num_held == descriptors.NUM_KEPT
    finally:
        reserve.give_up()
    assert reserve.num_held == 0
    with reserve.lent():
        pass
    assert reserve.num_held == 0


def test_the_soft_limit_is_raised_as_far_as_it_may_and_never_lowered() -> None:
    code = (
        "import resource as r; from engine.descriptors import raise_limit, limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, 900))\n"
        "print(raise_limit(500), raise_limit(), raise_limit(300), limit())"
    )
    assert run_python(code).stdout.split() == ["500", "900", "900", "900"]


@pytest.mark.parametrize(
    ("wanted", "num_side_ports", "free", "expected"),
    [
        (4096, 0, 60_000, Connections(4096, 4096)),
        (4096, 2, 60_000, Connections(4096, 4096)),
        (4096, 0, 800, Connections(800, 100)),
        (4096, 2, 800, Connections(600, 100)),
        (4096, 2, 10_000, Connections(4096, 1250)),
        (3, 2, 800, Connections(3, 3)),
        (4096, 2, 3, Connections(1, 1)),
    ],
)
def test_connections_leave_descriptors_to_all_else(
    wanted: int, num_side_ports: int, free: int, expected: Connections
) -> None:
    num_open = 50
    limit = free + num_open + NUM_OTHER_DESCRIPTORS
    found = connections_of_ports(wanted, num_side_ports, limit=limit, num_open=num_open)
    assert found == expected
    assert found.clients + num_side_ports * found.side <= free


def test_too_few_descriptors_for_anything_are_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(SettingsError, match=r"the limit on open files .* must be at least 181, got 100"):
        connections_of_ports(4096, 2, limit=100, num_open=50)
    assert connections_of_ports(4096, 2, limit=181, num_open=50) == Connections(1, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("code", SHORT)
async def test_a_shortage_is_no_death_of_the_runner(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = await ProcessRunner.start(ScriptedSource(8, 4), LIMITS)
    try:
        many = failing(5 * LIMITS.max_restarts, code, process_life.spawn_connected)
        monkeypatch.setattr(process_life, "spawn_connected", many)
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGKILL)
        loss = await lost(runner)
        await loss.recovery
        plan = Plan(1, (grant("a", 0, 3, 0, token_ids=[1, 2, 3], block_table=[1]),))
        assert (await runner.execute(plan)).sampled == {"a": expected_output([1, 2, 3], 1)[0]}
        assert runner.statistics().num_restarts == 1
    finally:
        await runner.close()


@pytest.mark.asyncio
async def test_what_will_not_pass_is_a_death_of_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = await ProcessRunner.start(ScriptedSource(8, 4), LIMITS)
    try:
        never = failing(LIMITS.max_restarts, errno.ENOENT, process_life.spawn_connected)
        monkeypatch.setattr(process_life, "spawn_connected", never)
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGKILL)
        loss = await lost(runner)
        with pytest.raises(RunnerDead, match="No such file"):
            await loss.recovery
    finally:
        await runner.close()


@pytest.mark.asyncio
async def test_a_first_start_without_room_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_life, "spawn_connected", failing(1, errno.EMFILE, lambda: None))
    settings = load_settings(None, {"model.path": "scripted", "server.listen": "127.0.0.1:0"}).settings
    app = App(settings, functools.partial(load, settings))
    with pytest.raises(ModelUnavailable, match="a process can't be started: Too many open files"):
        await app.run(lambda _: pytest.fail("it is ready"))


@pytest.mark.asyncio
async def test_closing_ends_the_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = await ProcessRunner.start(ScriptedSource(8, 4), LIMITS)
    monkeypatch.setattr(process_life, "spawn_connected", failing(10**9, errno.EMFILE, lambda: None))
    assert runner.pid is not None
    os.kill(runner.pid, signal.SIGKILL)
    await lost(runner)
    async with asyncio.timeout(20):
        await runner.close()


@pytest.mark.asyncio
async def test_a_text_whose_process_can_not_be_started_is_refused_for_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = TextWork([TextProcess(Scripted())], TextProcess(Scripted()))
    turn = Turn(lambda: 0, "")
    job = EncodeText("abc", PromptLimit(100, 8))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(process_life, "spawn_connected", failing(1, errno.EMFILE, lambda: None))
            with pytest.raises(ProcessStarting) as caught:
                await text.run(job, turn)
            assert caught.value.retryable
            assert row_of(caught.value).reason == "ENGINE_RESTARTING"
        assert list(await text.run(job, turn)) == list(b"abc")
    finally:
        await text.close()
