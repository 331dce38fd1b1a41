"""A model that costs what a profile says and computes nothing.

In an event loop with virtual time (``engine.sim.virtual_time``) its steps take no
real time; in an ordinary one it is a stand-in for a device, step for step.
"""

import asyncio
import zlib
from collections.abc import Sequence

from engine.request import RequestId
from engine.runner.base import ModelInfo, PoolShape
from engine.scheduler.plan import Plan, StepResult
from engine.sim.profiles import HardwareProfile, StepSize
from engine.text import ChatMessage, StreamDecoder

#: Ids are arbitrary 31-bit numbers: prompts are synthesised and outputs mean nothing.
VOCAB_SIZE = 2**31
CONTEXT_TOKENS = 131_072


def size_of(plan: Plan) -> StepSize:
    """What a plan has to do, in the cost model's terms."""
    num_tokens = num_kv_tokens = num_pairs = num_decode_kv_tokens = 0
    for grant in plan.grants:
        num_granted = grant.num_tokens
        context = grant.start + num_granted
        num_tokens += num_granted
        num_kv_tokens += context
        if num_granted == 1:
            num_decode_kv_tokens += context
        else:  # token i of the chunk attends to start + i + 1 tokens
            num_pairs += num_granted * grant.start + num_granted * (num_granted + 1) // 2
    num_mixed = num_decode_kv_tokens if num_pairs else 0
    return StepSize(num_tokens, len(plan.grants), num_kv_tokens, num_pairs, num_mixed)


def output_token(request_id: str, output_index: int) -> int:
    """The token the simulated model says: a fixed function of request and index."""
    return zlib.crc32(request_id.encode(), output_index) % VOCAB_SIZE


class SimulatedRunner:
    """A ``Runner`` that sleeps for the cost of a plan and then answers with made-up tokens.

    Args:
        profile: what steps cost; its pool unless ``num_blocks`` is given.
        num_blocks: size of the pool.
        context_tokens: longest prompt + output.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        *,
        num_blocks: int | None = None,
        context_tokens: int = CONTEXT_TOKENS,
    ) -> None:
        self._profile = profile
        name = f"simulated/{profile.name}"
        self._info = ModelInfo(name, "Simulated", VOCAB_SIZE, context_tokens, frozenset())
        self._pool = PoolShape(profile.num_blocks if num_blocks is None else num_blocks, profile.block_size)

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        return self._pool

    async def execute(self, plan: Plan) -> StepResult:
        """Let the plan's cost pass on the event loop's clock.

        Cancellation: at once; nothing is in flight while it waits.
        """
        await asyncio.sleep(self.step_s(plan))
        return self.run(plan)

    async def close(self) -> None:
        """Nothing to release."""

    def step_s(self, plan: Plan) -> float:
        """What the plan costs, in seconds."""
        return self._profile.step_s(size_of(plan))

    def run(self, plan: Plan) -> StepResult:
        """The plan's outcome, without its cost."""
        sampled: dict[RequestId, int] = {}
        after_drafts: dict[RequestId, list[int]] = {}
        for grant in plan.grants:
            if (first := grant.output_index) is None:
                continue
            sampled[grant.request_id] = output_token(grant.request_id, first)
            if grant.num_drafts:
                after_drafts[grant.request_id] = [
                    output_token(grant.request_id, first + 1 + i) for i in range(grant.num_drafts)
                ]
        return StepResult(sampled, after_drafts=after_drafts)


class SimulatedTokenizer:
    """Bytes as ids one way, no text the other: what the simulated model says means nothing."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        """Bytes of the text."""
        return list(text.encode())

    def encode_plain(self, text: str) -> list[int]:
        """Bytes of the text."""
        return self.encode(text)

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, tools_json: str = ""
    ) -> list[int]:
        """Bytes of all contents."""
        return self.encode(tools_json + "".join(message.content for message in messages))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Nothing."""
        return ""

    def stream_decoder(self, prompt_token_ids: Sequence[int]) -> StreamDecoder:
        """A decoder that says nothing."""
        return _Silent()


class _Silent:
    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
