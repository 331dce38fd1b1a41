"""``vorrangctl demo``: the same mixed workload under `priority` and under `fcfs`, side by side.

Long batch requests fill every seat of a server of the demo's own; then
interactive ones arrive. Under `priority` they overtake by preemption, and the
preempted streams still end with exactly the tokens they have under `fcfs`.
"""

import asyncio
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from clients.python.client import VorrangClient
from clients.python.demo_report import Outcome, PolicyRun, summarize, verdict
from clients.python.demo_server import DemoServer, serve_command, serving
from clients.python.demo_view import DemoView, print_summary, print_verdict
from clients.python.errors import VorrangError
from clients.python.events import Delta, Result, Started
from clients.python.progress import Progress
from clients.python.session import Session

POLICIES = ("priority", "fcfs")

_LONG_PROMPTS = (
    "Explain in detail how a bicycle stays upright while it moves.",
    "Tell a long story about a lighthouse keeper and a lost whale.",
    "Describe step by step how bread is made, from the field to the oven.",
    "Write an essay about why cities grow beside rivers.",
    "Explain how vaccines train the immune system, with examples.",
    "Describe a walk through a rain forest, with all its animals and plants.",
    "Write a guide for someone who wants to learn to play the violin.",
    "Explain how a steam engine works and why it changed the world.",
    "Tell the life of an old oak tree, season by season.",
    "Compare life in a small village with life in a large city.",
    "Explain how the moon causes the tides of the sea.",
    "Describe how a newspaper was printed a hundred years ago.",
)
_SHORT_PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many legs does a spider have?",
    "What do bees make?",
    "Which planet is closest to the sun?",
    "What is water made of?",
)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Size of the demo.

    Attributes:
        num_batch: long batch requests; at least ``num_seats``, so that every seat is taken.
        num_interactive: short interactive requests.
        num_seats: seats of the server.
        batch_tokens: longest output of a batch request.
        interactive_tokens: longest output of an interactive request.
        gap_tokens: batch output tokens from one interactive request to the next; a measure of
            work, so that a fast machine and a slow one meet the same traffic.
        num_threads: CPU threads of the server; None = its own choice.
        num_kv_blocks: KV blocks of the server; None = its own choice.
        ready_timeout_s: longest wait for the server to be ready.
        run_timeout_s: longest time the workload may take under one policy.
        decisions: folder in which the servers' decision logs are kept, ``POLICY.log``; None = none are.
    """

    num_batch: int = 10
    num_interactive: int = 4
    num_seats: int = 4
    batch_tokens: int = 128
    interactive_tokens: int = 24
    gap_tokens: int = 160
    num_threads: int | None = None
    num_kv_blocks: int | None = None
    ready_timeout_s: float = 180.0
    run_timeout_s: float = 300.0
    decisions: Path | None = None

    def __post_init__(self) -> None:
        if self.num_seats < 1 or self.num_interactive < 1 or self.num_batch < self.num_seats:
            raise ValueError("needs at least one seat, one interactive request and a batch request per seat")
        if self.batch_tokens < 1 or self.interactive_tokens < 1 or self.gap_tokens < 0:
            raise ValueError("token counts must be at least 1 and the gap at least 0")

    def server_arguments(self, policy: str) -> list[str]:
        """Arguments of the server under ``policy``."""
        arguments = ["--policy", policy, "--max-running-requests", str(self.num_seats)]
        if self.num_threads is not None:
            arguments += ["--threads", str(self.num_threads)]
        if self.num_kv_blocks is not None:
            arguments += ["--kv-blocks", str(self.num_kv_blocks)]
        if self.decisions is not None:
            arguments += ["--record-decisions", str(self.decisions / f"{policy}.log")]
        return arguments


async def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run the workload under both policies and print what came of it.

    Returns:
        Whether everything the demo promises held.

    Raises:
        ServerDied: a server did not start, or ended while it was needed.
        VorrangError: a session could not be opened.
        ValueError: the folder for the decision logs can't be made.
        TimeoutError: a run took longer than ``run_timeout_s``.

    Cancellation: stops the server it has started. SIGTERM is turned into a cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    runs = []
    if options.decisions is not None:
        try:
            options.decisions.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{error.filename} can't be made: {error.strerror}") from None
    with tempfile.TemporaryDirectory(prefix="vorrang-demo-") as folder:
        for policy in POLICIES:
            console.print(Text(f"starting a server with policy {policy} ..."), soft_wrap=True)
            command = serve_command(*options.server_arguments(policy))
            log = Path(folder) / f"{policy}.log"
            async with serving(command, log, ready_timeout_s=options.ready_timeout_s) as server:
                runs.append(await _run_policy(policy, server, options, console))
    priority, fcfs = runs
    classes = ("interactive", "batch")
    print_summary(console, [summarize(run, class_name) for run in runs for class_name in classes])
    checks = verdict(priority, fcfs)
    print_verdict(console, checks)
    if options.decisions is not None:
        for policy in POLICIES:
            console.print(f"decisions kept in {options.decisions / policy}.log", soft_wrap=True)
    return all(check.passed for check in checks)


async def _run_policy(policy: str, server: DemoServer, options: DemoOptions, console: Console) -> PolicyRun:
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    def elapsed_s() -> float:
        return loop.time() - began_s

    view = DemoView(console, f"policy {policy}, {options.num_seats} seats", elapsed_s)
    try:
        async with VorrangClient(server.target) as client, asyncio.timeout(options.run_timeout_s):
            with view:
                outcomes = await play(client, options, view, elapsed_s)
    except VorrangError:
        await server.check_alive()
        raise
    if any(outcome.error for outcome in outcomes):
        await server.check_alive()
    return PolicyRun(policy, tuple(outcomes))


async def play(
    client: VorrangClient, options: DemoOptions, view: DemoView, elapsed_s: Callable[[], float]
) -> list[Outcome]:
    """Send the workload and follow every stream to its end.

    The batch requests go first; once every seat has been taken, the interactive
    ones follow, each ``gap_tokens`` of batch output later. Requests that fail become outcomes with an error.
    """
    pace = _Pace(options.num_seats, options.num_batch)
    players = []
    async with (
        client.session(default_priority="batch", client_name="vorrang-demo") as batch,
        client.session(default_priority="interactive", client_name="vorrang-demo") as interactive,
        asyncio.TaskGroup() as group,
    ):
        for index in range(options.num_batch):
            prompt = _LONG_PROMPTS[index % len(_LONG_PROMPTS)]
            player = _Player(f"batch-{index + 1}", "batch", view, elapsed_s)
            # Awaited one by one, so that they arrive in the same order in every run.
            await player.send(batch, prompt, options.batch_tokens)
            players.append(group.create_task(player.follow(pace)))
        await pace.wait_for_seats()
        for index in range(options.num_interactive):
            await pace.wait_for_tokens((index + 1) * options.gap_tokens)
            prompt = _SHORT_PROMPTS[index % len(_SHORT_PROMPTS)]
            player = _Player(f"interactive-{index + 1}", "interactive", view, elapsed_s)
            await player.send(interactive, prompt, options.interactive_tokens)
            players.append(group.create_task(player.follow(pace)))
    return [task.result() for task in players]


class _Pace:
    """How far the batch requests are: seats taken so far, output tokens so far, requests that have ended."""

    def __init__(self, num_seats: int, num_batch: int) -> None:
        self._num_seats = num_seats
        self._num_batch_left = num_batch
        self._num_tokens = 0
        self._moved = asyncio.Condition()

    async def wait_for_seats(self) -> None:
        """Return when every seat has been taken once, or when that will not happen any more."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._num_seats <= 0 or self._num_batch_left <= 0)

    async def wait_for_tokens(self, num_tokens: int) -> None:
        """Return when the batch has put out so many tokens, or has ended with fewer."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._num_tokens >= num_tokens or self._num_batch_left <= 0)

    async def advance(self, *, seats: int = 0, tokens: int = 0, ends: int = 0) -> None:
        async with self._moved:
            self._num_seats -= seats
            self._num_tokens += tokens
            self._num_batch_left -= ends
            self._moved.notify_all()


class _Player:
    """Sends one request and follows it to its end."""

    def __init__(self, name: str, class_name: str, view: DemoView, elapsed_s: Callable[[], float]) -> None:
        self._name = name
        self._class_name = class_name
        self._view = view
        self._elapsed_s = elapsed_s
        self._progress = Progress()
        self._error: VorrangError | None = None

    async def send(self, session: Session, prompt: str, max_tokens: int) -> None:
        self._view.add(self._name, self._class_name, self._progress)
        try:
            self._stream = await session.start(
                messages=[{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                temperature=0.0,
                label=f"demo {self._name}",
            )
        except VorrangError as error:
            self._error = error

    async def follow(self, pace: _Pace) -> Outcome:
        try:
            result = await self._read(pace)
        except VorrangError as error:
            self._progress.fail(error)
            self._view.changed(self._name)
            return Outcome(self._name, self._class_name, error=str(error), ended_at_s=self._elapsed_s())
        finally:
            if self._class_name == "batch":
                await pace.advance(ends=1)
        return Outcome(
            name=self._name,
            class_name=self._class_name,
            token_ids=result.token_ids,
            text=result.text,
            finish_reason=result.finish_reason,
            ttft_s=result.ttft_s,
            tpot_s=result.tpot_s,
            ended_at_s=self._elapsed_s(),
            preemptions=result.usage.preemptions,
            recomputed_tokens=result.usage.recomputed_tokens,
        )

    async def _read(self, pace: _Pace) -> Result:
        if self._error is not None:
            raise self._error
        async for event in self._stream:
            if self._progress.apply(event):
                self._view.changed(self._name)
            if self._class_name == "batch":
                is_seated = isinstance(event, Started)
                num_tokens = len(event.token_ids) if isinstance(event, Delta) else 0
                await pace.advance(seats=int(is_seated), tokens=num_tokens)
        return await self._stream.result()
