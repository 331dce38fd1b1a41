"""What every server promises on a session, seen from a channel alone."""

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.wire import (
    WireSession,
    fields_in,
    open_session,
    reason_in,
    spec,
    status_in,
    stub,
)
from vorrang.v1 import generation_pb2 as gen
from vorrang.v1 import types_pb2 as types

pytestmark = pytest.mark.asyncio


async def still_works(session: WireSession, request_id: str = "witness") -> None:
    """The other requests of the session go on."""
    await session.start(request_id)
    end = await session.end_of(request_id)
    assert end.finished.usage.output_tokens == len(session.tokens(request_id)) > 0
    session.check(request_id)


def code_of(code: grpc.StatusCode) -> int:
    return int(code.value[0])


async def model_of(channel: Any) -> gen.GetModelResponse:
    return await stub(channel).GetModel(gen.GetModelRequest())


async def test_opened_announces_limits_defaults_and_policy(channel: Any) -> None:
    async with WireSession(channel) as session:
        opened = await session.open(default_priority=types.Priority(class_name="batch"))
    assert opened.limits == (await model_of(channel)).limits
    assert opened.limits.max_frame_bytes == 4 * 1024 * 1024
    assert opened.limits.max_session_requests == 256
    assert opened.default_level == 10
    assert opened.policy
    assert opened.server_version
    assert session.frames[0].sequence == 0


async def test_a_request_runs_from_accepted_to_finished(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec("hello", max_tokens=5, seed=7))
        end = await session.end_of("a")
    session.check("a")
    assert session.kinds("a")[:2] == ["accepted", "started"]
    accepted = session.of("a")[0].accepted
    assert (accepted.level, accepted.requested_level, accepted.capped) == (0, 0, False)
    assert accepted.seed == 7
    assert accepted.prompt_tokens == session.of("a")[1].started.prompt_tokens > 0
    usage = end.finished.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (accepted.prompt_tokens, 5)
    assert end.finished.reason == types.FINISH_REASON_LENGTH


async def test_a_seed_is_drawn_and_told_when_none_was_given(channel: Any) -> None:
    async with open_session(channel) as session:
        for request_id in ("a", "b"):
            await session.start(request_id)
            await session.end_of(request_id)
    seeds = {session.of(request_id)[0].accepted.seed for request_id in ("a", "b")}
    assert len(seeds - {0}) == 2


REFUSED_STARTS: dict[str, tuple[types.GenerationSpec, str, str]] = {
    "empty text": (spec(""), "EMPTY_PROMPT", "prompt"),
    "no ids": (spec([]), "EMPTY_PROMPT", "prompt"),
    "no prompt": (types.GenerationSpec(), "INVALID_REQUEST", "prompt"),
    "no messages": (
        types.GenerationSpec(prompt=types.Prompt(chat=types.ChatPrompt())),
        "INVALID_REQUEST",
        "prompt.chat.messages",
    ),
    "id outside the vocabulary": (spec([1, 2**32 - 1]), "INVALID_REQUEST", "prompt.tokens.ids[1]"),
    "stop id outside the vocabulary": (
        spec(stop_token_ids=[2**32 - 1]),
        "INVALID_REQUEST",
        "sampling.stop_token_ids[0]",
    ),
    "negative temperature": (spec(temperature=-0.5), "INVALID_REQUEST", "sampling.temperature"),
    "temperature that is no number": (
        spec(temperature=float("nan")),
        "INVALID_REQUEST",
        "sampling.temperature",
    ),
    "top_p of zero": (spec(top_p=0.0), "INVALID_REQUEST", "sampling.top_p"),
    "max_tokens of zero": (spec(max_tokens=0), "INVALID_REQUEST", "sampling.max_tokens"),
    "min_tokens over max_tokens": (spec(min_tokens=9), "INVALID_REQUEST", "sampling.min_tokens"),
    "empty stop string": (spec(stop_strings=["a", ""]), "INVALID_REQUEST", "sampling.stop_strings[1]"),
    "long stop string": (spec(stop_strings=["x" * 257]), "INVALID_REQUEST", "sampling.stop_strings[0]"),
    "many stop strings": (spec(stop_strings=["x"] * 17), "INVALID_REQUEST", "sampling.stop_strings"),
    "many stop ids": (spec(stop_token_ids=[1] * 65), "INVALID_REQUEST", "sampling.stop_token_ids"),
    "priority 1000": (spec(level=1000), "INVALID_REQUEST", "priority.level"),
    "priority without a form": (
        types.GenerationSpec(prompt=types.Prompt(text="x"), priority=types.Priority()),
        "INVALID_REQUEST",
        "priority",
    ),
    "unknown class": (
        types.GenerationSpec(prompt=types.Prompt(text="x"), priority=types.Priority(class_name="urgent")),
        "INVALID_REQUEST",
        "priority.class_name",
    ),
    "no time in the queue": (
        types.GenerationSpec(prompt=types.Prompt(text="x"), queue_timeout=Duration()),
        "INVALID_REQUEST",
        "queue_timeout",
    ),
    "negative time": (
        types.GenerationSpec(prompt=types.Prompt(text="x"), total_timeout=Duration(nanos=-1)),
        "INVALID_REQUEST",
        "total_timeout",
    ),
    "long label": (
        types.GenerationSpec(prompt=types.Prompt(text="x"), label="x" * 129),
        "INVALID_REQUEST",
        "label",
    ),
}


@pytest.mark.parametrize("name", REFUSED_STARTS)
async def test_a_bad_start_fails_alone_and_names_its_field(channel: Any, name: str) -> None:
    message, reason, field = REFUSED_STARTS[name]
    async with open_session(channel) as session:
        await session.start("bad", message)
        failed = (await session.end_of("bad")).failed
        await still_works(session)
    assert session.kinds("bad") == ["failed"]
    assert session.of("bad")[0].sequence == 1
    assert failed.status.code == code_of(grpc.StatusCode.INVALID_ARGUMENT)
    assert reason_in(failed.status) == reason
    assert fields_in(failed.status) == [field]
    assert not failed.retryable


async def test_a_prompt_longer_than_the_context_is_refused(channel: Any) -> None:
    context = (await model_of(channel)).context_tokens
    async with open_session(channel) as session:
        await session.start("long", spec([1] * (context + 1)))
        failed = (await session.end_of("long")).failed
        await still_works(session)
    assert reason_in(failed.status) == "CONTEXT_EXCEEDED"
    assert fields_in(failed.status) == ["prompt"]


async def test_max_tokens_beyond_the_context_is_refused(channel: Any) -> None:
    limits = (await model_of(channel)).limits
    async with open_session(channel) as session:
        await session.start("long", spec([1, 2], max_tokens=limits.max_output_tokens))
        failed = (await session.end_of("long")).failed
        await still_works(session)
    assert reason_in(failed.status) == "CONTEXT_EXCEEDED"
    assert fields_in(failed.status) == ["sampling.max_tokens"]


async def test_a_prompt_larger_than_the_pool_is_refused(channel: Any) -> None:
    model = await model_of(channel)
    size = model.limits.max_request_tokens
    if size > model.limits.max_output_tokens:
        pytest.skip("this server's pool holds the whole context")
    async with open_session(channel) as session:
        await session.start("large", spec([1] * size, max_tokens=1))
        failed = (await session.end_of("large")).failed
        await still_works(session)
    assert reason_in(failed.status) == "POOL_EXCEEDED"


async def test_neutral_values_are_taken(channel: Any) -> None:
    neutral = spec(
        typical_p=1.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, max_tokens=2
    )
    neutral.num_outputs = 1
    async with open_session(channel) as session:
        await session.start("a", neutral)
        assert (await session.end_of("a")).HasField("finished")


async def test_a_model_is_known_by_its_name_alone(channel: Any) -> None:
    served = (await model_of(channel)).name
    async with open_session(channel) as session:
        for request_id, model in (("good", served), ("bad", served + "x")):
            message = spec()
            message.model = model
            await session.start(request_id, message)
        assert (await session.end_of("good")).HasField("finished") or session.kinds("bad") == ["failed"]
        if not session.kinds("bad"):
            await session.end_of("bad")
    status = session.of("bad")[0].failed.status
    assert (status.code, reason_in(status)) == (code_of(grpc.StatusCode.NOT_FOUND), "UNKNOWN_MODEL")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"resume_session_token": "t"}, "RESUME_OUT_OF_RANGE"),
        ({"revision": 2}, "UNIMPLEMENTED"),
        ({"client_name": "x" * 129}, "INVALID_REQUEST"),
        ({"default_priority": types.Priority(level=101)}, "INVALID_REQUEST"),
    ],
)
async def test_a_bad_open_is_rejected_and_may_be_tried_again(channel: Any, fields: Any, reason: str) -> None:
    async with WireSession(channel) as session:
        await session.send(open=gen.OpenCommand(**fields))
        rejected = await session.event("command_rejected")
        await session.open()
        await still_works(session)
    assert (rejected.command, reason_in(rejected.status)) == ("open", reason)


async def test_open_comes_first_and_once(channel: Any) -> None:
    async with WireSession(channel) as session:
        await session.start("early")
        early = await session.until(lambda frame: frame.HasField("command_rejected"))
        await session.open()
        await session.send(open=gen.OpenCommand())
        twice = await session.event("command_rejected")
        await session.start("early")  # its id was never used
        assert (await session.end_of("early")).HasField("finished")
    assert (early.request_id, early.sequence, early.command_rejected.command) == ("early", 0, "start")
    assert reason_in(early.command_rejected.status) == "SESSION_STATE"
    assert early.command_rejected.status.code == code_of(grpc.StatusCode.FAILED_PRECONDITION)
    assert reason_in(twice.status) == "SESSION_STATE"


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a", b"", b"\xfa\x06\x00"])
async def test_a_malformed_frame_costs_itself_alone(channel: Any, raw: bytes) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec(max_tokens=40))
        await session.send_raw(raw)
        rejected = await session.until(lambda frame: frame.HasField("command_rejected"))
        if "finished" not in session.kinds("a"):
            await session.end_of("a")
        await still_works(session)
    session.check("a")
    assert (rejected.sequence, rejected.request_id) == (0, "")
    assert reason_in(rejected.command_rejected.status) == "MALFORMED_FRAME"
    assert rejected.command_rejected.command == ""


async def test_too_many_malformed_frames_end_the_stream(channel: Any) -> None:
    async with WireSession(channel) as session:
        opened = await session.open()
        for _ in range(opened.limits.max_bad_frames):
            await session.send_raw(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.to_the_end()
    rejected = [frame for frame in session.frames if frame.HasField("command_rejected")]
    assert len(rejected) == opened.limits.max_bad_frames
    assert reason_in(status_in(caught.value)) == "MALFORMED_FRAME"


async def test_a_second_start_with_the_same_id_is_rejected_and_the_first_goes_on(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec(max_tokens=40))
        await session.start("a", spec(max_tokens=3))
        rejected = await session.until(lambda frame: frame.HasField("command_rejected"))
        if "finished" not in session.kinds("a"):
            await session.end_of("a")
        await session.start("a")  # used, though it has ended
        again = await session.event("command_rejected")
    session.check("a")
    assert len(session.tokens("a")) == 40
    assert (rejected.request_id, rejected.command_rejected.command) == ("a", "start")
    for status in (rejected.command_rejected.status, again.status):
        assert status.code == code_of(grpc.StatusCode.ALREADY_EXISTS)
        assert reason_in(status) == "DUPLICATE_REQUEST_ID"


@pytest.mark.parametrize("request_id", ["", "x" * 129, "naïve", "a\nb"])
async def test_a_bad_request_id_is_rejected(channel: Any, request_id: str) -> None:  # SGLang 42
    async with open_session(channel) as session:
        frame = gen.SessionRequest(start=gen.StartCommand(request_id=request_id, spec=spec()))
        await session.send_raw(frame.SerializeToString())
        rejected = await session.event("command_rejected")
        await still_works(session)
    assert (reason_in(rejected.status), fields_in(rejected.status)) == ("INVALID_REQUEST", ["request_id"])


async def test_commands_for_an_unknown_id_are_rejected(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.cancel("nobody")
        cancel = await session.until(lambda frame: frame.HasField("command_rejected"))
        await session.reprioritize("nobody", 5)
        reprioritize = await session.event("command_rejected")
        await still_works(session)
    assert (cancel.request_id, cancel.command_rejected.command) == ("nobody", "cancel")
    for status in (cancel.command_rejected.status, reprioritize.status):
        assert status.code == code_of(grpc.StatusCode.NOT_FOUND)
        assert reason_in(status) == "UNKNOWN_REQUEST"


async def test_a_cancel_right_behind_its_start_finds_it(channel: Any) -> None:
    async with open_session(channel) as session:
        for request_id in ("a", "b", "c"):
            await session.start(request_id, spec("text to tokenise " * 20, max_tokens=500))
            await session.cancel(request_id)
            await session.cancel(request_id)
        await session.half_close()
        await session.to_the_end()
    assert not [frame for frame in session.frames if frame.HasField("command_rejected")]
    for request_id in ("a", "b", "c"):
        session.check(request_id)
        finished = session.of(request_id)[-1].finished
        assert finished.reason == types.FINISH_REASON_CANCELLED
        assert finished.usage.output_tokens == len(session.tokens(request_id)) < 500


async def test_cancelling_a_request_that_has_ended_is_harmless(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a")
        await session.end_of("a")
        await session.cancel("a")
        await still_works(session)
    assert not [frame for frame in session.frames if frame.HasField("command_rejected")]
    session.check("a")


async def test_a_bad_reprioritize_is_rejected_and_changes_nothing(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec(max_tokens=60))
        await session.reprioritize("a", 1000)
        rejected = await session.event("command_rejected")
        if "finished" not in session.kinds("a"):
            await session.end_of("a")
    assert fields_in(rejected.status) == ["priority.level"]
    assert "priority_changed" not in session.kinds("a")


async def test_after_half_close_running_requests_get_all_their_events(channel: Any) -> None:
    async with open_session(channel) as session:
        for number in range(10):
            await session.start(f"r{number}", spec(f"prompt {number}", max_tokens=30))
        await session.half_close()
        await session.to_the_end()
    for number in range(10):
        session.check(f"r{number}")
        assert len(session.tokens(f"r{number}")) == 30


async def test_a_stop_string_ends_the_output_and_text_is_complete(channel: Any) -> None:
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=spec(max_tokens=24)))
    stop = answer.text[5:8]
    at = answer.text.index(stop)
    for include, expected in ((False, answer.text[:at]), (True, answer.text[: at + len(stop)])):
        async with open_session(channel) as session:
            await session.start(
                "a", spec(max_tokens=24, stop_strings=["\x00never", stop], include_stop_string=include)
            )
            finished = (await session.end_of("a")).finished
        session.check("a")
        assert finished.reason == types.FINISH_REASON_STOP_STRING
        assert finished.stop_string == stop
        assert session.text("a") == expected


async def test_text_of_all_deltas_is_the_text_of_all_tokens(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec("héllo wörld", max_tokens=50, stop_strings=["\x00never"]))
        await session.end_of("a")
    response = await stub(channel).Detokenize(gen.DetokenizeRequest(token_ids=session.tokens("a")))
    assert session.text("a") == response.text


@pytest.mark.parametrize(
    "metadata",
    [
        [("x-priority", "urgent")],
        [("x-priority", "1_0")],
        [("x-priority", "")],
        [("x-priority", "101")],
        [("x-priority", "1"), ("x-priority", "1")],
        [("x-request-id", "x" * 129)],
        [("x-request-id", "a"), ("x-request-id", "b")],
    ],
)
async def test_bad_metadata_ends_the_call(channel: Any, metadata: Any) -> None:
    async with WireSession(channel, metadata) as session:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await session.next()
    status = status_in(caught.value)
    assert (status.code, reason_in(status)) == (3, "INVALID_METADATA")
    assert fields_in(status) == [f"metadata.{metadata[0][0]}"]


async def test_priority_is_resolved_in_order_of_precedence(channel: Any) -> None:
    cases: list[tuple[Any, Any, int | None, int]] = [
        ([], {}, None, 0),
        ([("x-priority", "batch")], {}, None, 10),
        ([("x-priority", "-7")], {"default_priority": types.Priority(level=3)}, None, 3),
        ([("x-priority", "-7")], {"default_priority": types.Priority(level=3)}, 0, 0),
        ([("x-priority", "-7")], {}, 4, 4),
    ]
    for metadata, fields, own, expected in cases:
        async with WireSession(channel, metadata) as session:
            opened = await session.open(**fields)
            await session.start("a", spec(level=own))
            accepted = await session.event("accepted", "a")
            await session.end_of("a")
        assert accepted.level == accepted.requested_level == expected
        assert opened.default_level == (expected if own is None else opened.default_level)


async def test_reprioritize_is_acknowledged_with_the_level_in_force(channel: Any) -> None:
    async with open_session(channel) as session:
        await session.start("a", spec("text " * 50, max_tokens=400))
        await session.reprioritize("a", -3)
        changed = await session.event("priority_changed", "a")
        await session.cancel("a")
        await session.end_of("a")
    assert changed.level == -3
    session.check("a")
