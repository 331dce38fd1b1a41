"""``vorrangctl explain``: where the time of one request went, as its server kept it."""

import json
from typing import Any

import grpc.aio
from rich.console import Console

from clients.python.client import VorrangClient
from clients.python.errors import error_from_call
from clients.python.events import enum_name, seconds
from timeline.account import Account, Interval, Loss, Neighbour, Part
from timeline.show import print_account
from vorrang.v1 import control_pb2 as pb
from vorrang.v1 import types_pb2

_METHOD = f"/{pb.DESCRIPTOR.services_by_name['ControlService'].full_name}/ExplainRequest"
_TIMEOUT_S = 10.0


async def explain(client: VorrangClient, request_id: str, *, timeout_s: float = _TIMEOUT_S) -> Account:
    """The account of a request, alive or ended a while ago.

    Args:
        client: of an operator, connected to where ControlService is.
        request_id: the server's, or the client's, which stands for the last request of the one tenant that
            used it.
        timeout_s: longest wait for the answer.

    Raises:
        RequestFailed: the server knows no such request (``reason`` UNKNOWN_REQUEST).
        InvalidRequest: requests of several tenants have this client's id; the message names them.
        AccessDenied: the caller is no operator.
        ConnectionLost: the server can't be reached.
    """
    method = client._channel.unary_unary(
        _METHOD,
        request_serializer=pb.ExplainRequestRequest.SerializeToString,
        response_deserializer=pb.ExplainRequestResponse.FromString,
    )
    call = method(pb.ExplainRequestRequest(id=request_id), timeout=timeout_s, metadata=client._metadata)
    try:
        return decode_account(await call)
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error) from error
    finally:
        call.cancel()


async def print_explanation(target: str, request_id: str, *, as_json: bool, console: Console) -> None:
    """Fetch an account and print it; raises as ``explain`` does."""
    async with VorrangClient.from_environment(target) as client:
        account = await explain(client, request_id)
    if as_json:
        console.file.write(json.dumps(account.as_json(), indent=2) + "\n")
    else:
        print_account(console, account)


def decode_account(answer: pb.ExplainRequestResponse) -> Account:
    """Read an account from the wire."""
    return Account(
        server_request_id=answer.server_request_id,
        request_id=answer.request_id,
        tenant=answer.tenant,
        label=answer.label,
        level=answer.level,
        class_name=answer.class_name,
        phase=answer.phase,
        end=answer.end,
        delivered=answer.delivered,
        total_s=seconds(answer.total),
        ttft_s=seconds(answer.ttft) if answer.HasField("ttft") else None,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        num_output_tokens=answer.num_output_tokens,
        num_ahead=answer.num_ahead if answer.HasField("num_ahead") else None,
        num_seated=answer.num_seated,
        seated=tuple(map(_neighbour, answer.seated)),
        num_holders=answer.num_holders,
        holders=tuple(map(_neighbour, answer.holders)),
        num_prefill_steps=answer.num_prefill_steps,
        num_decode_steps=answer.num_decode_steps,
        num_drafted_tokens=answer.num_drafted_tokens,
        num_accepted_tokens=answer.num_accepted_tokens,
        beside_prefill_s=seconds(answer.beside_prefill),
        losses=tuple(map(_loss, answer.losses)),
        num_losses=answer.num_losses,
        parts=tuple(
            Part(p.phase, p.gate, seconds(p.before_first_token), seconds(p.after_first_token))
            for p in answer.parts
        ),
        intervals=tuple(
            Interval(i.phase, i.gate, seconds(i.begin), seconds(i.end)) for i in answer.intervals
        ),
        num_intervals=answer.num_intervals,
    )


def _neighbour(other: pb.Neighbour) -> Neighbour:
    return Neighbour(other.server_request_id, other.request_id, other.level)


def _loss(loss: Any) -> Loss:
    return Loss(
        at_s=seconds(loss.at),
        reason=enum_name(types_pb2.PreemptReason, loss.reason).lower(),
        beneficiary=_neighbour(loss.beneficiary) if loss.HasField("beneficiary") else None,
        num_blocks=loss.num_blocks,
        num_lost_tokens=loss.num_lost_tokens,
        num_recomputed_tokens=loss.num_recomputed_tokens,
        waited_s=seconds(loss.waited),
        recompute_s=seconds(loss.recompute),
        resumed=loss.resumed,
    )
