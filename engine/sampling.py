"""Sampling parameters of one request, validated."""

import math
from dataclasses import dataclass

from engine.errors import InvalidRequest

SEED_MAX = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Order of operations: end and stop ids are banned while fewer than
    ``min_tokens`` were produced; logits are divided by ``temperature``; then
    ``top_k``, ``top_p`` and ``min_p`` each cut the distribution left by the one
    before; then an argmax over logit + Gumbel noise, whose noise is a function
    of (``seed``, output index, token id) alone. ``temperature == 0`` is the
    exact argmax, lowest id on ties.

    Attributes:
        temperature: 0..10, 0 = greedy.
        top_k: keep the k likeliest, 0 = all.
        top_p: keep the smallest set of likeliest whose mass reaches this, 0 < p <= 1.
        min_p: keep those with at least this share of the likeliest one's probability, 0..1.
        seed: 0..2**64-1.
        max_tokens: most output tokens, at least 1.
        min_tokens: fewest output tokens before anything but ``max_tokens`` ends the output.
        stop_token_ids: ids that end the output; they are part of it.
        stop_strings: strings that end the output.
        include_stop_string: keep the stop string in the text.
        ignore_eos: go on after the model's end token.

    Raises:
        InvalidRequest: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check(
            "temperature",
            math.isfinite(self.temperature) and 0 <= self.temperature <= 10,
            "must be between 0 and 10",
            self.temperature,
        )
        _check("top_k", self.top_k >= 0, "must be at least 0", self.top_k)
        _check("top_p", 0 < self.top_p <= 1, "must be greater than 0 and at most 1", self.top_p)
        _check("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1", self.min_p)
        _check("seed", 0 <= self.seed <= SEED_MAX, f"must be between 0 and {SEED_MAX}", self.seed)
        _check("max_tokens", self.max_tokens >= 1, "must be at least 1", self.max_tokens)
        _check(
            "min_tokens",
            0 <= self.min_tokens <= self.max_tokens,
            "must be between 0 and max_tokens",
            self.min_tokens,
        )
        _check(
            "stop_token_ids",
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"must hold at most {MAX_STOP_TOKEN_IDS} ids",
            len(self.stop_token_ids),
        )
        _check(
            "stop_strings",
            len(self.stop_strings) <= MAX_STOP_STRINGS,
            f"must hold at most {MAX_STOP_STRINGS} strings",
            len(self.stop_strings),
        )
        for index, text in enumerate(self.stop_strings):
            size = len(text.encode())
            _check(
                f"stop_strings[{index}]",
                1 <= size <= MAX_STOP_STRING_BYTES,
                f"must be 1 to {MAX_STOP_STRING_BYTES} bytes long",
                text,
            )


def _check(field: str, holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"sampling.{field}", rule, value)
