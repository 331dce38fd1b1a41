"""The numbered rules of docs/SCHEDULING.md, each by a small scenario.

"vLLM n" and "SGLang n" name behaviours that those projects' own test suites pin down, in our numbering.
"""

import pytest

from engine.errors import (
    ContextExceeded,
    Displaced,
    EmptyPrompt,
    InvalidRequest,
    PoolExceeded,
    QueueFull,
    TenantQuotaExceeded,
)
from engine.events import Failed, Finished, LevelChanged, Preempted, Resumed, Started
from engine.request import FinishReason, PreemptReason, RequestId
from engine.runner.scripted import expected_output
from engine.scheduler.commands import Fail, Finish, SetLevel
from engine.scheduler.config import ClassConfig, InvalidSetting, SchedulerConfig
from engine.scheduler.plan import StepResult
from tests.support.drive import Driver


def grants(plan):
    return {str(g.request_id): len(g.token_ids) for g in plan.grants}


def events(plan, kind):
    return [e for e in plan.events if isinstance(e, kind)]


# Rule 2: decodes first, then prefill chunks, in policy order


def test_all_fit_and_run_in_order_of_arrival():  # vLLM 1
    driver = Driver(max_running_requests=10, max_step_tokens=100, num_blocks=40)
    names = [driver.submit(f"r{i}", 10) for i in range(10)]
    assert list(grants(driver.step())) == names
    assert driver.running() == names


def test_decodes_come_before_a_more_urgent_prefill():
    driver = Driver(max_running_requests=3, max_step_tokens=6)
    driver.submit("decode", 4, level=10)
    driver.step()
    driver.submit("urgent", 12, level=-10)
    assert grants(driver.step()) == {"decode": 1, "urgent": 5}


def test_a_more_urgent_arrival_takes_the_token_budget_from_a_prefill_under_way():
    driver = Driver(max_running_requests=3, max_step_tokens=8, max_chunk_tokens=8)
    driver.submit("batch", 24, level=10)
    assert grants(driver.step()) == {"batch": 8}
    driver.submit("urgent", 12, level=-10)
    assert grants(driver.step()) == {"urgent": 8}
    assert grants(driver.step()) == {"urgent": 4, "batch": 4}


@pytest.mark.parametrize(
    ("levels", "order"),
    [([2, 0, 1], "bca"), ([0, 0, 0], "abc"), ([2, 1, 1, 0], "dbca")],
)  # vLLM 26-28
def test_priority_then_arrival(levels, order):
    driver = Driver(max_running_requests=8, num_blocks=64, max_step_tokens=64)
    for name, level in zip("abcd", levels, strict=False):
        driver.submit(name, level=level)
    driver.step()
    assert "".join(driver.running()) == order


def test_fcfs_ignores_levels():
    driver = Driver(policy="fcfs", max_running_requests=1)
    driver.submit("batch", level=10)
    driver.submit("urgent", level=-10)
    driver.step()
    assert driver.running() == ["batch"]
    driver.finish()
    assert driver.preemptions("batch") == 0


def test_under_fcfs_no_rule_looks_at_the_class():
    """Neither the interactive class's shorter wait nor its freedom from the watermark counts."""
    impatient = ClassConfig(max_wait_s=2.0, watermark=0.0)
    driver = Driver(policy="fcfs", max_running_requests=1, interactive=impatient)
    driver.submit("first", level=10, max_tokens=10)
    driver.submit("second", level=10)
    driver.submit("third", level=-10)
    order = []
    while driver.scheduler.has_requests:
        order += [str(e.request_id) for e in events(driver.step(), Started)]
    assert order == ["first", "second", "third"]


# Rule 3: admission asks for a seat, then whether the whole known prompt fits


def test_the_whole_prompt_must_fit_before_its_first_chunk_runs():
    driver = Driver(num_blocks=6)
    driver.submit("a", 12)
    driver.step()
    driver.submit("b", 16)  # 4 blocks, 3 free; its first chunk alone would fit
    driver.step()
    assert driver.waiting() == ["b"]


def test_nobody_of_equal_urgency_passes_a_request_that_does_not_fit():  # vLLM 3, unchunked half
    driver = Driver(num_blocks=6)
    driver.submit("a", 12, max_tokens=2)
    driver.step()
    driver.submit("large", 16)
    driver.submit("small", 4)
    driver.step()
    assert driver.waiting() == ["large", "small"]


def test_ordinary_requests_leave_the_watermark_and_urgent_ones_do_not():
    for level, waits in ((0, True), (-10, False)):
        driver = Driver(num_blocks=10, watermark=0.2)
        driver.submit("a", 16, level=level)
        driver.step()
        driver.submit("b", 17, level=level)  # 5 of 6 free blocks; the watermark is 2
        driver.step()
        assert bool(driver.waiting()) is waits


def test_without_anything_running_there_is_no_watermark():
    driver = Driver(num_blocks=4, watermark=0.5)
    driver.submit("a", 15, level=10, max_tokens=1)
    driver.step()
    assert driver.terminal("a") is None
    assert driver.running() == ["a"]


def test_nobody_is_admitted_without_a_token_to_compute():
    driver = Driver(max_running_requests=3, max_step_tokens=8, max_chunk_tokens=8)
    driver.submit("urgent", 24, level=-10)
    driver.step()
    driver.submit("waits", 4)
    assert grants(driver.step()) == {"urgent": 8}
    assert driver.waiting() == ["waits"]


def test_a_head_that_does_not_fit_does_not_stop_prefills_under_way():
    driver = Driver(num_blocks=10, max_step_tokens=8, max_chunk_tokens=4)
    driver.submit("equal", 18, level=0, max_tokens=3)
    driver.submit("under way", 12, level=10, max_tokens=3)
    driver.step()
    driver.submit("head", 28, level=0, max_tokens=1)
    assert grants(driver.step()) == {"equal": 4, "under way": 4}
    assert driver.waiting() == ["head"]
    driver.finish()


# Rule 4: preempting for an arrival


def test_equals_are_never_preempted_for_an_arrival():  # SGLang 3, 5
    driver = Driver(max_running_requests=1)
    driver.submit("a", level=0, max_tokens=6)
    driver.step()
    driver.submit("equal", level=0)
    driver.submit("less", level=5)
    driver.finish()
    assert driver.preemptions("a") == 0


@pytest.mark.parametrize(("gap", "preempts"), [(10, True), (11, False)])
def test_the_level_gap_decides(gap, preempts):  # SGLang 21
    driver = Driver(max_running_requests=1, preempt_level_gap=gap)
    driver.submit("a", level=10, max_tokens=20)
    driver.step()
    driver.submit("b", level=0)
    driver.step()
    assert driver.preemptions("a") == preempts


def test_nobody_is_evicted_when_evicting_all_would_not_help():  # SGLang 4, 24
    driver = Driver(num_blocks=10)
    driver.submit("equal", 16, level=-10, max_tokens=20)
    driver.submit("batch", 8, level=10, max_tokens=20)
    driver.step()
    driver.step()
    driver.submit("urgent", 28, level=-10)  # 7 blocks; without "equal" and "batch" 10, without "batch" 5
    for _ in range(3):
        assert not events(driver.step(), Preempted)
    assert driver.waiting() == ["urgent"]


def test_free_room_means_no_preemption():  # vLLM 32
    driver = Driver()
    for name, level in (("a", 3), ("b", 2), ("c", 1)):
        driver.submit(name, 4, level=level)
    driver.step()
    assert len(driver.running()) == 3
    driver.finish()
    assert sum(driver.preemptions(n) for n in "abc") == 0


def test_a_victim_gives_back_the_tokens_it_was_granted_in_the_same_step():
    driver = Driver(max_running_requests=2, max_step_tokens=2, max_chunk_tokens=2)
    driver.submit("a", 2, level=10, max_tokens=20)
    driver.submit("b", 2, level=10, max_tokens=20)
    while any(r.num_output_tokens == 0 for r in driver.scheduler.running()) or driver.waiting():
        driver.step()
    driver.submit("urgent", 4, level=-10)
    plan = driver.step()
    assert plan.num_tokens == 2
    assert grants(plan)["urgent"] == 1
    assert len(events(plan, Preempted)) == 1


# Rule 5: preempting for growth


def test_growth_evicts_the_less_urgent_first():  # vLLM 33
    driver = Driver(num_blocks=5, block_size=4)
    driver.submit("low", 8, level=5)
    driver.step()
    driver.submit("high", 8, level=0)
    driver.step()
    assert driver.running() == ["high", "low"]
    plans = [driver.step() for _ in range(2)]
    preempted = [e for plan in plans for e in events(plan, Preempted)]
    assert [(e.request_id, e.reason) for e in preempted] == [("low", PreemptReason.GROWTH)]
    driver.finish()


def test_growth_among_equals_evicts_the_last_arrived():  # vLLM 6
    driver = Driver(num_blocks=6, block_size=4, max_step_tokens=24)
    for name in "abc":
        driver.submit(name, 8, max_tokens=12)
    driver.step()
    preempted = [e for _ in range(2) for e in events(driver.step(), Preempted)]
    assert [e.request_id for e in preempted] == ["c"]
    assert preempted[0].beneficiary == "a"
    driver.finish()


def test_the_last_arrived_gives_itself_up():
    driver = Driver(num_blocks=5, block_size=4)
    driver.submit("first", 9, level=-10, max_tokens=6)
    driver.submit("second", 8, max_tokens=9)
    driver.step()
    plan = driver.step()
    (event,) = events(plan, Preempted)
    assert event.request_id == "second"
    assert event.beneficiary is None
    driver.finish()


def test_the_most_urgent_earliest_request_always_advances():
    driver = Driver(num_blocks=8, block_size=2, max_running_requests=8, max_step_tokens=16)
    for i in range(8):
        driver.submit(f"r{i}", 3, max_tokens=10)
    while driver.scheduler.has_requests:
        first = min((*driver.scheduler.running(), *driver.scheduler.waiting()), key=lambda r: r.arrival_seq)
        before = first.num_output_tokens
        driver.step()
        assert first.num_output_tokens > before or first.num_missing_tokens > 1
    driver.finish()


# Rule 6: which victims


def test_the_worst_level_goes_first_even_when_it_is_dearer():  # SGLang 2
    driver = Driver(max_running_requests=2, num_blocks=32)
    driver.submit("dear", 24, level=20, max_tokens=40)
    driver.submit("cheap", 4, level=10, max_tokens=40)
    for _ in range(5):
        driver.step()
    driver.submit("urgent", 4)
    (event,) = events(driver.step(), Preempted)
    assert event.request_id == "dear"


def test_within_a_level_the_cheapest_to_recompute_goes():
    driver = Driver(max_running_requests=2, num_blocks=32)
    driver.submit("dear", 24, level=10, max_tokens=40)
    driver.submit("cheap", 4, level=10, max_tokens=40)
    for _ in range(5):
        driver.step()
    driver.submit("urgent", 4)
    (event,) = events(driver.step(), Preempted)
    assert event.request_id == "cheap"


def test_one_victim_when_one_is_enough():  # SGLang 7
    driver = Driver(num_blocks=12, max_step_tokens=48, max_chunk_tokens=16)
    driver.submit("half", 14, level=10, max_tokens=2)
    driver.submit("whole", 30, level=10, max_tokens=2)
    driver.step()
    driver.submit("urgent", 30, level=-10)  # 8 blocks
    (event,) = events(driver.step(), Preempted)
    assert event.request_id == "whole"


def test_two_victims_when_two_are_needed():  # SGLang 8
    driver = Driver(num_blocks=12, max_step_tokens=48, max_chunk_tokens=16)
    for name in "abc":
        driver.submit(name, 15, level=10, max_tokens=2)
    driver.step()
    driver.submit("urgent", 30, level=-10)
    assert len(events(driver.step(), Preempted)) == 2
    assert "urgent" in driver.running()


def test_a_victim_that_would_free_nothing_is_spared():
    driver = Driver(num_blocks=7, block_size=4, max_running_requests=4, max_step_tokens=40)
    shared = list(range(12))
    driver.submit("keeper", [*shared, 99], level=-10, max_tokens=3)
    driver.step()
    driver.step()
    driver.submit("sharer", [*shared, 98], level=20, max_tokens=3)
    driver.submit("loner", 7, level=10, max_tokens=3)
    driver.step()
    assert driver.blocks.num_free_blocks == 0
    # The sharer owns one block; the loner's two are needed as well as the worst level's one.
    driver.submit("urgent", 7, level=-5)
    victims = {str(e.request_id) for e in events(driver.step(), Preempted)}
    assert victims == {"loner"}
    driver.finish()


def test_victims_that_share_with_each_other_free_what_they_share():
    driver = Driver(num_blocks=8, block_size=4, max_step_tokens=40, max_chunk_tokens=32)
    shared = list(range(24))
    driver.submit("a", [*shared, 1], level=10, max_tokens=3)
    driver.step()
    driver.submit("b", [*shared, 2], level=10, max_tokens=3)
    driver.step()
    assert driver.blocks.num_free_blocks == 0
    driver.submit("urgent", 24, level=-10)
    assert len(events(driver.step(), Preempted)) == 2
    assert driver.running() == ["urgent"]
    driver.finish()


# Preempt and resume


def test_a_preempted_request_keeps_output_and_seniority_and_hits_its_own_blocks():
    driver = Driver(max_running_requests=1, num_blocks=32)
    driver.submit("a", 8, level=10, max_tokens=12)
    driver.submit("later", 8, level=10, max_tokens=2)
    for _ in range(6):
        driver.step()
    before = list(driver.tokens("a"))
    driver.submit("urgent", 8, level=-10, max_tokens=2)
    driver.step()
    assert driver.waiting() == ["a", "later"]
    while not driver.running() or driver.running() == ["urgent"]:
        plan = driver.step()
    (resumed,) = events(plan, Resumed)
    assert resumed.request_id == "a"
    assert resumed.num_recomputed_tokens < 4  # only the unfinished block
    assert driver.tokens("a")[: len(before)] == before
    driver.finish()
    usage = driver.terminal("a").usage
    assert usage.preemptions == 1
    assert usage.recomputed_tokens == resumed.num_recomputed_tokens
    assert usage.preempted_s > 0


@pytest.mark.parametrize("every", range(1, 41))
@pytest.mark.parametrize("seed", [None, 7])
def test_a_preemption_after_every_kth_token_changes_nothing(every, seed):
    driver = Driver(max_running_requests=1, num_blocks=32, prefix_cache=every % 2 == 0)
    more = {} if seed is None else {"seed": seed}
    driver.submit("a", 9, max_tokens=41, **more)
    at = every
    while driver.scheduler.has_requests:
        driver.step()
        if len(driver.tokens("a")) == at and driver.scheduler.has_requests:
            driver.preempt("a")
            at += every
    assert driver.preemptions("a") == 40 // every
    prompt = driver.seen["a"].spec.prompt_token_ids
    assert driver.tokens("a") == expected_output(prompt, 41, seed or 0)


# Rule 10: what can never fit, and what outgrows the pool


def test_requests_that_can_never_run_are_refused_with_the_numbers():
    driver = Driver(num_blocks=4, block_size=4, max_context_tokens=32)
    with pytest.raises(EmptyPrompt):
        driver.submit("empty", [])
    with pytest.raises(ContextExceeded, match=r"prompt must be shorter than the context of 32 .* got 32"):
        driver.submit("long", 32)
    with pytest.raises(ContextExceeded, match=r"max_tokens must be at most 26.* got 27"):
        driver.submit("much", 6, max_tokens=27)
    with pytest.raises(PoolExceeded, match=r"KV pool of 16 tokens, got 16"):
        driver.submit("large", 16, max_tokens=1)
    with pytest.raises(InvalidRequest, match=r"level must be between -100 and 100, got 101"):
        driver.submit("level", 4, level=101)
    driver.submit("fits", 15, max_tokens=1)
    driver.finish()


@pytest.mark.parametrize("discipline", ["unified", "prefill_first", "static"])
def test_an_output_that_outgrows_the_pool_ends_at_once_and_cannot_be_preempted_into_limbo(discipline):
    # The random machine should have caught this: preempted after its last token that fits, it
    # waited for more blocks than there are, and everybody behind it as well.
    driver = Driver(num_blocks=4, block_size=4, discipline=discipline)
    driver.submit("grows", 10, max_tokens=100)
    driver.submit("next", 4, max_tokens=2)
    while driver.scheduler.find(RequestId("grows")):
        driver.step()
        if len(driver.tokens("grows")) == 7:
            driver.preempt("grows")
    assert driver.terminal("grows").reason is FinishReason.CAPACITY
    driver.finish()


def test_the_queue_is_bounded_and_preempted_requests_do_not_count():
    driver = Driver(max_running_requests=1, max_waiting_requests=2)
    driver.submit("a", level=10, max_tokens=20)
    driver.step()
    driver.submit("b", level=10)
    driver.submit("urgent", level=-10)
    driver.step()
    assert driver.waiting() == ["a", "b"]
    driver.submit("c", level=10)
    with pytest.raises(QueueFull, match="queue holds as many waiting requests as it may, 2"):
        driver.submit("d", level=10)
    driver.cancel("b")
    driver.submit("d", level=10)
    driver.finish()


# Rule 1: commands


def test_cancelling_gives_all_blocks_back_whatever_the_state():
    driver = Driver(num_blocks=32, max_running_requests=2)
    driver.submit("prefill", 24)
    driver.submit("r1", 8)
    driver.submit("r11", 8)
    driver.step()
    for name in ("r1", "prefill", "r11"):
        driver.cancel(name)
        assert driver.cancel(name) == []  # SGLang 44
    assert driver.blocks.num_free_blocks == 32


def test_ids_are_matched_exactly():  # SGLang 41
    driver = Driver()
    driver.submit("batch_1")
    driver.submit("batch_10")
    driver.cancel("batch_1")
    driver.finish()
    assert driver.terminal("batch_10").reason is FinishReason.LENGTH


def test_a_cancel_in_flight_drops_what_the_step_computes():  # vLLM 63
    driver = Driver()
    driver.submit("a", 4, max_tokens=1)
    driver.step(between=(Finish(RequestId("a")),))
    assert driver.terminal("a").reason is FinishReason.CANCELLED
    assert driver.tokens("a") == []
    driver.finish()


def test_reprioritising_a_queued_request_lets_it_overtake():
    driver = Driver(max_running_requests=1)
    for name in "abc":
        driver.submit(name, max_tokens=20)
    driver.step()
    assert driver.set_level("c", -10) == [LevelChanged(RequestId("c"), -10)]
    plan = driver.step()
    assert [e.request_id for e in events(plan, Preempted)] == ["a"]
    assert driver.running() == ["c"]


def test_reprioritising_a_running_request_may_cost_it_its_seat():
    driver = Driver(max_running_requests=1)
    driver.submit("a", max_tokens=20)
    driver.submit("b", max_tokens=20)
    driver.step()
    driver.set_level("a", 10)
    driver.step()
    assert driver.running() == ["b"]
    driver.finish()


def test_commands_for_unknown_requests_do_nothing():
    driver = Driver()
    for command in (Finish(RequestId("x")), SetLevel(RequestId("x"), 1)):
        assert driver.scheduler.apply(command, 0.0) == []


# Ends


def test_stop_tokens_end_the_output_and_belong_to_it():  # vLLM 7, 8
    prompt = [5, 6, 7]
    out = expected_output(prompt, 6)
    driver = Driver()
    driver.submit("stop", prompt, max_tokens=6, stop_token_ids=(out[2], 1000))
    driver.submit("eos", prompt, max_tokens=6, eos_token_ids=[out[1]])
    driver.submit("both", prompt, max_tokens=6)
    driver.finish()
    assert driver.tokens("stop") == out[:3]
    assert driver.terminal("stop").reason is FinishReason.STOP_TOKEN
    assert driver.terminal("stop").stop_token_id == out[2]
    assert driver.tokens("eos") == out[:2]
    assert driver.terminal("eos").reason is FinishReason.STOP
    assert driver.tokens("both") == out
    assert driver.terminal("both").reason is FinishReason.LENGTH  # vLLM 9


def test_min_tokens_bans_and_ignores_ends():  # vLLM 11
    prompt = [5, 6, 7]
    out = expected_output(prompt, 8)
    driver = Driver()
    driver.submit("a", prompt, max_tokens=8, min_tokens=5, eos_token_ids=[out[1]], stop_token_ids=(out[2],))
    banned = []
    while driver.scheduler.has_requests:
        banned.append(driver.step().grants[0].banned_token_ids)
    assert len(driver.tokens("a")) >= 5
    assert banned[:5] == [frozenset({out[1], out[2]})] * 5
    assert not any(banned[5:])


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_token_is_computed_in_vain(max_tokens):  # vLLM 38
    driver = Driver()
    driver.submit("a", 9, max_tokens=max_tokens)
    computed = 0
    while driver.scheduler.has_requests:
        computed += driver.step().num_tokens
    assert computed == 9 + max_tokens - 1


def test_the_context_ends_an_output():
    driver = Driver(max_context_tokens=12)
    driver.submit("a", 8, max_tokens=4)
    driver.finish()
    assert len(driver.tokens("a")) == 4


def test_a_row_that_fails_fails_alone():
    driver = Driver()
    driver.submit("bad", 4)
    driver.submit("good", 4)
    plan = driver.scheduler.plan(1.0)
    result = driver.runner.run(plan)
    error = EmptyPrompt()
    failing = StepResult(result.sampled, {RequestId("bad"): error})
    driver.book(plan.events)
    driver.book(driver.scheduler.commit(plan, failing, 1.5))
    assert driver.terminal("bad") == Failed(RequestId("bad"), error, driver.terminal("bad").usage)
    driver.finish()
    assert driver.terminal("good").reason is FinishReason.LENGTH


def test_failing_a_request_frees_it():
    driver = Driver()
    driver.submit("a", 4)
    driver.step()
    driver.apply(Fail(RequestId("a"), EmptyPrompt()))
    assert isinstance(driver.terminal("a"), Failed)
    driver.finish()


def test_the_first_admission_tells_what_the_cache_gave():  # vLLM 40, 41
    driver = Driver(max_step_tokens=120, max_chunk_tokens=120, num_blocks=64, block_size=16)
    prompt = list(range(100))
    driver.submit("a", prompt, max_tokens=4)
    driver.step()
    driver.submit("b", prompt)
    plan = driver.step()
    assert events(plan, Started)[0].num_cached_tokens == 96
    assert grants(plan) == {"a": 1, "b": 4}


# Settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_running_requests", 0),
        ("max_step_tokens", 3),
        ("max_chunk_tokens", 0),
        ("preempt_level_gap", 0),
        ("starved_share", 0.0),
        ("starved_share", 1.0),
        ("resume_quantum_tokens", -1),
        ("max_preemptions", 0),
        ("max_bypass", -1),
        ("max_context_tokens", 1),
        ("max_waiting_requests", 0),
    ],
)
def test_bad_settings_name_field_and_value(field, value):
    with pytest.raises(InvalidSetting, match=rf"scheduler\.{field} .*got {value}"):
        SchedulerConfig(**({"max_running_requests": 4} | {field: value}))


def test_an_unknown_policy_is_named():
    with pytest.raises(InvalidSetting, match="policy must be one of fair, fcfs, priority, got 'lottery'"):
        Driver(policy="lottery")


# Rule 7: anti-thrash


def resumed_batch(**config):
    """One seat; a batch request that was preempted once and has just resumed."""
    driver = Driver(max_running_requests=1, num_blocks=64, **config)
    driver.submit("batch", 8, level=10, max_tokens=60)
    driver.step()
    driver.step()
    driver.submit("urgent1", 4, level=-10, max_tokens=1)
    driver.step()
    driver.step()
    assert driver.running() == ["batch"]
    return driver


def test_a_resumed_request_may_produce_its_quantum_before_an_arrival_evicts_it():
    driver = resumed_batch(resume_quantum_tokens=5)
    had = len(driver.tokens("batch"))
    driver.submit("urgent2", 4, level=-10, max_tokens=1)
    while driver.waiting() != ["batch"]:
        driver.step()
    assert len(driver.tokens("batch")) - had == 4  # and the one of the step in which it resumed
    driver.finish()


def test_without_a_quantum_it_is_evicted_at_once():
    driver = resumed_batch(resume_quantum_tokens=0)
    driver.submit("urgent2", 4, level=-10, max_tokens=1)
    driver.step()
    assert driver.waiting() == ["batch"]
    driver.finish()


def test_after_max_preemptions_a_request_holds_all_it_can_need_and_stays():
    driver = resumed_batch(max_preemptions=1, block_size=4)
    assert len(driver.blocks.table("batch")) == (8 + 60) // 4
    driver.submit("urgent2", 4, level=-10, max_tokens=1)
    for _ in range(10):
        driver.step()
    assert driver.running() == ["batch"]
    driver.finish()
    assert driver.preemptions("batch") == 1


def test_preemptions_for_arrivals_are_bounded_per_step():
    driver = Driver(max_running_requests=4, num_blocks=64, max_preemptions_per_step=2)
    for i in range(4):
        driver.submit(f"batch{i}", 4, level=10, max_tokens=20)
    driver.step()
    for i in range(4):
        driver.submit(f"urgent{i}", 4, level=-10)
    assert len(events(driver.step(), Preempted)) == 2
    assert len(events(driver.step(), Preempted)) == 2
    driver.finish()


def test_one_arrival_may_need_more_victims_than_a_step_has():
    driver = Driver(num_blocks=12, max_step_tokens=48, max_chunk_tokens=16, max_preemptions_per_step=1)
    for name in "abc":
        driver.submit(name, 15, level=10, max_tokens=2)
    driver.step()
    driver.submit("urgent", 40, level=-10)
    assert len(events(driver.step(), Preempted)) == 3
    driver.finish()


def test_a_preempted_request_comes_back_only_with_the_watermark_left():
    driver = Driver(num_blocks=10, watermark=0.2, max_step_tokens=64, max_chunk_tokens=64)
    driver.submit("urgent", 16, level=-10, max_tokens=30)
    driver.step()
    driver.submit("interactive too", 19, level=-5, max_tokens=30)
    driver.step()
    driver.preempt("interactive too")
    driver.step()  # 5 blocks needed and 5 free, but the watermark is 2
    assert driver.waiting() == ["interactive too"]
    driver.finish()


# Rule 8: bounded bypass


def bypassed(max_bypass, num_small=10):
    driver = Driver(num_blocks=10, max_running_requests=8, max_step_tokens=64, max_bypass=max_bypass)
    driver.submit("holder", 20, max_tokens=30)
    driver.step()
    driver.submit("large", 28, max_tokens=2)
    for i in range(num_small):
        driver.submit(f"small{i}", 3, max_tokens=2)
    passed = 0
    for _ in range(12):
        passed += sum("small" in e.request_id for e in events(driver.step(), Started))
    return driver, passed


def test_without_bypass_the_queue_is_served_strictly_in_order():
    assert bypassed(max_bypass=0)[1] == 0


def test_with_much_bypass_all_small_ones_pass():
    assert bypassed(max_bypass=32)[1] == 10


def test_a_more_urgent_request_is_not_held_by_the_fence():
    driver, _ = bypassed(max_bypass=0)
    driver.submit("urgent", 4, level=-10)
    plan = driver.step()
    assert "urgent" in grants(plan)
    driver.finish()


# Rule 9: ageing


def test_a_starved_request_gets_the_next_seat_whatever_its_level():
    driver = Driver(max_running_requests=2, num_blocks=64, max_wait_s=10)
    driver.submit("batch", 4, level=10, max_tokens=4)
    for i in range(60):
        driver.submit(f"urgent{i}", 4, level=-10, max_tokens=6)
    started = None
    for step in range(60):
        if any(e.request_id == "batch" for e in events(driver.step(), Started)):
            started = step
            break
    assert started is not None
    assert 10 <= started <= 10 + 6
    driver.finish()


def test_a_starved_request_is_never_evicted_and_keeps_its_level():
    driver = Driver(max_running_requests=1, num_blocks=64, max_wait_s=5)
    driver.submit("urgent0", 4, level=-10, max_tokens=8)
    driver.submit("batch", 4, level=10, max_tokens=20)
    for i in range(1, 6):
        driver.submit(f"urgent{i}", 4, level=-10, max_tokens=8)
    while "batch" not in driver.running():
        driver.step()
    assert driver.scheduler.find(RequestId("batch")).level == 10
    driver.finish()
    assert driver.preemptions("batch") == 0


def test_blocks_are_kept_free_for_a_starved_request():
    driver = Driver(max_running_requests=8, num_blocks=10, max_step_tokens=64, max_wait_s=5, max_bypass=1000)
    driver.submit("large", 28, level=10, max_tokens=2)
    driver.submit("first", 12, level=-10, max_tokens=12)
    driver.step()
    for i in range(40):
        driver.submit(f"urgent{i}", 7, level=-10, max_tokens=4)
    for _ in range(40):
        driver.step()
        if driver.tokens("large"):
            break
    assert driver.tokens("large")
    driver.finish()


def test_a_prefill_without_tokens_gets_the_reserved_share():
    driver = Driver(
        max_running_requests=4, max_step_tokens=20, max_chunk_tokens=20, num_blocks=400, max_wait_s=3
    )
    driver.submit("batch", 100, level=10, max_tokens=1)
    driver.step()
    for i in range(30):
        driver.submit(f"urgent{i}", 60, level=-10, max_tokens=1)
    granted = [grants(driver.step()).get("batch", 0) for _ in range(12)]
    assert granted == [0, 0] + [2] * 10  # a tenth of the 20 tokens
    driver.finish()


# Deadlines


def test_a_queue_deadline_ends_only_what_never_started():
    driver = Driver(max_running_requests=1)
    driver.submit("runs", 4, max_tokens=20, queue_deadline=3.0)
    driver.submit("waits", 4, queue_deadline=3.0)
    for _ in range(2):
        driver.step()
    assert driver.terminal("waits") is None
    plan = driver.step()
    assert [e.request_id for e in events(plan, Finished)] == ["waits"]
    assert driver.terminal("waits").reason is FinishReason.TIME_LIMIT
    driver.finish()
    assert driver.terminal("runs").reason is FinishReason.LENGTH


def test_no_step_is_spent_on_an_expired_request():
    driver = Driver()
    driver.submit("a", 4, max_tokens=20, total_deadline=3.0)
    computed = [grants(driver.step()).get("a", 0) for _ in range(4)]
    assert computed == [4, 1, 0, 0]
    assert driver.terminal("a").reason is FinishReason.TIME_LIMIT
    assert len(driver.tokens("a")) == 2
    assert driver.blocks.num_free_blocks == driver.blocks.num_blocks


# Parking


def test_parking_gives_back_the_seat_and_keeps_the_blocks():
    driver = Driver(max_running_requests=1, num_blocks=32)
    driver.submit("a", 8, max_tokens=6)
    driver.submit("b", 8, max_tokens=2)
    driver.step()
    driver.park("a")
    plan = driver.step()
    assert "a" not in grants(plan)
    assert driver.running() == ["b"]
    assert driver.blocks.holds("a")
    driver.unpark("a")
    driver.run()
    assert not any(isinstance(e, Resumed) for e in driver.seen["a"].events)  # nothing was computed again
    driver.finish()
    assert driver.terminal("a").usage.parked_s > 0


def test_a_parked_request_is_the_first_victim_even_for_an_equal():
    driver = Driver(num_blocks=8, max_running_requests=4, max_step_tokens=64, max_chunk_tokens=32)
    driver.submit("parked", 15, max_tokens=4)
    driver.submit("runs", 7, max_tokens=4)
    driver.step()
    driver.park("parked")
    driver.submit("equal", 12, max_tokens=2)
    plan = driver.step()
    assert [e.request_id for e in events(plan, Preempted)] == ["parked"]
    assert "equal" in grants(plan)
    driver.unpark("parked")
    driver.finish()
    assert driver.terminal("parked").usage.preemptions == 1


def test_parking_a_queued_request_lets_others_pass():
    driver = Driver(max_running_requests=1)
    driver.submit("a", 4)
    driver.park("a")
    driver.submit("b", 4)
    driver.step()
    assert driver.running() == ["b"]
    driver.unpark("a")
    assert driver.waiting() == ["a"]
    driver.finish()


def test_parked_blocks_never_stop_the_last_one_that_could_run():
    driver = Driver(num_blocks=4, max_running_requests=2)
    driver.submit("urgent", 14, level=-10, max_tokens=2)
    driver.step()
    driver.park("urgent")
    driver.submit("batch", 12, level=10, max_tokens=2)
    driver.run_until_ended("batch")
    driver.unpark("urgent")
    driver.finish()


def test_cancelling_a_parked_request_frees_it():
    driver = Driver()
    driver.submit("a", 8)
    driver.step()
    driver.park("a")
    driver.cancel("a")
    driver.finish()


# Queue limits and displacement


def test_a_more_urgent_newcomer_displaces_the_least_urgent_queued_request():  # SGLang 19, 20
    driver = Driver(max_running_requests=1, max_waiting_requests=2)
    driver.submit("runs", level=-20)
    driver.step()
    driver.submit("batch", level=10)
    driver.submit("standard", level=0)
    driver.submit("urgent", level=-10)
    assert isinstance(driver.terminal("batch").error, Displaced)
    assert driver.terminal("batch").error.retryable
    with pytest.raises(QueueFull):
        driver.submit("another", level=0)
    driver.finish()


def test_preempted_requests_are_never_displaced():
    driver = Driver(max_running_requests=1, max_waiting_requests=1)
    driver.submit("batch", level=10, max_tokens=20)
    driver.step()
    driver.submit("urgent", level=-10, max_tokens=20)
    driver.step()
    assert driver.waiting() == ["batch"]
    driver.submit("standard", level=0)
    with pytest.raises(QueueFull):
        driver.submit("second", level=0)
    assert driver.terminal("batch") is None
    driver.finish()


def test_a_class_has_limits_of_its_own_in_requests_and_tokens():
    batch = ClassConfig(1e9, 0.0, max_waiting_requests=2, max_waiting_tokens=20)
    driver = Driver(max_running_requests=1, batch=batch)
    driver.submit("runs", level=0)
    driver.step()
    driver.submit("b1", 8, level=10)
    with pytest.raises(QueueFull, match="class batch holds as many waiting tokens as it may, 20"):
        driver.submit("b2", 13, level=10)
    driver.submit("b3", 12, level=20)
    with pytest.raises(QueueFull, match="class batch holds as many waiting requests"):
        driver.submit("b4", 1, level=20)
    driver.submit("b5", 8, level=15)  # displaces b3, which is less urgent
    assert isinstance(driver.terminal("b3").error, Displaced)
    driver.submit("standard", 8, level=0)
    driver.finish()


def test_a_tenant_has_limits_of_its_own():
    driver = Driver(max_running_requests=1, max_tenant_waiting_requests=2, max_tenant_waiting_tokens=30)
    driver.submit("runs")
    driver.step()
    driver.submit("a1", 8, tenant="a")
    driver.submit("a2", 8, tenant="a")
    with pytest.raises(TenantQuotaExceeded, match="tenant 'a' holds as many waiting requests as it may, 2"):
        driver.submit("a3", 8, tenant="a", level=-10)
    driver.submit("b1", 30, tenant="b")
    with pytest.raises(TenantQuotaExceeded, match="tokens"):
        driver.submit("b2", 1, tenant="b")
    driver.finish()


# The policy fair


def test_a_flood_of_one_tenant_does_not_delay_the_others():
    driver = Driver(policy="fair", max_running_requests=2, num_blocks=64)
    for i in range(20):
        driver.submit(f"flood{i}", 8, tenant="flood")
    for i in range(3):
        driver.submit(f"quiet{i}", 8, tenant="quiet")
    order = []
    while driver.scheduler.has_requests:
        order += [str(e.request_id)[:5] for e in events(driver.step(), Started)]
    assert order[:6].count("quiet") == 3


def test_fair_keeps_levels_above_tenants():
    driver = Driver(policy="fair", max_running_requests=1, num_blocks=64)
    driver.submit("a1", tenant="a", level=10)
    driver.submit("a2", tenant="a", level=-10)
    driver.submit("b1", tenant="b", level=10)
    driver.step()
    assert driver.running() == ["a2"]
    driver.finish()


def test_cached_tokens_are_free_and_outputs_cost_double():
    driver = Driver(policy="fair", num_blocks=64, block_size=4)
    policy = driver.scheduler.policy
    prompt = list(range(12))
    driver.submit("keeps alive", 4, tenant="z", max_tokens=30)
    driver.submit("a1", prompt, tenant="a", max_tokens=3)
    before = policy.served("a")
    driver.run_until_ended("a1")
    driver.submit("a2", prompt, tenant="a", max_tokens=1)
    lifted = policy.served("a")
    assert before == 0
    driver.run_until_ended("a2")
    driver.submit("a3", prompt, tenant="a", max_tokens=1)
    assert policy.served("a") >= lifted
    driver.finish()


def test_idleness_earns_no_credit():
    driver = Driver(policy="fair", num_blocks=64)
    policy = driver.scheduler.policy
    driver.submit("a1", 8, tenant="a", max_tokens=20)
    driver.step()
    for _ in range(10):
        driver.step()
    driver.submit("late", 8, tenant="late", max_tokens=20)
    assert policy.served("late") == policy.served("a") > 8
    driver.finish()


# The switch that shows what preempting for arrivals brings


def test_preempting_for_arrivals_can_be_switched_off():
    driver = Driver(max_running_requests=1, preempt_for_arrivals=False)
    driver.submit("batch", level=10, max_tokens=6)
    driver.step()
    driver.submit("urgent", level=-10)
    driver.finish()
    assert driver.preemptions("batch") == 0


def test_growth_never_takes_from_a_request_that_holds_all_it_needs():
    driver = Driver(num_blocks=8, max_running_requests=2, max_preemptions=1, max_step_tokens=32)
    driver.submit("grows", 3, max_tokens=20)
    driver.submit("pinned", 4, max_tokens=20)
    driver.step()
    driver.preempt("pinned")
    driver.step()
    assert driver.running() == ["grows", "pinned"]
    driver.finish()
    assert driver.preemptions("pinned") == 1  # by hand
    assert driver.preemptions("grows") == 1  # "pinned" comes later, but "grows" gave itself up
