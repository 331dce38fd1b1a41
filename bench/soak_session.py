"""What callers do in a soak: sessions that start, steer, drop and take up requests at random."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, Protocol

import grpc
import grpc.aio

from bench.books import TERMINAL, Books, Entry
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

SESSION = "/vorrang.v1.GenerationService/Session"
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
#: Seconds for the requests of a session to end once it starts no more.
END_S_MAX = 150.0
#: What requests ask for.
KINDS = (
    *("greedy", "greedy", "seeded", "long", "several", "logprobs", "stop", "adapter", "timed", "refused"),
    *("regex", "schema", "choice"),
)
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


class Latencies(Protocol):
    """Where latencies of urgent requests are put, in seconds."""

    ttfts_s: list[float]
    gaps_s: list[float]


def draw_spec(dice: random.Random, adapter: str) -> tuple[str, types.GenerationSpec]:
    """A request, and the question it asks: its name is that of everything that decides its tokens."""
    kind = dice.choice(KINDS)
    number = dice.randrange(12)
    length = 200 + number if kind == "long" else 5 + number
    sampling: dict[str, Any] = {"max_tokens": dice.choice((4, 16, 40, 90)), "temperature": 0.0}
    spec = types.GenerationSpec(label="soak")
    spec.prompt.tokens.ids.extend(33 + (number * 7 + at * at) % 90 for at in range(length))
    match kind:
        case "seeded":
            sampling |= {"temperature": 1.0, "top_p": 0.9, "seed": number}
        case "several":
            sampling |= {"temperature": 1.0, "seed": number}
            spec.num_outputs = 2 + number % 2
        case "regex":
            spec.grammar.regex = "[a-z]{2,30}(, [a-z]{2,30}){1,3}"
        case "schema":
            spec.grammar.json_schema = _SCHEMA
        case "choice":
            spec.grammar.choice.options.extend(["yes", "no", "perhaps"])
        case "logprobs":
            sampling |= {"logprobs": 3}
        case "stop":
            sampling |= {"stop_strings": ["e", "the"]}
        case "adapter":
            spec.adapter = adapter
        case "timed":
            spec.total_timeout.FromMilliseconds(dice.choice((50, 500, 3000)))
        case "refused":
            sampling |= {"temperature": -1.0}
    spec.sampling.CopyFrom(types.SamplingParams(**sampling))
    spec.priority.level = dice.choice((-10, -10, 0, 0, 5, 10, 10, 20))
    return f"{kind} {number}", spec


class SoakSession:
    """One caller with a connection of its own."""

    def __init__(
        self,
        name: str,
        address: str,
        books: Books,
        actions: Counter[str],
        dice: random.Random,
        adapter: str,
        num_alive_max: int,
    ) -> None:
        self._name, self._address, self._books, self._dice = name, address, books, dice
        self._actions, self._adapter, self._num_alive_max = actions, adapter, num_alive_max
        self._starts: dict[str, gen.SessionRequest] = {}
        self._paused: set[str] = set()
        self._call: Any = None
        self._token = ""
        self._num_started = 0
        self._none_alive = asyncio.Event()
        self._writing = asyncio.Lock()

    async def play(self, seconds: float) -> None:
        """Do what callers do for some time, then let everything end."""
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            await self._open(channel)
            reading = asyncio.create_task(self._read())
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                await asyncio.sleep(self._dice.expovariate(8.0))
                if self._dice.random() < 0.01:
                    self._actions["dropped"] += 1
                    self._call.cancel()
                    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                        await reading
                    await self._open(channel)
                    reading = asyncio.create_task(self._read())
                else:
                    await self._act()
            for request_id in sorted(self._paused):
                await self._send(unpause=gen.UnpauseCommand(request_id=request_id))
            self._none_alive.clear()
            if self._starts:
                await self._ended()
            await self._call.done_writing()
            with suppress(asyncio.CancelledError, TimeoutError):
                await asyncio.wait_for(reading, 10)
            self._call.cancel()

    async def _ended(self) -> None:
        """Wait until nothing is alive; what lasts for ever is wrong."""
        try:
            await asyncio.wait_for(self._none_alive.wait(), END_S_MAX)
        except TimeoutError:
            for request_id in self._starts:
                self._books.wrong(request_id, f"did not end within {END_S_MAX:g} s")

    async def _open(self, channel: grpc.aio.Channel) -> None:
        """Open a stream; one that was lost is taken up again, with all its requests."""
        self._call = channel.stream_stream(SESSION, None, gen.SessionResponse.FromString)()
        await self._send(open=gen.OpenCommand(client_name="soak", resume_session_token=self._token))
        while True:
            frame = await self._call.read()
            if frame is grpc.aio.EOF:
                raise RuntimeError(f"{self._name}: the session was not opened: {await self._call.details()}")
            if frame.HasField("opened"):
                break
            if frame.HasField("command_rejected"):  # a session of which nothing is alive may be forgotten
                for request_id in [r for r in self._starts if self._books.alive[r].last_sequence]:
                    self._books.wrong(
                        request_id, f"its session is gone: {frame.command_rejected.status.message}"
                    )
                await self._send(open=gen.OpenCommand(client_name="soak"))
                continue
            self._got(frame)
        self._token = frame.opened.session_token
        for request_id, start in list(self._starts.items()):
            entry = self._books.alive[request_id]
            if entry.last_sequence == 0:
                await self._write(start)
            else:
                command = gen.ResumeCommand(request_id=request_id, after_sequence=entry.last_sequence)
                await self._send(resume=command)
            # What was said of a pause shortly before the loss may not have arrived.
            command = gen.PauseCommand if request_id in self._paused else gen.UnpauseCommand
            name = "pause" if request_id in self._paused else "unpause"
            await self._send(**{name: command(request_id=request_id)})

    async def _act(self) -> None:
        dice, alive = self._dice, sorted(self._starts)
        if len(alive) < self._num_alive_max and dice.random() < 0.6:
            return await self._start()
        if not alive:
            return None
        request_id = dice.choice(alive)
        action = dice.choice(
            ("cancel", "reprioritize", "reprioritize", "pause", "pause", "nothing", "nothing")
        )
        self._actions[action] += 1
        match action:
            case "cancel":
                await self._send(cancel=gen.CancelCommand(request_id=request_id))
            case "reprioritize":
                priority = types.Priority(level=dice.choice((-10, 0, 10, 30)))
                await self._send(
                    reprioritize=gen.ReprioritizeCommand(request_id=request_id, priority=priority)
                )
            case "pause" if request_id in self._paused:
                self._paused.discard(request_id)
                await self._send(unpause=gen.UnpauseCommand(request_id=request_id))
            case "pause":
                self._paused.add(request_id)
                await self._send(pause=gen.PauseCommand(request_id=request_id))
        return None

    async def _start(self) -> None:
        self._num_started += 1
        request_id = f"soak-{self._name}-{self._num_started}"
        question, spec = draw_spec(self._dice, self._adapter)
        frame = gen.SessionRequest(start=gen.StartCommand(request_id=request_id, spec=spec))
        self._starts[request_id] = frame
        self._books.sent(request_id, question, time.monotonic())
        await self._write(frame)

    async def _send(self, **command: Any) -> None:
        await self._write(gen.SessionRequest(**command))

    async def _write(self, frame: gen.SessionRequest) -> None:
        async with self._writing:  # two writes that overlap fail
            await self._call.write(frame.SerializeToString())

    async def _read(self) -> None:
        while True:
            frame = await self._call.read()
            if frame is grpc.aio.EOF:
                return
            self._got(frame)
            if frame.delta.token_ids:
                command = gen.CreditCommand(
                    request_id=frame.request_id,
                    tokens=len(frame.delta.token_ids),
                    acknowledged_sequence=frame.sequence,
                )
                with suppress(grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError):
                    await self._send(credit=command)

    def _got(self, frame: gen.SessionResponse) -> None:
        entry = self._books.got(frame, time.monotonic())
        if frame.WhichOneof("event") in TERMINAL:
            self._starts.pop(frame.request_id, None)
            self._paused.discard(frame.request_id)
            if not self._starts:
                self._none_alive.set()
        if entry is not None:
            self.seen(frame, entry)

    def seen(self, frame: gen.SessionResponse, entry: Entry) -> None:
        """An event was booked."""


class Urgent(SoakSession):
    """One that asks something urgent every second, and measures."""

    def __init__(self, name: str, address: str, books: Books, latencies: Callable[[], Latencies]) -> None:
        super().__init__(name, address, books, Counter(), random.Random(name), "", 1)
        self._latencies = latencies

    async def play(self, seconds: float) -> None:
        """Ask once a second."""
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
            await self._open(channel)
            reading = asyncio.create_task(self._read())
            end_s = time.monotonic() + seconds
            while (began_s := time.monotonic()) < end_s:
                self._none_alive.clear()
                await self._start()
                await self._ended()
                await asyncio.sleep(max(0.0, began_s + 1.0 - time.monotonic()))
            await self._call.done_writing()
            await reading
            self._call.cancel()

    async def _start(self) -> None:
        self._num_started += 1
        request_id = f"soak-{self._name}-{self._num_started}"
        spec = types.GenerationSpec(label="urgent", priority=types.Priority(level=-50))
        spec.prompt.tokens.ids.extend(range(40, 60))
        spec.sampling.CopyFrom(types.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        frame = gen.SessionRequest(start=gen.StartCommand(request_id=request_id, spec=spec))
        self._starts[request_id] = frame
        self._books.sent(request_id, "urgent", time.monotonic())
        await self._write(frame)

    def seen(self, frame: gen.SessionResponse, entry: Entry) -> None:
        """An event was booked."""
        if entry.end and entry.token_times_s:
            times_s, latencies = entry.token_times_s, self._latencies()
            latencies.ttfts_s.append(times_s[0] - entry.sent_s)
            latencies.gaps_s += [b - a for a, b in pairwise(times_s)]
