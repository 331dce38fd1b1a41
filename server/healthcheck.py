"""``vorrang healthcheck``: one question to a running server, for containers and scripts."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def ask(target: str, service: str, timeout_s: float) -> str:
    """What the server says of its health.

    Args:
        target: ``host:port``, plaintext.
        service: such as ``vorrang.v1.GenerationService``; empty = the whole server.
        timeout_s: longest wait for an answer, connecting included.

    Returns:
        ``SERVING``, ``NOT_SERVING``, or why there is no answer: the name of a gRPC status.
    """
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code.name
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name
