"""Frames of one request that a client may ask for again. Pure; knows no stream and no message."""

from collections import deque
from itertools import islice
from typing import NamedTuple

#: What a kept frame costs beside its bytes: its entry here and the header of its bytes.
FRAME_OVERHEAD_BYTES = 128


class Kept(NamedTuple):
    """A frame.

    Attributes:
        raw: as it goes to the wire.
        num_tokens: output tokens of the request up to and including this frame.
    """

    raw: bytes
    num_tokens: int


class ReplayBuffer:
    """Frames in order of their sequence, which rises by one from 1; the oldest are let go first.

    A frame that was not sent is never let go: how many there are is bounded by credit.

    Args:
        max_bytes: memory for the frames that were sent.

    Attributes:
        last_sequence: of the newest frame; 0 = there was none.
        num_bytes: memory of all that is held.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: deque[Kept] = deque()
        self._num_tokens_gone = 0
        self.last_sequence = 0
        self.num_bytes = 0

    def append(self, raw: bytes, num_tokens: int) -> None:
        """Add the frame of sequence ``last_sequence + 1``."""
        self._kept.append(Kept(raw, num_tokens))
        self.last_sequence += 1
        self.num_bytes += len(raw) + FRAME_OVERHEAD_BYTES

    def after(self, sequence: int, max_frames: int | None = None) -> list[Kept]:
        """The first frames after a sequence, which must be one that ``holds_after``."""
        num_frames = self.last_sequence - sequence
        assert 0 <= num_frames <= len(self._kept), "these frames are not held"
        if num_frames == 1 and max_frames != 0:  # nearly always
            return [self._kept[-1]]
        first = len(self._kept) - num_frames
        return list(islice(self._kept, first, None if max_frames is None else first + max_frames))

    def holds_after(self, sequence: int) -> bool:
        """Whether every frame after a sequence is held; not so for one that is still to come."""
        return self._last_gone <= sequence <= self.last_sequence

    def num_tokens_at(self, sequence: int) -> int:
        """Output tokens up to and including a sequence that ``holds_after``."""
        assert self.holds_after(sequence)
        index = sequence - self._last_gone
        return self._kept[index - 1].num_tokens if index else self._num_tokens_gone

    def acknowledge(self, sequence: int) -> None:
        """Let go of all frames up to a sequence."""
        while self._last_gone < min(sequence, self.last_sequence):
            self._drop()

    def trim(self, sent_sequence: int) -> None:
        """Let go of the oldest frames that were sent until the rest fits."""
        while self.num_bytes > self._max_bytes and self._last_gone < sent_sequence:
            self._drop()

    @property
    def _last_gone(self) -> int:
        return self.last_sequence - len(self._kept)

    def _drop(self) -> None:
        kept = self._kept.popleft()
        self._num_tokens_gone = kept.num_tokens
        self.num_bytes -= len(kept.raw) + FRAME_OVERHEAD_BYTES
