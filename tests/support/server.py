"""A server in this process, with a scripted model whose steps a test can hold."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from engine.runner.base import Runner
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.scheduler.plan import Plan, StepResult
from engine.text import Tokenizer
from server.app import App, Loaded
from server.settings import load


class HeldRunner(ScriptedRunner):
    """A scripted runner that waits before every step while it is held."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._free = asyncio.Event()
        self._free.set()
        self.held = asyncio.Event()

    def hold(self) -> None:
        """Let no step pass until ``release``."""
        self.held.clear()
        self._free.clear()

    def release(self) -> None:
        """Let all steps pass."""
        self._free.set()

    async def execute(self, plan: Plan) -> StepResult:
        """Compute a plan once it may."""
        if not self._free.is_set():
            self.held.set()
            await self._free.wait()
        return await super().execute(plan)


@contextlib.asynccontextmanager
async def running_server(
    settings: Mapping[str, object] | None = None,
    runner: Runner | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    check_integrity: bool = True,
) -> AsyncIterator[App]:
    """A server that is ready; it is stopped at once on the way out, and must leave nothing behind."""
    values = {"server.listen": "127.0.0.1:0", "model.path": "scripted", "server.grace_s": 0.0}
    loaded = load(None, {**values, **(settings or {})}).settings
    model = Loaded(
        runner
        or ScriptedRunner(
            loaded.kv.num_blocks or 64,
            16,
            loaded.scheduler.max_context_tokens,
            adapters=tuple(loaded.model.adapters),
        ),
        tokenizer or ScriptedTokenizer(),
    )
    app = App(loaded, lambda: model, check_integrity=check_integrity)
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(app.run(lambda _: ready.set()))
        await ready.wait()
        try:
            yield app
        finally:
            app.stop()
            app.stop()
            await running
    assert app.statistics().num_requests == 0
    assert app.statistics().num_sessions == 0
