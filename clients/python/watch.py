"""``vorrangctl trace``: a timeline of what a server does from now on."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from clients.python.client import VorrangClient
from clients.python.errors import error_from_call
from clients.python.events import enum_name
from timeline.builder import Granted, RunBuilder
from timeline.chrome import write
from timeline.picture import PictureUnavailable, draw
from timeline.run import Run
from vorrang.v1 import control_pb2 as pb
from vorrang.v1 import types_pb2

_SERVICE = pb.DESCRIPTOR.services_by_name["ControlService"].full_name
_TIMEOUT_S = 10.0
_PAGE_SIZE = 500
_WAITING = (pb.REQUEST_STATE_WAITING, pb.REQUEST_STATE_PREEMPTED)
#: Levels up to which a class goes, in the order of the classes: docs/SCHEDULING.md.
_CLASSES = (("interactive", -1), ("standard", 9), ("batch", 100))


def class_name(level: int) -> str:
    """The class a level belongs to."""
    return next(name for name, worst in _CLASSES if level <= worst)


class WatchedRun:
    """Makes a run of the messages of ``WatchDecisions``.

    Args:
        num_seats: of the server.
        num_blocks: of its pool.
        every_step: see ``RunBuilder``.

    Attributes:
        num_lost_steps: steps that the server left out, since they were not read quickly enough.
    """

    def __init__(self, num_seats: int, num_blocks: int, *, every_step: bool = False) -> None:
        names = [name for name, _ in _CLASSES]
        self._builder = RunBuilder(names, num_seats=num_seats, num_blocks=num_blocks, every_step=every_step)
        self.num_lost_steps = 0

    def waiting(self, requests: Iterable[pb.RequestInfo], now: float) -> None:
        """Requests that wait already when the watch begins."""
        for request in requests:
            self._builder.arrived(request.server_request_id, class_name(request.level), now)

    def step(self, step: pb.WatchDecisionsResponse) -> None:
        """A step, and what happened before it."""
        builder, now = self._builder, _time(step.planned_at)
        self.num_lost_steps += step.num_lost_steps
        for happening in step.happenings:
            self._happened(happening)
        for preemption in step.preemptions:
            self._cut(preemption, now)
        grants = [
            (
                Granted(g.server_request_id, g.num_computed_tokens, g.num_tokens, g.samples),
                class_name(g.level),
            )
            for g in step.grants
        ]
        builder.planned(step.step, now, grants, num_free_blocks=step.num_free_blocks, gate=step.bound_gate)

    def finish(self) -> Run:
        """The run; once."""
        return self._builder.finish()

    def _happened(self, happening: pb.Happening) -> None:
        builder, now, request_id = self._builder, _time(happening.at), happening.server_request_id
        match happening.kind:
            case pb.HAPPENING_KIND_ARRIVED:
                builder.arrived(request_id, class_name(happening.level), now)
            case pb.HAPPENING_KIND_ENDED:
                builder.ended(request_id, happening.end, now)
            case pb.HAPPENING_KIND_PARKED:
                builder.parked(request_id, now)
            case pb.HAPPENING_KIND_UNPARKED:
                builder.unparked(request_id, now)
            case pb.HAPPENING_KIND_LEVEL_CHANGED:
                builder.changed_class(request_id, class_name(happening.level), now)
            case pb.HAPPENING_KIND_PREEMPTED:
                self._cut(happening.preemption, now)
            case pb.HAPPENING_KIND_COMPUTED:
                guesses = ((g.server_request_id, g.num_drafted, g.num_accepted) for g in happening.guesses)
                builder.computed(happening.step, now, guesses)

    def _cut(self, told: pb.PreemptDecision, now: float) -> None:
        reason = enum_name(types_pb2.PreemptReason, told.reason).lower()
        self._builder.cut(told.server_request_id, told.beneficiary_id, reason, told.num_lost_tokens, now)


def _time(at: Timestamp) -> float:
    return at.seconds + at.nanos / 1e9


async def watch(client: VorrangClient, seconds: float, *, every_step: bool = False) -> tuple[Run, int]:
    """What a server does for some time from now on, and how many steps were lost on the way.

    Args:
        client: of an operator, connected to where ControlService is.
        seconds: for how long.
        every_step: keep every decode.

    Raises:
        AccessDenied: the caller is no operator.
        RequestFailed: too many watch already (``reason`` CALL_LIMIT).
        ConnectionLost: the server can't be reached, or is gone.
    """
    try:
        info = await _ask(client, "GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
        watched = WatchedRun(info.max_running_requests, info.num_blocks, every_step=every_step)
        call = _watching(client)
        try:
            waiting = await _waiting(client)  # sent after the call that watches, so that nobody is missed
            async with asyncio.timeout(seconds):
                async for step in call:
                    watched.waiting(waiting, _time(step.planned_at))
                    waiting = []
                    watched.step(step)
        except TimeoutError:
            pass
        finally:
            call.cancel()
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error) from error
    return watched.finish(), watched.num_lost_steps


async def write_trace(
    target: str, seconds: float, output: Path | None, image: Path | None, *, every_step: bool
) -> str:
    """Watch a server and write its timeline; returns what was written, in words.

    Raises:
        ValueError: nothing is to be written, a file can't be, or the image can't be drawn.
        VorrangError: see ``watch``.
    """
    if output is None and image is None:
        raise ValueError("--output must be given, or --image")
    async with VorrangClient.from_environment(target) as client:
        run, num_lost = await watch(client, seconds, every_step=every_step)
    told = [f"{num_lost:,} steps were lost: they came faster than they could be read"] if num_lost else []
    try:
        if output is not None:
            with output.open("w", encoding="utf-8") as file:
                told.append(f"{output}: {write(run, file):,} events; open it at https://ui.perfetto.dev")
        if image is not None:
            draw(run, image)
            told.append(f"{image}: drawn")
    except PictureUnavailable as error:
        raise ValueError(str(error)) from None
    except OSError as error:
        raise ValueError(f"{error.filename} can't be written: {error.strerror}") from None
    return "\n".join(told)


def _watching(client: VorrangClient) -> Any:
    method = client._channel.unary_stream(
        f"/{_SERVICE}/WatchDecisions",
        request_serializer=pb.WatchDecisionsRequest.SerializeToString,
        response_deserializer=pb.WatchDecisionsResponse.FromString,
    )
    return method(pb.WatchDecisionsRequest(include_happenings=True), metadata=client._metadata)


async def _waiting(client: VorrangClient) -> list[pb.RequestInfo]:
    """Who waits now."""
    found: list[pb.RequestInfo] = []
    token = ""
    while True:
        page = pb.ListRequestsRequest(page_size=_PAGE_SIZE, page_token=token)
        answer = await _ask(client, "ListRequests", page, pb.ListRequestsResponse)
        found += [r for r in answer.requests if r.state in _WAITING]
        token = answer.next_page_token
        if not token:
            return found


async def _ask(client: VorrangClient, name: str, request: Any, response_type: Any) -> Any:
    method = client._channel.unary_unary(
        f"/{_SERVICE}/{name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=response_type.FromString,
    )
    call = method(request, timeout=_TIMEOUT_S, metadata=client._metadata)
    try:
        return await call
    finally:
        call.cancel()
