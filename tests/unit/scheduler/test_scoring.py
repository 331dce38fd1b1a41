"""Prompts that are scored, and siblings: what the prefix cache may give them."""

from engine.events import Started
from engine.scheduler.draft import Gate
from tests.support.decisions import MemoryLog
from tests.support.drive import Driver

PROMPT = [3 + i * i % 200 for i in range(40)]


def driver(**more):
    return Driver(**({"num_blocks": 64, "block_size": 4, "prefix_wait_tokens": 256} | more))


def cached(drive, name):
    return next(e for e in drive.seen[name].events if isinstance(e, Started)).num_cached_tokens


def test_a_prompt_that_is_scored_takes_nothing_from_the_cache_and_gives_as_usual():
    drive = driver()
    drive.submit("plain", PROMPT)
    drive.finish()
    drive.submit("scored", PROMPT, prompt_logprobs=0)
    drive.finish()
    drive.submit("again", PROMPT)
    drive.finish()
    assert [cached(drive, name) for name in ("plain", "scored", "again")] == [0, 0, 36]


def test_it_takes_what_was_scored_before_it_lost_its_blocks():
    log = MemoryLog()
    drive = driver(max_step_tokens=16, max_chunk_tokens=16, decisions=log)
    drive.submit("scored", PROMPT, prompt_logprobs=0)
    drive.step()
    request = drive.scheduler.find("scored")
    assert (request.num_scored_tokens, request.is_scored, request.num_cacheable_tokens) == (16, False, 16)
    drive.preempt("scored")
    assert [(g.start, g.num_tokens) for g in drive.step().grants] == [(16, 16)]
    drive.run()
    assert request.num_scored_tokens == 39
    drive.finish()
    log.replay(num_steps=4)


def test_it_does_not_wait_for_a_prefix_that_another_one_computes():
    drive = driver(max_step_tokens=16, max_chunk_tokens=8, prefix_wait_tokens=4)
    drive.submit("first", PROMPT)
    drive.step()
    drive.submit("scored", PROMPT, prompt_logprobs=0)
    drive.submit("waits", PROMPT)
    plan = drive.step()
    assert {g.request_id: g.num_tokens for g in plan.grants} == {"first": 8, "scored": 8}
    assert plan.gate is Gate.PREFIX
    drive.finish()


def test_siblings_wait_for_a_prompt_however_short_it_is():
    drive = driver(max_bypass=32)
    for index in range(3):
        drive.submit(f"s{index}", PROMPT[:9], family="s0")
    drive.submit("stranger", PROMPT[:9])
    plan = drive.step()
    assert {g.request_id for g in plan.grants} == {"s0", "stranger"}
    drive.step()
    assert [cached(drive, f"s{index}") for index in range(3)] == [0, 8, 8]
    assert len({drive.blocks.table(f"s{index}")[0] for index in range(3)}) == 1
    drive.finish()
