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


def test_what_a_step_scores_of_all_prompts_together_is_bounded():
    drive = driver(max_step_tokens=64, max_chunk_tokens=32, max_scored_tokens=8)
    drive.submit("plain", PROMPT)
    drive.submit("first", [*PROMPT, 5], prompt_logprobs=3)
    drive.submit("second", [*PROMPT, 6], prompt_logprobs=0)
    steps = [{g.request_id: g.num_tokens for g in drive.step().grants} for _ in range(5)]
    # One each at least: who has a seat makes progress.
    assert steps[0] == {"plain": 32, "first": 8, "second": 1}
    assert [step["first"] for step in steps] == [8, 8, 8, 8, 9]  # its last token scores no other
    drive.finish()


def test_only_what_is_scored_counts():
    drive = driver(max_step_tokens=64, max_chunk_tokens=32, max_scored_tokens=4, prefix_cache=False)
    drive.submit("scored", PROMPT[:9], prompt_logprobs=0, max_tokens=30)
    for _ in range(14):
        drive.step()
    request = drive.scheduler.find("scored")
    assert request.num_output_tokens > 8
    drive.preempt("scored")
    grants = [drive.step().grants[0] for _ in range(2)]
    assert [(g.start, g.num_tokens) for g in grants] == [(0, 4), (4, request.num_tokens - 5)]
    drive.finish()


def test_it_bounds_nobody_else():
    drive = driver(max_step_tokens=64, max_chunk_tokens=32, max_scored_tokens=1)
    drive.submit("plain", PROMPT)
    assert [g.num_tokens for g in drive.step().grants] == [32]
    drive.finish()
