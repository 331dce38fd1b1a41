"""Two hundred sessions that end in every way a session can, at random points."""

import asyncio
import os
import random
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from engine.runner.scripted import ScriptedTokenizer, expected_output
from tests.support.server import running_server
from tests.support.wire import WireSession, settled, spec
from vorrang.v1 import types_pb2 as types

NUM_SESSIONS = 200
NUM_AT_A_TIME = 40
ENDS = ("half_close", "cancel_requests", "cancel_call", "vanish", "time_out")


@dataclass
class Plan:
    """What one session does; drawn before anything runs, so that a seed means one plan."""

    end: str
    num_frames_before_end: int
    timeout_s: float
    requests: dict[str, types.GenerationSpec] = field(default_factory=dict)


def draw(dice: random.Random) -> Plan:
    plan = Plan(dice.choice(ENDS), dice.randrange(30), dice.uniform(0.001, 0.2))
    for number in range(dice.randint(1, 5)):
        text = "".join(dice.choices("abcdefgh é", k=dice.randint(1, 60)))
        greedy = dice.random() < 0.5
        plan.requests[f"r{number}"] = spec(
            text if dice.random() < 0.5 else list(text.encode()),
            level=dice.choice((-10, 0, 0, 5, 10)),
            temperature=0.0 if greedy else 1.0,
            seed=dice.randrange(1000),
            max_tokens=dice.randint(1, 60),
        )
    return plan


def expected(request: types.GenerationSpec, num_tokens: int) -> list[int]:
    ids = list(request.prompt.tokens.ids) or ScriptedTokenizer().encode(request.prompt.text)
    return expected_output(ids, num_tokens, request.sampling.seed if request.sampling.temperature else 0)


async def play(address: str, plan: Plan) -> WireSession | None:
    """Play one session; returned when it has ended well, with all its frames."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        timeout_s = plan.timeout_s if plan.end == "time_out" else None
        async with WireSession(channel, timeout_s=timeout_s) as session:
            try:
                return await _play(session, channel, plan)
            except grpc.aio.AioRpcError as error:
                ended_as = (plan.end, error.code())
                if error.details() == "Internal error from Core":  # a write of ours met the deadline
                    ended_as = (plan.end, grpc.StatusCode.DEADLINE_EXCEEDED)
            except grpc.aio.BaseError:  # the deadline struck between two frames, or before our half-close
                ended_as = (plan.end, grpc.StatusCode.DEADLINE_EXCEEDED)
            assert ended_as == ("time_out", grpc.StatusCode.DEADLINE_EXCEEDED)
            return None


async def _play(session: WireSession, channel: grpc.aio.Channel, plan: Plan) -> WireSession | None:
    await session.open()
    for request_id, message in plan.requests.items():
        await session.start(request_id, message)
    if plan.end == "half_close":
        await session.half_close()
    else:
        ended = 0
        for _ in range(plan.num_frames_before_end):
            ended += (await session.next()).HasField("finished")
            if ended == len(plan.requests):
                break
    match plan.end:
        case "cancel_call":
            session.call.cancel()
            return None
        case "vanish":
            await channel.close(None)
            return None
        case "cancel_requests":
            for request_id in plan.requests:
                await session.cancel(request_id)
            await session.half_close()
        case "time_out":
            await session.half_close()
    await session.to_the_end()
    return session


@pytest.mark.slow
@pytest.mark.asyncio
async def test_nothing_is_left_of_two_hundred_sessions_and_no_event_is_lost() -> None:
    seed = int(os.environ.get("VORRANG_TEST_SEED") or random.randrange(2**32))
    print(f"VORRANG_TEST_SEED={seed}")
    dice = random.Random(seed)
    plans = [draw(dice) for _ in range(NUM_SESSIONS)]
    settings = {"kv.num_blocks": 24, "scheduler.max_running_requests": 6, "scheduler.max_step_tokens": 64}
    async with running_server(settings) as app:
        first = Plan("half_close", 0, 1.0, {"r": spec()})
        assert await play(app.address, first)
        tasks_before = {task.get_name() for task in asyncio.all_tasks()}

        places = asyncio.Semaphore(NUM_AT_A_TIME)

        async def in_turn(plan: Plan) -> WireSession | None:
            async with places:
                return await play(app.address, plan)

        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(in_turn(plan)) for plan in plans]
        played = [(plan, task.result()) for plan, task in zip(plans, playing, strict=True)]

        engine = app.backend.engine
        await settled(lambda: engine.statistics().num_alive == 0)
        await settled(lambda: app.statistics().num_calls == 0)
        statistics, server = engine.statistics(), app.statistics()
        assert (server.num_sessions, server.num_calls, server.num_requests) == (0, 0, 0)
        assert statistics.num_running == statistics.num_waiting == 0
        assert statistics.num_free_blocks == statistics.num_blocks
        assert statistics.num_preemptions > 0, "the load was to cause preemptions"
        await settled(lambda: not _sessions_of(tasks_before))

    num_finished = 0
    for plan, session in played:
        if plan.end in ("half_close", "cancel_requests"):
            assert session is not None
        if session is None:
            continue
        for request_id, message in plan.requests.items():
            session.check(request_id)
            tokens, finished = session.tokens(request_id), session.of(request_id)[-1].finished
            assert tokens == expected(message, len(tokens)), (request_id, plan)
            assert len(tokens) == finished.usage.output_tokens
            assert session.text(request_id) == ScriptedTokenizer().decode(tokens)
            if plan.end == "half_close":
                assert len(tokens) == message.sampling.max_tokens
                num_finished += 1
    assert num_finished > NUM_SESSIONS // len(ENDS)


def _sessions_of(before: set[str]) -> list[str]:
    """Tasks of sessions that are still there."""
    names = {task.get_name() for task in asyncio.all_tasks() if not task.done()} - before
    return [name for name in names if name.startswith("session-")]
