"""What arrives: requests by length and time, made up or replayed.

A workload holds no tokens. A prompt is synthesised when its request arrives: the
same hash ids give the same leading tokens, everything else is unique, so the
prefix cache sees exactly the sharing the trace has.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest
from engine.priority import DEFAULT_LEVEL, level_named
from engine.request import RequestId, RequestSpec
from engine.sampling import SamplingParams

#: Fields of ``RequestSpec`` that this version has.
_SPEC_FIELDS = frozenset(field.name for field in dataclasses.fields(RequestSpec))


class InvalidWorkload(InvalidRequest):
    """A workload, or a wish about one, breaks a rule; the message names field, rule and value."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request to come.

    Attributes:
        index: number in its workload, from 0; names the request and makes its prompt unique.
        arrival_s: when, in seconds from the start of the workload.
        num_prompt_tokens: length of the prompt.
        num_output_tokens: length of the output, which is forced.
        level: level of urgency.
        tenant: whose; prefixes are shared inside a tenant alone.
        hash_ids: one per started block of ``hash_block_tokens`` prompt tokens; equal
            leading ids mean an equal prefix. Empty: nothing is shared.
        hash_block_tokens: tokens a hash id stands for.
    """

    index: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    level: int = DEFAULT_LEVEL
    tenant: str = ""
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512

    @property
    def request_id(self) -> RequestId:
        """Its name in the engine."""
        return RequestId(f"sim-{self.index}")

    def prompt_token_ids(self) -> tuple[int, ...]:
        """The synthesised prompt: even ids from hash ids, odd ones its own."""
        shared = [
            2 * (hash_id + 1)
            for hash_id in self.hash_ids[: -(-self.num_prompt_tokens // self.hash_block_tokens)]
            for _ in range(self.hash_block_tokens)
        ]
        own = self.num_prompt_tokens - len(shared)
        return (*shared[: self.num_prompt_tokens], *((2 * self.index + 1,) * max(0, own)))

    def spec(self) -> RequestSpec:
        """What is asked of the engine: exactly ``num_output_tokens`` tokens."""
        more: dict[str, Any] = {"tenant": self.tenant} if "tenant" in _SPEC_FIELDS else {}
        return RequestSpec(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids(),
            sampling=SamplingParams(temperature=0.0, max_tokens=self.num_output_tokens, ignore_eos=True),
            level=self.level,
            cache_salt=self.tenant,
            **more,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        name: what it is, for the report.
        requests: in order of arrival; indices are unique.
    """

    name: str
    requests: tuple[SimRequest, ...]

    def limited(self, num_requests: int) -> "Workload":
        """The first ``num_requests`` of it."""
        return dataclasses.replace(self, requests=self.requests[:num_requests])

    def scaled(self, factor: float) -> "Workload":
        """The same requests at ``factor`` times the rate.

        Raises:
            InvalidWorkload: the factor is not positive.
        """
        if not factor > 0:
            raise InvalidWorkload("scale", "must be greater than 0", factor)
        return self._mapped(lambda r: dataclasses.replace(r, arrival_s=r.arrival_s / factor))

    def with_prompts_up_to(self, num_tokens: int) -> "Workload":
        """Without the requests whose prompt is longer."""
        kept = tuple(r for r in self.requests if r.num_prompt_tokens <= num_tokens)
        return dataclasses.replace(self, requests=kept)

    def with_classes(self, shares: Mapping[str, float], seed: int) -> "Workload":
        """Classes drawn for its requests, each on its own.

        Args:
            shares: class name -> share of the requests; they must add up to 1.
            seed: of the draw.

        Raises:
            InvalidRequest: no class has that name.
            InvalidWorkload: the shares don't add up to 1.
        """
        levels = [level_named(name, field="classes") for name in shares]
        weights = list(shares.values())
        if min(weights, default=-1) < 0 or not math.isclose(sum(weights), 1.0, abs_tol=1e-9):
            raise InvalidWorkload("classes", "shares must be at least 0 and add up to 1", dict(shares))
        rng = random.Random(seed)
        drawn = rng.choices(levels, weights, k=len(self.requests))
        pairs = zip(self.requests, drawn, strict=True)
        requests = tuple(dataclasses.replace(request, level=level) for request, level in pairs)
        return dataclasses.replace(self, requests=requests)

    def with_tenants(self, num_tenants: int, seed: int) -> "Workload":
        """Tenants ``tenant-0 ..`` drawn for its requests, all equally likely."""
        rng = random.Random(seed)
        return self._mapped(lambda r: dataclasses.replace(r, tenant=f"tenant-{rng.randrange(num_tenants)}"))

    def _mapped(self, change: Callable[[SimRequest], SimRequest]) -> "Workload":
        return dataclasses.replace(self, requests=tuple(map(change, self.requests)))


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
        SimRequest(index, arrival_s, num_prompt, num_output, level)
        for index, (arrival_s, level, num_prompt, num_output) in enumerate(arrivals)
    )
    return Workload(f"{mix} ({duration_s:g} s, seed {seed})", tuple(requests))


def in_order(name: str, requests: Sequence[SimRequest]) -> Workload:
    """A workload of requests in any order: sorted by arrival, shifted to start at 0, numbered anew.

    Raises:
        InvalidWorkload: there are none.
    """
    if not requests:
        raise InvalidWorkload("workload", "must hold a request", name)
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start = ordered[0].arrival_s
    return Workload(
        name,
        tuple(
            dataclasses.replace(request, index=index, arrival_s=request.arrival_s - start)
            for index, request in enumerate(ordered)
        ),
    )


def _arrivals(traffic: TrafficClass, duration_s: float, rng: random.Random) -> list[float]:
    if traffic.rate_rps == 0:
        return [0.0] * traffic.num_requests
    times: list[float] = []
    time_s = rng.expovariate(traffic.rate_rps)
    while time_s < duration_s:
        times.append(time_s)
        time_s += rng.expovariate(traffic.rate_rps)
    return times
