"""What operators see and steer, on any server that lets them."""

import time
from typing import Any

import pytest

from tests.support.wire import fields_in, reason_in, refused, settled, spec, stub
from vorrang.v1 import control_pb2 as pb
from vorrang.v1 import control_pb2_grpc
from vorrang.v1 import generation_pb2 as gen

pytestmark = pytest.mark.asyncio


def control(channel: Any) -> Any:
    return control_pb2_grpc.ControlServiceStub(channel)


async def test_the_server_describes_itself(channel: Any) -> None:
    info = await control(channel).GetServerInfo(pb.GetServerInfoRequest())
    model = await stub(channel).GetModel(gen.GetModelRequest())
    assert (info.model, info.limits) == (model.name, model.limits)
    assert info.max_running_requests >= 1
    assert info.num_blocks * info.block_size >= info.limits.max_request_tokens
    assert info.started_at.seconds > 1_600_000_000


async def test_load_is_by_class_and_counts_steps(channel: Any) -> None:
    before = await control(channel).GetLoad(pb.GetLoadRequest())
    await stub(channel).Generate(gen.GenerateRequest(spec=spec(max_tokens=3)))
    after = await control(channel).GetLoad(pb.GetLoadRequest())
    assert [entry.class_name for entry in after.classes] == ["interactive", "standard", "batch"]
    assert after.num_steps >= before.num_steps + 3
    assert not after.draining
    assert after.last_step.ToNanoseconds() > 0
    assert after.num_output_tokens >= before.num_output_tokens + 3
    computed = after.num_computed_tokens - before.num_computed_tokens
    assert computed >= after.num_output_tokens - before.num_output_tokens + 1
    assert after.num_preemptions >= before.num_preemptions
    assert after.num_free_seats <= after.num_seats == (await info(channel)).max_running_requests


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("ListRequests", pb.ListRequestsRequest(class_name="nobody"), "class_name"),
        ("ListRequests", pb.ListRequestsRequest(page_size=100_000), "page_size"),
        ("ListRequests", pb.ListRequestsRequest(page_token="x"), "page_token"),
        ("ListRequests", pb.ListRequestsRequest(page_token="\uff11:\uff12"), "page_token"),
        ("ListRequests", pb.ListRequestsRequest(page_token=" 1:2"), "page_token"),
        ("ListRequests", pb.ListRequestsRequest(page_token="1:2_0"), "page_token"),
        ("ListRequests", pb.ListRequestsRequest(page_token="1:" + "9" * 5000), "page_token"),
        ("UpdateRequestPriority", pb.UpdateRequestPriorityRequest(server_request_id="r1"), "priority"),
        ("Drain", pb.DrainRequest(grace={"seconds": -1}), "grace"),
        ("ExplainRequest", pb.ExplainRequestRequest(), "id"),
    ],
)
async def test_bad_fields_are_named(channel: Any, method: str, request_message: Any, field: str) -> None:
    status = await refused(getattr(control(channel), method)(request_message))
    assert (reason_in(status), fields_in(status)) == ("INVALID_REQUEST", [field])


async def test_a_requests_time_is_told_by_parts_that_add_up(channel: Any) -> None:
    request = gen.GenerateRequest(
        spec=spec(max_tokens=5, ignore_eos=True), request_id=f"told-{time.time_ns()}"
    )
    answer = await stub(channel).Generate(request)
    account = await control(channel).ExplainRequest(pb.ExplainRequestRequest(id=request.request_id))
    assert (account.request_id, account.end) == (request.request_id, "length")
    assert account.num_output_tokens == answer.finished.usage.output_tokens == 5
    assert {"prefill", "decode", "delivery"} <= {part.phase for part in account.parts}
    spent_ns = sum(
        spent.ToNanoseconds()
        for part in account.parts
        for spent in (part.before_first_token, part.after_first_token)
    )
    assert abs(spent_ns - account.total.ToNanoseconds()) <= len(account.parts) * 2  # rounded to nanoseconds
    asked = pb.ExplainRequestRequest(id="never-was")
    assert reason_in(await refused(control(channel).ExplainRequest(asked))) == "UNKNOWN_REQUEST"


async def test_decisions_are_watched_as_they_are_made(channel: Any) -> None:
    watching = control(channel).WatchDecisions(pb.WatchDecisionsRequest())
    loading = await control(channel).GetLoad(pb.GetLoadRequest())
    answer = await stub(channel).Generate(gen.GenerateRequest(spec=spec(max_tokens=4, ignore_eos=True)))
    num_prompt_tokens = answer.finished.usage.prompt_tokens
    seen: list[Any] = []
    while sum(grant.num_tokens for step in seen for grant in step.grants) < num_prompt_tokens + 3:
        seen.append(await watching.read())
    steps = [step.step for step in seen]
    assert steps == sorted(set(steps))
    assert steps[0] > loading.num_steps - 1
    assert {step.num_lost_steps for step in seen} == {0}
    assert len({grant.server_request_id for step in seen for grant in step.grants}) == 1
    assert abs(seen[-1].planned_at.seconds - (await info(channel)).started_at.seconds) < 10**5
    watching.cancel()


async def info(channel: Any) -> Any:
    return await control(channel).GetServerInfo(pb.GetServerInfoRequest())


async def test_past_decisions_come_first(channel: Any) -> None:
    await stub(channel).Generate(gen.GenerateRequest(spec=spec(max_tokens=4, ignore_eos=True)))
    watching = control(channel).WatchDecisions(pb.WatchDecisionsRequest(num_past_steps=2))
    first, second = await watching.read(), await watching.read()
    assert first.step < second.step
    assert [grant.num_tokens for grant in second.grants] == [1]
    watching.cancel()
    await settled(watching.done)
