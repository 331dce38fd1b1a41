"""ControlService: in the protocol, not yet in this version; every call says so in a typed way."""

from typing import Any

import grpc

from engine.errors import Unimplemented
from server.errors import abort
from vorrang.v1 import control_pb2

SERVICE = "vorrang.v1.ControlService"


def rpc_handler() -> grpc.GenericRpcHandler:
    """What a server is given: a refusal for every method the protocol names."""
    service = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
    return grpc.method_handlers_generic_handler(
        SERVICE, {method.name: _refusal(method.name, method.server_streaming) for method in service.methods}
    )


def _refusal(name: str, streams: bool) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(_request: bytes, context: Any) -> None:
        await abort(context, Unimplemented(f"ControlService.{name}"))

    if streams:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
