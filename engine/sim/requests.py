"""A workload's request as the engine takes it."""

from engine.request import RequestId, RequestSpec
from engine.sampling import SamplingParams
from workloads.arrivals import Arrival


def spec_of(arrival: Arrival) -> RequestSpec:
    """What is asked of the engine: exactly ``num_output_tokens`` tokens."""
    return RequestSpec(
        request_id=RequestId(arrival.request_id),
        prompt_token_ids=arrival.prompt_token_ids(),
        sampling=SamplingParams(temperature=0.0, max_tokens=arrival.num_output_tokens, ignore_eos=True),
        level=arrival.level,
        cache_salt=arrival.tenant,
        tenant=arrival.tenant,
    )
