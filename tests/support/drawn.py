"""Simulations drawn at random: a configuration of the walk's generator, a device, and what arrives.

A draw is a pure function of (seed, number). Its configuration is that of the walk's
episode of that number, so whatever the walk learns to draw is simulated as well; sizes
and times fit its small pools: a step takes about a second, as in the walk.
"""

import dataclasses
import os
import random
from dataclasses import dataclass

import pytest

from engine.runner.simulated import SimulatedRunner
from engine.scheduler.config import ClassConfig, SchedulerConfig
from engine.sim.profiles import HardwareProfile
from engine.sim.recorder import Recording
from tests.support.draws import DISCIPLINE_DRAWS, POLICY_DRAWS
from tests.support.walk import LEVELS, Episode
from workloads.arrivals import Arrival, Workload, in_order

FIRST_SEED = int(os.environ.get("VORRANG_SEED", "20261201"))
#: "seed/number": that draw alone.
DRAW = os.environ.get("VORRANG_DRAW", "")


@dataclass(frozen=True, slots=True)
class DrawnSimulation:
    """What ``simulate`` is called with.

    Attributes:
        seed, number: what it is a function of.
        config: of the scheduler, guessing included.
        profile: what steps cost, and the pool.
        prefix_cache: whether freed blocks stay findable.
        workload: what arrives.
        sample_every_s: between two samples.
    """

    seed: int
    number: int
    config: SchedulerConfig
    profile: HardwareProfile
    prefix_cache: bool
    workload: Workload
    sample_every_s: float

    @property
    def runner(self) -> SimulatedRunner:
        """A new one."""
        return SimulatedRunner(self.profile, context_tokens=self.config.max_context_tokens)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a request may find what another has computed."""
        return any(request.hash_ids for request in self.workload.requests)

    def without_guesses(self) -> SchedulerConfig:
        """Its configuration for steps whose decodes are made together."""
        return dataclasses.replace(self.config, speculation_tokens=0)


def drawn(seed: int, number: int) -> DrawnSimulation:
    """Draw number ``number`` of a seed."""
    driver = Episode(seed, number).driver
    rng = random.Random(f"simulation {seed}/{number}")
    config = dataclasses.replace(driver.config, **_more_settings(rng, driver.config))
    num_blocks, block_size = driver.blocks.num_blocks, driver.blocks.block_size
    if rng.random() < 0.25:  # a pool in which several of the longest fit
        num_blocks *= rng.choice([4, 16])
    return DrawnSimulation(
        seed,
        number,
        config,
        _profile(rng, num_blocks, block_size),
        driver.blocks.enable_prefix_cache,
        _workload(rng, num_blocks * block_size, config),
        rng.choice([0.7, 5.0, 1e9]),
    )


def _more_settings(rng: random.Random, config: SchedulerConfig) -> dict[str, object]:
    """What the walk leaves as it is."""
    pick = rng.choice
    more: dict[str, object] = {"preempt_for_arrivals": rng.random() < 0.8}
    more["max_context_tokens"] = pick([config.max_context_tokens, config.max_context_tokens, 40])
    if rng.random() < 0.3:
        for name in ("interactive", "standard", "batch"):
            more[name] = ClassConfig(
                max_wait_s=pick([1e9, 5.0, 30.0]),
                watermark=pick([0.0, 0.1, 0.4]),
                max_waiting_requests=pick([1, 3, 1000]),
                max_waiting_tokens=pick([40, 100_000]),
            )
    if config.discipline == "prefill_first":
        more["prefill_first_max_chunk_tokens"] = pick([1, 5, 8192])
    if rng.random() < 0.3:  # many decodes at a time, and prompts that fit into a step
        seats = rng.randint(6, 24)
        more["max_running_requests"], more["max_step_tokens"] = seats, seats + pick([0, 8, 60])
        more["max_chunk_tokens"] = pick([1, 2, 7, 64])
    return more


def _profile(rng: random.Random, num_blocks: int, block_size: int) -> HardwareProfile:
    """Every term of the cost model, or none but the first; a step takes about a second."""
    if rng.random() < 0.2:
        return HardwareProfile(
            "fixed", "drawn", 1000.0, 0.0, 0.0, 0.0, num_blocks, "drawn", block_size=block_size
        )
    return HardwareProfile(
        "drawn",
        "drawn",
        weights_ms=rng.uniform(200, 1500),
        base_ms=rng.uniform(100, 300),
        token_ms=rng.uniform(1, 200),
        kv_token_us=rng.uniform(0, 5000),
        num_blocks=num_blocks,
        source="drawn",
        overhead_ms=rng.choice([0.0, rng.uniform(0, 50)]),
        sequences_ms=rng.choice([(), ((1, -0.3), (3, 40.0), (8, 90.0))]),
        attention_pair_ns=rng.choice([0.0, rng.uniform(0, 1e6)]),
        mixed_kv_token_us=rng.choice([0.0, rng.uniform(0, 4000)]),
        block_size=block_size,
    )


def _workload(rng: random.Random, pool_tokens: int, config: SchedulerConfig) -> Workload:
    """Requests that crowd the pool; some could never fit, few are far longer than the others."""
    pick, num_requests = rng.choice, rng.choice([3, 12, 25, 40])
    mean_gap_s = pick([0.0, 0.5, 3.0, 8.0])  # 0: a backlog
    on_the_second = rng.random() < 0.3  # arrivals at the very ends of steps
    tenants = pick(["", "a", "ab", "abc"]) or [""]
    longest_output = pick([4, 24, 24, max(2, pool_tokens // 2), 200])
    levels = pick([LEVELS, LEVELS, (-100, -11, -10, 0, 9, 10, 100), (10,)])
    families = [[rng.randrange(4) for _ in range(12)] for _ in range(3)] if rng.random() < 0.5 else []
    hash_block_tokens = pick([1, 3, 4, 8])
    # With a pool that is full for long, whoever waits lacks blocks; else it is seats, or the crowd before it.
    is_full = rng.random() < 0.3
    requests, now = [], 0.0
    for index in range(num_requests):
        now += rng.expovariate(1 / mean_gap_s) if mean_gap_s and rng.random() < 0.8 else 0.0
        is_large = rng.random() < 0.1
        num_prompt_tokens = rng.randint(1, min(60, pool_tokens + 1) if is_large else 12)
        num_output_tokens = rng.randint(1, 3 if rng.random() < 0.2 else longest_output)
        if is_full:
            num_prompt_tokens = rng.randint(1, max(1, min(200, pool_tokens) // 3))
            num_output_tokens = rng.randint(1, max(1, min(200, pool_tokens) // 2))
        requests.append(
            Arrival(
                index,
                float(round(now)) if on_the_second else now,
                num_prompt_tokens,
                num_output_tokens,
                level=pick(levels),
                tenant=pick(tenants),
                hash_ids=tuple(pick(families)) if families and rng.random() < 0.8 else (),
                hash_block_tokens=hash_block_tokens,
            )
        )
    return in_order("drawn", requests, shift=False)


def plain(recording: Recording) -> Recording:
    """A recording whose errors are compared by what they say."""
    failures = {name: f"{type(error).__name__}: {error}" for name, error in recording.failures.items()}
    return dataclasses.replace(recording, failures=failures)


def differences(one: Recording, other: Recording) -> list[str]:
    """What two recordings do not have alike, a line each."""
    found = []
    for field in dataclasses.fields(Recording):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name in ("records", "failures"):
            found += [
                f"{field.name}[{name!r}]: {mine.get(name)} / {theirs.get(name)}"
                for name in mine | theirs
                if mine.get(name) != theirs.get(name)
            ]
        elif mine != theirs:
            found.append(f"{field.name}: {mine} / {theirs}")
    return found


#: Settings as they are written on a command line, and values that a run of a made-up mix feels.
SETTINGS = {
    "max_running_requests": ("1", "4", "16", "60"),
    "max_step_tokens": ("64", "256", "2048"),
    "max_chunk_tokens": ("1", "16", "64", "100", "512"),
    "max_waiting_requests": ("5", "40"),
    "max_context_tokens": ("700", "4096"),
    "preempt_for_arrivals": ("false", "true"),
    "preempt_level_gap": ("1", "20", "21"),
    "watermark": ("0", "0.1", "0.3"),
    "max_wait_s": ("2", "15"),
    "batch.max_wait_s": ("1", "5"),
    "batch.max_waiting_tokens": ("4000", "20000"),
    "resume_quantum_tokens": ("0", "40"),
    "max_preemptions": ("1", "2"),
    "max_preemptions_per_step": ("1", "2"),
    "max_bypass": ("0", "1", "4"),
    "starved_share": ("0.05", "0.5"),
    "prefix_wait_tokens": ("1", "64"),
    "prefill_first_max_input_tokens": ("64", "1000"),
    "prefill_first_max_chunk_tokens": ("16", "300"),
    "prefill_first_max_requests": ("1", "3"),
    "prefill_first_conservativeness": ("0.1", "0.5"),
    "prefill_first_max_decode_gap_ms": ("none", "60", "400"),
}


def drawn_settings(rng: random.Random, most: int = 6) -> list[str]:
    """``field=value``, as after ``--set``; none that can't stand together."""
    names = rng.sample(sorted(SETTINGS), rng.randint(0, most))
    settings = {name: rng.choice(SETTINGS[name]) for name in names}
    if int(settings.get("max_running_requests", 256)) > int(settings.get("max_step_tokens", 2048)):
        settings["max_running_requests"] = settings["max_step_tokens"]
    return [f"{name}={value}" for name, value in settings.items()]


def drawn_command(seed: int, number: int) -> list[str]:
    """Arguments of ``vorrang sim run``: a made-up mix, crowded, under policy, discipline and settings."""
    rng = random.Random(f"command {seed}/{number}")
    pick = rng.choice
    arguments = [pick(["steady", "saturated", "saturated", "backlog"]), "--seed", str(rng.randrange(1000))]
    arguments += [
        "--duration",
        pick(["8", "15"]),
        "--scale",
        pick(["1", "3", "8"]),
        "--limit",
        pick(["30", "60"]),
    ]
    arguments += ["--profile", pick(["rtx4090", "rtxpro6000", "a100", "h100"])]
    arguments += ["--num-blocks", pick(["150", "300", "300", "2000"])]
    arguments += ["--policy", pick(POLICY_DRAWS)]
    arguments += ["--discipline", pick(DISCIPLINE_DRAWS)]
    arguments += pick([[], ["--tenants", "3"]]) + pick(
        [[], ["--classes", "interactive=0.3,standard=0.3,batch=0.4"]]
    )
    for setting in drawn_settings(rng):
        arguments += ["--set", setting]
    return arguments


# How tests go through draws


def draws(num_quick, num_deep, num_each):
    """Seeds and numbers as parameters, ``num_each`` at a time, the latter parts for the deep tests alone."""
    if DRAW:
        seed, number = map(int, DRAW.split("/"))
        return [pytest.param(seed, range(number, number + 1), id=DRAW)]
    return [
        pytest.param(
            FIRST_SEED, range(i, i + num_each), id=f"{i}-", marks=[pytest.mark.deep] * (i >= num_quick)
        )
        for i in range(0, num_deep, num_each)
    ]


class Replay:
    """Names the draw under way when a test fails in it."""

    def __init__(self, request, seed):
        self._test = f"{request.path.relative_to(request.config.rootpath)}::{request.node.originalname}"
        self._seed = seed
        self._number = None

    def __call__(self, number):
        self._number = number
        return self

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, Exception):
            error.add_note(f"again: VORRANG_DRAW={self._seed}/{self._number} python -m pytest {self._test}")
