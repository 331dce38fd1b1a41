"""The Python client and its command line.

async with VorrangClient("127.0.0.1:50051") as client, client.session() as session:
    stream = await session.start("Once upon a time", priority="interactive", max_tokens=32)
    async for event in stream:
        ...
"""

from clients.python.client import VorrangClient
from clients.python.errors import (
    AccessDenied,
    CommandRejected,
    ConnectionLost,
    DeadlineExceeded,
    Displaced,
    DuplicateRequestId,
    FieldViolation,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestCancelled,
    RequestFailed,
    ResumeOutOfRange,
    ServerUnavailable,
    SessionClosed,
    SlowConsumer,
    Unimplemented,
    UnknownModel,
    VorrangError,
)
from clients.python.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    Limits,
    Model,
    PositionLogprobs,
    Preempted,
    PriorityChanged,
    QueueUpdate,
    Result,
    Resumed,
    SessionInfo,
    Started,
    TokenLogprob,
    Usage,
)
from clients.python.request import Messages, PriorityLike, RequestOptions, SamplingOptions
from clients.python.request_stream import RequestStream
from clients.python.session import Session
from clients.python.stream import CallStream, EventStream
from clients.python.sync import SyncClient, SyncRequestStream, SyncSession, SyncStream

__all__ = [
    "Accepted",
    "AccessDenied",
    "CallStream",
    "CommandRejected",
    "ConnectionLost",
    "DeadlineExceeded",
    "Delta",
    "Displaced",
    "DuplicateRequestId",
    "Event",
    "EventStream",
    "FieldViolation",
    "Finished",
    "InvalidRequest",
    "Limits",
    "Messages",
    "Model",
    "NotReady",
    "Overloaded",
    "PositionLogprobs",
    "Preempted",
    "PriorityChanged",
    "PriorityLike",
    "QueueUpdate",
    "RequestCancelled",
    "RequestFailed",
    "RequestOptions",
    "RequestStream",
    "Result",
    "ResumeOutOfRange",
    "Resumed",
    "SamplingOptions",
    "ServerUnavailable",
    "Session",
    "SessionClosed",
    "SessionInfo",
    "SlowConsumer",
    "Started",
    "SyncClient",
    "SyncRequestStream",
    "SyncSession",
    "SyncStream",
    "TokenLogprob",
    "Unimplemented",
    "UnknownModel",
    "Usage",
    "VorrangClient",
    "VorrangError",
]
