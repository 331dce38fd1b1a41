"""How much of a device's memory the KV pool may take, and the step that shows what else is needed. Pure."""

import math
from dataclasses import dataclass

from engine.request import Request, RequestId, RequestSpec
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant, Plan


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device after its largest step was computed once.

    Attributes:
        free_bytes: what the driver would still give.
        reserved_bytes: what torch holds, in use or cached.
        peak_bytes: the most that torch had in use at one time, the weights included and the
            KV pool of that step not.
    """

    free_bytes: int
    reserved_bytes: int
    peak_bytes: int

    def pool_bytes(self, share: float) -> int:
        """Bytes for the KV pool: ``share`` of what weights and the largest step leave of what is ours."""
        return int(max(0, self.free_bytes + self.reserved_bytes - self.peak_bytes) * share)


def largest_step(max_step_tokens: int, max_requests: int, block_size: int) -> Plan:
    """A plan that needs as much memory beside the KV pool as any: all tokens, and all seats sample.

    Its requests share their blocks, 0 to ``num_profile_blocks - 1``, and read nonsense from them.
    """
    num_requests = min(max_requests, max_step_tokens)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    grants = []
    for index in range(num_requests):
        # The shares differ by one at most and add up to the whole budget.
        num_tokens = (index + 1) * max_step_tokens // num_requests - index * max_step_tokens // num_requests
        table = list(range(-(-num_tokens // block_size)))
        spec = RequestSpec(RequestId(f"profile-{index}"), (0,) * num_tokens, sampling)
        grants.append(Grant(Request(spec, 0, 0.0), 0, num_tokens, table, 0))
    return Plan(0, tuple(grants))


def num_profile_blocks(max_step_tokens: int, max_requests: int, block_size: int) -> int:
    """Blocks that ``largest_step`` names."""
    num_requests = min(max_requests, max_step_tokens)
    longest_tokens = math.ceil(max_step_tokens / num_requests)
    return math.ceil(longest_tokens / block_size)
