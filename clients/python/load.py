"""The load generator: sends a workload when it is due, whatever becomes of what was sent before.

Open loop: the intended start of a request is its arrival time in the workload, and
every latency is measured from there, so that a server, or a generator, that stalls
can't make its own stall invisible (coordinated omission: Gil Tene, "How NOT to
Measure Latency"). The generator's own lateness is measured, too. Times are
``time.monotonic``: an event loop's own clock may be coarse, or stand still
while the loop is late, which is what must not be hidden.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from uuid import uuid4

from clients.python.admin_client import ControlClient
from clients.python.errors import ConnectionLost, SessionClosed, VorrangError
from clients.python.events import Accepted, Delta, Finished, Preempted
from clients.python.load_lanes import Lane, LaneClient
from clients.python.load_sampling import sample_load, watch_lag
from clients.python.load_state import LoadState
from clients.python.session import Session
from clients.python.stream import EventStream
from workloads.arrivals import Arrival, Workload
from workloads.records import RequestRecord, Run

#: Errors of the generator's own making.
NOT_SENT, UNFINISHED, UNANSWERED = "NOT_SENT", "UNFINISHED", "CONNECTION_LOST"
_LEAD_S = 0.1
_AWAKE_S = 0.0015


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a workload is sent.

    Attributes:
        num_connections: TCP connections for each tenant.
        num_sessions: sessions on each of them; a request goes to the one with the fewest.
        max_in_flight: requests alive at most; what is due beyond counts as an error, ``NOT_SENT``.
        drain_s: how long requests are waited for after the last one was due; then they are
            cancelled and count as errors, ``UNFINISHED``.
        tokens: bearer tokens by tenant of the workload; others use ``VORRANG_TOKEN``.
        model: that is asked for; empty = the one that is served.
        adapters: LoRA adapters that requests name in turn; an empty name = none.
        sample_s: seconds between two looks at the server's load; 0 = none.
        control: address of ControlService; empty = the server's.

    Raises:
        ValueError: a value is out of range; names field, rule and value.
    """

    num_connections: int = 1
    num_sessions: int = 1
    max_in_flight: int = 10_000
    drain_s: float = 60.0
    tokens: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    adapters: Sequence[str] = ()
    sample_s: float = 0.0
    control: str = ""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_connections", 1, 256),
            ("num_sessions", 1, 256),
            ("max_in_flight", 1, 1_000_000),
            ("drain_s", 0.0, 86_400.0),
            ("sample_s", 0.0, 3600.0),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}: must be between {least:g} and {most:g}, got {value!r}")

    def adapter_of(self, index: int) -> str:
        """The adapter that the request of that index in the workload names."""
        return self.adapters[index % len(self.adapters)] if self.adapters else ""


async def run_load(
    target: str,
    workload: Workload,
    options: LoadOptions | None = None,
    *,
    state: LoadState | None = None,
    stop: asyncio.Event | None = None,
    run: Run | None = None,
) -> Run:
    """Send a workload and measure what becomes of it.

    Args:
        target: address of the server; credentials come from the environment.
        workload: what to send; prompts are synthesised, output lengths are forced.
        options: how.
        state: is kept up to date meanwhile, for whoever watches.
        stop: once set, nothing more is sent, what is alive is cancelled and counts as
            ``UNFINISHED``, and what was measured is returned.
        run: taken as it is for name, seed and the like; its records are made here.

    Returns:
        The run, a record for each request that was due, in order of arrival. Times are seconds from its
        start, which was ``figures["started_s"]`` on this machine's monotonic clock
        (``time.monotonic``). ``figures`` also holds the generator's own lateness; see
        ``load_report.summarise``.

    Raises:
        ConnectionLost: the server can't be reached at the start; a loss later on is an error of its requests.
        VorrangError: the server refuses sessions.

    Cancellation: cancels every request and returns nothing; to keep what was measured, set ``stop``.
    """
    options = options or LoadOptions()
    state = state or LoadState()
    run = run or Run("load")
    run.workload = run.workload or workload.name
    generator = _Generator(target, workload, options, state, stop or asyncio.Event(), run)
    await generator.run()
    return run


class _Generator:
    """One run."""

    def __init__(
        self,
        target: str,
        workload: Workload,
        options: LoadOptions,
        state: LoadState,
        stop: asyncio.Event,
        run: Run,
    ) -> None:
        self._target = target
        self._workload = workload
        self._options = options
        self._state = state
        self._stop = stop
        self._run = run
        self._lanes: dict[str, list[Lane]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._vocabulary_size = 2
        self._started_s = 0.0
        self._run_id = uuid4().hex[:4]  # ids must be new in the tenant, runs before and beside this included

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            helpers = await stack.enter_async_context(_Helpers())
            await self._connect(stack)
            self._started_s = self._run.figures["started_s"] = time.monotonic() + _LEAD_S
            self._state.begin(self._workload.requests, self._started_s)
            lags = helpers.start(watch_lag(self._state.lags_s))
            if self._options.sample_s:
                control = ControlClient.from_environment(self._options.control or self._target)
                await stack.enter_async_context(control)
                helpers.start(
                    sample_load(control, self._options.sample_s, self._started_s, self._run.samples)
                )
            try:
                await self._send_all()
                await self._drain()
            finally:
                await self._cancel_rest()
                lags.cancel()
                self._run.end_s = time.monotonic() - self._started_s
        self._run.records = self._state.records
        self._run.figures.update(self._state.own_lateness())

    async def _connect(self, stack: AsyncExitStack) -> None:
        """Open all sessions before the first request is due."""
        tenants = {arrival.tenant for arrival in self._workload.requests} & self._options.tokens.keys()
        for tenant in ("", *sorted(tenants)):
            lanes = self._lanes[tenant] = []
            for _ in range(self._options.num_connections):
                client = LaneClient.from_environment(self._target)
                if tenant:
                    client = LaneClient.of_tenant(self._target, self._options.tokens[tenant])
                await stack.enter_async_context(client)
                if not lanes and not tenant:
                    model = await client.get_model()
                    self._vocabulary_size = model.vocabulary_size
                    self._run.server = self._run.server or f"{model.name} at {self._target}"
                sessions = range(self._options.num_sessions)
                lanes += [await stack.enter_async_context(Lane(client)) for _ in sessions]
        try:
            self._run.versions.setdefault("vorrang", version("vorrang"))
        except PackageNotFoundError:
            self._run.versions.setdefault("vorrang", "not installed")

    async def _send_all(self) -> None:
        """Send every request when it is due, or as soon after as this process can."""
        loop = asyncio.get_running_loop()
        for arrival in self._workload.requests:
            due_s = self._started_s + arrival.arrival_s
            await _wait_until(due_s, self._stop)
            if self._stop.is_set():
                return
            record = self._state.due(arrival)
            if self._state.num_in_flight >= self._options.max_in_flight:
                rule = f"{self._options.max_in_flight} requests were alive"
                self._state.failed(record, NOT_SENT, rule, time.monotonic() - self._started_s)
                continue
            self._state.num_in_flight += 1
            task = loop.create_task(self._follow(arrival, record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow(self, arrival: Arrival, record: RequestRecord) -> None:
        """Send one request and book what becomes of it."""
        lanes = self._lanes.get(arrival.tenant) or self._lanes[""]
        lane = min(lanes, key=lambda lane: lane.num_alive)
        lane.num_alive += 1
        session: Session | None = None
        try:
            session = lane.session
            stream = await session.start(
                request_id=f"load-{self._run_id}-{arrival.index}",
                token_ids=arrival.prompt_token_ids(self._vocabulary_size),
                priority=arrival.level,
                max_tokens=arrival.num_output_tokens,
                temperature=0.0,
                ignore_eos=True,
                label=arrival.label or "vorrangctl load",
                model=self._options.model,
                adapter=self._options.adapter_of(arrival.index),
            )
            record.sent_s = time.monotonic() - self._started_s
            self._state.num_sent += 1
            await self._read(stream, record)
        except VorrangError as error:
            reason = error.reason or (UNANSWERED if isinstance(error, ConnectionLost) else error.code.name)
            self._state.failed(record, reason, error.message, time.monotonic() - self._started_s)
            if session is not None and isinstance(error, ConnectionLost | SessionClosed):
                lane.lost(session, error)
        except asyncio.CancelledError:
            now_s = time.monotonic() - self._started_s
            self._state.failed(record, UNFINISHED, "it was given up by the generator", now_s)
            raise
        finally:
            lane.num_alive -= 1
            self._state.num_in_flight -= 1

    async def _read(self, stream: EventStream, record: RequestRecord) -> None:
        async for event in stream:
            now_s = time.monotonic() - self._started_s
            match event:
                case Delta() if event.token_ids:
                    self._state.got(record, len(event.token_ids), now_s)
                case Accepted():
                    record.accepted_s = now_s
                case Preempted():
                    record.num_preemptions = event.count
                case Finished():
                    self._state.finished(record, event, now_s)

    async def _drain(self) -> None:
        """Wait for what was sent, for as long as that is meant to take."""
        if self._tasks and not self._stop.is_set():
            stopped = asyncio.ensure_future(self._stop.wait())
            all_done = asyncio.ensure_future(asyncio.wait(list(self._tasks)))
            try:
                await asyncio.wait(
                    {stopped, all_done},
                    timeout=self._options.drain_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                stopped.cancel()
                all_done.cancel()

    async def _cancel_rest(self) -> None:
        """Give up what is alive; leaving its session cancels it on the server."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lanes = [lane for lanes in self._lanes.values() for lane in lanes]
        await asyncio.gather(*(lane.leave() for lane in lanes))


class _Helpers:
    """Tasks that live as long as the run, and whose failure is not its failure."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "_Helpers":
        return self

    def start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        return task

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _wait_until(due_s: float, stop: asyncio.Event) -> None:
    """Sleep until then, but not beyond ``stop``.

    The event loop's timers are up to a millisecond late; the last one of a longer wait is
    therefore spent awake, which costs at most a third of a core.
    """
    awake_s = _AWAKE_S if due_s - time.monotonic() > 3 * _AWAKE_S else 0.0
    while (left_s := due_s - awake_s - time.monotonic()) > 0 and not stop.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await stop.wait()
    while time.monotonic() < due_s and not stop.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0)


def tenants_without_token(workload: Workload, tokens: Sequence[str] | Mapping[str, str]) -> list[str]:
    """Tenants of a workload that the server will not be able to tell apart."""
    return sorted({arrival.tenant for arrival in workload.requests} - set(tokens) - {""})
