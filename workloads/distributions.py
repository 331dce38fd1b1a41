"""When requests arrive and how long they are: the distributions a workload file may name.

Lengths, in tokens:

- ``500``: always;
- ``{min = 100, max = 900}``: uniform;
- ``{median = 500, sigma = 0.8, min = 1, max = 4096}``: log-normal, cut to the range; sigma is that of
  the logarithm: 0.8 makes the 90th percentile 2.8 times the median.

Arrivals (``process``):

- ``poisson``: ``rate_rps``;
- ``constant``: ``rate_rps``, evenly spaced;
- ``gamma``: ``rate_rps`` and ``cv``, the coefficient of variation of the gaps; above 1 it is bursty;
- ``bursts``: ``num_requests`` at once at ``first_s`` and ``every_s`` after, spread over ``spread_s``;
- ``at_once``: ``num_requests`` at the stream's start.
"""

import math
import random
from collections.abc import Callable, Iterator

from workloads.errors import InvalidWorkload
from workloads.tables import Table

MAX_TOKENS = 1_000_000
#: Draws a length in tokens.
Length = Callable[[random.Random], int]
#: Draws all arrival times from ``start_s`` up to ``end_s``, in order.
Arrivals = Callable[[random.Random, float, float], Iterator[float]]

PROCESSES = ("poisson", "constant", "gamma", "bursts", "at_once")


def read_length(parent: Table, key: str) -> Length:
    """Read a length.

    Raises:
        InvalidWorkload: it is none.
    """
    if not isinstance(parent.take_a_look(key), dict):
        length = parent.whole(key, most=MAX_TOKENS)
        return lambda rng: length
    table = parent.table(key)
    low = table.whole("min", 1, most=MAX_TOKENS)
    if "median" in table:
        median, sigma = table.number("median", least=1), table.number("sigma", 0.8, least=0)
        high = table.whole("max", MAX_TOKENS, least=low, most=MAX_TOKENS)
        table.end()
        mu = math.log(median)
        return lambda rng: min(high, max(low, round(rng.lognormvariate(mu, sigma))))
    high = table.whole("max", least=low, most=MAX_TOKENS)
    table.end()
    return lambda rng: rng.randint(low, high)


def read_arrivals(parent: Table) -> Arrivals:
    """Read ``arrivals``.

    Raises:
        InvalidWorkload: it is not what the module says.
    """
    table = parent.table("arrivals")
    process = table.text("process", one_of=PROCESSES)
    if process in ("bursts", "at_once"):
        arrivals = _bursts(table) if process == "bursts" else _at_once(table.whole("num_requests"))
    else:
        arrivals = _steady(process, table)
    table.end()
    return arrivals


def _steady(process: str, table: Table) -> Arrivals:
    gap_s = 1 / table.number("rate_rps", above=0)
    if process == "constant":
        return lambda rng, start_s, end_s: _until(end_s, start_s, lambda: gap_s, first=True)
    shape = 1.0 if process == "poisson" else 1 / table.number("cv", above=0) ** 2

    def gamma(rng: random.Random, start_s: float, end_s: float) -> Iterator[float]:
        if shape == 1.0:
            return _until(end_s, start_s, lambda: rng.expovariate(1 / gap_s))
        return _until(end_s, start_s, lambda: rng.gammavariate(shape, gap_s / shape))

    return gamma


def _bursts(table: Table) -> Arrivals:
    num_requests = table.whole("num_requests")
    first_s, spread_s = table.number("first_s", 0.0, least=0), table.number("spread_s", 0.0, least=0)
    every_s = table.number("every_s", math.nan, above=0) if "every_s" in table else math.inf
    if spread_s >= every_s:
        raise InvalidWorkload(table.field("spread_s"), f"must be less than every_s = {every_s:g}", spread_s)

    def bursts(rng: random.Random, start_s: float, end_s: float) -> Iterator[float]:
        burst_s = start_s + first_s
        while burst_s < end_s:
            yield from sorted(burst_s + rng.random() * spread_s for _ in range(num_requests))
            burst_s += every_s

    return bursts


def _at_once(num_requests: int) -> Arrivals:
    return lambda rng, start_s, end_s: iter([start_s] * num_requests)


def _until(end_s: float, time_s: float, gap: Callable[[], float], *, first: bool = False) -> Iterator[float]:
    if not first:
        time_s += gap()
    while time_s < end_s:
        yield time_s
        time_s += gap()
