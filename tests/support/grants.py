"""Grants made by hand, for runners and reports that are tested without a scheduler."""

from engine.request import Request, RequestId, RequestSpec
from engine.sampling import SamplingParams
from engine.scheduler.plan import Grant


def grant(
    name,
    start,
    num_tokens,
    output_index=None,
    *,
    token_ids=None,
    block_table=(),
    sampling=None,
    level=0,
):
    """``token_ids``: those granted; what stands before them is not looked at."""
    token_ids = [0] * num_tokens if token_ids is None else token_ids
    known = (*[0] * start, *token_ids)
    spec = RequestSpec(RequestId(name), known, sampling or SamplingParams(), level)
    return Grant(Request(spec, 0, 0.0), start, num_tokens, block_table, output_index)
