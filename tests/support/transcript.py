"""Performs ``clients/transcript``, whose README says what the acts mean, with the Python client."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from clients.python import (
    Accepted,
    Delta,
    Event,
    Finished,
    Preempted,
    PriorityChanged,
    QueueUpdate,
    RequestStream,
    Resumed,
    Session,
    Started,
    VorrangClient,
)
from tests.support.cutting_proxy import CuttingProxy
from tests.support.process import ROOT
from tests.support.wire import settled

FOLDER = ROOT / "clients/transcript"
_WAIT_S_MAX = 60.0


def play() -> dict[str, Any]:
    """The settings of the server, and the acts."""
    script: dict[str, Any] = json.loads((FOLDER / "transcript.json").read_text())
    return script


def golden() -> str:
    """What every language writes down."""
    return (FOLDER / "golden.json").read_text()


def write_config(path: Path) -> Path:
    """The play's settings as a configuration file of the server."""
    lines = ['engine.runner = "inline"']
    for name, value in play()["settings"].items():
        section, _, key = name.removeprefix("VORRANG_").lower().partition("__")
        lines.append(f"{section}.{key} = {value}")
    text = "\n".join([*lines, ""])
    path.write_text(text)
    return path


class Role:
    """A request and what was seen of it."""

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream
        self._news = asyncio.Condition()
        self._num_tokens = 0
        self.reading: asyncio.Task[None] | None = None
        self.events: list[str] = []
        self.kinds: set[str] = set()
        self.text = ""

    def read(self) -> None:
        """Begin to read, once."""
        if self.reading is None:
            self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._stream:
            async with self._news:
                self._write(event)
                self._news.notify_all()

    def _write(self, event: Event) -> None:
        line = line_of(event)
        if isinstance(event, Delta):
            assert event.first_token_index == self._num_tokens, self._stream.request_id
            self._num_tokens += len(event.token_ids)
            self.text += event.text
        if not isinstance(event, QueueUpdate) and not (line == "delta" and self.events[-1] == line):
            self.events.append(line)
        self.kinds.add(line.partition(" ")[0])

    async def wait(self, holds: Callable[[], bool]) -> None:
        """Read until something holds."""
        self.read()
        async with asyncio.timeout(_WAIT_S_MAX), self._news:
            await self._news.wait_for(holds)

    async def progress(self) -> None:
        """Wait for more text."""
        before = len(self.text)
        await self.wait(lambda: len(self.text) > before)

    async def cancel(self) -> None:
        """Send a cancel."""
        await self._stream.cancel()


def line_of(event: Event) -> str:
    """An event as it is written down."""
    match event:
        case Accepted():
            return f"accepted {event.level}"
        case Started():
            return "started"
        case Delta():
            return "delta"
        case Preempted():
            return f"preempted {event.reason} {event.count}"
        case Resumed():
            return "resumed"
        case PriorityChanged():
            return f"priority_changed {event.level}"
        case Finished():
            return f"finished {event.reason} {event.usage.output_tokens}"
        case QueueUpdate():
            return "queue_update"


async def perform(address: str) -> str:
    """Perform the play on a server; returns what is written down."""
    async with (
        CuttingProxy(address) as proxy,
        VorrangClient(proxy.address) as client,
        client.session() as session,
    ):
        stage = _Stage(proxy, session)
        token = session.info.session_token
        for act in play()["acts"]:
            await stage.perform(act)
        records = {}
        for name, role in stage.roles.items():
            role.read()
            assert role.reading is not None
            async with asyncio.timeout(_WAIT_S_MAX):
                await role.reading
            records[name] = {"events": role.events, "text": role.text}
        account = {"requests": records, "resumed": session.info.session_token == token}
        return json.dumps(account, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class _Stage:
    def __init__(self, proxy: CuttingProxy, session: Session) -> None:
        self._proxy = proxy
        self._session = session
        self._prefix = f"{uuid4().hex}-"
        self.roles: dict[str, Role] = {}

    async def perform(self, act: dict[str, Any]) -> None:
        match act["do"]:
            case "start":
                await self._start(act)
            case "wait":
                role = self.roles[act["id"]]
                await role.wait(lambda: act["event"] in role.kinds)
            case "progress":
                await self.roles[act["id"]].progress()
            case "cancel":
                await self.roles[act["id"]].cancel()
            case "reprioritize":
                await self._session.reprioritize(self._prefix + act["id"], act["priority"])
            case "cut":
                self._proxy.refuse()  # so that the session can't be back before it was looked at
                await settled(lambda: not self._session.connected)
                self._proxy.refuse(False)
            case unknown:
                raise AssertionError(f"nobody knows how to do {unknown}")

    async def _start(self, act: dict[str, Any]) -> None:
        stream = await self._session.start(
            act["id"],
            request_id=self._prefix + act["id"],
            priority=act["priority"],
            max_tokens=act["max_tokens"],
            temperature=0.0,
            credit_tokens=act.get("credit_tokens"),
        )
        role = self.roles[act["id"]] = Role(stream)
        if act.get("read", True):
            role.read()
