"""Rank 0 of a model that is cut over several devices, and how it leads the others.

The other ranks are processes that this one starts. They are told of every step in
one message, compute it in lockstep, and meet in sums over ranks. One that ends,
fails or falls silent is the end of this process, too: whoever runs it then starts
all of them again. Every wait is bounded.
"""

import dataclasses
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from torch import Tensor

from engine.models.errors import ModelLoadError
from engine.models.sharding import Shard
from engine.runner import follower, process_life
from engine.runner.base import ModelBroken, ModelInfo
from engine.runner.channel import BEAT, LOG, BlockingChannel, unpack_error
from engine.runner.device_runner import DeviceModel
from engine.runner.grammars.limits import GrammarLimits
from engine.runner.grammars.model_masks import masks_of
from engine.runner.memory import largest_step, num_profile_blocks
from engine.runner.packing import StepShape
from engine.runner.peers import ProcessGroupPeers
from engine.runner.rank import Rank, RankOptions

#: Signs of life in the time without one after which a rank counts as hanging.
NUM_BEATS = 10
#: Seconds that a rank which closed its socket gets to exit by itself.
EXIT_S_MAX = 2.0

log = structlog.get_logger("vorrang.runner")


class RankUnavailable(ModelLoadError):
    """A rank ended, or took too long, before the model was loaded."""


class Followers:
    """Ranks 1 and up. None at all where ``size`` is 1; then nothing happens.

    Args:
        options: what they load.
        size: number of ranks, the first included.
        hang_s: seconds without a sign of life after which one counts as hanging.
        start_s_max: seconds an answer may take while the model is loaded.
        on_loss: is told on a thread when one is gone after ``watch``; must not return.
    """

    def __init__(
        self,
        options: RankOptions,
        size: int,
        *,
        hang_s: float,
        start_s_max: float,
        on_loss: Callable[[ModelBroken], None] = process_life.end_broken,
    ) -> None:
        self._start_s_max = start_s_max
        self._on_loss = on_loss
        self._is_serving = False
        self._loss: ModelBroken | None = None
        self._is_lost = threading.Event()
        self._lock = threading.Lock()
        self._all: list[_Follower] = []
        try:
            for rank in range(1, size):
                self._all.append(_Follower(options, Shard(rank, size), hang_s, self._lost))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Their processes, by rank."""
        return [each.pid for each in self._all]

    def tell(self, *message: Any) -> None:
        """Have all of them do something; ``answers`` must follow."""
        for each in self._all:
            each.send(message)

    def answers(self) -> list[Any]:
        """What all of them answer.

        Raises:
            RankUnavailable: one ended, or took too long.
            Exception: what one of them raised.
        """
        return [each.answer(self._start_s_max) for each in self._all]

    def watch(self) -> None:
        """From now on a loss is the end."""
        with self._lock:
            self._is_serving = True
            loss = self._loss
        if loss is not None:
            self._on_loss(loss)

    def announce(self, shape: StepShape, words: Tensor) -> None:
        """Tell all of a step.

        Raises:
            OSError: one is gone.
        """
        content = words.numpy().tobytes()
        self.tell(follower.STEP, shape, content)

    def explain(self, error: Exception) -> ModelBroken:
        """Why a step failed that they were told of: a rank that is gone has the better words."""
        self._is_lost.wait(EXIT_S_MAX)
        return self._loss or ModelBroken(f"a step failed after the other ranks were told of it: {error}")

    def close(self) -> None:
        """End them. May be called twice."""
        for each in self._all:
            each.close()

    def _lost(self, loss: ModelBroken) -> None:
        with self._lock:
            self._loss = self._loss or loss
            is_serving = self._is_serving
        self._is_lost.set()
        if is_serving:
            self._on_loss(loss)


class _Follower:
    """One process, and the thread that reads what it says."""

    def __init__(
        self, options: RankOptions, shard: Shard, hang_s: float, on_loss: Callable[[ModelBroken], None]
    ) -> None:
        self._rank = shard.rank
        self._hang_s = hang_s
        self._on_loss = on_loss
        self._is_closing = False
        self._answers: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._process, self._socket = process_life.spawn_connected("engine.runner.follower")
        self._channel = BlockingChannel(self._socket)
        self.send((follower.LOAD, options, shard, hang_s / NUM_BEATS))
        self._reader = threading.Thread(target=self._read, name=f"rank-{shard.rank}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: tuple[Any, ...]) -> None:
        self._channel.send(message)

    def answer(self, timeout_s: float) -> Any:
        try:
            kind, content = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RankUnavailable(f"rank {self._rank} did not answer within {timeout_s:g} s") from None
        if kind == follower.FAILED:
            raise unpack_error(content)
        if kind != follower.DONE:
            raise RankUnavailable(content)
        # While it loads, it may be silent: importing and reading hold up the thread that beats.
        self._socket.settimeout(self._hang_s)
        return content

    def close(self) -> None:
        self._is_closing = True
        self._process.kill()
        self._process.wait()
        self._reader.join(EXIT_S_MAX)  # it has met the end of the socket
        self._channel.close()

    def _read(self) -> None:
        loss: ModelBroken | None = None
        try:
            while (message := self._channel.receive()) is not None:
                if message[0] == LOG:
                    getattr(log, message[1])(message[2].pop("event", ""), rank=self._rank, **message[2])
                elif message[0] != BEAT:
                    self._answers.put(message)
                if message[0] == follower.FAILED:
                    loss = self._loss(f"failed: {unpack_error(message[1])}", from_outside=False)
        except TimeoutError:
            loss = self._loss(f"gave no sign of life for {self._hang_s:g} s", from_outside=True)
        except OSError:  # closed by a process that had not read all it was told
            pass
        if self._is_closing:
            return
        loss = loss or self._death()
        self._answers.put(("lost", str(loss)))
        self._on_loss(loss)

    def _loss(self, words: str, *, from_outside: bool) -> ModelBroken:
        return ModelBroken(f"rank {self._rank} {words}", from_outside=from_outside)

    def _death(self) -> ModelBroken:
        """How it ended."""
        try:
            death = process_life.death_by(self._process.wait(EXIT_S_MAX))
        except subprocess.TimeoutExpired:
            return self._loss("closed its socket", from_outside=False)
        return self._loss(death.cause, from_outside=death.from_outside)


def load(
    options: RankOptions,
    size: int,
    info: ModelInfo,
    *,
    num_blocks: int | None,
    hang_s: float,
    start_s_max: float,
    grammar_limits: GrammarLimits | None = None,
) -> tuple[DeviceModel, str]:
    """A model on one device or on several, which this process leads, and how its matrices are kept.

    Args:
        options: what every rank loads.
        size: number of ranks.
        info: what is served.
        num_blocks: blocks for requests; None = as many as the rank with the least memory has room for.
        hang_s: seconds without a sign of life after which a rank counts as hanging.
        start_s_max: seconds each step of loading may take.
        grammar_limits: what a grammar may cost.

    Raises:
        ModelLoadError: the model can't be read or cut, a device is not there, or a rank ended.
        PoolAllocationError: the KV pool does not fit.
    """
    followers = Followers(options, size, hang_s=hang_s, start_s_max=start_s_max)
    try:
        rank = Rank(options, Shard(0, size))
        followers.answers()
        _join(rank, followers, options, size)
        if num_blocks is None:
            num_blocks = _num_blocks(rank, followers, options, info)
        _together(rank.allocate, followers, follower.ALLOCATE, num_blocks)
        buckets = _together(rank.capture_graphs, followers, follower.CAPTURE)
        followers.watch()
    except BaseException:
        followers.close()
        raise
    others = followers if size > 1 else None
    info = dataclasses.replace(info, computed_by=_computed_by(rank, options, size, buckets))
    masks = masks_of(info, options.folder, grammar_limits)
    model = DeviceModel(info, rank.executor, buckets=buckets, others=others, masks=masks)
    return model, rank.weight_type


def _computed_by(rank: Rank, options: RankOptions, size: int, buckets: tuple[int, ...]) -> str:
    """For the ready line."""
    words = ["own decoder", f"{options.kernels} kernels with {rank.weight_type} weights"]
    if rank.device.type == "cpu":
        words.append(f"threads {rank.num_threads}")
    else:
        words.append(f"graphs for up to {max(buckets)} requests")
    if size > 1:
        words.append(f"{size} ranks")
    return ", ".join(words)


def _together(work: Callable[..., Any], followers: Followers, *message: Any) -> Any:
    """Have all ranks do the same at the same time; what this one returns."""
    followers.tell(*message)
    result = work(*message[1:])
    followers.answers()
    return result


def _join(rank: Rank, followers: Followers, options: RankOptions, size: int) -> None:
    if size == 1:
        rank.join(None)
        return
    in_order = rank.device.type == "cpu" or options.batch_invariant

    def join(meeting_place: Path, in_order: bool) -> None:
        rank.join(
            ProcessGroupPeers.join(
                Shard(0, size), meeting_place, rank.device, options.step_s_max, in_order=in_order
            )
        )

    with tempfile.TemporaryDirectory(prefix="vorrang-") as folder:
        _together(join, followers, follower.JOIN, Path(folder) / "ranks", in_order)


def _num_blocks(rank: Rank, followers: Followers, options: RankOptions, info: ModelInfo) -> int:
    """What the rank with the least memory has room for; cards are asked after their largest step."""
    if rank.device.type != "cpu" and options.kv_bytes is None:
        tokens, seats, block_size = options.max_step_tokens, options.max_requests, options.block_size
        _together(rank.allocate, followers, follower.ALLOCATE, num_profile_blocks(tokens, seats, block_size))
        others = followers if followers.pids else None
        DeviceModel(info, rank.executor, others=others).run(largest_step(tokens, seats, block_size))
    followers.tell(follower.MEASURE)
    num_blocks: list[int] = [rank.num_blocks_wanted(), *followers.answers()]
    return min(num_blocks)
