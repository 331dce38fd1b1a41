"""How the channel to a server is set up: keepalive, retries, limits, and credentials from the environment."""

import json
import os
from pathlib import Path
from typing import Any

import grpc

from vorrang.v1 import generation_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_RETRIED = ("GenerateStream", "Generate", "Tokenize", "Detokenize", "GetModel")
#: As many as gRPC allows.
_ATTEMPTS_MAX = 5


def channel_settings(
    keepalive_s: float, keepalive_timeout_s: float, attempts_max: int, max_message_bytes: int
) -> list[tuple[str, Any]]:
    """Options of a gRPC channel; see ``VorrangClient``.

    Raises:
        ValueError: ``attempts_max`` is out of range.
    """
    if not 1 <= attempts_max <= _ATTEMPTS_MAX:
        raise ValueError(f"attempts_max must be between 1 and {_ATTEMPTS_MAX}, got {attempts_max}")
    return [
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_timeout_s * 1000)),
        # The keepalive waits for pings gRPC sends of its own accord; their limit is a minute by default.
        ("grpc.http2.ping_timeout_ms", int(keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        # A session looks for a lost server every second; the channel must not take longer by itself.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.service_config", json.dumps(service_config(attempts_max))),
    ]


def environment_credentials() -> tuple[grpc.ChannelCredentials | None, list[tuple[str, str]]]:
    """Credentials, None = plaintext, and metadata that the environment names; see ``VorrangClient``.

    Raises:
        ValueError: a file can't be read, or one of a pair is missing.
    """
    token, ca, certificate, key = (
        os.environ.get(f"VORRANG_{name}") for name in ("TOKEN", "CA", "CERTIFICATE", "KEY")
    )
    if (certificate is None) != (key is None):
        raise ValueError("VORRANG_CERTIFICATE and VORRANG_KEY must be set together")
    if certificate is not None and ca is None:
        raise ValueError("VORRANG_CERTIFICATE must not be set without VORRANG_CA")
    try:
        ca_pem, certificate_pem, key_pem = (
            Path(path).read_bytes() if path else None for path in (ca, certificate, key)
        )
    except OSError as error:
        raise ValueError(f"{error.filename} can't be read: {error.strerror}") from None
    credentials = grpc.ssl_channel_credentials(ca_pem, key_pem, certificate_pem) if ca_pem else None
    metadata = [("authorization", f"Bearer {token}")] if token else []
    return credentials, metadata


def service_config(attempts_max: int) -> dict[str, Any]:
    """Retries of calls, and a limit for all of a channel's: a server in trouble is not to get more of it."""
    method: dict[str, Any] = {"name": [{"service": SERVICE, "method": name} for name in _RETRIED]}
    if attempts_max > 1:
        # Safe: the server sends initial metadata only once it has taken a request, and that ends the retries.
        method["retryPolicy"] = {
            "maxAttempts": attempts_max,
            "initialBackoff": "0.1s",
            "maxBackoff": "2s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
    return {"methodConfig": [method], "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.5}}
