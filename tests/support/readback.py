"""A model whose KV is honest, and that knows what it must read: for ``Driver``.

The arithmetic is that of ``engine.runner.scripted``. That runner computes a token
from what it reads back; this one knows the whole output beforehand and asserts that
it reads back exactly the tokens before it, through the block table of the grant. A
wrong table, a lost block, a missed recomputation or KV of another adapter fails in the
step it happens in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.request import RequestId
from engine.runner.scripted import adapter_shift, next_token
from engine.sampling import SamplingParams
from engine.scheduler.plan import Plan, StepResult

#: What is sampled after a wrong guess; texts may hold it.
NONSENSE = 40
#: What is computed after a failure; no text holds it.
GARBAGE = -1


@dataclass(slots=True)
class Text:
    """Prompt and the longest possible output of a request, and how it must be sampled."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams


def text_of(prompt: Sequence[int], sampling: SamplingParams, *, repetitive: bool = False) -> Text:
    """The whole text; the first output token by ``next_token``, the others from the running sum it keeps.

    ``repetitive``: the same few tokens over and over, other ones from time to time.
    """
    seed = sampling.seed if sampling.temperature > 0 else 0
    token_ids = list(prompt)
    if repetitive:
        period = 1 + len(prompt) % 4
        token_ids += (32 + (n % period * 7 + seed + n // 13) % 95 for n in range(sampling.max_tokens))
        return Text(token_ids, len(prompt), sampling)
    token_ids.append(next_token(token_ids, seed))
    total = sum((position + 1) * token_id for position, token_id in enumerate(token_ids))
    for n in range(len(token_ids), len(prompt) + sampling.max_tokens):
        token_ids.append(32 + (total + 7 * n + seed) % 95)
        total += (n + 1) * token_ids[-1]
    return Text(token_ids, len(prompt), sampling)


class ReadBackRunner:
    """Writes granted tokens into blocks and reads everything back before it samples.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        texts: what each request must read; the caller adds to it.
    """

    def __init__(self, num_blocks: int, block_size: int, texts: Mapping[RequestId, Text]) -> None:
        self._block_size = block_size
        self._blocks: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._texts = texts
        self._sampled: dict[RequestId, int] = {}
        self._broken: set[RequestId] = set()

    def fail(self, request_ids: Iterable[RequestId]) -> None:
        """The step computed last has failed for these: they have no sample, and garbage in their blocks."""
        self._broken.update(request_ids)
        for request_id in self._broken:
            self._sampled.pop(request_id, None)

    def run(self, plan: Plan) -> StepResult:
        """Compute a plan on the spot. A token it does not know is what the plan before has sampled."""
        size, blocks = self._block_size, self._blocks
        for grant in plan.grants:
            table, token_ids = grant.block_table, list(grant.token_ids)
            if len(token_ids) < grant.num_tokens:
                is_broken = grant.request_id in self._broken
                token_ids.append(GARBAGE if is_broken else self._sampled[grant.request_id])
            shift = adapter_shift(grant.request.adapter)
            for position, token_id in enumerate(token_ids, start=grant.start):
                blocks[table[position // size]][position % size] = token_id + shift
        self._sampled = sampled = {}
        after_drafts: dict[RequestId, list[int]] = {}
        for grant in plan.grants:
            if grant.request_id in self._broken:
                if grant.output_index is not None:
                    sampled[grant.request_id] = GARBAGE
                continue
            num_drafts = grant.num_drafts
            text, num_tokens = self._texts[grant.request_id], grant.start + grant.num_tokens - num_drafts
            read: list[int | None] = []
            for block in grant.block_table[: -(-(num_tokens + num_drafts) // size)]:
                read += blocks[block]
            if shift := adapter_shift(grant.request.adapter):
                read = [None if token_id is None else token_id - shift for token_id in read]
            assert read[:num_tokens] == text.token_ids[:num_tokens], "KV read back is not what was known"
            assert grant.sampling is text.sampling
            if grant.output_index is not None:
                assert num_tokens == text.num_prompt_tokens + grant.output_index
                sampled[grant.request_id] = text.token_ids[num_tokens]
            if num_drafts:
                assert num_tokens + num_drafts < len(text.token_ids), "guessed beyond the longest output"
                assert read[num_tokens : num_tokens + num_drafts] == list(grant.request.draft_token_ids)
                after_drafts[grant.request_id] = said = []
                for end in range(num_tokens + 1, num_tokens + num_drafts + 1):
                    is_right = read[num_tokens:end] == text.token_ids[num_tokens:end]
                    said.append(text.token_ids[end] if is_right else NONSENSE)
        return StepResult(sampled, after_drafts=after_drafts)
