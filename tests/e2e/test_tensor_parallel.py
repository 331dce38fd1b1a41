"""A model over two processes: the tokens of one, and what happens when either of them is gone."""

import contextlib
import os
import queue
import random
import signal
import time

import psutil
import pytest

from engine.models.errors import InvalidCheckpoint
from engine.models.registry import load
from engine.models.sharding import UnsuitableTensorParallel
from engine.request import RequestId, RequestSpec
from engine.runner import follower
from engine.runner.base import RunnerLost
from engine.runner.child import RunnerLimits
from engine.runner.packing import StepShape
from engine.runner.process import ProcessRunner
from engine.runner.rank import RankOptions
from engine.runner.sources import TorchSource
from engine.runner.tensor_parallel import Followers, RankUnavailable
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Plan
from engine.scheduler.scheduler import Scheduler
from kernels import registry
from kv.block_manager import BlockManager
from tests.support.grants import grant
from tests.support.models import tiny_llama, tiny_qwen3
from tests.support.process import children, command_of, server_process
from tests.support.runners import is_running
from tests.support.wire import settled

pytestmark = [pytest.mark.slow]

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
LIMITS = RunnerLimits(hang_s=10.0, backoff_s=0.01)
NUM_BLOCKS = 20


@pytest.fixture(autouse=True, scope="module")
def _restored():
    before = registry.active_name()
    yield
    registry.use(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {"llama": tmp_path_factory.mktemp("llama"), "qwen3": tmp_path_factory.mktemp("qwen3")}
    tiny_llama(folders["llama"], tie_word_embeddings=False, num_hidden_layers=2)
    tiny_qwen3(folders["qwen3"], tie_word_embeddings=True, num_hidden_layers=2)
    return folders


def source(folder, **arguments):
    return TorchSource(
        {
            "model": str(folder),
            "num_threads": 1,
            "num_blocks": NUM_BLOCKS,
            "tensor_parallel": 2,
            "kernels": "reference",
        }
        | arguments
    )


@contextlib.asynccontextmanager
async def ranks(folder, limits=LIMITS, **arguments):
    runner = await ProcessRunner.start(source(folder, hang_s=limits.hang_s, **arguments), limits)
    followers = followers_of(runner)
    try:
        yield runner
    finally:
        await runner.close()
    await settled(lambda: not any(alive(each) for each in followers))


def followers_of(runner):
    """The ranks that the first one started, which may have started grammars' process too."""
    return [child for child in children(runner.pid) if "nursery" not in command_of(child)]


def follower_of(runner):
    (child,) = followers_of(runner)
    return child


def alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def serve(execute):
    """Greedy outputs of six requests, chunked and batched, some of them preempted."""
    rng = random.Random(3)
    config = SchedulerConfig(max_running_requests=4, max_step_tokens=24, max_chunk_tokens=16)
    scheduler = Scheduler(config, BlockManager(10, 16, enable_prefix_cache=False))
    requests = []
    for index in range(6):
        prompt = tuple(rng.randrange(3, 259) for _ in range(rng.randrange(1, 45)))
        spec = RequestSpec(RequestId(f"r{index}"), prompt, GREEDY, -index)
        scheduler.submit(spec, 0.0)
        requests.append(scheduler.find(spec.request_id))
    step = 0
    while scheduler.has_requests:
        plan = scheduler.plan(float(step))
        scheduler.commit(plan, await execute(plan), float(step))
        step += 1
    return [request.output_token_ids for request in requests]


async def serve_alone(folder):
    model = load(str(folder), num_threads=1, num_blocks=NUM_BLOCKS, kernels="reference").model

    async def execute(plan):
        return model.run(plan)

    return await serve(execute)


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param("qwen3", 2),  # a Llama is served below, before and after its ranks die
        pytest.param("qwen3", 4, marks=pytest.mark.deep),  # two ranks for each KV head; sums in order
    ],
)
async def test_several_ranks_give_the_greedy_tokens_of_one(family, size, folders):
    wanted = await serve_alone(folders[family])
    assert all(len(output) == 16 for output in wanted)

    async with ranks(folders[family], tensor_parallel=size) as runner:
        assert runner.pool.num_blocks == NUM_BLOCKS
        assert f"{size} ranks" in runner.info.computed_by
        assert await serve(runner.execute) == wanted


@pytest.mark.deep
@pytest.mark.asyncio
async def test_a_rank_that_dies_or_hangs_is_a_loss_and_all_come_back_with_the_tokens_of_one(folders):
    wanted = await serve_alone(folders["llama"])
    limits = RunnerLimits(hang_s=2.0, backoff_s=0.01)
    async with ranks(folders["llama"], limits) as runner:
        assert await serve(runner.execute) == wanted
        for number, cause in ((signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "SIGKILL")):
            leader, rank_1 = psutil.Process(runner.pid), follower_of(runner)
            began = time.monotonic()
            os.kill(rank_1.pid, number)
            with pytest.raises(RunnerLost, match=cause) as lost:
                await steps(runner)  # one that waits for a rank that is gone must end, too
            assert time.monotonic() - began < 8
            assert lost.value.from_outside
            assert not alive(leader)
            await settled(lambda rank_1=rank_1: not alive(rank_1))
            await lost.value.recovery

        assert runner.statistics().num_restarts == 2
        assert await serve(runner.execute) == wanted

        rank_1 = follower_of(runner)
        os.kill(runner.pid, signal.SIGKILL)
        await settled(lambda: not alive(rank_1))  # it does not outlive the first


async def steps(runner):
    plan = Plan(1, (grant("a", 0, 1, 0, token_ids=[5], block_table=[1], sampling=GREEDY),))
    while True:
        await runner.execute(plan)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_model_that_cannot_be_cut_is_refused_by_field_rule_and_value(folders):
    before = set(psutil.Process().children(recursive=True))
    why = r"tensor_parallel 3 needs .* num_q_heads .* 4"
    with pytest.raises(UnsuitableTensorParallel, match=why):
        await ProcessRunner.start(source(folders["llama"], tensor_parallel=3), LIMITS)
    assert set(psutil.Process().children(recursive=True)) <= before, "a rank was left behind"


def options(folder):
    return RankOptions(
        folder=folder,
        context_tokens=64,
        weights="auto",
        kernels="reference",
        batch_invariant=False,
        device="cpu",
        num_threads=1,
        block_size=16,
        kv_bytes=None,
        kv_share=0.9,
        max_step_tokens=16,
        max_requests=2,
        step_s_max=5.0,
    )


def test_a_rank_that_ends_while_it_loads_is_named(tmp_path):
    followers = Followers(options(tmp_path), 2, hang_s=10.0, start_s_max=20.0)
    try:
        (pid,) = followers.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankUnavailable, match="rank 1 killed by SIGKILL"):
            followers.answers()
    finally:
        followers.close()
        followers.close()
    assert not is_running(pid)


@pytest.mark.deep
def test_a_rank_that_cannot_load_says_why_and_one_that_fails_later_is_a_loss(folders, tmp_path):
    losses = queue.SimpleQueue()
    followers = Followers(options(tmp_path), 2, hang_s=10.0, start_s_max=20.0)
    try:
        with pytest.raises(InvalidCheckpoint, match=r"config\.json is missing"):
            followers.answers()
    finally:
        followers.close()

    followers = Followers(options(folders["llama"]), 2, hang_s=10.0, start_s_max=20.0, on_loss=losses.put)
    try:
        assert followers.answers() == [None]
        followers.watch()
        followers.tell(follower.STEP, StepShape(1, 1, 1, 0, 16), b"")  # before there is a pool
        loss = losses.get(timeout=10)
        assert str(loss).startswith("rank 1 failed: ")
        assert not loss.from_outside
        assert followers.explain(ValueError("the sum failed")) is loss
    finally:
        followers.close()


@pytest.mark.deep
def test_the_ready_line_names_the_ranks(folders):
    more = ("--tensor-parallel", "2", "--kernels", "reference", "--threads", "1", "--kv-blocks", "8")
    with server_process(*more, model=str(folders["llama"])) as server:
        assert (
            ", reference kernels with fp32 weights, threads 1, 2 ranks, runner process " in server.ready_line
        )
