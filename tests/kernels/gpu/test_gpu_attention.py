"""Paged attention on the GPU kernels against the reference, and the bits of a row against its neighbours."""

import itertools

import pytest
import torch

from kernels.gpu import kv_layout, paged_decode, paged_prefill
from kernels.gpu.device import INTERPRETING
from kernels.gpu.paged_attention import paged_attention
from tests.support.paged import expected, step

#: How far a result may be from float32 arithmetic: the rounding of results and, on a card, of the weights.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FLOAT32 = [torch.float32] if INTERPRETING else []
#: What tests of the arithmetic itself use.
PRECISE = torch.float32 if INTERPRETING else torch.float16

#: (queries, context with them) of each request.
BATCHES = {
    "one token, first of all": [(1, 1)],
    "decodes, ragged": [(1, 1), (1, 123), (1, 64), (1, 65)],
    "a decode in several pieces": [(1, 300)],
    "one whole prompt": [(123, 123)],
    "one block, full": [(16, 16)],
    "last block holds one": [(5, 17)],
    "decodes and chunks": [(1, 9), (5, 77), (1, 130), (64, 64)],
    "two tokens": [(2, 2), (2, 66)],
}


def check(wanted, out, scale, window=None, softcap=None):
    tolerance = TOLERANCES[wanted.q.dtype]
    assert out.dtype == wanted.q.dtype
    torch.testing.assert_close(
        out.cpu().float(), expected(wanted, scale, window, softcap), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.usefixtures("nothing_is_written_past_the_end")
def test_equals_the_reference(name, invariant, device):
    wanted = step(BATCHES[name], dtype=PRECISE, device=device)
    out = paged_attention(*wanted.arguments(), 0.125, batch_invariant=invariant)
    check(wanted, out, 0.125)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FLOAT32])
@pytest.mark.parametrize("head_dim", kv_layout.HEAD_DIMS)
@pytest.mark.usefixtures("nothing_is_written_past_the_end")
def test_every_head_size_and_data_type(head_dim, dtype, device):
    wanted = step([(1, 70), (5, 37)], head_dim=head_dim, block_size=32, dtype=dtype, device=device)
    check(wanted, paged_attention(*wanted.arguments(), head_dim**-0.5), head_dim**-0.5)


@pytest.mark.parametrize("block_size", kv_layout.BLOCK_SIZES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (6, 2), (14, 2), (17, 1)])
@pytest.mark.usefixtures("nothing_is_written_past_the_end")
def test_every_block_size_and_groups_of_heads(num_q_heads, num_kv_heads, block_size, device):
    wanted = step([(1, 67), (3, 20)], num_q_heads, num_kv_heads, 64, block_size, PRECISE, device)
    check(wanted, paged_attention(*wanted.arguments(), 0.125), 0.125)


@pytest.mark.usefixtures("programs_run_backwards", "nothing_is_written_past_the_end")
def test_no_program_writes_what_is_anothers(device):
    wanted = step([(50, 60), (1, 300), (1, 20)], 6, 2, 80, 16, PRECISE, device)
    check(wanted, paged_attention(*wanted.arguments(), 0.125), 0.125)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("window", "softcap"), [(1, None), (20, None), (64, None), (65, 3.0), (500, None), (None, 3.0)]
)
def test_a_window_hides_what_is_far_and_a_softcap_bounds_scores(window, softcap, invariant, device):
    wanted = step([(1, 150), (70, 200)], dtype=PRECISE, device=device)
    out = paged_attention(*wanted.arguments(), 0.5, window, softcap, batch_invariant=invariant)
    check(wanted, out, 0.5, window, softcap)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # meant: infinity is right
def test_large_scores_do_not_overflow(device):
    wanted = step([(1, 70), (5, 70)], dtype=PRECISE, device=device)
    wanted.q.mul_(100)
    check(wanted, paged_attention(*wanted.arguments(), 10.0), 10.0)
    check(wanted, paged_attention(*wanted.arguments(), 10.0, None, 50.0), 10.0, None, 50.0)


def test_a_context_of_more_pieces_than_there_may_be_has_longer_ones(monkeypatch, device):
    monkeypatch.setattr(paged_decode, "SPLITS_MAX", 2)
    wanted = step([(1, 700), (1, 300)], dtype=PRECISE, device=device)
    check(wanted, paged_attention(*wanted.arguments(), 0.125), 0.125)


def test_a_tile_finds_its_request_among_more_than_are_looked_through_at_a_time(monkeypatch, device):
    monkeypatch.setattr(paged_prefill, "SEARCH", 2)
    wanted = step([(1, 5), (70, 70), (2, 9), (1, 1), (3, 3)], dtype=PRECISE, device=device)
    check(wanted, paged_attention(*wanted.arguments(), 0.125, batch_invariant=True), 0.125)


@pytest.mark.parametrize("invariant", [False, True])
def test_queries_may_be_a_view_into_wider_rows_of_which_nothing_else_is_read(invariant, device):
    wanted = step([(1, 9), (3, 11)], head_dim=80, dtype=PRECISE, device=device)
    wide = torch.full((4, 4, 80), float("nan"), dtype=PRECISE, device=device)
    wide[:, :2] = wanted.q
    out = paged_attention(wide[:, :2], *wanted.arguments()[1:], 0.125, batch_invariant=invariant)
    assert torch.equal(out, paged_attention(*wanted.arguments(), 0.125, batch_invariant=invariant))


def test_a_step_of_nothing_is_nothing(device):
    wanted = step([], device=device, dtype=PRECISE)
    assert paged_attention(*wanted.arguments(), 0.125).shape == (0, 2, 64)


# A row's bits


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.usefixtures("rows_of_products_stand_alone")
def test_a_row_has_the_same_bits_alone_as_in_a_batch(window, invariant, device):
    wanted = step([(1, 300), (5, 77), (1, 1), (70, 130)], dtype=PRECISE, device=device)
    out = paged_attention(*wanted.arguments(), 0.125, window, batch_invariant=invariant)
    for request in range(len(wanted.batch)):
        alone = paged_attention(*wanted.alone(request).arguments(), 0.125, window, batch_invariant=invariant)
        assert torch.equal(alone, out[wanted.rows(request)])


def test_room_in_the_tables_does_not_change_a_bit(device):
    wanted = step([(1, 300), (1, 20)], dtype=PRECISE, device=device)
    room = torch.full((2, 100), int(wanted.tables[0, -1]), device=device)
    room[:, : wanted.tables.shape[1]] = wanted.tables
    q, k_cache, v_cache, _, query_start, contexts = wanted.arguments()
    out = paged_attention(q, k_cache, v_cache, room, query_start, contexts, 0.125)
    assert torch.equal(out, paged_attention(*wanted.arguments(), 0.125))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.usefixtures("rows_of_products_stand_alone")
def test_a_row_has_the_same_bits_however_its_prompt_was_cut(window, softcap, device):
    whole = step([(131, 150)], dtype=PRECISE, device=device)
    out = paged_attention(*whole.arguments(), 0.125, window, softcap)
    for cuts in ([0, 64, 131], [0, 3, 66, 131]):
        parts = [
            paged_attention(*whole.chunk(*cut).arguments(), 0.125, window, softcap)
            for cut in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), out)


@pytest.mark.parametrize("window", [None, 70, 1])
@pytest.mark.usefixtures("rows_of_products_stand_alone")
def test_batch_invariant_a_decode_has_the_bits_of_a_chunks_last_row(window, device):
    whole = step([(131, 150)], dtype=PRECISE, device=device)
    out = paged_attention(*whole.arguments(), 0.125, window, batch_invariant=True)
    for row in (0, 3, 40, 65, 130):
        one = whole.chunk(row, row + 1)
        decoded = paged_attention(*one.arguments(), 0.125, window, batch_invariant=True)
        assert torch.equal(decoded[0], out[row])


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": -1.0}, "scale must be positive, got -1.0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"softcap": 0.0}, "softcap must be positive, got 0.0"),
        ({"q": torch.zeros(1, 2, 80)}, "q must have the caches'"),
        ({"q": torch.zeros(1, 2, 64, dtype=torch.float64)}, "q must have the caches'"),
        (
            {"query_start": torch.zeros(3, dtype=torch.int64)},
            "query_start and context_lens must have 2 and 1",
        ),
        ({"context_lens": torch.ones(1, dtype=torch.int32)}, "context_lens must be int64"),
        ({"k_cache": torch.zeros(3, 1, 8, 64)}, "block_size must be one of"),
        ({"k_cache": torch.zeros(3, 1, 16, 72)}, "head_dim must be one of"),
        ({"k_cache": torch.zeros(3, 1, 16, 64, dtype=torch.int8)}, "k_cache dtype must be one of"),
        ({"v_cache": torch.zeros(4, 1, 16, 64)}, "v_cache must be like k_cache"),
        ({"k_cache": torch.zeros(3, 4, 16, 64), "v_cache": torch.zeros(3, 4, 16, 64)}, "query heads must be"),
    ],
)
def test_what_the_kernels_were_not_made_for_is_refused(change, message):
    if not INTERPRETING:
        pytest.skip("the same checks on a card, where the data types differ")
    arguments = {
        "q": torch.zeros(1, 2, 64),
        "k_cache": torch.zeros(3, 1, 16, 64),
        "v_cache": torch.zeros(3, 1, 16, 64),
        "block_tables": torch.zeros(1, 1, dtype=torch.int64),
        "query_start": torch.tensor([0, 1]),
        "context_lens": torch.tensor([1]),
        "scale": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arguments | change))


@pytest.mark.parametrize(
    ("num_slots", "window", "pieces"),
    [(1, None, 1), (256, None, 1), (257, None, 2), (8192, None, 32), (8193, None, 32), (10**6, 256, 2)],
)
def test_the_grid_has_room_for_the_longest_contexts_pieces(num_slots, window, pieces):
    assert paged_decode.splits_max(num_slots, window, 64) == pieces
