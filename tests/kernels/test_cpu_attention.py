"""Paged attention of the C++ file: the reference's values, and a row's bits whatever it is computed with."""

import pytest
import torch

from kernels import cpu, reference

#: (tokens granted, context with them) of each request.
BATCHES = {
    "first token": [(1, 1)],
    "one decode": [(1, 123)],
    "whole prompt": [(123, 123)],
    "one page, full": [(16, 16)],
    "last page holds one": [(1, 17)],
    "chunk in the middle": [(5, 77)],
    "decodes, ragged": [(1, 1), (1, 123), (1, 16), (1, 33)],
    "decodes and chunks": [(1, 9), (5, 5), (64, 123), (7, 40)],
}
OPTIONS = {
    "plain": (None, None),
    "window": (20, None),
    "window of one": (1, None),
    "softcap": (None, 3.0),
    "both": (37, 5.0),
}
NAN = float("nan")


class Problem:
    """Random KV in both layouts; every slot that holds none is poisoned, and blocks are in disorder."""

    def __init__(self, batch, num_q_heads, num_kv_heads, head_dim, block_size=16, seed=0):
        generator = torch.Generator().manual_seed(seed)
        needs = [-(-context // block_size) for _, context in batch]
        num_blocks = sum(needs) + 3
        order = torch.randperm(num_blocks, generator=generator).tolist()
        self.tables = torch.full(
            (len(batch), max(needs) + 1), num_blocks + 99
        )  # reading past the context fails
        for row, need in enumerate(needs):
            self.tables[row, :need] = torch.tensor([order.pop() for _ in range(need)])
        self.caches = [
            torch.full(s, NAN) for s in cpu.kv_cache_shapes(num_blocks, block_size, num_kv_heads, head_dim)
        ]
        self.plain = [torch.full((num_blocks, block_size, num_kv_heads, head_dim), NAN) for _ in range(2)]
        for row, (_, context) in enumerate(batch):
            at = torch.arange(context)
            slots = self.tables[row][at // block_size] * block_size + at % block_size
            qkv = torch.randn(context, 3 * num_kv_heads, head_dim, generator=generator)
            still = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), -1)
            for module, caches in ((cpu, self.caches), (reference, self.plain)):
                module.rotary_write_kv(qkv, still, torch.zeros_like(at), slots, *caches)
        self.q = torch.randn(sum(n for n, _ in batch), num_q_heads, head_dim, generator=generator)
        self.query_start = torch.tensor([0] + [n for n, _ in batch]).cumsum(0)
        self.contexts = torch.tensor([context for _, context in batch])
        self.scale = head_dim**-0.5

    def run(self, module=cpu, window=None, softcap=None):
        caches = self.caches if module is cpu else self.plain
        return module.paged_attention(
            self.q, *caches, self.tables, self.query_start, self.contexts, self.scale, window, softcap
        )

    def row(self, token, window=None, softcap=None):
        """One query as a decode of its own, with the context it had."""
        request = int(torch.searchsorted(self.query_start, token, right=True)) - 1
        behind = int(self.query_start[request + 1]) - 1 - token
        return cpu.paged_attention(
            self.q[token : token + 1].clone(),
            *self.caches,
            self.tables[request : request + 1].clone(),
            torch.tensor([0, 1]),
            self.contexts[request : request + 1] - behind,
            self.scale,
            window,
            softcap,
        )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (4, 1)])
def test_equals_the_reference(heads, name, options):
    problem = Problem(BATCHES[name], *heads, head_dim=64)

    out = problem.run(cpu, *OPTIONS[options])

    torch.testing.assert_close(out, problem.run(reference, *OPTIONS[options]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 12, 24, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 48])
def test_every_head_size_and_larger_blocks(head_dim, block_size):
    problem = Problem(BATCHES["decodes and chunks"], 6, 2, head_dim, block_size)

    torch.testing.assert_close(problem.run(), problem.run(reference), rtol=1e-4, atol=1e-5)


def test_large_scores_do_not_overflow():
    problem = Problem([(5, 37)], 2, 1, 16)
    problem.q *= 1e4

    torch.testing.assert_close(problem.run(), problem.run(reference), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_in_a_chunk_or_a_batch_is_the_same_row_as_a_decode_alone(options):
    problem = Problem(BATCHES["decodes and chunks"], 9, 3, 24)
    for threads in (1, 2):
        cpu.set_num_threads(threads)
        whole = problem.run(cpu, *OPTIONS[options])
        rows = [problem.row(token, *OPTIONS[options]) for token in range(len(problem.q))]
        assert torch.equal(torch.cat(rows), whole), threads
    cpu.set_num_threads(1)


def test_queries_need_not_be_contiguous():
    problem = Problem([(1, 9), (3, 20)], 4, 2, 16)
    wanted = problem.run()
    wide = torch.randn(4, 8, 16)
    wide[:, :4] = problem.q
    problem.q = wide[:, :4]

    assert torch.equal(problem.run(), wanted)


def test_poison_inside_the_context_shows_in_its_own_request_alone():
    problem = Problem([(1, 20), (4, 20)], 4, 2, 16)
    wanted = problem.run()
    problem.caches[0][problem.tables[0, 1]] = NAN

    out = problem.run()

    assert out[0].isnan().all()
    assert torch.equal(out[1:], wanted[1:])
