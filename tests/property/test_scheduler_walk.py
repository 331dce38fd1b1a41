"""A random walk over the scheduler: any calls, in any order, on small pools.

10,000 steps by ``make test``, and as many with every plan made while the step before is
in flight; 40,000 in CI, 100,000 by ``make test-deep``, a million by ``make soak``. The
state machine beside it draws the same calls with Hypothesis and finds the shortest
failing run; this one goes further for the same time.
"""

import os
import textwrap

import pytest

from engine.scheduler.limits import QueueLimits
from engine.scheduler.scheduler import Scheduler
from tests.support.walk import MOODS, Episode, WalkFailed, walk

NUM_WALKS = 10
NUM_STEPS = int(os.environ.get("VORRANG_WALK_STEPS", "100000")) // NUM_WALKS
FIRST_SEED = int(os.environ.get("VORRANG_SEED", "20261129"))
#: "seed/number": that episode alone, at the depth VORRANG_WALK_DEPTH.
EPISODE = os.environ.get("VORRANG_WALK_EPISODE", "")
SEEDS = [int(EPISODE.split("/")[0])] if EPISODE else range(FIRST_SEED, FIRST_SEED + NUM_WALKS)


def rarer_from(slow, deep, seeds):
    """Seeds as parameters, from the first place on for the slow tests alone, from the second for the deep."""
    marks = [[pytest.mark.deep] if i >= deep else [pytest.mark.slow] * (i >= slow) for i in range(len(seeds))]
    return [pytest.param(seed, marks=mark) for seed, mark in zip(seeds, marks, strict=True)]


#: What ten thousand steps must come by, or they prove little; less than half of what they do.
AT_LEAST = {
    "preempted for growth": 35,
    "preempted for blocks": 35,
    "preempted for seats": 25,
    "preempted for operator": 50,
    "preempted for runner": 18,
    "kept out by seat": 800,
    "kept out by blocks": 900,
    "kept out by watermark": 180,
    "kept out by budget": 25,
    "kept out by prefix": 10,
    "kept out by tenant": 5,
    "kept out by just_preempted": 50,
    "steps with a fence": 120,
    "starved": 80,
    "ended by capacity": 50,
    "full, then preempted or parked": 45,
    "outgrown, then preempted or parked": 12,
    "ended by time_limit": 50,
    "ended by stop": 18,
    "ended by stop_token": 15,
    "ended by cancelled": 50,
    "failed": 45,
    "displaced": 25,
    "refused by a limit": 150,
    "refused as too large": 12,
    "refused for good": 8,
    "accepted together": 12,
    "refused together by a limit": 5,
    "refused together for good": 8,
    "guessed": 100,
    "more than one token in a step": 50,
    "replayed": 2,
}

#: The same for plans made ahead, in ten thousand steps.
AT_LEAST_AHEAD = {
    "granted a token nobody knew": 4000,
    "computed a token nobody knew": 1200,
    "computed in vain": 80,
    "delivered to one without a seat": 180,
    "failed as a whole": 10,
    "kept out by in_flight": 20,
    "lost with two steps in flight": 4,
    "preempted for growth": 60,
    "preempted for blocks": 35,
    "preempted for seats": 25,
    "preempted for operator": 50,
    "kept out by prefix": 10,
    "starved": 80,
    "ended by capacity": 60,
    "ended by stop": 18,
    "ended by cancelled": 45,
    "replayed": 2,
}

#: What is too rare for ten thousand steps.
AT_LEAST_IN_SOAKS = {"refused a level": 50, "displaced for a level": 5}


@pytest.mark.timeout(120 if NUM_STEPS <= 10_000 else 0)
@pytest.mark.parametrize("seed", rarer_from(1, 4, SEEDS))
def test_a_random_walk_keeps_every_invariant(seed):
    if EPISODE:
        depth = int(os.environ.get("VORRANG_WALK_DEPTH", "0"))
        walk(seed, 1, only=int(EPISODE.split("/")[1]), depth=depth)
        return
    check_visited(seed, walk(seed, NUM_STEPS), AT_LEAST | (AT_LEAST_IN_SOAKS if NUM_STEPS >= 200_000 else {}))


@pytest.mark.timeout(120 if NUM_STEPS <= 10_000 else 0)
@pytest.mark.parametrize("seed", rarer_from(1, 1, [] if EPISODE else SEEDS[: NUM_WALKS // 5]))
def test_it_keeps_them_too_when_plans_are_made_ahead(seed):
    check_visited(seed, walk(seed, NUM_STEPS, depth=1), AT_LEAST_AHEAD)


def check_visited(seed, visited, at_least):
    print(f"seed {seed}:", ", ".join(f"{what} {count}" for what, count in sorted(visited.items())))
    missed = {what: visited[what] for what, least in at_least.items() if visited[what] < least}
    assert not missed or NUM_STEPS < 10_000, "too seldom there"


def test_a_broken_scheduler_is_found_and_a_short_script_shows_it(monkeypatch):
    commit = Scheduler.commit

    def forgetful(self, plan, result, now):
        events = commit(self, plan, result, now)
        return events[1:] if len(plan.grants) > 1 else events

    monkeypatch.setattr(Scheduler, "commit", forgetful)
    monkeypatch.setattr("tests.support.walk.MAX_SHORTENING_STEPS", 10_000)
    with pytest.raises(WalkFailed) as failed:
        walk(7, 10_000)
    told = str(failed.value)
    assert "VORRANG_WALK_EPISODE=7/" in told
    script = textwrap.dedent(told[told.index("  from tests.support.walk") :])
    assert len(script.splitlines()) < 12
    with pytest.raises(AssertionError):
        exec(script, {})


def only_the_first_limit(self, newcomer, tally, units):
    """``room_for`` as if the first broken limit were the only one."""
    broken = [limit for limit in self._of(newcomer) if limit.excess(tally, newcomer) > 0]
    first, every = broken[:1], self._of
    self._of = lambda place: tuple(first)
    try:
        return room_for(self, newcomer, tally, units)
    finally:
        self._of = every


room_for = QueueLimits.room_for


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (QueueLimits, "room_for", only_the_first_limit),
        (QueueLimits, "check_ever", lambda self, place, num_outputs: None),
        (Scheduler, "check_together", lambda self, specs: None),
        (Scheduler, "_room_at", lambda self, requests, level: []),
    ],
    ids=["one limit alone", "nothing is for good", "one output after the other", "any level"],
)
def test_limits_that_do_not_hold_are_found(monkeypatch, where, name, instead):
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(AssertionError):
        about_limits(100)


def about_limits(number):
    """So many episodes of those that are about limits."""
    for place in range(number):
        Episode(FIRST_SEED, MOODS.index("limits") + place * len(MOODS)).run()
