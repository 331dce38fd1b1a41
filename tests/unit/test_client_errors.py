"""What the Python client makes of a status, and what importing it costs."""

import subprocess
import sys

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2

from clients.python import (
    CommandRejected,
    ConnectionLost,
    DuplicateRequestId,
    RequestFailed,
    VorrangError,
    events,
)
from clients.python.errors import CLASS_BY_REASON, error_from_status
from tests.support.fake_server import status
from vorrang.v1 import errors_pb2, generation_pb2, types_pb2


def test_every_reason_in_the_table_is_one_the_server_may_send():
    names = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert CLASS_BY_REASON.keys() <= names


@pytest.mark.parametrize("name", sorted(errors_pb2.ErrorReason.keys()))
def test_every_reason_becomes_a_typed_error_that_keeps_it(name: str):
    reason = name.removeprefix("ERROR_REASON_")
    error = error_from_status(status(grpc.StatusCode.FAILED_PRECONDITION, reason, "why"))
    assert isinstance(error, VorrangError)
    assert (error.reason, error.message) == (reason, "why")
    assert str(error) == f"why ({reason})"


def test_the_reason_decides_over_the_code():
    error = error_from_status(status(grpc.StatusCode.UNAVAILABLE, "DUPLICATE_REQUEST_ID"))
    assert type(error) is DuplicateRequestId


def test_without_a_reason_the_code_decides():
    assert type(error_from_status(status(grpc.StatusCode.UNAVAILABLE))) is ConnectionLost
    assert type(error_from_status(status(grpc.StatusCode.DATA_LOSS))) is RequestFailed


def test_a_reason_of_another_domain_is_not_ours():
    foreign = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="elsewhere")
    error = error_from_status(status(grpc.StatusCode.INTERNAL, "", "x", foreign))
    assert (type(error), error.reason) == (RequestFailed, "")


def test_unreadable_details_do_not_hide_the_error():
    broken = status(grpc.StatusCode.ABORTED, "DISPLACED")
    broken.details.append(AnyMessage(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff\xff"))
    assert error_from_status(broken).reason == "DISPLACED"


def test_what_the_server_says_of_retrying_wins_over_the_code():
    refused = status(grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert error_from_status(refused).retryable
    assert not error_from_status(refused, retryable=False).retryable


def test_a_rejected_command_is_never_mistaken_for_a_failed_request():
    error = error_from_status(status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"), rejected=True)
    assert type(error) is CommandRejected
    assert not isinstance(error, RequestFailed)


def test_enum_values_lose_their_prefix_and_unknown_ones_stay_numbers():
    assert events.enum_name(types_pb2.FinishReason, types_pb2.FINISH_REASON_STOP_STRING) == "STOP_STRING"
    assert events.enum_name(types_pb2.PreemptReason, types_pb2.PREEMPT_REASON_BLOCKS) == "BLOCKS"
    assert events.enum_name(types_pb2.FinishReason, 77) == "77"


def test_every_event_of_a_call_can_be_decoded():
    oneof = generation_pb2.GenerateStreamResponse.DESCRIPTOR.oneofs_by_name["event"]
    for field in oneof.fields:
        response = generation_pb2.GenerateStreamResponse()
        getattr(response, field.name).SetInParent()
        assert events.decode(response) is not None, field.name


def test_importing_the_client_and_its_command_line_pulls_in_nothing_heavy():
    heavy = {"torch", "transformers", "numpy", "pydantic", "triton", "engine", "server", "kv", "kernels"}
    program = (
        "import sys, clients.python, clients.python.cli, clients.python.demo;"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


def test_importing_the_client_alone_does_not_pull_in_the_command_line():
    program = "import sys, clients.python; print(sorted({'typer', 'rich'} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"
