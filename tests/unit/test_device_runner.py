"""The runner for devices, on CPU tensors: packed inputs, padded decodes, graphs, one report back."""

import random

import pytest
import structlog
import torch

from engine.models.registry import load
from engine.request import Request, RequestId, RequestSpec
from engine.runner.base import ModelBroken
from engine.runner.device_runner import HostWords
from engine.runner.executor import count_broken, resolved
from engine.runner.graphs import DecodeGraphs
from engine.runner.packing import StepShape
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Grant, Plan
from engine.scheduler.scheduler import Scheduler
from kv.block_manager import BlockManager
from tests.support.device_models import Remembered, device_model
from tests.support.grants import grant
from tests.support.models import tiny_qwen3

pytestmark = pytest.mark.usefixtures("kernels_restored")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
KERNELS = ["reference", "auto"]


def serve(model, seed=0):
    """Outputs of twelve requests of all kinds, on a pool so small that some are preempted."""
    rng = random.Random(seed)
    config = SchedulerConfig(max_running_requests=8, max_step_tokens=40, max_chunk_tokens=16)
    scheduler = Scheduler(config, BlockManager(14, model.pool.block_size, enable_prefix_cache=True))
    requests = []
    for index in range(12):
        prompt = tuple(rng.randrange(3, 259) for _ in range(rng.randrange(1, 50)))
        drawn = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=index, max_tokens=12, min_tokens=6)
        spec = RequestSpec(
            RequestId(f"r{index}"), prompt, GREEDY if index % 2 else drawn, index % 3, frozenset({2, 7})
        )
        scheduler.submit(spec, 0.0)
        requests.append(scheduler.find(spec.request_id))
    step = 0
    while scheduler.has_requests:
        plan = scheduler.plan(float(step))
        scheduler.commit(plan, model.run(plan), float(step))
        step += 1
    assert sum(request.num_preemptions for request in requests) > 0
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_it_gives_the_tokens_of_the_runner_for_a_cpu(kernels, graphs, folder):
    plain = load(str(folder), num_threads=1, num_blocks=64, kernels=kernels).model
    backend = Remembered() if graphs else None
    model = device_model(folder, backend=backend)

    assert serve(model) == serve(plain)

    if backend is not None:
        assert backend.num_captured == 4
        assert backend.num_replayed > 5, "no step was a decode alone"


def test_so_it_does_for_a_model_that_norms_its_heads(tmp_path):
    tiny_qwen3(tmp_path)
    plain = load(str(tmp_path), num_threads=1, num_blocks=64).model

    assert serve(device_model(tmp_path, backend=Remembered())) == serve(plain)


def _decode(name, token, block, start=0, table=None):
    return grant(name, start, 1, 0, token_ids=[token], block_table=table or [block], sampling=GREEDY)


def test_padding_touches_no_block_that_anybody_may_have(folder):
    model = device_model(folder, backend=Remembered())
    executor = model._executor
    before = [cache.clone() for cache in (*executor.pool.keys, *executor.pool.values)]

    model.run(Plan(1, (_decode("a", 5, 3), _decode("b", 6, 9), _decode("c", 7, 11))))  # padded to four

    for cache, old in zip((*executor.pool.keys, *executor.pool.values), before, strict=True):
        same = torch.isclose(cache, old, rtol=0, atol=0, equal_nan=True).flatten(1).all(dim=1)
        assert set((~same).nonzero().flatten().tolist()) - {executor.scratch_block} == {3, 9, 11}
    assert model.pool.num_blocks == executor.scratch_block == 64


def test_a_graph_reads_the_tables_and_tokens_of_its_own_step(folder):
    model, plain = device_model(folder, backend=Remembered()), device_model(folder)
    prompt = list(range(3, 43))
    steps = [
        Plan(1, (grant("a", 0, 40, None, token_ids=prompt, block_table=[5, 6, 7], sampling=GREEDY),)),
        Plan(2, (_decode("a", 9, 0, 40, [5, 6, 7]),)),  # a wide table, then a narrow one in the same graph
        Plan(3, (_decode("b", 9, 8),)),
        Plan(4, (_decode("a", 10, 0, 41, [5, 6, 7]),)),
    ]

    for plan in steps:
        assert model.run(plan).sampled == plain.run(plan).sampled


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("cause", ["its KV is broken", "its ids are unknown", "negative id"])
def test_a_poisoned_request_fails_alone(cause, graphs, folder):
    model = device_model(folder, backend=Remembered() if graphs else None)
    wanted = model.run(Plan(1, (_decode("good", 9, 1),))).sampled["good"]
    model.run(Plan(2, (grant("bad", 0, 8, None, token_ids=range(3, 11), block_table=[4], sampling=GREEDY),)))
    token = {"its KV is broken": 9, "its ids are unknown": 259, "negative id": -1}[cause]
    if cause == "its KV is broken":
        model._executor.pool.values[0][4] = float("nan")

    with structlog.testing.capture_logs() as logs:
        result = model.run(Plan(3, (_decode("bad", token, 4, 8), _decode("good", 9, 1))))

    assert result.sampled == {"good": wanted}
    assert result.failures.keys() == {"bad"}
    assert [line["request_id"] for line in logs if line["event"] == "runner.row_failed"] == ["bad"]


def test_a_poisoned_chunk_that_does_not_sample_fails_too(folder):
    model = device_model(folder)
    bad = grant("bad", 0, 3, None, token_ids=[5, 999, 6], block_table=[4], sampling=GREEDY)

    result = model.run(Plan(1, (bad, _decode("good", 9, 1))))

    assert (result.failures.keys(), result.sampled.keys()) == ({"bad"}, {"good"})
    assert model.run(Plan(2, ())).sampled == {}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_second_step_may_begin_before_the_host_knows_the_ids_of_the_first(graphs, folder):
    model = device_model(folder, backend=Remembered() if graphs else None)
    plain = device_model(folder)
    first = Plan(1, (_decode("a", 5, 1), _decode("b", 6, 2), _decode("c", 7, 3)))
    sampled = plain.run(first).sampled
    assert len(set(sampled.values())) == 3, "the test could not tell them apart"
    wanted = plain.run(
        Plan(2, (_decode("c", sampled["c"], 3, 1), _decode("d", 9, 4), _decode("a", sampled["a"], 1, 1)))
    ).sampled

    one = model.launch(first)
    two = model.launch(Plan(2, (_unknown("c", 3), _decode("d", 9, 4), _unknown("a", 1))))

    assert model.collect(one).sampled == sampled
    assert model.collect(two).sampled == wanted
    assert model.run(Plan(3, (_unknown("nobody", 4),))).sampled.keys() == {"nobody"}, "any id will do"


def _unknown(name, block):
    """A decode of a token that the step before samples, after one token."""
    one = _decode(name, 0, block, 1)
    return Grant(Request(RequestSpec(RequestId(name), (0,), GREEDY), 0, 0.0), 1, 1, one.block_table, 0)


def test_ids_of_the_last_step_are_taken_by_row():
    last_ids = torch.tensor([50, 60, 70])

    assert resolved(torch.tensor([-2, 4, -1, -3]), last_ids).tolist() == [60, 4, 50, 70]


def test_when_other_ranks_were_told_an_error_is_the_end_of_the_process(folder, monkeypatch):
    model = device_model(folder)
    told = []

    class Others:
        def announce(self, shape, words):
            told.append((shape, words.clone()))

        def explain(self, error):
            return ModelBroken(f"rank 1 is gone: {error}")

    model._others = Others()
    model.run(Plan(1, (_decode("a", 5, 1),)))
    assert [shape for shape, _ in told] == [StepShape(1, 1, 1, 0, 16)]

    def fail(shape, words):
        raise ValueError("a bug")

    monkeypatch.setattr(model._executor, "compute", fail)
    with pytest.raises(ModelBroken, match="rank 1 is gone: a bug"):
        model.run(Plan(2, (_decode("a", 5, 1),)))
    model._others = None
    with pytest.raises(ValueError, match="a bug"):
        model.run(Plan(2, (_decode("a", 5, 1),)))


def test_graphs_cover_decodes_of_their_sizes_and_widths_alone(folder):
    graphs = device_model(folder, backend=Remembered())._executor.graphs
    assert isinstance(graphs, DecodeGraphs)

    assert graphs.covers(StepShape(4, 4, 4, 9, 32))
    assert not graphs.covers(StepShape(3, 3, 3, 0, 16)), "no such bucket"
    assert not graphs.covers(StepShape(5, 4, 4, 0, 16)), "a chunk"
    assert not graphs.covers(StepShape(4, 4, 3, 0, 16)), "not all sample"
    assert not graphs.covers(StepShape(4, 4, 4, 0, 48)), "longer than any context"


def test_a_host_buffer_stays_where_it_is_until_it_must_grow():
    buffer = HostWords(pinned=False)
    first = buffer.take(10)

    assert first.shape == (10,)
    assert buffer.take(1024).data_ptr() == first.data_ptr()
    assert buffer.take(1025).shape == (1025,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_broken_tokens_are_counted_by_request(dtype):
    hidden = torch.full((6, 512), 1000.0, dtype=dtype)  # sums of which float16 can't hold
    hidden[1, 5] = float("nan")
    hidden[3, 0] = float("inf")
    hidden[4, 511] = -float("inf")

    assert count_broken(hidden, torch.tensor([0, 1, 2, 5, 6])).tolist() == [0, 1, 2, 0]
