"""Options of clients and sessions as types, for what passes them on; see ``VorrangClient``."""

from collections.abc import Sequence
from typing import Any, TypedDict

import grpc

from clients.python.request import PriorityLike


class ClientOptions(TypedDict, total=False):
    """Options of ``VorrangClient``, under the same names."""

    credentials: grpc.ChannelCredentials | None
    metadata: Sequence[tuple[str, str]]
    keepalive_s: float
    keepalive_timeout_s: float
    attempts_max: int
    wait_for_ready: bool
    max_message_bytes: int
    channel_options: Sequence[tuple[str, Any]]


class SessionOptions(TypedDict, total=False):
    """Options of ``VorrangClient.session``, under the same names."""

    default_priority: PriorityLike | None
    default_credit_tokens: int | None
    keep_credit: bool
    resume_token: str
    client_name: str
    open_timeout_s: float
    reconnect_s: float
