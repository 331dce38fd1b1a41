"""Every RPC that the protocol describes has a handler, and every handler an RPC."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from server.control import ControlService
from server.generation import GenerationService
from vorrang.v1 import control_pb2, generation_pb2


class OpenGuard:
    """Lets everything in."""

    def wrap(self, call: Any, *_: Any, **__: Any) -> Any:
        return call


SERVICES = {
    "GenerationService": (generation_pb2, GenerationService(backend=None)),  # type: ignore[arg-type]
    "ControlService": (control_pb2, ControlService(None, None, None)),  # type: ignore[arg-type]
}


def test_every_service_of_the_protocol_is_served() -> None:
    described = {name for module, _ in SERVICES.values() for name in module.DESCRIPTOR.services_by_name}
    assert described == SERVICES.keys()


@pytest.mark.parametrize("service", SERVICES)
def test_every_method_has_a_handler_of_its_kind(service: str) -> None:
    module, implementation = SERVICES[service]
    handlers = implementation.rpc_handler(OpenGuard())  # type: ignore[arg-type]
    descriptor = module.DESCRIPTOR.services_by_name[service]
    for method in descriptor.methods:
        details = SimpleNamespace(method=f"/{descriptor.full_name}/{method.name}", invocation_metadata=())
        handler: grpc.RpcMethodHandler[Any, Any] | None = handlers.service(details)  # type: ignore[arg-type]
        assert handler is not None, f"{method.name} would be answered UNIMPLEMENTED"
        kinds = (handler.request_streaming, handler.response_streaming)
        assert kinds == (method.client_streaming, method.server_streaming), method.name
