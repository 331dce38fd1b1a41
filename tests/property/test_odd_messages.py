"""Whatever a message holds, a call answers it or refuses it by the error table: nothing is INTERNAL."""

import contextlib
import os
from random import Random

import grpc.aio
import pytest

from engine.grammar import GrammarKind, GrammarRefused, GrammarSpec
from engine.runner.grammars.json_schema import check_schema
from tests.support.odd_messages import odd
from tests.support.server import running_server
from tests.support.wire import WireSession, reason_in, status_in
from vorrang.v1 import control_pb2, generation_pb2
from vorrang.v1 import generation_pb2 as gen

SEED = int(os.environ.get("VORRANG_TEST_SEED", "20"))
NUM_MESSAGES = 60
UNDRAWN = {"Session", "Drain", "WatchDecisions"}  # frames below; the others end or last
#: Bounds that end what odd numbers begin.
SETTINGS = {"session.max_request_s": 5.0, "kv.num_blocks": 64, "control.past_requests": 16}


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": [{}]}', '{"type": {"a": 1}}', '{"format": [1]}', '{"required": [[]], "properties": {}}',
        '{"enum": [1], "type": [[]]}', '{"oneOf": [{"type": {}}]}', "[" * 5000,
        '{"items":' * 900 + "1" + "}" * 900,
        '{"const": 1, "type": {}}',
    ],
)  # fmt: skip
def test_a_schema_whose_keywords_hold_anything_is_refused_or_left_to_the_compiler(schema: str) -> None:
    with contextlib.suppress(GrammarRefused):
        check_schema(GrammarSpec(GrammarKind.JSON_SCHEMA, schema))


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [SEED, pytest.param(SEED + 1, marks=pytest.mark.deep)])
async def test_odd_messages_are_answered_or_refused(seed: int) -> None:
    draw, reasons = Random(seed), set()
    async with running_server(SETTINGS) as app, grpc.aio.insecure_channel(app.address) as channel:
        for module in (generation_pb2, control_pb2):
            (service,) = module.DESCRIPTOR.services_by_name.values()
            for method in service.methods:
                if method.name in UNDRAWN:
                    continue
                kind = "unary_stream" if method.server_streaming else "unary_unary"
                call = getattr(channel, kind)(f"/{service.full_name}/{method.name}")
                for _ in range(NUM_MESSAGES):
                    message = odd(getattr(module, method.input_type.name), draw)
                    try:
                        running = call(message.SerializeToString(), timeout=20)
                        if method.server_streaming:
                            async for _frame in running:
                                pass
                        else:
                            await running
                    except grpc.aio.AioRpcError as error:
                        reason = reason_in(status_in(error))
                        assert reason != "INTERNAL", (method.name, message)
                        reasons.add(reason)
    assert "INVALID_REQUEST" in reasons


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [SEED, pytest.param(SEED + 1, marks=pytest.mark.deep)])
async def test_odd_frames_are_obeyed_or_rejected(seed: int) -> None:
    draw, num_rejected = Random(seed), 0
    commands = gen.SessionRequest.DESCRIPTOR.oneofs_by_name["command"].fields
    async with (
        running_server(SETTINGS) as app,
        grpc.aio.insecure_channel(app.address) as channel,
        WireSession(channel) as session,
    ):
        await session.open()
        for _ in range(4 * NUM_MESSAGES):
            command = draw.choice(commands)
            body = odd(getattr(gen, command.message_type.name), draw)
            body_field = {command.name: body}
            await session.send_raw(gen.SessionRequest(**body_field).SerializeToString())
        await session.half_close()
        await session.to_the_end()
        for frame in session.frames:
            for event in (frame.command_rejected, frame.failed):
                if event.HasField("status"):
                    num_rejected += 1
                    assert reason_in(event.status) != "INTERNAL", frame
    assert num_rejected > NUM_MESSAGES
