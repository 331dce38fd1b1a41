"""A workload's request as the engine takes it."""

from collections.abc import Sequence
from functools import lru_cache

from engine.request import RequestId, RequestSpec
from engine.sampling import SamplingParams
from kv.prefix_index import chained_hashes, root_hash
from workloads.arrivals import Arrival


def spec_of(arrival: Arrival) -> RequestSpec:
    """What is asked of the engine: exactly ``num_output_tokens`` tokens."""
    return RequestSpec(
        request_id=RequestId(arrival.request_id),
        prompt_token_ids=arrival.prompt_token_ids(),
        sampling=_sampling(arrival.num_output_tokens),
        level=arrival.level,
        cache_salt=arrival.tenant,
        tenant=arrival.tenant,
    )


@lru_cache(maxsize=4096)
def _sampling(num_output_tokens: int) -> SamplingParams:
    """Parameters never change, and checking them takes longer than anything else here."""
    return SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True)


class PromptHashes:
    """Block hashes of prompts, made once for all runs of a workload; about 100 bytes a block.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: dict[tuple[object, ...], list[bytes]] = {}

    def of(self, arrival: Arrival, spec: RequestSpec) -> Sequence[bytes]:
        """Those of its blocks that may be found in the cache: all that leave a token to compute."""
        key = (
            arrival.index,
            arrival.num_prompt_tokens,
            arrival.hash_ids,
            arrival.hash_block_tokens,
            arrival.tenant,
        )
        hashes = self._hashes.get(key)
        if hashes is None:
            num_tokens = (arrival.num_prompt_tokens - 1) // self._block_size * self._block_size
            prompt = spec.prompt_token_ids[:num_tokens]
            hashes = chained_hashes(root_hash(spec.prefix_salt), prompt, self._block_size)
            self._hashes[key] = hashes
        return hashes
