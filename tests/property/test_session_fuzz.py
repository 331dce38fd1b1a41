"""Sessions whose clients do anything: frames in any order, bad bytes, lost streams, slow reading.

500 sessions in CI, 10,000 by ``make soak``.
"""

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from server.session import EOF_DOUBT_S
from tests.support.server import running_server
from tests.support.session_fuzz import Player
from tests.support.wire import settled

NUM_SESSIONS = int(os.environ.get("VORRANG_FUZZ_SESSIONS", "500"))
NUM_AT_A_TIME = 40
#: One session alone, such as "1234/17".
ONE = os.environ.get("VORRANG_FUZZ_SESSION", "")
SETTINGS = {
    "kv.num_blocks": 24,
    "scheduler.max_running_requests": 6,
    "scheduler.max_step_tokens": 64,
    "scheduler.max_context_tokens": 256,
    "engine.max_buffered_tokens": 40,
    "session.slow_client_timeout_s": 0.05,
    "session.resume_grace_s": 3.0,
    "session.retention_s": 3.5,
    "session.max_retained_requests": 1_000_000,
    "session.queue_update_s": 0.01,
    "log.level": "error",
}
#: What 500 sessions must have come by, or they prove little; less than half of what they do.
AT_LEAST = {
    "resumed": 120,
    "lose": 60,
    "take_over": 60,
    "stall": 60,
    "FINISH_REASON_LENGTH": 250,
    "FINISH_REASON_CANCELLED": 60,
    "FINISH_REASON_TIME_LIMIT": 50,
    "SLOW_CONSUMER": 60,
    "rejected: MALFORMED_FRAME": 20,
    "rejected: UNKNOWN_REQUEST": 150,
    "rejected: DUPLICATE_REQUEST_ID": 8,
    "rejected: SESSION_LIMIT": 20,
    "ends by vanish": 50,
}

#: Seconds between two looks at the event loop's lateness.
LOOK_S = 0.002


@dataclass
class Lateness:
    """Seconds by which the loop was late."""

    worst_s: float = 0.0


@contextlib.asynccontextmanager
async def lateness() -> AsyncIterator[Lateness]:
    """How late the event loop is at worst, while the context lasts."""
    found, now_s = Lateness(), asyncio.get_running_loop().time

    async def look() -> None:
        while True:
            due_s = now_s() + LOOK_S
            await asyncio.sleep(LOOK_S)
            found.worst_s = max(found.worst_s, now_s() - due_s)

    looking = asyncio.ensure_future(look())
    try:
        yield found
    finally:
        looking.cancel()


@pytest.mark.timeout(240 if NUM_SESSIONS <= 500 else 0)
@pytest.mark.asyncio
async def test_whatever_clients_do_they_are_told_the_truth_and_nothing_is_left() -> None:
    """Once more where the machine was so busy that a vanished client looks like one that half-closed."""
    for attempts_left in (2, 1, 0):
        async with lateness() as late:
            try:
                await play_all()
            except BaseExceptionGroup:
                if not attempts_left or late.worst_s < EOF_DOUBT_S:
                    raise
            else:
                return


async def play_all() -> None:
    seed = int(os.environ.get("VORRANG_TEST_SEED") or random.randrange(2**32))
    print(f"VORRANG_TEST_SEED={seed}")
    names = [ONE] if ONE else [f"{seed}/{number}" for number in range(NUM_SESSIONS)]
    done: Counter[str] = Counter()
    async with running_server(SETTINGS) as app:
        places = asyncio.Semaphore(NUM_AT_A_TIME)

        async def in_turn(name: str) -> None:
            async with places:
                player = Player(app.address, name)
                try:
                    async with asyncio.timeout(60):
                        await player.play()
                except BaseException as failure:
                    failure.add_note(f"VORRANG_FUZZ_SESSION={name}, which did {dict(player.done)}")
                    raise
                done.update(player.done)
                app.backend.registry.check_integrity()

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(in_turn(name))
        engine, registry = app.backend.engine, app.backend.registry
        await settled(lambda: app.statistics().num_calls == 0)
        await settled(lambda: engine.statistics().num_alive == 0)
        await settled(lambda: registry.num_sessions == registry.num_requests == 0)
        statistics, server = engine.statistics(), app.statistics()
        assert (server.num_sessions, server.num_calls, server.num_requests) == (0, 0, 0)
        assert statistics.num_running == statistics.num_waiting == 0
        assert statistics.num_free_blocks == statistics.num_blocks
        assert statistics.num_preemptions > 0 or ONE
        assert registry.num_ended_bytes == 0
        registry.check_integrity()
        left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("session-")]
        assert left == []
    print(", ".join(f"{what} {count}" for what, count in sorted(done.items())))
    if NUM_SESSIONS >= 500 and not ONE:
        missing = {what: done[what] for what, least in AT_LEAST.items() if done[what] < least}
        assert missing == {}, "the draw was to come by more of these"
