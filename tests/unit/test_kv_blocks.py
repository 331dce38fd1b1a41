"""Blocks, free list and prefix index. "vLLM n" names a behaviour of docs/PEERS.md."""

from kv.block_manager import BlockManager
from kv.free_list import FreeList


class Owner:
    def __init__(self, name, tokens, salt="", rank=0):
        self.request_id = name
        self.token_ids = list(tokens)
        self.block_hashes = []
        self.cache_salt = salt
        self.cache_rank = rank
        self.block_table = []
        self.num_confirmed_blocks = 0


def reuse_order(manager):
    return [block for part in manager._free for block in part]


def admit(manager, name, tokens, salt="", *, computed=None, rank=0):
    owner = Owner(name, tokens, salt, rank)
    hit = manager.match(owner)
    assert manager.admit(owner, hit)
    manager.confirm(owner, len(owner.token_ids) if computed is None else computed)
    manager.check_integrity()
    return owner


def test_the_free_list_keeps_order_through_every_operation():  # vLLM 57
    free = FreeList(5)
    assert list(free) == [0, 1, 2, 3, 4]
    free.remove(2)
    assert free.pop_some(1) == [0]
    free.append([0])
    free.prepend([2])
    assert list(free) == [2, 1, 3, 4, 0]
    assert len(free) == 5
    assert free.pop_some(3) == [2, 1, 3]
    assert list(free) == [4, 0]
    assert free.pop_some(3) == [4, 0]
    assert free.pop_some(1) == []
    assert len(free) == 0
    free.append([3])
    assert list(free) == [3]


def test_a_second_request_shares_the_full_blocks_of_the_first():  # vLLM 48
    manager = BlockManager(10, 16)
    first = admit(manager, "a", range(55))
    assert manager.table("a") == [0, 1, 2, 3]
    second = admit(manager, "b", [*range(48), *range(900, 907)])
    assert manager.table("b") == [0, 1, 2, 4]
    assert manager.num_free_blocks == 5
    assert manager.num_shared_prefix_blocks(first) == 3
    assert manager.free(first) == 1
    assert manager.free(second) == 4
    # Never hashed first, hashed last, the start of a prefix longest of all.
    assert reuse_order(manager) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    third = admit(manager, "c", range(1000, 1000 + 160))
    assert manager.table("c") == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    manager.free(third)


def test_a_freed_block_is_found_until_it_is_reused():
    manager = BlockManager(4, 4)
    owner = admit(manager, "a", range(12))
    manager.free(owner)
    again = Owner("a2", range(12))
    assert manager.match(again).blocks == (0, 1)  # capped: one token must be computed for logits
    assert manager.match(again).num_tokens == 8
    assert manager.match(again).num_free_blocks == 2
    admit(manager, "b", range(100, 108))  # takes the never used block, then the tail of "a"
    assert manager.match(again).blocks == (0, 1)
    admit(manager, "c", range(200, 204))
    assert manager.match(again).blocks == (0,)


def test_a_hit_never_covers_the_last_token():
    manager = BlockManager(8, 4)
    admit(manager, "a", range(8))
    assert manager.match(Owner("b", range(8))).num_tokens == 4
    assert manager.match(Owner("b", range(9))).num_tokens == 8
    assert manager.match(Owner("b", range(4))).num_tokens == 0


def test_a_hit_on_a_free_block_consumes_a_free_block():
    manager = BlockManager(3, 4)
    manager.free(admit(manager, "a", range(9)))
    other = admit(manager, "other", range(50, 54))
    owner = Owner("b", range(12))
    hit = manager.match(owner)
    assert hit.num_free_blocks == len(hit.blocks)
    assert manager.num_blocks_to_admit(owner, hit) == 3
    assert not manager.admit(owner, hit)
    manager.check_integrity()
    manager.free(other)


def test_a_failed_admission_changes_nothing():  # vLLM 52
    manager = BlockManager(6, 16)
    admit(manager, "a", range(16))
    before = reuse_order(manager), list(manager._references)
    owner = Owner("b", [*range(16), *range(500, 600)])
    hit = manager.match(owner)
    assert hit.blocks == (0,)
    assert not manager.admit(owner, hit)
    assert (reuse_order(manager), list(manager._references)) == before
    assert manager.num_owners == 1


def test_growing_takes_a_block_only_at_a_border():  # vLLM 49
    manager = BlockManager(8, 16)
    owner = admit(manager, "a", range(55))
    owner.token_ids += range(4)
    assert manager.grow(owner)
    assert len(manager.table("a")) == 4
    owner.token_ids += range(15)
    assert manager.grow(owner)
    assert len(manager.table("a")) == 5


def test_growing_without_a_free_block_changes_nothing():
    manager = BlockManager(2, 4)
    owner = admit(manager, "a", range(8))
    owner.token_ids.append(8)
    assert not manager.grow(owner)
    assert manager.table("a") == [0, 1]
    manager.check_integrity()


def test_salts_do_not_share():  # vLLM 54, SGLang 34
    manager = BlockManager(8, 4)
    admit(manager, "a", range(9), "tenant-a")
    assert manager.match(Owner("b", range(9), "tenant-b")).blocks == ()
    assert manager.match(Owner("b", range(9))).blocks == ()
    assert len(manager.match(Owner("b", range(9), "tenant-a")).blocks) == 2


def test_equal_blocks_at_different_places_are_different():  # SGLang 39
    manager = BlockManager(8, 4)
    admit(manager, "a", [1, 2, 3, 4, 1, 2, 3, 4, 9])
    assert manager.match(Owner("b", [1, 2, 3, 4, 9])).blocks == (0,)
    assert manager.match(Owner("c", [5, 5, 5, 5, 1, 2, 3, 4, 9])).blocks == ()


def test_of_two_blocks_with_one_hash_either_may_go():  # vLLM 55
    manager = BlockManager(3, 4)
    first, second = Owner("a", range(4)), Owner("b", range(4))
    for owner in (first, second):
        assert manager.admit(owner, manager.match(owner))
    for owner in (first, second):
        manager.confirm(owner, 4)
    manager.check_integrity()
    manager.free(first)
    admit(manager, "other", range(50, 58))  # reuses the first one's block
    assert manager.match(Owner("c", range(5))).blocks == (1,)


def test_only_computed_full_blocks_are_found():
    manager = BlockManager(8, 4)
    owner = admit(manager, "a", range(10), computed=7)
    assert manager.match(Owner("b", range(10))).num_tokens == 4
    manager.confirm(owner, 10)
    assert manager.match(Owner("b", range(10))).num_tokens == 8


def test_a_hit_is_not_evicted_while_another_block_is_free():  # vLLM 53
    manager = BlockManager(4, 4)
    manager.free(admit(manager, "a", range(5)))
    admit(manager, "b", range(100, 110))
    assert manager.match(Owner("c", range(5))).blocks == (0,)


def test_a_reused_block_is_no_longer_found():  # vLLM 53
    manager = BlockManager(1, 4)
    manager.free(admit(manager, "a", range(4)))
    manager.free(admit(manager, "b", range(10, 13)))
    assert manager.match(Owner("c", range(5))).blocks == ()
    assert len(manager._index) == 0


def test_without_prefix_cache_nothing_is_found():  # vLLM 56, SGLang 40
    manager = BlockManager(8, 4, enable_prefix_cache=False)
    admit(manager, "a", range(9))
    assert manager.match(Owner("b", range(9))).blocks == ()


def gain(reclaim, name):
    before = reclaim.num_blocks
    reclaim.add(name)
    after = reclaim.num_blocks
    reclaim.remove(name)
    return after - before


def test_reclaim_counts_a_shared_block_once_its_last_holder_is_in():
    manager = BlockManager(10, 4)
    admit(manager, "a", range(10))
    admit(manager, "b", [*range(8), 77])
    reclaim = manager.reclaim()
    assert gain(reclaim, "a") == gain(reclaim, "b") == 1
    reclaim.add("a")
    assert reclaim.num_blocks == 1
    assert gain(reclaim, "b") == 3
    reclaim.add("b")
    assert reclaim.num_blocks == 4
    reclaim.remove("a")
    assert reclaim.num_blocks == 1
    assert gain(manager.reclaim(keep=[0, 1]), "a") == 1


def test_the_cache_gives_up_blocks_of_less_dear_owners_first():
    manager = BlockManager(4, 4)
    manager.free(admit(manager, "batch", range(5), rank=2))
    manager.free(admit(manager, "urgent", range(50, 55), rank=0))
    manager.free(admit(manager, "batch again", range(100, 105), rank=2))
    # Unhashed first, then batch by age, then urgent although it is older than the last batch.
    admit(manager, "filler", range(200, 208))
    assert manager.match(Owner("x", range(5))).blocks == ()
    assert manager.match(Owner("y", range(50, 55))).num_tokens == 4


def test_a_block_is_as_dear_as_the_dearest_owner_it_had():
    manager = BlockManager(3, 4)
    manager.free(admit(manager, "batch", range(5), rank=2))
    manager.free(admit(manager, "urgent", range(5), rank=0))
    manager.free(admit(manager, "other", range(60, 65), rank=1))
    admit(manager, "filler", range(200, 208))
    assert manager.match(Owner("x", range(5))).num_tokens == 4
    assert manager.match(Owner("y", range(60, 65))).num_tokens == 0


def test_of_two_copies_the_held_one_is_hit():
    manager = BlockManager(6, 4)
    first = admit(manager, "a", range(4))
    admit(manager, "b", range(4))  # computed side by side: a hit would be capped one token short
    manager.free(first)
    hit = manager.match(Owner("c", range(5)))
    assert hit.blocks == (1,)
    assert hit.num_free_blocks == 0
