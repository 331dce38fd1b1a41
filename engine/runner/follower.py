"""A rank that is not the first: ``python -m engine.runner.follower FD PARENT_PID``.

Loads its share of a model, then computes what rank 0 tells it of, in the same
order. Ends when rank 0 does, and on any error: then rank 0 ends, too.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models.sharding import Shard
from engine.runner import process_life
from engine.runner.channel import BlockingChannel, pack_error
from engine.runner.peers import ProcessGroupPeers
from engine.runner.rank import Rank, RankOptions

#: From rank 0. All but steps are answered.
LOAD, JOIN, ALLOCATE, MEASURE, CAPTURE, STEP = "load", "join", "allocate", "measure", "capture", "step"
#: Answers.
DONE, FAILED = "done", "failed"


def main() -> None:
    """Serve the process that started this one."""
    channel = process_life.begin()
    try:
        _serve(channel)
    except OSError:  # nobody is left to listen
        process_life.end()


def _serve(channel: BlockingChannel) -> None:
    message = channel.receive()
    if message is None:
        return
    _, options, shard, beat_s = message
    process_life.start_beating(channel, beat_s)
    try:
        rank = Rank(options, shard)
        channel.send((DONE, None))
        while (message := channel.receive()) is not None:
            if message[0] == STEP:
                _compute(rank, *message[1:])
            else:
                channel.send((DONE, _obey(rank, options, shard, message)))
    except OSError:
        raise
    except Exception as error:
        channel.send((FAILED, pack_error(error)))
        process_life.end(1)
    process_life.end()


def _obey(rank: Rank, options: RankOptions, shard: Shard, message: tuple[Any, ...]) -> Any:
    match message:
        case ("join", Path() as meeting_place, bool(in_order)):
            rank.join(
                ProcessGroupPeers.join(
                    shard, meeting_place, rank.device, options.step_s_max, in_order=in_order
                )
            )
        case ("allocate", int(num_blocks)):
            rank.allocate(num_blocks)
        case ("measure",):
            return rank.num_blocks_wanted()
        case ("capture",):
            rank.capture_graphs()
        case _:
            raise ValueError(f"unknown message {message[0]!r}")
    return None


def _compute(rank: Rank, shape: Any, words: bytes) -> None:
    rank.executor.compute(shape, torch.from_numpy(np.frombuffer(bytearray(words), dtype=np.int64)))


if __name__ == "__main__":
    main()
