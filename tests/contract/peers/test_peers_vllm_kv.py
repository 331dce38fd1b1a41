"""What vLLM's tests of its KV cache pin down, held against the block manager.

Blocks are numbered from 0 here and every block is usable; there number 0 is set aside.
Every test names the behaviour's number in docs/PEERS.md.
"""

from engine.request import RequestId
from kv.block_manager import BlockManager
from tests.support.drive import Driver
from tests.support.peers import Owner, admit, grants, reuse_order


def test_equal_prompts_share_from_the_step_after_the_first_is_computed():
    """vLLM 40: there the second of one step computes 4 of 100 tokens; here only computed blocks are found."""
    driver = Driver(num_blocks=64, block_size=16, max_step_tokens=220, max_chunk_tokens=110)
    for name in ("a", "b"):
        driver.submit(name, range(100))
    assert grants(driver.step()) == {"a": 100, "b": 100}
    driver.submit("c", range(100))
    assert grants(driver.step()) == {"a": 1, "b": 1, "c": 4}
    driver.finish()


def test_a_follow_up_turn_computes_its_new_tokens_alone():
    """vLLM 41: 12 of 300 tokens; outputs of the turn before are found like its prompt."""
    driver = Driver(num_blocks=64, block_size=16, max_step_tokens=320, max_chunk_tokens=320)
    first = [i * 7 % 256 for i in range(276)]
    driver.submit("first turn", first, max_tokens=13)
    driver.finish()
    history = first + driver.tokens("first turn")
    driver.submit("second turn", [*history, *range(300 - len(history))], max_tokens=1)
    assert grants(driver.step()) == {"second turn": 12}
    assert driver.seen[RequestId("second turn")].events[0].num_cached_tokens == 288
    driver.finish()


def test_blocks_come_back_in_the_order_of_their_worth():
    """vLLM 50: never hashed first, then the ends of prefixes; a hit is taken out from the middle."""
    manager = BlockManager(10, 16)
    first = admit(manager, "a", range(87))
    second = admit(manager, "b", range(1000, 1048))
    assert (list(manager.table("a")), list(manager.table("b"))) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    assert manager.num_free_blocks == 1
    manager.free(first)
    assert reuse_order(manager) == [5, 9, 4, 3, 2, 1, 0]
    manager.free(second)
    assert reuse_order(manager) == [5, 9, 4, 3, 2, 1, 0, 8, 7, 6]
    admit(manager, "c", [*range(32), *range(2000, 2016)])
    assert list(manager.table("c")) == [0, 1, 5]
    assert manager.num_free_blocks == 7
    assert reuse_order(manager) == [9, 4, 3, 2, 8, 7, 6]


def test_who_asks_does_not_matter_to_what_is_found():
    """vLLM 51: equal tokens under other ids find the same blocks (there are no prompt logprobs yet)."""
    manager = BlockManager(10, 16)
    admit(manager, "a", range(55))
    hits = [manager.match(Owner(name, range(55))) for name in ("b", "c", "a again")]
    assert {hit.blocks for hit in hits} == {(0, 1, 2)}
    first, second = Owner("d", range(55)), Owner("e", range(55))
    for owner in (first, second):
        manager.match(owner)
    assert first.block_hashes == second.block_hashes
    assert len(first.block_hashes) == 3


def test_without_a_cache_blocks_are_counted_out_until_none_is_left():
    """vLLM 56: four blocks of four; three for the prompt, the fourth by growing, and then no more."""
    manager = BlockManager(4, 4, enable_prefix_cache=False)
    owner = admit(manager, "a", range(10))
    assert len(manager.table("a")) == 3
    owner.token_ids += range(6)
    assert manager.grow(owner)
    assert len(manager.table("a")) == 4
    owner.token_ids.append(0)
    assert not manager.grow(owner)
    manager.free(owner)
    assert manager.match(Owner("b", range(10))).blocks == ()


def test_room_may_be_asked_for_beyond_the_known_tokens():
    """vLLM 58: three tokens and room for two more are two blocks of four."""
    manager = BlockManager(8, 4)
    owner = Owner("a", range(3))
    assert manager.num_blocks_to_admit(owner, manager.match(owner), 5) == 2
    assert manager.admit(owner, manager.match(owner), 5)
    assert len(manager.table("a")) == 2
    assert manager.grow(owner, 8)
    assert len(manager.table("a")) == 2
    assert manager.grow(owner, 9)
    assert len(manager.table("a")) == 3
    manager.check_integrity()
