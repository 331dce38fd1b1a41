"""What happens between two steps, as the wire has it."""

from collections.abc import Callable, Iterator

from google.protobuf.timestamp_pb2 import Timestamp

from engine.events import Failed, Finished, LevelChanged, Preempted, SchedulerEvent
from engine.scheduler.commands import Park, Unpark
from engine.scheduler.decisions import Applied, Committed, Record, Submitted
from server import convert
from server.feed import Watched
from vorrang.v1 import control_pb2 as pb

#: From a time of the engine's clock to one of the wall.
Wall = Callable[[float], Timestamp]


def preemption(event: Preempted) -> pb.PreemptDecision:
    """A preemption."""
    return pb.PreemptDecision(
        server_request_id=event.request_id,
        reason=convert.preempt_reason(event.reason),
        beneficiary_id=event.beneficiary or "",
        num_blocks=event.num_blocks,
        num_lost_tokens=event.num_lost_tokens,
    )


def happenings(watched: Watched, wall: Wall) -> Iterator[pb.Happening]:
    """What happened since the step before, and what planning decided besides preemptions."""
    for record in watched.between:
        if record.error is None:
            yield from _of_call(record, wall)
    for event in watched.decision.events:
        if not isinstance(event, Preempted):
            yield from _of_event(event, watched.decision.now, wall)


def _of_call(record: Record, wall: Wall) -> Iterator[pb.Happening]:
    now, call = record.now, record.call
    match call:
        case Submitted(spec=spec):
            kind = pb.HAPPENING_KIND_ARRIVED
            request_id, level = spec.request_id, spec.level
            yield pb.Happening(kind=kind, at=wall(now), server_request_id=request_id, level=level)
        case Committed(step=step):
            guesses = (
                pb.Guesses(
                    server_request_id=g.request_id, num_drafted=g.num_drafted, num_accepted=g.num_accepted
                )
                for g in record.guesses
            )
            kind = pb.HAPPENING_KIND_COMPUTED
            yield pb.Happening(kind=kind, at=wall(now), step=step, guesses=guesses)
        case Applied(command=Park(request_id=request_id)):
            yield pb.Happening(kind=pb.HAPPENING_KIND_PARKED, at=wall(now), server_request_id=request_id)
        case Applied(command=Unpark(request_id=request_id)):
            yield pb.Happening(kind=pb.HAPPENING_KIND_UNPARKED, at=wall(now), server_request_id=request_id)
    for event in record.events:
        yield from _of_event(event, now, wall)


def _of_event(event: SchedulerEvent, now: float, wall: Wall) -> Iterator[pb.Happening]:
    request_id = event.request_id
    match event:
        case Finished() | Failed():
            end = event.reason.value if isinstance(event, Finished) else "failed"
            kind = pb.HAPPENING_KIND_ENDED
            yield pb.Happening(kind=kind, at=wall(now), server_request_id=request_id, end=end)
        case LevelChanged(level=level):
            kind = pb.HAPPENING_KIND_LEVEL_CHANGED
            yield pb.Happening(kind=kind, at=wall(now), server_request_id=request_id, level=level)
        case Preempted():
            kind, told = pb.HAPPENING_KIND_PREEMPTED, preemption(event)
            yield pb.Happening(kind=kind, at=wall(now), server_request_id=request_id, preemption=told)
