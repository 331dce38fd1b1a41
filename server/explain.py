"""The account of a request as the wire has it."""

from engine.request import PreemptReason
from server import convert
from timeline.account import Account, Interval, Loss, Neighbour, Part
from vorrang.v1 import control_pb2 as pb


def explained(account: Account) -> pb.ExplainRequestResponse:
    """All of it."""
    return pb.ExplainRequestResponse(
        server_request_id=account.server_request_id,
        request_id=account.request_id,
        tenant=account.tenant,
        label=account.label,
        level=account.level,
        class_name=account.class_name,
        phase=account.phase,
        end=account.end,
        delivered=bool(account.delivered),
        total=convert.duration(account.total_s),
        ttft=None if account.ttft_s is None else convert.duration(account.ttft_s),
        num_prompt_tokens=account.num_prompt_tokens,
        num_cached_tokens=account.num_cached_tokens,
        num_output_tokens=account.num_output_tokens,
        num_ahead=account.num_ahead,
        num_seated=account.num_seated,
        seated=map(_neighbour, account.seated),
        num_holders=account.num_holders,
        holders=map(_neighbour, account.holders),
        num_prefill_steps=account.num_prefill_steps,
        num_decode_steps=account.num_decode_steps,
        num_drafted_tokens=account.num_drafted_tokens,
        num_accepted_tokens=account.num_accepted_tokens,
        beside_prefill=convert.duration(account.beside_prefill_s),
        losses=map(_loss, account.losses),
        num_losses=account.num_losses,
        parts=map(_part, account.parts),
        intervals=map(_interval, account.intervals),
        num_intervals=account.num_intervals,
    )


def _neighbour(other: Neighbour) -> pb.Neighbour:
    return pb.Neighbour(
        server_request_id=other.server_request_id, request_id=other.request_id, level=other.level
    )


def _loss(loss: Loss) -> pb.LifeLoss:
    return pb.LifeLoss(
        at=convert.duration(loss.at_s),
        reason=convert.preempt_reason(PreemptReason(loss.reason)),
        beneficiary=None if loss.beneficiary is None else _neighbour(loss.beneficiary),
        num_blocks=loss.num_blocks,
        num_lost_tokens=loss.num_lost_tokens,
        num_recomputed_tokens=loss.num_recomputed_tokens,
        waited=convert.duration(loss.waited_s),
        recompute=convert.duration(loss.recompute_s),
        resumed=loss.resumed,
    )


def _part(part: Part) -> pb.LifePart:
    return pb.LifePart(
        phase=part.phase,
        gate=part.gate,
        before_first_token=convert.duration(part.before_s),
        after_first_token=convert.duration(part.after_s),
    )


def _interval(interval: Interval) -> pb.LifeInterval:
    return pb.LifeInterval(
        phase=interval.phase,
        gate=interval.gate,
        begin=convert.duration(interval.begin_s),
        end=convert.duration(interval.end_s),
    )
