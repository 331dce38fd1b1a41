"""A client that does anything a client may do, and much that it may not, and checks all it is told.

What a player will do is drawn from its own seed; what the server makes of it depends on
time as well, so the oracle judges what arrives: sequences, deltas, ends, credit.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from engine.runner.scripted import ScriptedTokenizer, expected_output
from tests.support.wire import TERMINAL, WireSession, reason_in, spec
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

#: How a failed request may have failed.
FAILURES = {"SLOW_CONSUMER", "DISPLACED", "QUEUE_FULL", "SESSION_LIMIT"}
GARBAGE = (b"\xff\xff\xff", b"\x0a", b"", b"\xfa\x06\x00", b"\x12\x00", b"\x0a\x02\x08\x01")
#: Fewer than the server takes before it ends a stream.
MAX_BAD_FRAMES = 10
ENDINGS = ("half_close", "read_out", "vanish", "leave_paused")


class Track:
    """What a player knows of one of its requests."""

    def __init__(self, message: types.GenerationSpec, window_tokens: int) -> None:
        self.message = message
        self.initial_tokens = message.credit_tokens if message.HasField("credit_tokens") else window_tokens
        self.allowed_tokens = self.initial_tokens
        self.bound_tokens: float = self.initial_tokens
        self.frames: dict[int, gen.SessionResponse] = {}
        self.next = 1
        self.over_here = False
        self.acknowledged = 0
        self.started_again = False

    @property
    def ended(self) -> bool:
        return any(frame.WhichOneof("event") in TERMINAL for frame in self.frames.values())

    @property
    def received(self) -> int:
        """Events so far without a gap, which the protocol promises there is not."""
        return max(self.frames, default=0)

    def tokens(self, up_to: int | None = None) -> list[int]:
        last = self.received if up_to is None else up_to
        return [i for n in range(1, last + 1) for i in self.frames[n].delta.token_ids]

    def grant(self, num_tokens: int) -> None:
        self.allowed_tokens += num_tokens
        self.bound_tokens = max(self.bound_tokens, self.allowed_tokens)

    def sent_again_after(self, sequence: int) -> None:
        """It was taken up: events after a sequence come again, and credit counts from there."""
        self.next = sequence + 1
        self.over_here = sequence > 0 and self.frames[sequence].WhichOneof("event") in TERMINAL
        self.allowed_tokens = len(self.tokens(sequence)) + self.initial_tokens
        self.bound_tokens = max(self.bound_tokens, self.allowed_tokens)

    def take(self, frame: gen.SessionResponse) -> None:
        """Judge an event."""
        if self.over_here and self.started_again and frame.sequence == 1:
            self.sent_again_after(0)  # a start of what had just ended
        assert not self.over_here, f"{frame.WhichOneof('event')} after the terminal event"
        assert frame.sequence == self.next, f"{frame.sequence} instead of {self.next}"
        self.next += 1
        known = self.frames.setdefault(frame.sequence, frame)
        assert known == frame, "sent again as something else"
        self.over_here = frame.WhichOneof("event") in TERMINAL
        assert len(self.tokens()) <= self.bound_tokens, "more than was granted"

    def check(self) -> str:
        """Judge a request that has ended; how it did."""
        kinds = [self.frames[n].WhichOneof("event") for n in range(1, self.received + 1)]
        assert [kind in TERMINAL for kind in kinds] == [False] * (len(kinds) - 1) + [True], kinds
        tokens = self.tokens()
        sampling = self.message.sampling
        seed = sampling.seed if sampling.temperature else 0
        ids = list(self.message.prompt.tokens.ids)
        assert tokens == expected_output(ids, len(tokens), seed)
        text = "".join(frame.delta.text for frame in self.frames.values())
        assert text == ScriptedTokenizer().decode(tokens)
        end = self.frames[self.received]
        if end.HasField("failed"):
            reason = reason_in(end.failed.status)
            assert reason in FAILURES, reason
            return reason
        assert end.finished.usage.output_tokens == len(tokens)
        if end.finished.reason == types.FINISH_REASON_LENGTH:
            assert len(tokens) == sampling.max_tokens
        return str(types.FinishReason.Name(end.finished.reason))


class Player:
    """Plays one session to its end.

    Args:
        address: of the server.
        seed: says what it does.

    Attributes:
        done: what it did and saw, counted.
    """

    def __init__(self, address: str, seed: str) -> None:
        self._address = address
        self._dice = random.Random(seed)
        self._tracks: dict[str, Track] = {}
        self._scope: str | None = None
        self._token = ""
        self._window = 0
        self._num_bad_frames = 0
        self._num_started = 0
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._news = asyncio.Event()
        self._reader: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self.done: Counter[str] = Counter()

    async def play(self) -> None:
        """Play; what it was told must be right."""
        try:
            await self._open()
            for _ in range(self._dice.randint(1, 4)):
                await self._start()
            for _ in range(self._dice.randrange(12)):
                action = self._dice.choice(self._actions())
                self.done[action.__name__.strip("_")] += 1
                await action()
                self._raise()
            await self._end(self._dice.choice(ENDINGS))
        finally:
            await self._close()
        self._raise()

    def _actions(self) -> list[Callable[[], Any]]:
        return [
            self._start, self._cancel, self._reprioritize, self._pause, self._unpause, self._credit,
            self._credit, self._acknowledge, self._send_garbage, self._command_nobody, self._start_again,
            self._start_otherwise, self._stall, self._read, self._read, self._read, self._lose,
            self._take_over,
        ]  # fmt: skip

    # Streams.

    async def _open(self, token: str = "") -> bool:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(self._address, options=options)
        self._session = WireSession(self._channel, scope=self._scope)
        self._scope, self._num_bad_frames = self._session.scope, 0
        default = self._dice.choice([None, None, 5, 1000])
        await self._session.send(
            open=gen.OpenCommand(resume_session_token=token, default_credit_tokens=default)
        )
        answer = await self._session.next()
        if answer.HasField("command_rejected"):
            assert reason_in(answer.command_rejected.status) == "RESUME_OUT_OF_RANGE"
            return False
        self._token, self._window = answer.opened.session_token, answer.opened.default_credit_tokens
        self._reader = asyncio.ensure_future(self._read_frames(self._session))
        return True

    async def _close(self) -> None:
        self._session.call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        await self._channel.close(None)

    async def _read_frames(self, session: WireSession) -> None:
        try:
            while True:
                await self._may_read.wait()
                frame = await session.next()
                if frame.request_id and frame.sequence:
                    self._tracks[frame.request_id].take(frame)
                elif frame.HasField("command_rejected"):
                    self.done[f"rejected: {reason_in(frame.command_rejected.status)}"] += 1
                self._news.set()
        except (EOFError, asyncio.CancelledError, grpc.aio.AioRpcError, grpc.aio.UsageError) as ended:
            self.done[f"stream ended: {type(ended).__name__}"] += 1
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._news.set()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    # What it does.

    async def _start(self) -> None:
        dice = self._dice
        message = spec(
            [dice.randrange(256) for _ in range(dice.randint(1, 60))],
            level=dice.choice((None, -10, 0, 5, 10)),
            temperature=dice.choice((0.0, 1.0)),
            seed=dice.randrange(1000),
            max_tokens=dice.randint(1, 60),
        )
        if dice.random() < 0.5:
            message.credit_tokens = dice.choice((0, 1, 3, 10, 100))
        if dice.random() < 0.15:
            message.total_timeout.FromMilliseconds(dice.randint(1, 40))
        if dice.random() < 0.1:
            message.queue_timeout.FromMilliseconds(dice.randint(1, 40))
        self._num_started += 1
        request_id = f"q{self._num_started}"
        self._tracks[request_id] = Track(message, self._window)
        await self._session.start(request_id, message)

    def _some(self) -> str:
        return self._dice.choice(list(self._tracks))

    async def _cancel(self) -> None:
        await self._session.cancel(self._some())

    async def _reprioritize(self) -> None:
        request_id = self._some()
        for _ in range(self._dice.choice((1, 1, 20))):
            await self._session.reprioritize(request_id, self._dice.randint(-105, 105))

    async def _pause(self) -> None:
        await self._session.pause(self._some())

    async def _unpause(self) -> None:
        await self._session.unpause(self._some())

    async def _credit(self) -> None:
        request_id, num_tokens = self._some(), self._dice.choice((1, 5, 50))
        self._tracks[request_id].grant(num_tokens)
        await self._session.credit(request_id, num_tokens)

    async def _acknowledge(self) -> None:
        request_id = self._some()
        track = self._tracks[request_id]
        if track.received and self._dice.random() < 0.8:
            track.acknowledged = max(track.acknowledged, self._dice.randint(1, track.received))
            await self._session.credit(request_id, 0, track.acknowledged)
        else:
            await self._session.credit(request_id, 0, 2**63)  # nobody can have got that far

    async def _send_garbage(self) -> None:
        if self._num_bad_frames < MAX_BAD_FRAMES:
            self._num_bad_frames += 1
            await self._session.send_raw(self._dice.choice(GARBAGE))

    async def _command_nobody(self) -> None:
        command = self._dice.choice(("cancel", "pause", "unpause", "credit"))
        await getattr(self._session, command)("nobody")

    async def _start_again(self) -> None:
        request_id = self._some()
        track = self._tracks[request_id]
        if not track.acknowledged:
            track.started_again = True
            await self._session.start(request_id, track.message)

    async def _start_otherwise(self) -> None:
        request_id = self._some()
        if self._tracks[request_id].received and not self._tracks[request_id].ended:
            other = types.GenerationSpec()
            other.CopyFrom(self._tracks[request_id].message)
            other.label = "other"
            await self._session.start(request_id, other)

    async def _stall(self) -> None:
        self._may_read.clear()
        await asyncio.sleep(self._dice.uniform(0, 0.05))
        self._may_read.set()

    async def _read(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(self._dice.uniform(0, 0.01)):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _lose(self) -> None:
        """The stream is lost, and everything is taken up again on another one."""
        await self._close()
        await self._again()

    async def _take_over(self) -> None:
        """A second stream takes the session from the first, which lives."""
        channel, session, reader = self._channel, self._session, self._reader
        assert reader is not None
        resumed = await self._open(self._token)
        await asyncio.wait([reader])
        session.call.cancel()
        await channel.close(None)
        await self._take_up(resumed)

    async def _again(self) -> None:
        await self._take_up(await self._open(self._token))

    async def _take_up(self, resumed: bool) -> None:
        if not resumed:
            # The server may have sent all of it, and ended the session, before it heard that nobody reads.
            for request_id, track in self._tracks.items():
                if track.received and not track.ended:
                    self._tracks[request_id] = Track(track.message, self._window)
            await self._channel.close(None)
            assert await self._open()
        self.done["resumed" if resumed else "opened anew"] += 1
        for request_id, track in self._tracks.items():
            if track.ended and (not resumed or self._dice.random() < 0.5):
                track.over_here = True
            elif track.received:
                after = self._dice.choice((track.received, self._dice.randint(0, track.received)))
                after = max(after, track.acknowledged)
                track.sent_again_after(after)
                await self._session.resume(request_id, after)
            else:  # nobody knows whether it ever arrived, and so with which session's credit
                if not track.message.HasField("credit_tokens"):
                    track.initial_tokens = max(track.initial_tokens, self._window)
                track.sent_again_after(0)
                await self._session.start(request_id, track.message)

    async def _end(self, how: str) -> None:
        self.done[f"ends by {how}"] += 1
        if how == "vanish":
            return
        if how == "half_close":
            for track in self._tracks.values():
                track.bound_tokens = float("inf")  # nobody can grant any more
            await self._session.half_close()
            assert self._reader is not None
            await asyncio.wait([self._reader])
        else:
            if how == "leave_paused":
                for request_id in self._tracks:
                    await self._session.pause(request_id)
                    await self._session.cancel(request_id)
            for request_id, track in self._tracks.items():
                await self._session.unpause(request_id)
                track.grant(1000)
                await self._session.credit(request_id, 1000)
            while not all(track.ended for track in self._tracks.values()) and self._failure is None:
                self._news.clear()
                await self._news.wait()
        self._raise()
        for request_id, track in self._tracks.items():
            assert track.ended, f"{request_id} has no end, only {sorted(track.frames)}"
            self.done[track.check()] += 1
