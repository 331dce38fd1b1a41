"""Makes the workload that ``vorrangctl load`` sends: from a file, a mix by name, or options. Pure."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from workloads.arrivals import Arrival, Workload, in_order
from workloads.classes import level_named
from workloads.distributions import MAX_TOKENS, Length
from workloads.errors import InvalidWorkload
from workloads.mixes import MIXES
from workloads.sources import is_trace, workload_from

#: Requests of one run at most: each is kept with the time of each of its tokens.
MAX_REQUESTS = 200_000
ARRIVALS = ("poisson", "constant")
_SIGMA = 0.8
#: Unless said otherwise: long enough for a look, short enough to be waited for.
_MIX_DURATION_S = 60.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wished for where no file says it.

    Attributes:
        rate_rps: mean arrivals a second; with a file or mix: that it is brought to; None: as it is.
        duration_s: arrivals end then; None: the file's own end, 60 s of a mix, or 30 s.
        num_requests: most requests; None: as many as come.
        arrivals: ``poisson`` or ``constant``.
        classes: class name -> share of the requests; None: the file's own, or all ``standard``.
        prompt_tokens: length of a prompt, see ``parse_length``.
        output_tokens: length of an output.
        seed: of everything that is drawn.
    """

    rate_rps: float | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    arrivals: str = "poisson"
    classes: Mapping[str, float] | None = None
    prompt_tokens: str = "64"
    output_tokens: str = "64"
    seed: int = 0


def workload_of(source: str | None, wish: Wish) -> Workload:
    """The workload that is wished for.

    Args:
        source: as ``workloads.sources.workload_from`` takes it, or None: made up as ``wish`` says.
        wish: rate, length and so on.

    Raises:
        InvalidWorkload: names field, rule and value.
        OSError: the file can't be read.
    """
    _check(wish)
    workload = _made_up(wish) if source is None else _found(source, wish)
    if wish.classes is not None and source is not None:
        workload = workload.with_classes(wish.classes, wish.seed)
    if wish.num_requests is not None:
        workload = workload.limited(wish.num_requests)
    if not workload.requests:
        raise InvalidWorkload("workload", "must hold a request; raise rate or duration", workload.name)
    _check_number(len(workload.requests))
    return workload


def parse_classes(text: str) -> dict[str, float]:
    """Read ``interactive=0.2,batch=0.8``; shares are brought to a sum of 1.

    Raises:
        InvalidWorkload: it is not of that form, names no class, or a share is negative.
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        level_named(name, field="classes")
        try:
            shares[name] = float(share or 1)
        except ValueError:
            raise InvalidWorkload("classes", "must be CLASS=SHARE, ...", text) from None
    total = math.fsum(shares.values())
    if not (min(shares.values()) >= 0 and 0 < total < math.inf):
        raise InvalidWorkload("classes", "shares must be at least 0, one of them more", text)
    return {name: share / total for name, share in shares.items()}


def parse_length(text: str, field: str) -> Length:
    """Read a length: ``64``; ``16-256``: all equally likely; ``~200`` or ``~200/0.5``: log-normal.

    The latter has median 200 and standard deviation 0.8, or 0.5, of its logarithm.

    Raises:
        InvalidWorkload: it is not of these forms, or out of range.
    """
    try:
        if text.startswith("~"):
            median_text, _, sigma_text = text[1:].partition("/")
            median, sigma = float(median_text), float(sigma_text or _SIGMA)
            if not (1 <= median <= MAX_TOKENS and 0 <= sigma <= 5):
                raise ValueError
            mu = math.log(median)
            return lambda rng: min(MAX_TOKENS, max(1, round(rng.lognormvariate(mu, sigma))))
        low_text, _, high_text = text.partition("-")
        low, high = int(low_text), int(high_text or low_text)
        if not 1 <= low <= high <= MAX_TOKENS:
            raise ValueError
    except ValueError:
        rule = f"must be N, LOW-HIGH, ~MEDIAN or ~MEDIAN/SIGMA, in tokens from 1 to {MAX_TOKENS}"
        raise InvalidWorkload(field, rule, text) from None
    return lambda rng: rng.randint(low, high)


def _check_number(num_requests: float) -> None:
    if num_requests > MAX_REQUESTS:
        rule = f"must hold at most {MAX_REQUESTS} requests; see --requests and --duration"
        raise InvalidWorkload("workload", rule, round(num_requests))


def _check(wish: Wish) -> None:
    for name, value in (("rate", wish.rate_rps), ("duration", wish.duration_s)):
        if value is not None and not 0 < value < math.inf:
            raise InvalidWorkload(name, "must be greater than 0", value)
    if wish.num_requests is not None and wish.num_requests < 1:
        raise InvalidWorkload("requests", "must be at least 1", wish.num_requests)
    if wish.arrivals not in ARRIVALS:
        raise InvalidWorkload("arrivals", f"must be one of {', '.join(ARRIVALS)}", wish.arrivals)


def _found(source: str, wish: Wish) -> Workload:
    """A workload by name or file, brought to the rate that is wished for, up to when it is to end."""
    duration_s = _MIX_DURATION_S if wish.duration_s is None and source in MIXES else wish.duration_s
    workload = workload_from(source, seed=wish.seed)
    if wish.rate_rps is not None:
        factor = wish.rate_rps / workload.mean_rate_rps
        if duration_s is not None and not is_trace(source):  # as much more of it as the rate will use up
            workload = workload_from(source, seed=wish.seed, duration_s=duration_s * factor)
        workload = workload.scaled(factor)
    elif duration_s is not None:
        workload = workload_from(source, seed=wish.seed, duration_s=duration_s)
    if duration_s is None:
        return workload
    return Workload(workload.name, tuple(r for r in workload.requests if r.arrival_s < duration_s))


def _made_up(wish: Wish) -> Workload:
    """Arrivals of one process, each of a class that is drawn by its share."""
    rate_rps, duration_s = wish.rate_rps or 1.0, wish.duration_s
    if duration_s is None:
        duration_s = wish.num_requests / rate_rps * 2 if wish.num_requests else 30.0
    most = wish.num_requests or math.inf
    _check_number(min(most, rate_rps * duration_s))
    shares = dict(wish.classes or {"standard": 1.0})
    levels = [level_named(name) for name in shares]
    prompt = parse_length(wish.prompt_tokens, "prompt_tokens")
    output = parse_length(wish.output_tokens, "output_tokens")
    # Each quantity has a source of its own, so that changing one leaves the others as they were.
    times, kinds, prompts, outputs = (random.Random(f"{wish.seed}/{name}") for name in "tkpo")
    requests: list[Arrival] = []
    time_s = 0.0
    while len(requests) < most and time_s < duration_s:
        level = kinds.choices(levels, list(shares.values()))[0]
        requests.append(Arrival(len(requests), time_s, prompt(prompts), output(outputs), level))
        time_s += times.expovariate(rate_rps) if wish.arrivals == "poisson" else 1 / rate_rps
    return in_order(f"{wish.arrivals}, {rate_rps:g}/s, seed {wish.seed}", requests)
