"""Made-up mixes of traffic: Poisson arrivals and log-normal lengths, by name."""

import math
import random
from dataclasses import dataclass

from workloads.arrivals import Arrival, Workload
from workloads.classes import level_named
from workloads.errors import InvalidWorkload


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One class of a synthetic mix: Poisson arrivals, log-normal lengths.

    Attributes:
        name: class of urgency.
        rate_rps: mean arrivals per second; 0: all ``num_requests`` are there at the start.
        num_requests: how many when ``rate_rps`` is 0.
        prompt_median: tokens.
        output_median: tokens.
        sigma: of the logarithms of both lengths; 0.8 makes the 90th percentile 2.8 times the median.
    """

    name: str
    rate_rps: float
    prompt_median: int
    output_median: int
    num_requests: int = 0
    sigma: float = 0.8


#: Synthetic mixes by name. Rates suit the RTX 4090 profile; ``scaled`` suits them to others.
MIXES: dict[str, tuple[TrafficClass, ...]] = {
    # Chat beside steady batch work, about 80 % of what the device can do.
    "steady": (TrafficClass("interactive", 0.5, 500, 150), TrafficClass("batch", 1.0, 1000, 200)),
    # The same chat under twice the batch work: saturated, the queue grows all the time.
    "saturated": (TrafficClass("interactive", 0.5, 500, 150), TrafficClass("batch", 4.0, 1000, 200)),
    # A night's batch is already there when the chat begins.
    "backlog": (
        TrafficClass("interactive", 0.5, 500, 150),
        TrafficClass("batch", 0.0, 1500, 300, num_requests=400),
    ),
}


def synthetic(mix: str, *, duration_s: float, seed: int, max_tokens: int = 4096) -> Workload:
    """A synthetic mix.

    Args:
        mix: a name in ``MIXES``.
        duration_s: arrivals end then.
        seed: of times and lengths.
        max_tokens: longest prompt and longest output.

    Raises:
        InvalidWorkload: no mix has that name.
    """
    if mix not in MIXES:
        raise InvalidWorkload("workload", f"must be a file or one of {', '.join(MIXES)}", mix)
    arrivals: list[tuple[float, int, int, int]] = []
    for number, traffic in enumerate(MIXES[mix]):
        rng = random.Random(f"{seed}/{number}/{traffic.name}")
        level = level_named(traffic.name)
        for arrival_s in _arrivals(traffic, duration_s, rng):
            lengths = [
                min(max_tokens, max(1, round(rng.lognormvariate(math.log(median), traffic.sigma))))
                for median in (traffic.prompt_median, traffic.output_median)
            ]
            arrivals.append((arrival_s, level, *lengths))  # type: ignore[arg-type]
    arrivals.sort(key=lambda arrival: arrival[:2])
    requests = (
        Arrival(index, arrival_s, num_prompt, num_output, level)
        for index, (arrival_s, level, num_prompt, num_output) in enumerate(arrivals)
    )
    return Workload(f"{mix} ({duration_s:g} s, seed {seed})", tuple(requests))


def _arrivals(traffic: TrafficClass, duration_s: float, rng: random.Random) -> list[float]:
    if traffic.rate_rps == 0:
        return [0.0] * traffic.num_requests
    times: list[float] = []
    time_s = rng.expovariate(traffic.rate_rps)
    while time_s < duration_s:
        times.append(time_s)
        time_s += rng.expovariate(traffic.rate_rps)
    return times
