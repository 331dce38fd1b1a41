"""A step as one row of words, and decode batches padded to buckets."""

import dataclasses
import itertools

import pytest
import torch

from engine.runner.batch import build_batch
from engine.runner.memory import DeviceMemory, largest_step, num_profile_blocks
from engine.runner.packing import (
    ALIGN_TABLE,
    ALIGN_WORDS,
    StepShape,
    bucket_for,
    decode_buckets,
    num_fixed_words,
    num_words,
    pack,
    padded,
    sections,
    shape_of,
    unpack,
)
from engine.sampling import SamplingParams
from engine.scheduler.plan import Plan
from tests.support.grants import grant

BLOCK_SIZE = 4
DRAWN = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=2**64 - 3, min_tokens=9)


def decode(name, start=5, table=(7, 2), sampling=DRAWN):
    return grant(name, start, 1, 3, token_ids=[11], block_table=table, sampling=sampling)


def mixed():
    return build_batch(
        Plan(
            1,
            (
                decode("a"),
                grant("b", 0, 6, None, token_ids=[1, 2, 3, 4, 5, 6], block_table=[3, 9], sampling=DRAWN),
                grant("c", 3, 2, 0, token_ids=[8, 9], block_table=[1, 4], sampling=DRAWN),
            ),
        ),
        BLOCK_SIZE,
    )


def decodes(count):
    return build_batch(Plan(1, tuple(decode(f"r{i}", table=(i, i + 50)) for i in range(count))), BLOCK_SIZE)


def tensors_of(inputs):
    """Every tensor of a batch or of a step's inputs, by name; block tables cut to what is named."""
    found = {"token_ids": inputs.token_ids, "sample_rows": inputs.sample_rows}
    for part in (inputs.attention, inputs.sampling):
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        found |= {name: value for name, value in values.items() if value is not None}
    return found


def packed(batch):
    words = torch.full((num_words(shape_of(batch)),), -99)
    pack(batch, words)
    return words


@pytest.mark.parametrize("batch", [mixed(), decodes(3)], ids=["mixed", "decodes"])
def test_what_is_packed_comes_back(batch):
    shape = shape_of(batch)
    found, wanted = tensors_of(unpack(shape, packed(batch))), tensors_of(batch)

    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype, name
        if name == "block_tables":
            assert torch.equal(found[name][:, : values.shape[1]], values)
            assert not found[name][:, values.shape[1] :].any()
        else:
            assert torch.equal(found[name], values), name


def test_banned_pairs_come_back():
    sampling = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=(4, 6))
    batch = build_batch(Plan(1, (decode("a"), decode("b", sampling=sampling))), BLOCK_SIZE)
    found = unpack(shape_of(batch), packed(batch)).sampling

    assert shape_of(batch).num_banned == 2
    assert found.banned_rows.tolist() == [1, 1]
    assert sorted(found.banned_ids.tolist()) == [4, 6]


def test_sections_are_aligned_and_do_not_overlap():
    for shape in (StepShape(1, 1, 1, 0, 16), StepShape(17, 3, 2, 5, 32), StepShape(40, 40, 0, 0, 16)):
        places = list(sections(shape).values())
        assert all(place.start % ALIGN_WORDS == 0 for place in places)
        for before, after in itertools.pairwise(places):
            assert before.stop <= after.start
        assert num_words(shape) == max(place.stop for place in places)
        assert shape_of(mixed()).table_width % ALIGN_TABLE == 0


def test_a_graph_finds_everything_but_bans_and_tables_in_one_place():
    narrow, wide = StepShape(8, 8, 8, 0, 16), StepShape(8, 8, 8, 31, 512)

    assert num_fixed_words(narrow) == num_fixed_words(wide)
    for name, place in sections(narrow).items():
        if name not in ("banned_rows", "banned_ids", "block_tables"):
            assert place == sections(wide)[name]
            assert place.stop <= num_fixed_words(narrow)


@pytest.mark.parametrize(
    ("max_requests", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (30, (1, 2, 4, 8, 16, 24, 30)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_buckets_end_with_the_number_of_seats(max_requests, buckets):
    assert decode_buckets(max_requests) == buckets


def test_a_batch_takes_the_smallest_bucket_that_holds_it():
    buckets = decode_buckets(24)

    found = {n: bucket_for(decodes(n), buckets) for n in (1, 2, 3, 5, 8, 9, 17, 24)}
    assert found == {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 16, 17: 24, 24: 24}
    assert bucket_for(decodes(25), buckets) is None
    assert bucket_for(mixed(), buckets) is None


def test_a_token_that_does_not_sample_keeps_a_batch_out_of_the_buckets():
    last_but_one = grant("b", 0, 1, None, token_ids=[1], block_table=[3], sampling=DRAWN)

    assert bucket_for(build_batch(Plan(1, (decode("a"), last_but_one)), BLOCK_SIZE), (1, 2, 4)) is None


def test_padding_writes_into_the_scratch_block_and_reads_one_token():
    batch = decodes(3)
    found = padded(batch, 8, scratch_block=77, block_size=BLOCK_SIZE)

    assert shape_of(found)[:3] == (8, 8, 8)
    assert found.request_ids == batch.request_ids
    attention = found.attention
    assert attention.slots.tolist() == [*batch.attention.slots.tolist(), *[77 * BLOCK_SIZE] * 5]
    assert attention.context_lens.tolist() == [6, 6, 6, 1, 1, 1, 1, 1]
    assert attention.query_start.tolist() == list(range(9))
    assert attention.block_tables[3:].unique().tolist() == [77]
    assert found.sample_rows.tolist() == list(range(8))
    assert found.sampling.temperature[3:].tolist() == [0.0] * 5
    before, after = tensors_of(batch), tensors_of(found)
    for name, values in before.items():
        assert torch.equal(after[name][: values.shape[0]], values), name
    assert padded(batch, 3, 77, BLOCK_SIZE) is batch


@pytest.mark.parametrize(("tokens", "seats"), [(64, 8), (100, 7), (4, 9), (16, 16), (5, 1)])
def test_the_largest_step_uses_every_token_and_every_seat(tokens, seats):
    plan = largest_step(tokens, seats, BLOCK_SIZE)

    assert plan.num_tokens == tokens
    assert len(plan.grants) == min(tokens, seats)
    assert all(grant.output_index is not None for grant in plan.grants)
    named = {block for grant in plan.grants for block in grant.block_table}
    assert named == set(range(num_profile_blocks(tokens, seats, BLOCK_SIZE)))
    assert all(len(grant.block_table) * BLOCK_SIZE >= grant.num_tokens for grant in plan.grants)


def test_the_pool_gets_a_share_of_what_weights_and_the_largest_step_leave():
    gib = 2**30
    memory = DeviceMemory(free_bytes=60 * gib, reserved_bytes=20 * gib, peak_bytes=30 * gib)

    assert memory.pool_bytes(0.9) == int(50 * gib * 0.9)
    assert DeviceMemory(10 * gib, 0, 20 * gib).pool_bytes(0.9) == 0
