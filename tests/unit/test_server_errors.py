"""The one table of errors, over a real call and row by row."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2

from engine import errors as e
from engine.scheduler.config import InvalidSetting
from server.errors import TABLE, EngineStarting, abort, status_of
from tests.support.wire import fields_in, reason_in, status_in
from vorrang.v1 import errors_pb2

METHOD = "/test.Errors/Raise"

EXAMPLES: dict[type[e.VorrangError], Callable[[], e.VorrangError]] = {
    e.InvalidRequest: lambda: e.InvalidRequest("sampling.top_p", "must be at most 1", 2.0),
    e.EmptyPrompt: e.EmptyPrompt,
    e.ContextExceeded: lambda: e.ContextExceeded("prompt", "must be shorter than 10", 11),
    e.PoolExceeded: lambda: e.PoolExceeded("prompt", "must fit 10", 11),
    e.InvalidMetadata: lambda: e.InvalidMetadata("metadata.x-priority", "must be given once", "2 times"),
    e.MalformedFrame: lambda: e.MalformedFrame("frame", "must be a SessionRequest", "3 bytes"),
    e.UnknownModel: lambda: e.UnknownModel("no such model"),
    e.UnknownRequest: lambda: e.UnknownRequest("a"),
    e.DuplicateRequestId: lambda: e.DuplicateRequestId("a"),
    e.SessionState: lambda: e.SessionState("open came twice"),
    e.QueueFull: lambda: e.QueueFull("queue", "requests", 7, retry_after_s=1.5),
    e.TenantQuotaExceeded: lambda: e.TenantQuotaExceeded("queue of tenant 'a'", "tokens", 7),
    e.Displaced: e.Displaced,
    e.SessionLimit: lambda: e.SessionLimit("too many"),
    e.ResumeOutOfRange: lambda: e.ResumeOutOfRange("the events after 5 are not held"),
    e.SlowConsumer: lambda: e.SlowConsumer("too slow"),
    e.Draining: lambda: e.Draining(2.5),
    EngineStarting: EngineStarting,
    e.DeadlineExceeded: lambda: e.DeadlineExceeded("too late"),
    e.Cancelled: lambda: e.Cancelled("gone"),
    e.Unimplemented: lambda: e.Unimplemented("grammar"),
    e.InternalError: lambda: e.InternalError("abc123"),
}

#: Reasons the protocol has and this version never sends.
LATER = {
    "SLO_UNATTAINABLE",
    "PREEMPTION_LIMIT",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
}


class Raiser:
    """Aborts every call with ``error``."""

    def __init__(self) -> None:
        self.error: Exception = RuntimeError()
        self.channel: Any = None

    async def call(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.channel.unary_unary(METHOD)(b"")
        return caught.value


@pytest_asyncio.fixture
async def raiser() -> AsyncIterator[Raiser]:
    raiser = Raiser()

    async def handle(_: bytes, context: Any) -> None:
        await abort(context, raiser.error)

    server = grpc.aio.server()
    handlers = {"Raise": grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Errors", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as raiser.channel:
        yield raiser
    await server.stop(None)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
async def test_every_row_survives_the_way_to_a_client(raiser: Raiser, kind: type[e.VorrangError]) -> None:
    # SGLang 22: the status of a refusal reaches the client as it was meant.
    raiser.error = EXAMPLES[kind]()
    failure = await raiser.call()
    status = status_in(failure)  # checks that code and message agree with the call's
    row = TABLE[kind]
    assert failure.code() is row.code
    assert reason_in(status) == row.reason
    assert status.message == str(raiser.error)
    assert bool(fields_in(status)) is issubclass(kind, e.InvalidRequest)


def test_every_class_of_the_engine_has_a_row_of_its_own() -> None:
    classes = {c for c in vars(e).values() if isinstance(c, type) and issubclass(c, e.VorrangError)}
    assert classes - {e.VorrangError} <= set(TABLE)
    assert set(EXAMPLES) == set(TABLE)


def test_every_reason_is_sent_by_one_row_or_belongs_to_a_later_version() -> None:
    reasons = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()}  # noqa: SIM118
    sent = [row.reason for row in TABLE.values()]
    assert len(sent) == len(set(sent))
    assert set(sent) | LATER == reasons - {"UNSPECIFIED"}
    assert not set(sent) & LATER


def test_a_class_without_a_row_uses_its_ancestors() -> None:
    assert reason_in(status_of(InvalidSetting("a.b", "must be 1", 2))) == "INVALID_REQUEST"


@pytest.mark.asyncio
async def test_text_of_an_unknown_error_stays_inside(raiser: Raiser) -> None:
    raiser.error = ValueError("secret path /etc/shadow")
    failure = await raiser.call()
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert reason_in(status_in(failure)) == "INTERNAL"
    assert "secret" not in repr(failure)
    assert (failure.details() or "").startswith("internal error, incident ")


@pytest.mark.parametrize("error", [e.VorrangError("bare text"), KeyError("x")])
def test_what_has_no_row_is_opaque(error: Exception) -> None:
    assert "bare text" not in str(status_of(error))
    assert reason_in(status_of(error)) == "INTERNAL"


@pytest.mark.asyncio
async def test_a_retryable_refusal_says_when_to_come_back(raiser: Raiser) -> None:
    raiser.error = e.QueueFull("queue", "requests", 7, retry_after_s=1.5)
    failure = await raiser.call()
    retry, quota = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
    details = status_in(failure).details
    assert any(detail.Unpack(retry) for detail in details)
    assert any(detail.Unpack(quota) for detail in details)
    assert retry.retry_delay.ToMilliseconds() == 1500
    assert "requests as it may, 7" in quota.violations[0].description
    assert quota.violations[0].subject == "queue"
    assert dict(failure.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1500"


def test_a_violation_names_field_rule_and_value() -> None:
    bad = error_details_pb2.BadRequest()
    status_of(e.InvalidRequest("sampling.top_p", "must be at most 1", 2.0)).details[1].Unpack(bad)
    assert bad.field_violations[0].field == "sampling.top_p"
    assert bad.field_violations[0].description == "must be at most 1, got 2.0"
