"""Reflection (gRPC's ``doc/server-reflection.md``) as tools ask for it: v1 beside v1alpha, methods by name.

The packaged servicer speaks v1alpha alone, and its descriptor pool finds no symbol of a method, which is
what ``grpcurl describe`` and ``ghz --call`` ask for. Both versions have the same messages on the wire.
"""

from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace(".v1alpha.", ".v1.")


class _Servicer(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # grpc_reflection has no types
    def _file_containing_symbol(self, request: Any, fully_qualified_name: str) -> Any:
        """The file of a symbol; of a method it is that of its service."""
        answer = super()._file_containing_symbol(request, fully_qualified_name)
        owner = fully_qualified_name.rpartition(".")[0]
        if answer.HasField("error_response") and self._is_method(owner, fully_qualified_name):
            return super()._file_containing_symbol(request, owner)
        return answer

    def _is_method(self, owner: str, name: str) -> bool:
        try:
            service = self._pool.FindServiceByName(owner)
        except KeyError:
            return False
        return any(method.full_name == name for method in service.methods)


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Have a server describe its services, by both versions of the protocol.

    Args:
        server: that has not been started.
        services: full names; reflection itself is added.
    """
    _describe_v1()
    servicer = _Servicer((*services, V1ALPHA, V1))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, methods) for name in (V1ALPHA, V1))
    )


def _describe_v1() -> None:
    """Put v1's descriptor into the pool: v1alpha's under the other package."""
    pool = descriptor_pool.Default()
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    old, new = reflection_pb2.DESCRIPTOR.package, V1.rpartition(".")[0]
    file.name, file.package = file.name.replace("v1alpha", "v1"), new
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(f".{old}.", f".{new}.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{old}.", f".{new}.")
            method.output_type = method.output_type.replace(f".{old}.", f".{new}.")
    pool.Add(file)
