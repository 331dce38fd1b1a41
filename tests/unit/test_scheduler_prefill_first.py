"""The discipline ``prefill_first``: prefills before decodes, five budgets, retraction.

"SGLang n" names behaviours that its own test suite pins down, numbered as in docs/PEERS.md;
where ours is deliberately different the test says so. Decodes mixed into a prefill step have
no counterpart here: whoever wants that wants the unified discipline.
"""

from types import SimpleNamespace

import pytest

from engine.events import Preempted, Resumed
from engine.request import FinishReason, PreemptReason, Request, RequestId, RequestSpec, RequestStatus
from engine.sampling import SamplingParams
from engine.scheduler.config import InvalidSetting, SchedulerConfig
from engine.scheduler.eviction import retraction_order
from engine.scheduler.order import PriorityPolicy
from engine.scheduler.prefill_first import NewTokenRatio, OutputReserve
from kv.block_manager import BlockManager
from tests.support.drive import Driver


def prefill_first(**config):
    config = {
        "num_blocks": 64,
        "max_running_requests": 8,
        "max_step_tokens": 64,
        "max_chunk_tokens": 64,
    } | config
    config = {f"prefill_first_{name}" if name in OWN else name: value for name, value in config.items()}
    return Driver(discipline="prefill_first", **config)


OWN = ("max_input_tokens", "max_requests", "conservativeness", "max_decode_gap_ms")


def grants(plan):
    return {str(g.request_id): len(g.token_ids) for g in plan.grants}


def events(plan, kind):
    return [e for e in plan.events if isinstance(e, kind)]


def step_until(driver, kind):
    """Step until something of that kind happens; what it was, and the outputs before that step."""
    for _ in range(200):
        outputs = {str(r.request_id): r.num_output_tokens for r in driver.scheduler.running()}
        if found := events(driver.step(), kind):
            return found, outputs
    raise AssertionError(f"no {kind.__name__}")


def ratio(driver):
    return driver.scheduler._discipline.ratio


def set_ratio(driver, value):
    ratio(driver).value = value


def request(name="r", prompt=4, outputs=0, *, max_tokens=100, level=0, arrival=0):
    spec = RequestSpec(RequestId(name), tuple(range(prompt)), SamplingParams(max_tokens=max_tokens), level)
    made = Request(spec, arrival, 0.0)
    made.token_ids += [0] * outputs
    return made


# Prefill or decode, never both


def test_a_prefill_goes_before_all_decodes():
    driver = prefill_first()
    driver.submit("a", 8)
    assert grants(driver.step()) == {"a": 8}
    assert grants(driver.step()) == {"a": 1}
    driver.submit("b", 8)
    assert grants(driver.step()) == {"b": 8}
    assert grants(driver.step()) == {"a": 1, "b": 1}
    driver.finish()


def test_several_prefills_are_under_way_at_once():  # SGLang has one chunked request at a time
    driver = prefill_first(max_chunk_tokens=8)
    for name in "abc":
        driver.submit(name, 20)
    assert [grants(driver.step()) for _ in range(3)] == [
        {"a": 8, "b": 8, "c": 8},
        {"a": 8, "b": 8, "c": 8},
        {"a": 4, "b": 4, "c": 4},
    ]
    assert grants(driver.step()) == {"a": 1, "b": 1, "c": 1}
    driver.finish()


def test_a_last_chunk_of_one_token_is_a_prefill():
    driver = prefill_first(max_chunk_tokens=8)
    driver.submit("decodes", 4)
    driver.step()
    driver.submit("a", 9)
    assert grants(driver.step()) == {"a": 8}
    assert grants(driver.step()) == {"a": 1}
    assert grants(driver.step()) == {"decodes": 1, "a": 1}
    driver.finish()


# The five budgets


def test_chunk_tokens_are_shared_by_the_prefills_of_a_step():  # SGLang 10
    driver = prefill_first(prefill_first_max_chunk_tokens=56)
    driver.submit("a", 56)
    driver.submit("b", 8)
    assert grants(driver.step()) == {"a": 56}
    assert driver.waiting() == ["b"]
    driver.finish()


def test_what_is_left_of_a_chunk_goes_to_the_next():  # SGLang 11
    driver = prefill_first(prefill_first_max_chunk_tokens=56)
    driver.submit("a", 53)
    driver.submit("b", 3)
    driver.submit("c", 3)
    assert grants(driver.step()) == {"a": 53, "b": 3}
    assert driver.waiting() == ["c"]
    driver.finish()


def test_input_tokens_bound_a_step():
    # SGLang lets the first request exceed them; ours is cut, for a step is never larger than promised.
    driver = prefill_first(max_input_tokens=20)
    driver.submit("a", 30)
    assert grants(driver.step()) == {"a": 20}
    assert grants(driver.step()) == {"a": 10}
    driver.finish()


def test_max_step_tokens_hold_as_well():
    driver = prefill_first(max_step_tokens=16)
    driver.submit("a", 30)
    assert grants(driver.step()) == {"a": 16}
    driver.finish()


def test_prefill_requests_per_step_are_bounded():
    driver = prefill_first(max_requests=2)
    for name in "abc":
        driver.submit(name, 4)
    assert grants(driver.step()) == {"a": 4, "b": 4}
    assert grants(driver.step()) == {"c": 4}
    assert len(grants(driver.step())) == 3  # decodes are not
    driver.finish()


def test_a_victim_makes_room_in_the_number_of_prefills():
    driver = prefill_first(max_requests=1, max_running_requests=1, max_chunk_tokens=4)
    driver.submit("batch", 16, level=10)
    driver.step()
    driver.submit("urgent", 4, level=-10)
    assert grants(driver.step()) == {"urgent": 4}
    driver.finish()


def test_seats_bound_admission():
    driver = prefill_first(max_running_requests=2)
    for name in "abc":
        driver.submit(name, 4)
    assert grants(driver.step()) == {"a": 4, "b": 4}
    assert grants(driver.step()) == {"a": 1, "b": 1}
    driver.finish()


@pytest.mark.parametrize(("max_tokens", "admitted"), [(15, True), (16, True), (17, False)])
def test_a_newcomer_is_charged_prompt_page_and_whole_output(max_tokens, admitted):
    driver = prefill_first(num_blocks=14, block_size=4)
    driver.submit("runs", 12, max_tokens=20)
    driver.step()
    set_ratio(driver, 0.5)
    # 44 tokens are free, 0.5 x 19 reserved; 12 prompt + 4 page + 16 output leave 12, in blocks 3: 9.5.
    driver.submit("new", 12, max_tokens=max_tokens + 2)
    driver.step()
    assert ("new" in driver.running()) == admitted
    driver.finish()


def test_who_was_admitted_in_the_same_step_is_charged_in_full():
    driver = prefill_first(num_blocks=14, block_size=4)
    driver.submit("runs", 12, max_tokens=20)
    driver.step()
    set_ratio(driver, 0.01)
    driver.submit("b", 4, max_tokens=12)  # 44 - 4; page and output 16
    driver.submit("c", 4, max_tokens=12)  # 40 - 4 - 16; page and output 16; and 1 for the first
    driver.submit("d", 4, max_tokens=1)
    assert grants(driver.step()) == {"b": 4, "c": 4}
    assert grants(driver.step()) == {"d": 4}  # now the others count by the ratio
    driver.finish()


def test_outputs_are_reserved_for_up_to_4096_tokens():
    runs, newcomer = request("runs", 4, 1, max_tokens=9000), request("new", 8, max_tokens=8000)
    runs.status = RequestStatus.RUNNING
    state = SimpleNamespace(running=[runs], blocks=BlockManager(4, 4))
    reserve = OutputReserve(state, 0.5)
    assert reserve.num_blocks(newcomer, 8, ()) == (4096 + 4 + 4096 / 2) / 4
    assert reserve.num_blocks(newcomer, 8, [runs]) == 0


def test_a_replayed_request_needs_prompt_and_output():  # SGLang 12
    # SGLang charges the whole max_new once more; ours what may still come.
    runs, replayed = request("runs", 4, 1), request("replayed", 367, 438, max_tokens=500)
    runs.status = RequestStatus.RUNNING
    state = SimpleNamespace(running=[runs], blocks=BlockManager(4, 1))
    assert replayed.num_tokens == 805  # what admission asks blocks for
    assert OutputReserve(state, 0.0).num_blocks(replayed, 805, ()) == 500 - 438 + 1


def test_with_nothing_running_anything_that_fits_is_admitted():  # SGLang 29, SGLang 33
    # SGLang shortens the output to what fits; ours runs until it really outgrows the pool.
    driver = prefill_first(num_blocks=8, block_size=64, max_step_tokens=512, max_chunk_tokens=512)
    driver.submit("near", 447, max_tokens=1)
    assert grants(driver.step()) == {"near": 447}
    driver.submit("large", 400, max_tokens=112)
    driver.submit("next", 4)
    driver.finish()
    assert all(driver.terminal(n).reason is FinishReason.LENGTH for n in ("near", "large", "next"))


# The new-token ratio


def test_the_ratio_starts_at_seven_tenths_and_has_a_floor():  # SGLang 14
    made = NewTokenRatio()
    assert made.value == 0.7
    assert made.floor == pytest.approx(0.098)


@pytest.mark.parametrize(("conservativeness", "start"), [(0.5, 0.35), (1.0, 0.7), (2.0, 1.0)])
def test_conservativeness_scales_the_ratio_up_to_one(conservativeness, start):  # SGLang 15
    made = NewTokenRatio(conservativeness)
    assert made.value == pytest.approx(start)
    assert made.floor == pytest.approx(start * 0.14)


def test_the_ratio_falls_to_its_floor_in_600_steps_and_comes_back():  # SGLang 16
    made = NewTokenRatio()
    for _ in range(300):
        made.decode()
    assert made.value == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(400):
        made.decode()
    assert made.value == made.floor
    made.reset()
    assert made.value == 0.7


def test_after_a_retraction_the_ratio_is_what_the_survivors_show():  # SGLang 17
    made = NewTokenRatio()
    made.retracted([])
    assert made.value == 0
    made.retracted([request(outputs=5, max_tokens=100), request(outputs=3, max_tokens=50)])
    assert made.value == (5 + 3 + 40) / 151
    made.retracted([request(outputs=5, max_tokens=6)])
    assert made.value == 1.0


def test_decode_steps_lower_the_ratio_and_prefill_steps_do_not():
    driver = prefill_first()
    driver.submit("a", 8, max_tokens=10)
    driver.step()
    assert ratio(driver).value == 0.7
    driver.step()
    driver.step()
    assert ratio(driver).value == pytest.approx(0.7 - 2 * (0.7 - 0.098) / 600)
    driver.finish()
    driver.submit("b", 8, max_tokens=2)
    driver.step()
    assert ratio(driver).value == 0.7  # nothing ran
    driver.finish()


def test_a_low_ratio_admits_more():
    numbers = []
    for conservativeness in (0.01, 1.0):
        driver = prefill_first(num_blocks=20, block_size=4, conservativeness=conservativeness)
        for i in range(6):
            driver.submit(f"r{i}", 4, max_tokens=24)
        for _ in range(8):
            driver.step()
        numbers.append(len(driver.running()))
        driver.finish()
    assert numbers[0] > numbers[1]


# Retraction


def order(*requests):
    return [str(r.request_id) for r in retraction_order(requests, PriorityPolicy())]


def test_the_shortest_output_goes_first_then_the_longest_prompt():  # SGLang 25
    long_out = request("long out", 10, 20)
    short_in = request("short in", 5, 2)
    long_in = request("long in", 50, 2)
    assert order(long_out, short_in, long_in) == ["long in", "short in", "long out"]


def test_urgency_decides_before_length():  # SGLang 26, SGLang 27: always here, there an option
    urgent = request("urgent", 50, 0, level=-10)
    batch = request("batch", 5, 30, level=10)
    assert order(urgent, batch) == ["batch", "urgent"]


def test_equals_in_all_else_go_latest_first():  # SGLang 27: deterministic
    assert order(request("a", arrival=0), request("b", arrival=1)) == ["b", "a"]


def test_the_least_urgent_is_retracted_even_with_the_longest_output():
    driver = prefill_first(num_blocks=9, block_size=4, conservativeness=0.001)
    driver.submit("batch", 8, level=10, max_tokens=16)
    driver.step()
    driver.step()
    driver.step()
    driver.submit("urgent", 4, level=-10, max_tokens=12)
    preempted, outputs = step_until(driver, Preempted)
    assert [str(e.request_id) for e in preempted] == ["batch"]
    assert outputs["batch"] > outputs["urgent"]
    assert driver.preemptions("urgent") == 0
    driver.finish()


def test_the_ratio_after_a_retraction_lets_fewer_in():
    driver = prefill_first(num_blocks=24, block_size=4, conservativeness=0.001)
    for i in range(3):
        driver.submit(f"r{i}", 8, max_tokens=60)
        driver.step()
    step_until(driver, Preempted)
    running = driver.scheduler.running()
    num_outputs = sum(r.num_output_tokens - 1 for r in running)  # each has sampled one since
    assert ratio(driver).value == (num_outputs + 20 * len(running)) / (60 * len(running) + 1)
    driver.finish()


def test_a_decode_batch_without_blocks_retracts_and_keeps_the_longest_output():
    driver = prefill_first(num_blocks=9, block_size=4, conservativeness=0.001)
    driver.submit("a", 8, max_tokens=16)
    driver.step()
    driver.step()
    driver.step()
    driver.submit("b", 4, max_tokens=12)
    preempted, outputs = step_until(driver, Preempted)
    assert [str(e.request_id) for e in preempted] == ["b"]
    assert outputs["b"] < outputs["a"]
    (event,) = preempted
    assert event.reason is PreemptReason.GROWTH
    assert event.beneficiary is None
    assert driver.running() == ["a"]
    assert ratio(driver).value == 1.0  # more than (13 + 20) / (16 + 1) is not to be expected
    driver.finish()


def test_a_retracted_request_keeps_its_place_and_finds_its_blocks():
    driver = prefill_first(num_blocks=9, block_size=4, conservativeness=0.001, max_waiting_requests=1)
    driver.submit("a", 8, max_tokens=16)
    driver.step()
    driver.step()
    driver.step()
    driver.submit("b", 4, max_tokens=12)
    step_until(driver, Preempted)
    driver.submit("later", 4, max_tokens=1)  # the queue takes one; who was retracted does not count
    assert driver.waiting() == ["b", "later"]
    resumed, _ = step_until(driver, Resumed)
    assert resumed[0].request_id == "b"
    assert resumed[0].num_recomputed_tokens < 4  # only the unfinished block
    driver.finish()
    assert driver.terminal("b").reason is FinishReason.LENGTH


def test_the_last_one_that_does_not_fit_ends_with_what_it_has():
    driver = prefill_first(num_blocks=4, block_size=4)
    driver.submit("grows", 10, max_tokens=100)
    driver.submit("other", 4, max_tokens=3)
    driver.finish()
    assert driver.terminal("grows").reason is FinishReason.CAPACITY
    assert len(driver.tokens("grows")) == 7  # 17 known tokens need a fifth block
    assert driver.terminal("other").reason is FinishReason.LENGTH


def test_parked_blocks_go_before_a_decode_is_retracted():
    driver = prefill_first(num_blocks=6, block_size=4, conservativeness=0.001)
    driver.submit("parked", 11, max_tokens=4)
    driver.step()
    driver.park("parked")
    driver.submit("a", 8, max_tokens=14)
    driver.run_until_ended("a")
    assert driver.preemptions("parked") == 1
    assert driver.preemptions("a") == 0
    driver.unpark("parked")
    driver.finish()


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_forced_retraction_every_three_steps_changes_no_token(prefix_cache, block_size):  # SGLang 28
    driver = prefill_first(num_blocks=256, block_size=block_size, prefix_cache=prefix_cache)
    for i in range(4):
        driver.submit(f"r{i}", 10 + i, max_tokens=12, seed=i)
    for step in range(400):
        if not driver.scheduler.has_requests:
            break
        driver.step()  # the driver compares every token with the undisturbed output
        if step % 3 == 2 and driver.running():
            driver.preempt(driver.running()[-1])
    driver.finish()


# Preempting for arrivals


def test_seats_full_of_batch_work_give_way_at_once():
    driver = prefill_first(max_running_requests=2)
    for name in "ab":
        driver.submit(name, 8, level=10, max_tokens=20)
    driver.step()
    driver.submit("urgent", 8, level=-10)
    plan = driver.step()
    assert [e.reason for e in events(plan, Preempted)] == [PreemptReason.SEATS]
    assert grants(plan) == {"urgent": 8}
    driver.finish()


@pytest.mark.parametrize(("gap", "preempts"), [(20, True), (21, False)])
def test_the_level_gap_decides(gap, preempts):  # SGLang 21
    driver = prefill_first(max_running_requests=1, preempt_level_gap=gap)
    driver.submit("batch", 8, level=10, max_tokens=20)
    driver.step()
    driver.submit("urgent", 8, level=-10)
    driver.step()
    assert driver.preemptions("batch") == preempts
    driver.finish()


def test_a_victims_reserve_counts_as_room():  # SGLang 1, SGLang 7: the offset shrinks with the victim
    driver = prefill_first(num_blocks=24, block_size=4)
    driver.submit("small", 4, level=10, max_tokens=2)
    driver.submit("large", 4, level=10, max_tokens=40)
    driver.step()
    set_ratio(driver, 1.0)
    # 22 of 24 blocks are free, 39 tokens and 1 are reserved for those two: 12 blocks are left.
    driver.submit("urgent", 40, level=-10, max_tokens=12)  # 10 + 1 + 3: 2 too many
    plan = driver.step()
    assert [str(e.request_id) for e in events(plan, Preempted)] == ["large"] or driver.preemptions(
        "large"
    ) == 1
    assert "small" in driver.running()
    assert "urgent" in grants(plan)
    driver.finish()


def test_two_run_and_one_is_preempted_the_other_goes_on_correctly():  # SGLang 23
    driver = prefill_first(max_running_requests=2)
    driver.submit("a", 8, level=5, max_tokens=20)
    driver.submit("b", 8, level=10, max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.submit("urgent", 8, level=-10, max_tokens=4)
    driver.finish()
    assert (driver.preemptions("a"), driver.preemptions("b")) == (0, 1)


def test_nobody_is_preempted_for_an_arrival_that_would_not_fit_anyway():  # SGLang 24
    driver = prefill_first(num_blocks=10)
    driver.submit("equal", 16, level=-10, max_tokens=20)
    driver.submit("batch", 8, level=10, max_tokens=2)
    driver.step()
    driver.submit("urgent", 28, level=-10)
    assert not events(driver.step(), Preempted)
    driver.finish()


# The gap between decodes


def flood(**config):
    """One decode under a stream of prefills; a step takes a second."""
    driver = prefill_first(max_running_requests=16, num_blocks=512, **config)
    driver.submit("decodes", 4, max_tokens=5)
    driver.step()
    steps = []
    for i in range(9):
        driver.submit(f"r{i}", 8, max_tokens=1)
        steps.append("decodes" in grants(driver.step()))
    driver.finish()
    return steps


def test_prefills_may_hold_up_a_decode_for_ever():  # SGLang 30: never armed by default
    assert not any(flood())


def test_a_bounded_gap_lets_a_decode_go_first():  # SGLang 30: there decodes hold up prefills
    # Granted at 1 s; at 2 and 3 s it has waited 1 and 2 s, at 4 s three.
    assert flood(max_decode_gap_ms=2000) == [False, False, True] * 3


def test_a_gap_shorter_than_a_step_makes_the_two_take_turns():
    assert (
        flood(max_decode_gap_ms=1)[:6] == [False, True] * 3
        or flood(max_decode_gap_ms=1)[:6] == [True, False] * 3
    )


def test_while_anyone_starves_the_two_take_turns():
    steps = flood(max_wait_s=4)
    assert steps[:3] == [False] * 3
    assert steps[3:7] == [True, False, True, False]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_input_tokens", 0),
        ("max_chunk_tokens", 0),
        ("max_requests", 0),
        ("conservativeness", 0),
        ("max_decode_gap_ms", 0),
    ],
)
def test_bad_settings_name_field_and_value(field, value):
    with pytest.raises(InvalidSetting, match=rf"scheduler\.prefill_first_{field} .*got {value}"):
        SchedulerConfig(**{f"prefill_first_{field}": value})


def test_an_unknown_discipline_is_named():
    with pytest.raises(InvalidSetting, match="must be one of prefill_first, static, unified, got 'lottery'"):
        Driver(discipline="lottery")
