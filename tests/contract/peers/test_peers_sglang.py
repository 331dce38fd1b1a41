"""What SGLang's tests pin down about admission, order, radix cache and aborts, held against this engine.

Budgets, new-token ratio and retraction are in tests/unit/test_scheduler_prefill_first.py.
Every test names the behaviour's number in docs/PEERS.md, and says where ours differs on purpose.
"""

import asyncio

import pytest

from engine.events import Finished, Preempted, Started
from engine.loop import Engine
from engine.request import FinishReason, RequestId, RequestSpec
from engine.runner.scripted import ScriptedRunner, ScriptedTokenizer
from engine.sampling import SamplingParams
from engine.scheduler.commands import Finish
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import Gate
from kv.block_manager import BlockManager
from tests.support.drive import Driver
from tests.support.peers import Owner, admit, grants, of


def test_a_victim_makes_room_once():
    """SGLang 6: a second arrival of the same step gets no credit for blocks the first one took."""
    driver = Driver(num_blocks=9, max_step_tokens=64, max_chunk_tokens=32)
    driver.submit("equal", 15, level=-10, max_tokens=2)
    driver.submit("victim", 15, level=10, max_tokens=2)
    driver.step()
    assert driver.blocks.num_free_blocks == 1
    for name in ("first", "second"):
        driver.submit(name, 15, level=-10, max_tokens=1)
    plan = driver.step()
    assert of(plan.events, Preempted) == ["victim"]
    assert of(plan.events, Started) == ["first"]
    assert driver.waiting() == ["second", "victim"]
    assert plan.gate is Gate.BLOCKS
    driver.finish()


def test_decodes_of_a_mixed_step_come_off_its_tokens():
    """SGLang 9: eight decodes leave 192 of 200 tokens to prefills.

    A chunk stays as large as it may be (64, where it would shrink to 56 there); such steps are
    the business of the unified discipline.
    """
    driver = Driver(max_running_requests=16, max_step_tokens=200, max_chunk_tokens=64, num_blocks=200)
    decodes, prefills = [f"d{i}" for i in range(8)], [f"p{i}" for i in range(4)]
    for name in decodes:
        driver.submit(name, 4, max_tokens=8)
    driver.step()
    for name in prefills:
        driver.submit(name, 64, max_tokens=2)
    plan = driver.step()
    assert grants(plan) == dict.fromkeys(decodes, 1) | dict.fromkeys(prefills[:3], 64)
    assert (plan.num_tokens, plan.gate) == (200, Gate.BUDGET)
    driver.finish()


@pytest.mark.parametrize(
    ("levels", "order"),
    [([5, 0, 5], "bac"), ([0, 5, -5], "cab"), ([1, 1, 1], "abc")],
    ids=["SGLang 18 two levels", "SGLang 18 three levels", "SGLang 18 one level"],
)
def test_one_runs_and_three_wait_in_order_of_priority_then_arrival(levels, order):
    driver = Driver(max_running_requests=1, max_waiting_requests=3)
    driver.submit("runs", 4, level=-100, max_tokens=3)
    driver.step()
    for name, level in zip("abc", levels, strict=True):
        driver.submit(name, 4, level=level, max_tokens=3)
    ended = []
    while driver.scheduler.has_requests:
        driver.step()
        ended += [str(r) for r, seen in driver.seen.items() if seen.terminal and str(r) not in ended]
    assert ended == ["runs", *order]


# The prefix cache: hashed blocks with reference counts where SGLang has a radix tree


def test_tokens_in_use_are_protected_and_given_back():
    """SGLang 35: three tokens in pages of one; who holds them keeps them from being evicted."""
    manager = BlockManager(8, 1)
    manager.free(admit(manager, "a", [1, 2, 3]))
    assert manager.num_free_blocks == 8
    holder = admit(manager, "b", [1, 2, 3, 4])
    assert manager.num_free_blocks == 4
    other = Owner("other", range(10, 15))
    assert not manager.admit(other, manager.match(other))  # five asked for: the three are not to be had
    manager.free(holder)
    assert manager.num_free_blocks == 8
    assert manager.match(Owner("c", [1, 2, 3, 9])).num_tokens == 3
    assert manager.admit(other, manager.match(other))


@pytest.mark.parametrize("num_blocks", range(1, 5), ids=lambda n: f"SGLang 36 {n} blocks")
def test_a_full_cache_gives_up_what_is_asked_for_and_no_more(num_blocks):
    """SGLang 36: there is no call to evict; an admission evicts exactly what it needs."""
    manager = BlockManager(4, 4)
    manager.free(admit(manager, "cached", range(16)))
    assert len(manager.match(Owner("again", range(17))).blocks) == 4
    admit(manager, "new", range(100, 100 + 4 * num_blocks))
    assert len(manager.match(Owner("again", range(17))).blocks) == 4 - num_blocks


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_match_is_a_multiple_of_the_block_size(block_size):
    """SGLang 37: and leaves one token to compute."""
    manager = BlockManager(64, block_size)
    admit(manager, "a", range(40))
    for size in range(1, 50):
        hit = manager.match(Owner("b", range(size)))
        usable = min(size - 1, 40)
        assert hit.num_tokens == usable - usable % block_size == len(hit.blocks) * block_size


@pytest.mark.parametrize("shared", range(13))
def test_prefixes_that_part_ways_leave_the_totals_alone(shared):
    """SGLang 38: nothing is split; the block in which two prefixes part is not shared."""
    manager = BlockManager(16, 4)
    first = admit(manager, "a", range(12))
    second = admit(manager, "b", [*range(shared), *range(100, 116 - shared)])
    tables = [list(manager.table(name)) for name in "ab"]
    held = {block for table in tables for block in table}
    assert len(held) == 3 + 4 - shared // 4
    assert manager.num_free_blocks + len(held) == 16
    manager.free(first)
    manager.free(second)
    assert manager.num_free_blocks == 16
    assert manager.match(Owner("c", range(13))).num_tokens == 12
    manager.check_integrity()


# Aborts


def test_an_empty_id_aborts_nobody():
    """SGLang 42: ids are matched whole, and the empty one is nobody's."""
    driver = Driver()
    driver.submit("a", 4)
    driver.submit("b", 4)
    driver.step()
    assert driver.cancel("") == []
    assert driver.apply(Finish(RequestId("r"))) == []
    assert driver.running() == ["a", "b"]
    driver.finish()
    assert {driver.terminal(name).reason for name in "ab"} == {FinishReason.LENGTH}


@pytest.mark.asyncio
async def test_a_cancelled_request_is_known_until_its_end_has_been_said():
    """SGLang 43: the command is on its way before anything about the request is forgotten."""
    engine = Engine(ScriptedRunner(), ScriptedTokenizer(), SchedulerConfig(), check_integrity=True)
    handle = engine.submit(RequestSpec(RequestId("a"), (1, 2, 3), SamplingParams(max_tokens=100)))
    handle.cancel()
    assert not handle.finished
    assert engine.statistics().num_alive == 1
    loop = asyncio.create_task(engine.run())
    events = [event async for event in handle.events()]
    assert [type(event) for event in events] == [Finished]
    assert events[0].reason is FinishReason.CANCELLED
    assert engine.statistics().num_alive == 0
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
