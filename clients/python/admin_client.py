"""The client of operators: ControlService as typed values.

It may have a port of its own, and where tenants have credentials it lets
operators in alone; ``explained`` says so when a call fails for that reason.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from clients.python.admin_types import (
    ClassLoad,
    Drained,
    Grant,
    LiveRequest,
    Preemption,
    ServerInfo,
    ServerLoad,
    Step,
)
from clients.python.client import VorrangClient
from clients.python.errors import AccessDenied, Unimplemented, VorrangError, error_from_call
from clients.python.events import decode_limits, decode_usage, enum_name, seconds
from clients.python.request import PriorityLike, encode_priority
from vorrang.v1 import control_pb2 as pb
from vorrang.v1 import types_pb2

_SERVICE = pb.DESCRIPTOR.services_by_name["ControlService"].full_name
_PAGE_SIZE = 500
_TIMEOUT_S = 10.0
#: Who watches a server wants to see it come back; grpc's own waits grow to two minutes.
_RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


class NoSuchRequest(VorrangError):
    """No request of that id is alive, or several are."""

    default_code = grpc.StatusCode.NOT_FOUND


class ControlClient(VorrangClient):
    """A client of ControlService at ``target``; made and used as a ``VorrangClient``.

    Every call raises ``ConnectionLost`` when the server can't be reached, ``AccessDenied``
    when the caller is no operator, and ``Unimplemented`` where ControlService isn't on this port.
    """

    def __init__(
        self, target: str, *, channel_options: Sequence[tuple[str, Any]] = (), **options: Any
    ) -> None:
        super().__init__(target, channel_options=[*_RECONNECT, *channel_options], **options)

    async def info(self) -> ServerInfo:
        """What the server is."""
        answer = await self._call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
        return ServerInfo(
            version=answer.version,
            model=answer.model,
            policy=answer.policy,
            discipline=answer.discipline,
            limits=decode_limits(answer.limits),
            max_running_requests=answer.max_running_requests,
            max_step_tokens=answer.max_step_tokens,
            block_size=answer.block_size,
            num_blocks=answer.num_blocks,
            started_at=_time(answer.started_at),
        )

    async def load(self) -> ServerLoad:
        """How much there is to do."""
        answer = await self._call("GetLoad", pb.GetLoadRequest(), pb.GetLoadResponse)
        return ServerLoad(
            classes=tuple(
                ClassLoad(c.class_name, c.num_waiting, c.num_running, c.num_preempted, c.num_parked)
                for c in answer.classes
            ),
            num_seats=answer.num_seats,
            num_free_seats=answer.num_free_seats,
            num_blocks=answer.num_blocks,
            num_free_blocks=answer.num_free_blocks,
            last_step_s=seconds(answer.last_step),
            num_steps=answer.num_steps,
            num_computed_tokens=answer.num_computed_tokens,
            num_output_tokens=answer.num_output_tokens,
            num_preemptions=answer.num_preemptions,
            num_runner_losses=answer.num_runner_losses,
            draining=answer.draining,
        )

    async def requests(self, *, class_name: str = "", limit: int | None = None) -> list[LiveRequest]:
        """Requests that are alive, most urgent first.

        Args:
            class_name: only those of a class; empty = all.
            limit: most to be returned; None = all, however many pages they fill.

        Raises:
            InvalidRequest: no class of that name.
        """
        found: list[LiveRequest] = []
        token = ""
        while limit is None or len(found) < limit:
            size = _PAGE_SIZE if limit is None else min(_PAGE_SIZE, limit - len(found))
            request = pb.ListRequestsRequest(class_name=class_name, page_size=size, page_token=token)
            answer = await self._call("ListRequests", request, pb.ListRequestsResponse)
            found += [_live_request(entry) for entry in answer.requests]
            token = answer.next_page_token
            if not token:
                break
        return found

    async def find(self, request_id: str) -> LiveRequest:
        """The request alive that has this id, be it the server's or its client's.

        Raises:
            NoSuchRequest: none has, or several clients chose it.
        """
        alive = await self.requests()
        found = [r for r in alive if r.server_request_id == request_id]
        found = found or [r for r in alive if r.request_id == request_id]
        if not found:
            raise NoSuchRequest(f"no request {request_id!r} is alive")
        if len(found) > 1:
            ids = ", ".join(r.server_request_id for r in found)
            raise NoSuchRequest(f"several requests are called {request_id!r}; say which: {ids}")
        return found[0]

    async def cancel_request(self, server_request_id: str) -> bool:
        """Cancel a request, whoever's; False when it was not alive."""
        request = pb.CancelRequestRequest(server_request_id=server_request_id)
        answer = await self._call("CancelRequest", request, pb.CancelRequestResponse)
        return bool(answer.found)

    async def set_priority(self, server_request_id: str, priority: PriorityLike) -> int:
        """Change a request's priority, free of its tenant's cap; returns the level in force.

        Raises:
            RequestFailed: it is not alive (``reason`` UNKNOWN_REQUEST).
            InvalidRequest: no class of that name, or a level out of range.
        """
        request = pb.UpdateRequestPriorityRequest(
            server_request_id=server_request_id, priority=encode_priority(priority)
        )
        answer = await self._call("UpdateRequestPriority", request, pb.UpdateRequestPriorityResponse)
        return int(answer.level)

    async def drain(self, grace_s: float | None = None) -> Drained:
        """Have the server take no more requests and end; a second call ends it at once.

        Args:
            grace_s: seconds the running requests are given; None = the server's setting.

        Raises:
            InvalidRequest: the grace is negative or too long.
        """
        request = pb.DrainRequest()
        if grace_s is not None:
            request.grace.CopyFrom(_duration(grace_s))
        answer = await self._call("Drain", request, pb.DrainResponse)
        return Drained(answer.num_running, answer.num_waiting)

    async def decisions(self, num_past_steps: int = 0) -> AsyncIterator[Step]:
        """Steps as they are planned, until the server ends or the iterator is closed.

        Args:
            num_past_steps: steps of the past to begin with.

        Raises:
            Overloaded: as many watch as may.
        """
        method = self._channel.unary_stream(
            f"/{_SERVICE}/WatchDecisions",
            request_serializer=pb.WatchDecisionsRequest.SerializeToString,
            response_deserializer=pb.WatchDecisionsResponse.FromString,
        )
        call = method(pb.WatchDecisionsRequest(num_past_steps=num_past_steps), metadata=self._metadata)
        try:
            with explained(self.target):
                while (answer := await _read(call)) is not None:
                    yield _step(answer)
        finally:
            call.cancel()

    async def _call(self, name: str, request: Any, response_type: Any) -> Any:
        method = self._channel.unary_unary(
            f"/{_SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        call = method(request, timeout=_TIMEOUT_S, metadata=self._metadata)
        with explained(self.target):
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                raise error_from_call(error) from error
            finally:
                call.cancel()


@contextmanager
def explained(target: str) -> Iterator[None]:
    """Says what an operator can do about it when ControlService does not answer."""
    try:
        yield
    except Unimplemented as error:
        raise Unimplemented(
            f"ControlService, or this call of it, is not at {target}; where it has a port of its own "
            "(control.listen), name that with --control",
            code=error.code,
            reason=error.reason,
        ) from error
    except AccessDenied as error:
        raise AccessDenied(
            f"{error.message}; VORRANG_TOKEN, or the certificate, must be an operator's",
            code=error.code,
            reason=error.reason,
        ) from error


async def _read(call: Any) -> Any:
    """The next message of a call; None at its end."""
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error) from error
    return None if answer is grpc.aio.EOF else answer


def _live_request(entry: pb.RequestInfo) -> LiveRequest:
    return LiveRequest(
        server_request_id=entry.server_request_id,
        request_id=entry.request_id,
        tenant=entry.tenant,
        level=entry.level,
        state=enum_name(pb.RequestState, entry.state),
        usage=decode_usage(entry.usage),
        age_s=seconds(entry.age),
        num_blocks=entry.num_blocks,
        label=entry.label,
        max_output_tokens=entry.max_output_tokens,
        num_computed_tokens=entry.num_computed_tokens,
        num_known_tokens=entry.num_known_tokens,
        starved=entry.starved,
    )


def _step(answer: pb.WatchDecisionsResponse) -> Step:
    return Step(
        step=answer.step,
        planned_at=_time(answer.planned_at),
        grants=tuple(
            Grant(g.server_request_id, g.num_computed_tokens, g.num_tokens, g.level) for g in answer.grants
        ),
        preemptions=tuple(
            Preemption(
                p.server_request_id,
                enum_name(types_pb2.PreemptReason, p.reason),
                p.beneficiary_id,
                p.num_blocks,
                p.num_lost_tokens,
            )
            for p in answer.preemptions
        ),
        bound_gate=answer.bound_gate,
        num_waiting=answer.num_waiting,
        num_free_blocks=answer.num_free_blocks,
        num_lost_steps=answer.num_lost_steps,
    )


def _time(timestamp: Timestamp) -> str:
    return timestamp.ToJsonString()


def _duration(seconds_: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds_ * 1e9))
    return duration
