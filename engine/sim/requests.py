"""A workload's request as the engine takes it."""

from functools import lru_cache

from engine.request import RequestId, RequestSpec
from engine.sampling import SamplingParams
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


class BlockHashes:
    """Hashes of blocks, made once for all runs of a workload, whose outputs are always the same.

    They take about 100 bytes a block, and hold for one block size.
    """

    def __init__(self) -> None:
        self._hashes: dict[tuple[object, ...], list[bytes]] = {}

    def of(self, arrival: Arrival) -> list[bytes]:
        """As many as any run has made of a request's; add to it what is made more."""
        key = (
            arrival.index,
            arrival.num_prompt_tokens,
            arrival.hash_ids,
            arrival.hash_block_tokens,
            arrival.tenant,
        )
        return self._hashes.setdefault(key, [])
