"""A model that costs what a profile says and computes nothing.

In an event loop with virtual time (``engine.sim.virtual_time``) its steps take no
real time; in an ordinary one it is a stand-in for a device, step for step.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from engine.runner.base import ModelInfo, PoolShape
from engine.scheduler.plan import Grant, Granted, Plan, StepResult
from engine.sim.profiles import HardwareProfile, StepSize
from engine.text import ChatMessage, StreamDecoder

#: Ids are arbitrary 31-bit numbers: prompts are synthesised and outputs mean nothing.
VOCAB_SIZE = 2**31
CONTEXT_TOKENS = 131_072


#: What the simulated model says, whoever asks: it counts. The token of each output index.
OUTPUT = range(VOCAB_SIZE)


def size_of(grants: Sequence[Grant], *, num_decodes: int = 0, num_kv_tokens: int = 0) -> StepSize:
    """What a step has to do, in the cost model's terms.

    Args:
        grants: of its plan.
        num_decodes: requests that compute a token without a grant of their own.
        num_kv_tokens: that these read.
    """
    num_tokens = num_decodes
    num_pairs = num_chunk_kv_tokens = 0
    for _, start, num_granted, _, _ in grants:  # members without names: half the time
        num_tokens += num_granted
        num_kv_tokens += start + num_granted
        if num_granted != 1:  # token i of the chunk attends to start + i + 1 tokens
            num_chunk_kv_tokens += start + num_granted
            num_pairs += num_granted * start + num_granted * (num_granted + 1) // 2
    num_mixed = num_kv_tokens - num_chunk_kv_tokens if num_pairs else 0
    return StepSize(num_tokens, num_decodes + len(grants), num_kv_tokens, num_pairs, num_mixed)


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
        return self._profile.step_s(size_of(plan.grants))

    def mixed_s(self, num_decodes: int, num_kv_tokens: int, grants: Sequence[Grant]) -> float:
        """What a step costs of so many decodes, which read so much KV, and of what is granted to others."""
        return self._profile.step_s(size_of(grants, num_decodes=num_decodes, num_kv_tokens=num_kv_tokens))

    def decodes_s(self, num_requests: int, num_kv_tokens: int) -> Iterator[float]:
        """What plans of the same decodes cost, one after the other; the first reads so much KV."""
        return self._profile.decodes_s(num_requests, num_kv_tokens)

    def run(self, plan: Plan) -> StepResult:
        """The plan's outcome, without its cost."""
        grants = cast("Sequence[tuple[Granted, int, int, object, int | None]]", plan.grants)
        sampled = {request.request_id: i for request, _, _, _, i in grants if i is not None}
        after_drafts = {
            request.request_id: tuple(range(i + 1, i + 1 + len(request.draft_token_ids)))
            for request, _, num_tokens, _, i in grants
            if num_tokens > 1 and i is not None and request.draft_token_ids
        }
        return StepResult(sampled, after_drafts=after_drafts)


class SimulatedTokenizer:
    """Bytes as ids one way, no text the other: what the simulated model says means nothing."""

    has_chat_template = True
    max_token_bytes = 1

    def encode(self, text: str) -> list[int]:
        """Bytes of the text."""
        return list(text.encode())

    def encode_plain(self, text: str) -> list[int]:
        """Bytes of the text."""
        return self.encode(text)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools_json: str = "",
        check_text: Callable[[str], object] | None = None,
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
