"""A seeded random walk over the scheduler: any calls, in any order, on small pools.

A walk is a row of episodes. An episode is a pure function of (seed, number): a
configuration drawn at random, then calls of a ``Driver``, which checks every
invariant, then a drain to the end, after which everything must be free. Calls are
plain data, so a failing episode can be shortened and printed as a script.
"""

import random
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from engine.errors import Displaced, InternalError, InvalidRequest, QueueFull
from engine.events import Failed, Finished, Preempted
from engine.request import FinishReason, RequestId
from engine.scheduler.commands import Command, Fail, Finish, Park, Preempt, SetLevel, Unpark
from engine.scheduler.config import TenantConfig
from tests.support.decisions import MemoryLog
from tests.support.draws import DISCIPLINE_DRAWS, POLICY_DRAWS
from tests.support.drive import Driver
from tests.support.queue_oracle import is_for_other_reasons

LEVELS = (-10, -1, 0, 0, 1, 10, 10)
KINDS = ("cancel", "fail", *["preempt"] * 3, *["park"] * 2, *["unpark"] * 3, *["set_level"] * 4)
#: What episodes are about, in turn.
MOODS = ("growth", "crowd", "seats", "limits", "flood", "growth", "crowd", "seats", "mixed")
#: Every n-th episode is recorded and replayed; every n-th recounts after every call.
REPLAY_EVERY, RECOUNT_EVERY = 10, 8

#: Steps that are spent on shortening a failing episode.
MAX_SHORTENING_STEPS = 50_000
TEST = "tests/property/test_scheduler_walk.py"


def family(number: int, size: int) -> list[int]:
    """A prompt; those of one family share their beginning."""
    return [(number * 50 + i) % 256 for i in range(size)]


class Call(NamedTuple):
    """Something done to a driver.

    ``step`` has commands in between as tuples, and names of rows that fail.
    """

    what: str
    args: tuple[Any, ...] = ()
    more: Mapping[str, Any] = MappingProxyType({})

    def perform(self, driver: Driver) -> Any:
        """Do it."""
        if self.what == "submit":
            name, number, size = self.args
            return driver.try_submit(name, family(number, size), **self.more)
        if self.what == "submit_together":
            names, number, size = self.args
            return driver.try_submit_together(names, family(number, size), **self.more)
        if self.what == "set_level":
            return driver.try_apply(command("set_level", *self.args))
        if self.what == "step":
            between, failing = self.args
            errors = {name: InternalError("nan") for name in failing}
            return driver.step(between=tuple(command(*c) for c in between), failing=errors)
        if self.what == "fail":
            return driver.apply(command("fail", *self.args))
        return getattr(driver, self.what)(*self.args)

    def __str__(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.more.items())
        if self.what == "set_level":
            return f"driver.try_apply(command('set_level', {', '.join(map(repr, self.args))}))"
        if self.what == "submit_together":
            names, number, size = self.args
            return f"driver.try_submit_together({names!r}, family({number}, {size}){more})"
        if self.what == "submit":
            name, number, size = self.args
            return f"driver.try_submit({name!r}, family({number}, {size}){more})"
        if self.what == "step":
            between, failing = self.args
            parts = []
            if between:
                commands = ", ".join(f"command{c!r}" for c in between)
                parts.append(f"between=({commands},)")
            if failing:
                errors = ", ".join(f'{name!r}: InternalError("nan")' for name in failing)
                parts.append(f"failing={{{errors}}}")
            return f"driver.step({', '.join(parts)})"
        if self.what == "fail":
            return f"driver.apply(command('fail', {self.args[0]!r}))"
        return f"driver.{self.what}({', '.join(map(repr, self.args))})"


def command(what: str, name: str, *args: int) -> Command:
    """A command by its name."""
    if what == "fail":
        return Fail(RequestId(name), InternalError("nan"))
    kinds = {"cancel": Finish, "preempt": Preempt, "set_level": SetLevel, "park": Park, "unpark": Unpark}
    return kinds[what](RequestId(name), *args)


STEP = Call("step", ((), ()))


class Episode:
    """One run: a configuration and calls drawn as it goes; all it did is in ``calls``.

    Attributes:
        config: what the driver is made of.
        calls: what was done so far.
        visited: how often something of interest was seen.
    """

    def __init__(self, seed: int, number: int, depth: int = 0) -> None:
        self.depth = depth
        self.number = number
        self.random = random.Random(f"{seed}/{number}")
        self.config = self.draw_config()
        self.calls: list[Call] = []
        self.visited: Counter[str] = Counter()
        self.log = MemoryLog() if number % REPLAY_EVERY == 0 else None
        self.driver = Driver(decisions=self.log, check_every_call=number % RECOUNT_EVERY == 0, **self.config)
        self.num_steps = self.random.choice([60, 120, 240])
        # In some episodes masks are late; drawn apart, so that the others are what they were.
        is_late = random.Random(f"{seed}/{number}/sits").random() < 0.2
        self.sits = is_late and not self.driver.config.speculation_tokens
        self.alive: list[str] = []
        self.ended: list[str] = []  # by the last call
        self.bothered: Counter[str] = Counter()
        self.num_submitted = 0

    # What is drawn

    def draw_config(self) -> dict[str, Any]:
        """Small pools and few seats."""
        rng = self.random
        pick = rng.choice
        block_size = pick([1, 2, 4, 4, 4])
        self.mood = mood = MOODS[self.number % len(MOODS)]
        pool_tokens = pick([72, 100] if mood == "seats" else [8, 16, 24, 32, 40, 56, 56])
        seats = rng.randint(3 if mood == "growth" else 1, 3 if mood == "seats" else 5)
        config = {
            "num_blocks": max(2, pool_tokens // block_size),
            "block_size": block_size,
            "depth": self.depth,
            "policy": pick(POLICY_DRAWS),
            "discipline": pick(DISCIPLINE_DRAWS),
            "max_running_requests": seats,
            "max_step_tokens": seats + pick([0, 1, 3, 6, 12]),
            "max_chunk_tokens": rng.randint(1, 9),
            "max_scored_tokens": pick([1, 3, 32]),
            "preempt_level_gap": pick([1, 1, 5]),
            "watermark": pick([0.0, 0.0, 0.02, 0.3]),
            "prefix_cache": rng.random() < 0.6,
            "prefix_wait_tokens": pick([256, 1, 4, 12]),
            "max_bypass": pick([0, 0, 1, 3]),
            "max_wait_s": pick([1e9, 1e9, 1e9, 1e9, 60.0, 12.0]),
            "resume_quantum_tokens": pick([0, 2, 5]),
            "max_preemptions": pick([1, 2, 8, 100, 100]),
            "max_preemptions_per_step": pick([1, 2, 8]),
            "starved_share": pick([0.1, 0.1, 0.5]),
        }
        if not self.depth:
            config["speculation_tokens"] = pick([0, 0, 1, 4])
            config["speculation_max_running"] = pick([1, 8])
        if mood == "growth":
            config["max_wait_s"] = pick([1e9, 1e9, 1e9, 30.0])
        elif mood == "flood":
            config["max_wait_s"] = pick([20.0, 12.0, 4.0])
        elif mood == "limits":
            config["max_waiting_requests"] = pick([1, 2, 4, 6, 100])
            config["max_tenant_waiting_requests"] = pick([2, 3, 100, 100])
            config["max_tenant_waiting_tokens"] = pick([30, 1000])
            config["class_limits"] = {
                name: {
                    "max_waiting_requests": pick([1, 2, 3, 100, 100]),
                    "max_waiting_tokens": pick([12, 30, 1000, 1000]),
                }
                for name in ("interactive", "standard", "batch")
                if rng.random() < 0.6
            }
        if mood in ("limits", "seats", "flood"):
            limits = pick(
                [{}, {"max_running_requests": 1}, {"max_running_requests": 2, "max_running_tokens": 40}]
            )
            own = {}
            if mood == "limits":
                own = {
                    "max_waiting_requests": pick([None, 1, 3]),
                    "max_waiting_tokens": pick([None, None, 20]),
                }
            config["tenants"] = (
                TenantConfig("a", **limits),
                TenantConfig("b", weight=pick([0.5, 3.0]), **own),
            )
        if config["discipline"] == "prefill_first":
            config["prefill_first_max_input_tokens"] = pick([16384, 6])
            config["prefill_first_max_requests"] = pick([1024, 1, 2])
            config["prefill_first_conservativeness"] = pick([1.0, 0.2])
            config["prefill_first_max_decode_gap_ms"] = pick([None, None, 2500.0])
        return config

    def draw_calls(self) -> Iterator[Call]:
        """What to do next, for ever; looks at the driver, which must have done what came before."""
        rng, mood = self.random, self.mood
        limit = 12 if mood == "limits" else 7
        while True:
            for _ in range(rng.randint(0, max(0, limit - len(self.alive)))):
                yield self.draw_submit()
            if len(self.alive) < limit and rng.random() < (0.3 if mood == "limits" else 0.05):
                yield self.draw_siblings()
            if mood == "flood" and len(self.alive) < 11:
                yield self.draw_submit(level=-20, size=rng.randint(1, 12))
            if mood == "crowd" and len(self.alive) <= 3:
                for _ in range(rng.randint(2, 5)):
                    yield self.draw_submit(size=rng.randint(1, 24), max_tokens=rng.randint(4, 24))
                yield from [STEP] * rng.randint(1, 3)
                yield self.draw_submit(level=-30, size=rng.randint(1, 12), max_tokens=4)
            if self.alive and rng.random() < 0.25:
                yield Call(*self.draw_command())
            if self.alive and mood == "limits" and rng.random() < 0.6:
                yield Call("set_level", (rng.choice(self.alive), rng.choice(LEVELS)))
            for _ in range(rng.randint(1, 6)):
                yield self.draw_step()
                yield from self.at_the_brink()
            if self.alive and rng.random() < 0.02:  # the runner; again and again, it makes somebody guilty
                how = rng.choice(["in_step", "between"])
                if self.depth and rng.random() < 0.4:
                    how = "fails"
                yield from [Call("die", (how,))] * rng.choice([1, 1, 2, 3])
            if self.sits and self.alive and rng.random() < 0.6:
                yield Call("sit_out", (rng.choice(self.alive), rng.random() < 0.5))
            if self.sits and self.alive and rng.random() < 0.5:
                yield Call("mask_ready", (rng.choice(self.alive),))
            if (parked := self.driver.scheduler.parked()) and rng.random() < 0.4:
                yield Call("unpark", (str(rng.choice(parked).request_id),))

    def draw_submit(
        self, *, level: int | None = None, size: int | None = None, max_tokens: int | None = None
    ) -> Call:
        """A request. Families are few, so prompts share prefixes; r1 and r11 must not be mixed up (7)."""
        rng = self.random
        pool_tokens = self.driver.blocks.num_blocks * self.driver.blocks.block_size
        grows = self.mood == "growth" and rng.random() < 0.8
        if size is None:
            is_large = not grows and rng.random() < 0.25
            size = rng.randint(1, min(40, pool_tokens + rng.choice([-1, -1, 1])) if is_large else 8)
        longest = 24
        if grows:
            longest = pool_tokens if rng.random() < 0.15 else max(2, pool_tokens // 2)
        more: dict[str, Any] = {"level": rng.choice(LEVELS) if level is None else level}
        more["max_tokens"] = max_tokens = rng.randint(1, longest) if max_tokens is None else max_tokens
        now, chance = self.driver.now, rng.random
        if chance() < 0.2:
            more["seed"] = rng.randint(0, 3)
        if chance() < 0.2:
            more["cache_salt"] = "b"
        if chance() < 0.2:
            more["adapter"] = rng.choice("xy")
        if chance() < 0.5:
            more["tenant"] = rng.choice("abc")
        if chance() < 0.08:
            more["queue_deadline"] = now + rng.randint(0, 30)
        if chance() < 0.08:
            more["total_deadline"] = now + rng.randint(0, 40)
        if chance() < 0.15:
            more["min_tokens"] = rng.randint(0, max_tokens)
        if chance() < 0.15:
            more["eos_token_ids"] = [rng.randint(32, 126) for _ in range(4)]
        if chance() < 0.15:
            more["stop_token_ids"] = tuple(rng.randint(32, 126) for _ in range(4))
        if chance() < 0.1:
            more["prompt_logprobs"] = 0
        if chance() < 0.15:
            more["family"] = rng.choice("pq")
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        return Call("submit", (name, rng.randint(0, 2), size), more)

    def draw_siblings(self) -> Call:
        """Outputs of one prompt, which arrive together."""
        call = self.draw_submit()
        first, number, size = call.args
        names = (first, *(f"{first}.{index}" for index in range(1, self.random.randint(2, 4))))
        return Call("submit_together", (names, number, size), {**call.more, "family": first})

    def draw_step(self) -> Call:
        """A step; now and then commands come in while it computes, or a row fails."""
        rng = self.random
        if not self.alive or rng.random() < 0.92:
            return STEP
        between = []
        for _ in range(rng.randint(1, 3)):
            what, args = self.draw_command()
            between.append((what, *args))
        failing = (rng.choice(self.alive),) if rng.random() < 0.05 else ()
        return Call("step", (tuple(between), failing))

    def draw_command(self) -> tuple[str, tuple[Any, ...]]:
        """A command to a request that is probably alive."""
        rng = self.random
        name = rng.choice(self.alive) if rng.random() < 0.95 else f"r{rng.randrange(self.num_submitted)}"
        what = rng.choice(KINDS)
        return what, (name, rng.choice(LEVELS)) if what == "set_level" else (name,)

    def at_the_brink(self) -> Iterator[Call]:
        """Preempt or park a request that has just outgrown the pool, or is about to, before the next plan.

        Alive with more tokens than fit, it would wait for ever and everybody behind it as well.
        """
        driver, rng = self.driver, self.random
        pool_tokens = driver.blocks.num_blocks * driver.blocks.block_size
        for name in [*self.alive, *self.ended]:
            seen = driver.seen[RequestId(name)]
            if seen.end[1] is FinishReason.CAPACITY and self.bothered[name] < 3 and rng.random() < 0.7:
                num_tokens = len(seen.spec.prompt_token_ids) + len(seen.tokens)
                if num_tokens >= pool_tokens:
                    self.bothered[name] += 1
                    outgrown = num_tokens > pool_tokens
                    self.visited["outgrown, then preempted or parked"] += outgrown
                    self.visited["full, then preempted or parked"] += not outgrown
                    yield Call(rng.choice(["preempt", "preempt", "park"]), (name,))

    # How it is done

    def run(self) -> None:
        """As many steps as were drawn, or a few more; then to the end; then the log once more."""
        for call in self.draw_calls():
            self.do(call)
            if self.driver.num_steps >= self.num_steps:
                break
        self.do(Call("masks_ready"))
        for request in self.driver.scheduler.parked():
            self.do(Call("unpark", (str(request.request_id),)))
        self.do(Call("finish"))
        if self.log is not None:
            self.visited["replayed"] += 1
            self.log.replay(self.driver.num_steps)
        self.count()

    def do(self, call: Call) -> None:
        """Do it, note it, count what is not to be seen in events."""
        self.calls.append(call)
        outcome = call.perform(self.driver)
        if call.what in ("submit", "submit_together"):
            names = [call.args[0]] if call.what == "submit" else call.args[0]
            together = " together" if len(names) > 1 else ""
            if outcome is None:
                self.alive.extend(names)
                self.visited["accepted together"] += bool(together)
            elif isinstance(outcome, QueueFull):
                self.visited[f"refused{together} by a limit"] += 1
            else:
                assert isinstance(outcome, InvalidRequest)
                never = not is_for_other_reasons(outcome)
                self.visited[f"refused{together} for good" if never else "refused as too large"] += 1
        elif call.what == "step" and outcome.gate is not None:
            self.visited[f"kept out by {outcome.gate.value}"] += 1
            max_bypass, seen = self.driver.config.max_bypass, self.driver.seen_alive
            if max_bypass and any(
                seen[r.request_id].num_passed >= max_bypass for r in self.driver.scheduler.waiting()
            ):
                self.visited["steps with a fence"] += 1
        self.ended = [name for name in self.alive if RequestId(name) not in self.driver.seen_alive]
        if self.ended:
            self.alive = [name for name in self.alive if RequestId(name) in self.driver.seen_alive]

    def count(self) -> None:
        """What the requests went through."""
        visited = self.visited
        visited["episodes"] += 1
        visited["steps"] += self.driver.num_steps
        visited.update(self.driver.noted)
        for seen in self.driver.seen.values():
            visited["starved"] += seen.starved
            for event in seen.events:
                if isinstance(event, Preempted):
                    visited["preempted"] += 1
                    visited[f"preempted for {event.reason.value}"] += 1
                elif isinstance(event, Finished):
                    visited[f"ended by {event.reason.value}"] += 1
                elif isinstance(event, Failed):
                    visited["displaced" if isinstance(event.error, Displaced) else "failed"] += 1


class WalkFailed(AssertionError):
    """An episode broke a rule; the message says how to do it again."""


def walk(seed: int, num_steps: int, *, only: int | None = None, depth: int = 0) -> Counter[str]:
    """Episodes until ``num_steps`` steps are done, or the one of number ``only``.

    Returns:
        What was visited, and how often.

    Raises:
        WalkFailed: an invariant does not hold.
    """
    visited: Counter[str] = Counter()
    number = 0 if only is None else only
    while visited["steps"] < num_steps:
        episode = Episode(seed, number, depth)
        try:
            episode.run()
        except Exception as error:
            raise WalkFailed(failure(seed, episode, error)) from error
        visited.update(episode.visited)
        number += 1
        if only is not None:
            break
    return visited


# When it fails


def failure(seed: int, episode: Episode, error: Exception) -> str:
    """What to do with a failed episode: how to run it again, and a short script that fails alike."""
    calls = shortened(episode.config, episode.calls, error)
    return "\n".join(
        [
            f"{type(error).__name__}: {error}",
            f"seed {seed}, episode {episode.number}, call {len(episode.calls)}; again:",
            f"  VORRANG_WALK_DEPTH={episode.depth} VORRANG_WALK_EPISODE={seed}/{episode.number}"
            f" python -m pytest {TEST}",
            f"the same with {len(calls)} calls:",
            "  from tests.support.walk import *",
            f"  driver = Driver(**{episode.config!r})",
            *(f"  {line}" for line in script(calls)),
        ]
    )


def script(calls: Sequence[Call]) -> list[str]:
    """Calls as lines of Python."""
    lines: list[str] = []
    for line, group in groupby(map(str, calls)):
        num_times = len(list(group))
        lines += [line] if num_times == 1 else [f"for _ in range({num_times}):", f"    {line}"]
    return lines


def shortened(config: dict[str, Any], calls: Sequence[Call], error: Exception) -> list[Call]:
    """Fewer of the calls that fail in the same place: leaves out ever smaller parts while any can go.

    All of them when they do not fail again, as when a replay differed.
    """
    place, calls, num_steps_left = place_of(error), list(calls), MAX_SHORTENING_STEPS
    size = len(calls) // 2
    while size >= 1 and num_steps_left > 0:
        start, before = 0, len(calls)
        while start < len(calls) and num_steps_left > 0:
            fewer = calls[:start] + calls[start + size :]
            found, num_steps = attempt(config, fewer)
            num_steps_left -= num_steps + 10
            if found == place:
                calls = fewer
            else:
                start += size
        if size == 1 and len(calls) == before:
            break
        size = max(1, size // 2)
    return calls


def attempt(config: dict[str, Any], calls: Sequence[Call]) -> tuple[tuple[str, int | None] | None, int]:
    """Where these calls fail (None: nowhere), and the steps they took."""
    driver = Driver(**config)
    try:
        for call in calls:
            call.perform(driver)
    except Exception as error:
        return place_of(error), driver.num_steps
    return None, driver.num_steps


def place_of(error: Exception) -> tuple[str, int | None]:
    """The line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return frame.filename, frame.lineno
