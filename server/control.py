"""ControlService: what operators see and steer. Sees every tenant; the guard lets operators in alone."""

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from engine.errors import InvalidRequest, UnknownRequest
from engine.look import ClassLook, RequestLook
from engine.priority import CLASSES, class_of
from engine.request import RequestId, RequestStatus
from engine.scheduler.decisions import Decision
from server import convert
from server.backend import Backend, server_version
from server.explain import explained
from server.feed import DecisionFeed, Watched
from server.guard import Guard
from server.happenings import happenings, preemption
from server.session_writer import PeerGone
from vorrang.v1 import control_pb2 as pb

SERVICE = "vorrang.v1.ControlService"
DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000
MAX_DRAIN_GRACE_S = 3600.0
_PAGE_TOKEN = re.compile(r"(-?[0-9]{1,3}):([0-9]{1,19})", re.ASCII)

_STATES = {
    RequestStatus.WAITING: pb.REQUEST_STATE_WAITING,
    RequestStatus.PREEMPTED: pb.REQUEST_STATE_PREEMPTED,
    RequestStatus.PARKED: pb.REQUEST_STATE_PARKED,
}


class ControlService:
    """The calls of the service.

    Args:
        backend: engine and register.
        feed: decisions as they are made.
        drain: begins to drain the server, within so many seconds; None = the server's setting.
    """

    def __init__(self, backend: Backend, feed: DecisionFeed, drain: Callable[[float | None], None]) -> None:
        self._backend = backend
        self._feed = feed
        self._drain = drain
        self._started_at = Timestamp()
        self._started_at.GetCurrentTime()

    def rpc_handler(self, guard: Guard) -> grpc.GenericRpcHandler:
        """What a server is given."""
        methods: dict[str, Any] = {
            "WatchDecisions": grpc.unary_stream_rpc_method_handler(
                guard.wrap(self.watch_decisions, pb.WatchDecisionsRequest, operators_only=True),
                response_serializer=pb.WatchDecisionsResponse.SerializeToString,
            )
        }
        for name, call in (
            ("GetServerInfo", self.get_server_info),
            ("GetLoad", self.get_load),
            ("ListRequests", self.list_requests),
            ("CancelRequest", self.cancel_request),
            ("UpdateRequestPriority", self.update_request_priority),
            ("Drain", self.drain),
            ("ExplainRequest", self.explain_request),
        ):
            request_class, response_class = (getattr(pb, f"{name}{kind}") for kind in ("Request", "Response"))
            methods[name] = grpc.unary_unary_rpc_method_handler(
                guard.wrap(call, request_class, operators_only=True),
                response_serializer=response_class.SerializeToString,
            )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def get_server_info(self, _request: pb.GetServerInfoRequest, _: Any) -> pb.GetServerInfoResponse:
        """What this server is."""
        engine = self._backend.engine
        return pb.GetServerInfoResponse(
            version=server_version(),
            model=self._backend.info.name,
            policy=engine.config.policy,
            discipline=engine.config.discipline,
            limits=self._backend.limits(),
            max_running_requests=engine.config.max_running_requests,
            max_step_tokens=engine.config.max_step_tokens,
            block_size=engine.pool.block_size,
            num_blocks=engine.pool.num_blocks,
            started_at=self._started_at,
        )

    async def get_load(self, _request: pb.GetLoadRequest, _: Any) -> pb.GetLoadResponse:
        """How much there is to do."""
        engine = self._backend.engine
        now = engine.statistics()
        by_class = {priority_class.name: ClassLook() for priority_class in CLASSES}
        for (class_name, _tenant), look in engine.class_looks().items():
            total = by_class[class_name]
            total.num_waiting += look.num_waiting
            total.num_running += look.num_running
            total.num_preempted += look.num_preempted
            total.num_parked += look.num_parked
        return pb.GetLoadResponse(
            classes=[
                pb.ClassLoad(
                    class_name=name,
                    num_waiting=look.num_waiting,
                    num_running=look.num_running,
                    num_preempted=look.num_preempted,
                    num_parked=look.num_parked,
                )
                for name, look in by_class.items()
            ],
            num_free_seats=engine.config.max_running_requests - now.num_running,
            num_free_blocks=now.num_free_blocks,
            num_blocks=now.num_blocks,
            last_step=convert.duration(now.last_step_s),
            num_steps=now.num_steps,
            draining=engine.is_draining,
            num_computed_tokens=now.num_computed_tokens,
            num_output_tokens=now.num_output_tokens,
            num_preemptions=now.num_preemptions,
            num_seats=engine.config.max_running_requests,
            num_runner_losses=now.num_runner_losses,
        )

    async def list_requests(self, request: pb.ListRequestsRequest, _: Any) -> pb.ListRequestsResponse:
        """Who is alive, most urgent first, page by page.

        Raises:
            InvalidRequest: no such class, too large a page, or a token that is none of ours.
        """
        names = [priority_class.name for priority_class in CLASSES]
        if request.class_name and request.class_name not in names:
            raise InvalidRequest("class_name", f"must be one of {', '.join(names)}", request.class_name)
        if request.page_size > MAX_PAGE_SIZE:
            raise InvalidRequest("page_size", f"must be at most {MAX_PAGE_SIZE}", request.page_size)
        after = _place_of(request.page_token) if request.page_token else None
        found = [
            look
            for look in self._backend.engine.look()
            if (not request.class_name or class_of(look.level).name == request.class_name)
            and (after is None or (look.level, look.arrival_seq) > after)
        ]
        page = found[: request.page_size or DEFAULT_PAGE_SIZE]
        last = page[-1] if len(page) < len(found) else None
        return pb.ListRequestsResponse(
            requests=[self._info(look) for look in page],
            next_page_token=f"{last.level}:{last.arrival_seq}" if last else "",
        )

    async def cancel_request(self, request: pb.CancelRequestRequest, _: Any) -> pb.CancelRequestResponse:
        """End any request with its output so far; harmless when it is not alive."""
        ticket = self._backend.find(RequestId(request.server_request_id))
        if ticket is None or ticket.handle.finished:
            return pb.CancelRequestResponse(found=False)
        ticket.handle.cancel()
        return pb.CancelRequestResponse(found=True)

    async def update_request_priority(
        self, request: pb.UpdateRequestPriorityRequest, _: Any
    ) -> pb.UpdateRequestPriorityResponse:
        """Give any request another level, whatever its tenant may.

        Raises:
            InvalidRequest: no priority, or its class can never hold it.
            QueueFull: it was never admitted, and the queue of its new class has no room for it.
            UnknownRequest: it is not alive.
        """
        level = convert.level_of(request.priority)
        ticket = self._backend.find(RequestId(request.server_request_id))
        if ticket is None or ticket.handle.finished:
            raise UnknownRequest(request.server_request_id[:80])
        ticket.handle.set_level(level)
        return pb.UpdateRequestPriorityResponse(level=level)

    async def drain(self, request: pb.DrainRequest, _: Any) -> pb.DrainResponse:
        """Take no more requests, let those that run end, then end the server; the second time: at once.

        Raises:
            InvalidRequest: the grace is negative or longer than an hour.
        """
        grace_s = None
        if request.HasField("grace"):
            grace_s = request.grace.seconds + request.grace.nanos / 1e9
            if not 0 <= grace_s <= MAX_DRAIN_GRACE_S:
                raise InvalidRequest("grace", f"must be between 0 and {MAX_DRAIN_GRACE_S:g} s", grace_s)
        now = self._backend.engine.statistics()
        self._drain(grace_s)
        return pb.DrainResponse(num_running=now.num_running, num_waiting=now.num_waiting)

    async def explain_request(self, request: pb.ExplainRequestRequest, _: Any) -> pb.ExplainRequestResponse:
        """Where the time of a request went, by the server's id or the client's.

        Raises:
            InvalidRequest: no id, or a client's that several tenants used.
            UnknownRequest: it never was, or ended too long ago.
        """
        if not request.id:
            raise InvalidRequest("id", "must be given", request.id)
        engine, lives = self._backend.engine, self._backend.lives
        account = None if lives is None else lives.account(request.id, engine.now())
        if account is None:
            raise UnknownRequest(request.id[:80])
        ticket = self._backend.find(RequestId(account.server_request_id))
        if ticket is not None and not account.end:
            account = dataclasses.replace(account, num_output_tokens=ticket.handle.num_output_tokens)
        return explained(account)

    async def watch_decisions(self, request: pb.WatchDecisionsRequest, context: Any) -> None:
        """Steps as they are planned, until the client leaves or the server ends.

        Raises:
            TooManyCalls: as many watch as may.

        Cancellation: the watcher is forgotten.
        """
        wants_between = request.include_happenings
        watcher = self._feed.watch(request.num_past_steps, wants_between=wants_between)
        try:
            async for watched in watcher:
                try:
                    await context.write(_decision(watched, with_happenings=wants_between))
                except grpc.aio.BaseError as error:
                    raise PeerGone from error
        finally:
            self._feed.leave(watcher)

    def _info(self, look: RequestLook) -> pb.RequestInfo:
        ticket = self._backend.find(look.request_id)
        running = pb.REQUEST_STATE_PREFILL if look.is_prefilling else pb.REQUEST_STATE_DECODE
        return pb.RequestInfo(
            server_request_id=look.request_id,
            request_id=ticket.client_request_id if ticket else "",
            tenant=look.tenant,
            level=look.level,
            state=_STATES.get(look.status, running),
            usage=convert.usage(look.usage),
            age=convert.duration(look.age_s),
            num_blocks=look.num_blocks,
            label=look.label,
            max_output_tokens=look.max_output_tokens,
            num_computed_tokens=look.num_computed_tokens,
            num_known_tokens=look.num_known_tokens,
            starved=look.is_starved,
        )


def _place_of(page_token: str) -> tuple[int, int]:
    match = _PAGE_TOKEN.fullmatch(page_token)
    if match is None:
        raise InvalidRequest("page_token", "must come from an earlier answer", page_token)
    return int(match[1]), int(match[2])


def _decision(watched: Watched, *, with_happenings: bool) -> pb.WatchDecisionsResponse:
    decision: Decision = watched.decision
    # The engine's clock is monotonic; a step is a moment old at most when it is sent.
    offset_ns = time.time_ns() - round(time.monotonic() * 1e9)

    def wall(now: float) -> Timestamp:
        at = Timestamp()
        at.FromNanoseconds(offset_ns + round(now * 1e9))
        return at

    return pb.WatchDecisionsResponse(
        step=decision.step,
        planned_at=wall(decision.now),
        grants=[
            pb.GrantDecision(
                server_request_id=grant.request_id,
                num_computed_tokens=grant.start,
                num_tokens=grant.num_tokens,
                level=grant.level,
                samples=grant.output_index is not None,
            )
            for grant in decision.grants
        ],
        preemptions=map(preemption, decision.preemptions),
        bound_gate=decision.gate.value if decision.gate else "",
        num_waiting=decision.num_waiting,
        num_free_blocks=decision.num_free_blocks,
        num_lost_steps=watched.num_lost,
        happenings=happenings(watched, wall) if with_happenings else (),
    )
