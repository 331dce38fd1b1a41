"""The runner and the tokenizer load side by side; whichever fails ends the other."""

import asyncio

import pytest

from engine.models.errors import InvalidCheckpoint
from server import load
from server.settings import Settings

pytestmark = pytest.mark.asyncio


class Runner:
    closed = False

    async def close(self) -> None:
        self.closed = True


class Starting:
    """Stands for ``ProcessRunner.start``: never done, or done at once."""

    def __init__(self, runner: Runner | None) -> None:
        self.runner = runner
        self.cancelled = False
        self.begun = asyncio.Event()

    async def __call__(self, *_: object) -> Runner:
        self.begun.set()
        if self.runner is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled = True
        assert self.runner is not None
        return self.runner


def damaged(_: Settings) -> None:
    raise InvalidCheckpoint("tokenizer.json is damaged")


async def test_a_damaged_tokenizer_ends_the_start_of_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Starting(None)
    monkeypatch.setattr(load.ProcessRunner, "start", starting)
    monkeypatch.setattr(load, "_tokenizer", damaged)

    with pytest.raises(load.ModelUnavailable, match=r"tokenizer\.json is damaged"):
        await load.load(Settings())
    assert starting.cancelled


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_runner_nobody_will_use_is_closed(monkeypatch: pytest.MonkeyPatch, cancelled: bool) -> None:
    starting, release = Starting(Runner()), asyncio.Event()
    loop = asyncio.get_running_loop()

    def tokenizer(_: Settings) -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        damaged(_)

    monkeypatch.setattr(load.ProcessRunner, "start", starting)
    monkeypatch.setattr(load, "_tokenizer", tokenizer)
    loading = asyncio.create_task(load.load(Settings()))
    await starting.begun.wait()
    await asyncio.sleep(0)
    if cancelled:
        loading.cancel()
    release.set()

    with pytest.raises(asyncio.CancelledError if cancelled else load.ModelUnavailable):
        await loading
    assert starting.runner is not None
    assert starting.runner.closed
