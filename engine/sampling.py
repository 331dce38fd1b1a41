"""Sampling parameters of one request, validated. What each means: docs/SAMPLING.md."""

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import InvalidRequest

SEED_MAX = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
#: Of ``allowed_token_ids`` and of ``banned_token_ids``.
MAX_LISTED_TOKEN_IDS = 4096
MAX_BANNED_SEQUENCES = 256
MAX_SEQUENCE_TOKENS = 32
#: Outputs of one prompt.
MAX_OUTPUTS = 16


class Needs(enum.IntFlag):
    """What choosing a token of a request takes beside its row of numbers."""

    TYPICAL = 1
    BANS = 2
    ADJUSTMENTS = 4
    ALLOWED = 8
    LOGPROBS = 16
    #: The tokens before it must be known; who plans ahead of them has to wait.
    TOKENS = 32


#: temperature, top_p, min_p, typical_p, top_k, seed, needs
_PACKED = struct.Struct("<ddddqQq")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Order of operations: ``logit_bias`` is added; ``repetition_penalty``, then
    ``frequency_penalty`` and ``presence_penalty``; ids leave that are banned, would
    complete a banned sequence, are not among the allowed ones, or would end the output
    before ``min_tokens``; logits are divided by ``temperature``; then ``top_k``,
    ``top_p``, ``min_p`` and ``typical_p`` each cut the distribution left by the one
    before; then an argmax over logit + Gumbel noise, whose noise is a function of
    (``seed``, output index, token id) alone. ``temperature == 0`` is the exact argmax,
    lowest id on ties. Log probabilities are those of the model, before all of this.

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
        typical_p: keep the most typical of them whose mass reaches this, 0 < p <= 1.
        repetition_penalty: divides positive logits of ids in prompt or output, multiplies negative ones,
            0.01..100.
        presence_penalty: subtracted from logits of ids in the output, -2..2.
        frequency_penalty: subtracted from them once per occurrence, -2..2.
        logit_bias: pairs of id and what is added to its logit, -100..100; each id once.
        allowed_token_ids: nothing else may be sampled; empty = everything may.
        banned_token_ids: never sampled.
        banned_sequences: ids in a row, of which the last is never sampled after the others.
        logprobs: report the log probability of each output token, and of so many likeliest; None = don't.
        prompt_logprobs: the same for the prompt's tokens but the first; None = don't.
        packed: what is read of all requests in every step, as seven 64-bit words; made of the others.

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
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    packed: bytes = field(init=False, repr=False, compare=False)

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
        _check("typical_p", 0 < self.typical_p <= 1, "must be greater than 0 and at most 1", self.typical_p)
        self._check_adjustments()
        self._check_lists()
        for name, limit in (("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_PROMPT_LOGPROBS)):
            value = getattr(self, name)
            _check(name, value is None or 0 <= value <= limit, f"must be between 0 and {limit}", value)
        object.__setattr__(self, "packed", self._pack())

    def _check_adjustments(self) -> None:
        _check(
            "repetition_penalty",
            0.00999 <= self.repetition_penalty <= 100,  # what a float makes of 0.01 is a little less
            "must be between 0.01 and 100",
            self.repetition_penalty,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, -2 <= value <= 2, "must be between -2 and 2", value)
        _check_length("logit_bias", self.logit_bias, MAX_LOGIT_BIASES)
        for index, (_, bias) in enumerate(self.logit_bias):
            _check(f"logit_bias[{index}].bias", -100 <= bias <= 100, "must be between -100 and 100", bias)
        distinct = {token_id for token_id, _ in self.logit_bias}
        _check("logit_bias", len(distinct) == len(self.logit_bias), "must name each token once", "one twice")

    def _check_lists(self) -> None:
        _check_length("allowed_token_ids", self.allowed_token_ids, MAX_LISTED_TOKEN_IDS)
        _check_length("banned_token_ids", self.banned_token_ids, MAX_LISTED_TOKEN_IDS)
        _check_length("banned_sequences", self.banned_sequences, MAX_BANNED_SEQUENCES)
        for index, sequence in enumerate(self.banned_sequences):
            _check(
                f"banned_sequences[{index}]",
                1 <= len(sequence) <= MAX_SEQUENCE_TOKENS,
                f"must hold 1 to {MAX_SEQUENCE_TOKENS} ids",
                len(sequence),
            )
        if self.allowed_token_ids:
            left = set(self.allowed_token_ids).difference(self.always_banned())
            _check("allowed_token_ids", bool(left), "must hold an id that is not banned", 0)

    def always_banned(self) -> tuple[int, ...]:
        """Ids that may never be sampled: the banned ones, and banned sequences of one."""
        return self.banned_token_ids + tuple(s[0] for s in self.banned_sequences if len(s) == 1)

    @property
    def may_be_guessed(self) -> bool:
        """Whether output tokens may be guessed and verified: choosing one takes no record of the others."""
        return self.logprobs is None and not self.penalises and not self.banned_sequences

    @property
    def penalises(self) -> bool:
        """Whether a choice depends on what was said before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _pack(self) -> bytes:
        needs = Needs(0)
        if self.typical_p < 1:
            needs |= Needs.TYPICAL
        if self.banned_token_ids or self.banned_sequences or self.min_tokens:
            needs |= Needs.BANS
        if self.logit_bias or self.penalises:
            needs |= Needs.ADJUSTMENTS
        if self.allowed_token_ids:
            needs |= Needs.ALLOWED
        if self.logprobs is not None:
            needs |= Needs.LOGPROBS
        if self.penalises or any(len(sequence) > 1 for sequence in self.banned_sequences):
            needs |= Needs.TOKENS
        numbers = (self.temperature, self.top_p, self.min_p, self.typical_p)
        return _PACKED.pack(*numbers, min(self.top_k, 2**63 - 1), self.seed, needs)


def sibling_seed(seed: int, output_index: int) -> int:
    """The seed of one of several outputs; that of the first is the request's own.

    The others are outputs of SplitMix64 (Steele, Lea and Flood, 2014) for the state ``seed``.
    """
    if output_index == 0:
        return seed
    value = (seed + output_index * 0x9E3779B97F4A7C15) & SEED_MAX
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MAX
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & SEED_MAX
    return value ^ (value >> 31)


def _check_length(field: str, items: Sequence[object], limit: int) -> None:
    _check(field, len(items) <= limit, f"must hold at most {limit} entries", len(items))


def _check(field: str, holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"sampling.{field}", rule, value)
