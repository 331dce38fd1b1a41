"""What arrives: requests by length and time, made up or replayed.

A workload holds no tokens. A prompt is synthesised when its request arrives: the
same hash ids give the same leading tokens, everything else is unique, so the
prefix cache sees exactly the sharing the workload has.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workloads.classes import DEFAULT_LEVEL, level_named
from workloads.errors import InvalidWorkload

#: Thirty years: beyond, seconds as floats no longer tell one step from the next.
MAX_ARRIVAL_S = 1e9


@dataclass(frozen=True, slots=True)
class Arrival:
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
        label: free text that groups requests in a report; empty: their class is enough.
    """

    index: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    level: int = DEFAULT_LEVEL
    tenant: str = ""
    hash_ids: tuple[int, ...] = ()
    hash_block_tokens: int = 512
    label: str = ""

    @property
    def request_id(self) -> str:
        """Its name, in the engine and in records."""
        return f"request-{self.index}"

    def prompt_token_ids(self, vocab_size: int = 2**31) -> tuple[int, ...]:
        """The synthesised prompt: even ids from hash ids, odd ones its own.

        Args:
            vocab_size: ids are below it; at least 4. A small one makes every number
                a pattern of several ids, so that prompts still differ from their start.
        """
        shared: list[int] = []
        for hash_id in self.hash_ids[: -(-self.num_prompt_tokens // self.hash_block_tokens)]:
            shared += _repeated(hash_id + 1, self.hash_block_tokens, vocab_size, 0)
        own = self.num_prompt_tokens - len(shared)
        return (*shared[: self.num_prompt_tokens], *_repeated(self.index, max(0, own), vocab_size, 1))


def _repeated(number: int, length: int, vocab_size: int, parity: int) -> tuple[int, ...]:
    """``length`` ids that say ``number`` over and over, in digits of base ``vocab_size / 2``."""
    base = max(2, vocab_size // 2)
    if number < base and vocab_size >= 2**31:
        return (2 * number + parity,) * length
    digits = [number % base]
    # Always the same number of digits: enough for 2^40 numbers.
    for _ in range(math.ceil(40 / math.log2(base)) - 1):
        number //= base
        digits.append(number % base)
    ids = tuple(2 * digit + parity for digit in digits)
    return (ids * (length // len(ids) + 1))[:length]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        name: what it is, for the report.
        requests: in order of arrival; indices are unique.
    """

    name: str
    requests: tuple[Arrival, ...]

    @property
    def mean_rate_rps(self) -> float:
        """Arrivals a second from the start to the last one.

        Raises:
            InvalidWorkload: all arrive at the start, so there is no rate.
        """
        last_s = self.requests[-1].arrival_s if self.requests else 0.0
        if last_s <= 0:
            raise InvalidWorkload("rate", "needs a workload whose requests arrive over time", self.name)
        return len(self.requests) / last_s

    def at_rate(self, rate_rps: float) -> "Workload":
        """The same requests, ``rate_rps`` of them a second in the mean.

        Raises:
            InvalidWorkload: the rate is not positive, or there is none to scale.
        """
        return self.scaled(rate_rps / self.mean_rate_rps)

    def limited(self, num_requests: int) -> "Workload":
        """The first ``num_requests`` of it."""
        return dataclasses.replace(self, requests=self.requests[:num_requests])

    def scaled(self, factor: float) -> "Workload":
        """The same requests at ``factor`` times the rate.

        Raises:
            InvalidWorkload: the factor is not a positive number, or the last request would come in no time.
        """
        if not 0 < factor < math.inf:
            raise InvalidWorkload("scale", "must be greater than 0 and finite", factor)
        if self.requests and self.requests[-1].arrival_s / factor > MAX_ARRIVAL_S:
            rule = f"must leave the last arrival within {MAX_ARRIVAL_S:g} s"
            raise InvalidWorkload("scale", rule, factor)
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
            InvalidWorkload: no class has that name, or the shares don't add up to 1.
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

    def _mapped(self, change: Callable[[Arrival], Arrival]) -> "Workload":
        return dataclasses.replace(self, requests=tuple(map(change, self.requests)))


def in_order(name: str, requests: Sequence[Arrival], *, shift: bool = True) -> Workload:
    """A workload of requests in any order: sorted by arrival and numbered anew, from 0 s on if ``shift``.

    Raises:
        InvalidWorkload: there are none.
    """
    if not requests:
        raise InvalidWorkload("workload", "must hold a request", name)
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start = ordered[0].arrival_s if shift else 0.0
    return Workload(
        name,
        tuple(
            dataclasses.replace(request, index=index, arrival_s=request.arrival_s - start)
            for index, request in enumerate(ordered)
        ),
    )


def parse_rates(text: str) -> list[float]:
    """Read offered rates, ``1,2.5,4`` requests a second; ascending, each once.

    Raises:
        InvalidWorkload: it is not of that form, or a rate is not above 0 and finite.
    """
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise InvalidWorkload("rates", "must be numbers separated by commas", text) from None
    if not all(0 < rate < math.inf for rate in rates):
        raise InvalidWorkload("rates", "must be greater than 0 and finite", text)
    return rates
