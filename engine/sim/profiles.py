"""What a step costs on a piece of hardware: the cost model and its constants.

    step = o + max(W, c0 + c1 T) + h(S) + kappa K + alpha P + mu M

with T tokens in the step, S sequences, K KV tokens read, P pairs of (prompt
token, KV token it attends to), and M, the part of K that decodes read in a step
which holds a prompt's chunk, too. ``W`` is the time to read the weights once:
below some T a step is bound by memory, above it by arithmetic. The module knows
neither plans nor time. docs/SIMULATOR.md says how the constants were found.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import InvalidRequest


class UnknownProfile(InvalidRequest):
    """No hardware profile has that name."""


class StepSize(NamedTuple):
    """What a step has to do; the cost model's arguments.

    Attributes:
        num_tokens: T, tokens computed.
        num_sequences: S, requests granted tokens.
        num_kv_tokens: K, KV tokens read: the sum over requests of their context
            after the step (a chunk of a prompt reads its context once).
        num_attention_pairs: P, pairs of a prompt token and a KV token it attends
            to, over chunks of more than one token; decodes are in K alone.
    """

    num_tokens: int
    num_sequences: int
    num_kv_tokens: int
    num_attention_pairs: int = 0
    num_mixed_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Constants of the cost model for one model on one device, and the size of its KV pool.

    Attributes:
        name: as on the command line.
        description: device and model.
        weights_ms: W, least time of the dense layers: one read of the weights.
        base_ms: c0, fixed part of the dense layers once arithmetic is the limit.
        token_ms: c1, dense layers per token.
        kv_token_us: kappa, reading the KV of one token in all layers.
        num_blocks: blocks in the pool unless said otherwise.
        source: where the constants come from.
        overhead_ms: o, per step, whatever is in it (launches, host work that is not hidden).
        sequences_ms: h as points (number of sequences, ms), linear between them and
            constant beyond: what a step of that many decodes costs beyond the other
            terms (head, sampler, attention's fixed part, dense layers' rows).
        attention_pair_ns: alpha, per pair of prompt token and KV token.
        mixed_kv_token_us: mu, what a decode's KV token costs more when the step holds a chunk
            (one kernel launch serves both, without splitting the KV of the decodes).
        block_size: tokens per block.
    """

    name: str
    description: str
    weights_ms: float
    base_ms: float
    token_ms: float
    kv_token_us: float
    num_blocks: int
    source: str
    overhead_ms: float = 0.0
    sequences_ms: tuple[tuple[int, float], ...] = ()
    attention_pair_ns: float = 0.0
    mixed_kv_token_us: float = 0.0
    block_size: int = 16

    def step_s(self, size: StepSize) -> float:
        """Duration of a step, in seconds; 0 for an empty one."""
        if size.num_tokens == 0:
            return 0.0
        dense_ms = max(self.weights_ms, self.base_ms + self.token_ms * size.num_tokens)
        sequences_ms = _interpolate(self.sequences_ms, size.num_sequences)
        kv_us = self.kv_token_us * size.num_kv_tokens + self.mixed_kv_token_us * size.num_mixed_kv_tokens
        attention_ns = self.attention_pair_ns * size.num_attention_pairs
        return (self.overhead_ms + dense_ms + sequences_ms) / 1e3 + kv_us / 1e6 + attention_ns / 1e9

    def decodes_s(self, num_sequences: int, num_kv_tokens: int) -> Iterator[float]:
        """Durations of steps of the same decodes, one after the other; the first reads so much KV."""
        fixed_s = self.step_s(StepSize(num_sequences, num_sequences, 0))
        while True:
            yield fixed_s + self.kv_token_us * num_kv_tokens / 1e6
            num_kv_tokens += num_sequences


def _interpolate(points: Sequence[tuple[int, float]], x: int) -> float:
    """Linear between points, constant outside them, 0 without any."""
    if not points:
        return 0.0
    index = bisect_left(points, x, key=lambda point: point[0])
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _points(text: str) -> tuple[tuple[int, float], ...]:
    """``1:0.5 2:0.7`` as points."""
    pairs = (pair.split(":") for pair in text.split())
    return tuple((int(x), float(y)) for x, y in pairs)


_TABLE = (
    HardwareProfile(
        name="rtx4090",
        description="RTX 4090 24 GB, Llama-3.1-8B bf16, TP 1",
        weights_ms=16.6,
        base_ms=7.1,
        token_ms=0.0859,
        kv_token_us=0.143,
        num_blocks=2588,
        sequences_ms=_points("1:-0.1 2:0.56 4:0.58 8:0.74 16:1.05 32:2.55 64:3.38 128:3.95"),
        attention_pair_ns=4.15,
        mixed_kv_token_us=0.160,
        source="fit to LLMServingSim's layer profiles (casys-kaist, MIT); pool of its vLLM 0.19.0 run",
    ),
    HardwareProfile(
        name="rtxpro6000",
        description="RTX PRO 6000 96 GB, Llama-3.1-8B bf16, TP 1",
        weights_ms=10.8,
        base_ms=6.2,
        token_ms=0.0352,
        kv_token_us=0.098,
        num_blocks=35_000,
        sequences_ms=_points("1:0.51 2:0.44 4:0.17 8:0.2 16:0.36 32:1.0 64:1.69 128:2.61"),
        attention_pair_ns=2.14,
        mixed_kv_token_us=0.057,
        source="fit to LLMServingSim's layer profiles (casys-kaist, MIT); pool: 0.9 x 95 GiB - 16.5 GiB",
    ),
    HardwareProfile(
        name="a100",
        description="A100 80 GB, 8B model bf16, TP 1",
        weights_ms=10.6,
        base_ms=5.7,
        token_ms=0.0671,
        kv_token_us=0.082,
        num_blocks=28_000,
        source="fit to Vidur's layer profiles (Microsoft, MIT); pool: 0.9 x 79 GiB - 16.5 GiB",
    ),
    HardwareProfile(
        name="h100",
        description="H100 80 GB, Llama-3.1-8B bf16, TP 1",
        weights_ms=6.1,
        base_ms=3.1,
        token_ms=0.0163,
        kv_token_us=0.049,
        num_blocks=28_000,
        source="fit to LLMServingSim's layer profiles (casys-kaist, MIT); pool as for the A100",
    ),
)

PROFILES: dict[str, HardwareProfile] = {profile.name: profile for profile in _TABLE}


def fixed_step(step_s: float, num_blocks: int) -> HardwareProfile:
    """A device on which every step takes the same time, such as the scripted runner's."""
    return HardwareProfile(
        "fixed", f"every step takes {step_s * 1e3:g} ms", step_s * 1e3, 0.0, 0.0, 0.0, num_blocks, "made up"
    )


def profile_named(name: str) -> HardwareProfile:
    """The profile of that name.

    Raises:
        UnknownProfile: there is none.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise UnknownProfile("profile", f"must be one of {', '.join(PROFILES)}", name) from None
