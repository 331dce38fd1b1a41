"""The client of one server: a channel, sessions, and the plain calls.

The async API is for ``asyncio``; client and sessions belong to the event loop
they were entered in. It needs nothing but grpc and protobuf.
"""

import asyncio
import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack
from weakref import WeakSet

import grpc
import grpc.aio

from clients.python.channel import SERVICE, channel_settings, environment_credentials
from clients.python.errors import NotReady, error_from_call
from clients.python.events import (
    Model,
    Result,
    decode_accepted,
    decode_finished,
    decode_limits,
    decode_logprobs,
    decode_outputs,
)
from clients.python.request import Messages, PriorityLike, RequestOptions, encode_prompt, encode_spec
from clients.python.session import Session
from clients.python.stream import CallStream
from vorrang.v1 import generation_pb2 as pb

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_HEALTH_POLL_S = 0.1
# HealthCheckResponse{status: SERVING}; its one field is an enum, so its bytes are fixed.
_SERVING = b"\x08\x01"


class VorrangClient:
    """A client of the server at ``target``; an async context manager.

    Args:
        target: address as gRPC writes it, such as ``127.0.0.1:50051``.
        credentials: TLS credentials; None = plaintext.
        metadata: sent with every call, such as ``[("authorization", "Bearer ...")]``.
        keepalive_s: silence after which the connection is probed. Vorrang allows pings every
            10 s; many proxies end connections for pings more often than every 300 s.
        keepalive_timeout_s: longest wait for the answer to a probe; then the connection counts as lost.
        attempts_max: how often a call, not a session, is tried while the server is unavailable: 1 to 5. Once
            the server has taken a request it is not tried again.
        wait_for_ready: calls and sessions wait for a server that can't be reached, as long as their time
            allows, instead of failing with ``ConnectionLost``.
        max_message_bytes: largest message that is accepted from the server.
        channel_options: further gRPC channel options; they win over the ones made here.

    Raises:
        ValueError: ``attempts_max`` is out of range.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        keepalive_s: float = 30.0,
        keepalive_timeout_s: float = 10.0,
        attempts_max: int = 4,
        wait_for_ready: bool = False,
        max_message_bytes: int = 16 * 2**20,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.target = target
        self._wait_for_ready = wait_for_ready
        self._sessions: WeakSet[Session] = WeakSet()
        self._credentials = credentials
        self._metadata = tuple(metadata)
        self._options = [
            *channel_settings(keepalive_s, keepalive_timeout_s, attempts_max, max_message_bytes),
            *channel_options,
        ]
        self._open_channel: grpc.aio.Channel | None = None

    @classmethod
    def from_environment(cls, target: str) -> Self:
        """A client with the credentials that the environment names.

        ``VORRANG_TOKEN`` is a bearer token; ``VORRANG_CA`` a PEM file with the server's authority: it makes
        it TLS; ``VORRANG_CERTIFICATE`` and ``VORRANG_KEY`` PEM files with the client's own, for mTLS.

        Raises:
            ValueError: a file can't be read, or one of a pair is missing.
        """
        credentials, metadata = environment_credentials()
        return cls(target, credentials=credentials, metadata=metadata)

    async def __aenter__(self) -> Self:
        if self._credentials is None:
            self._open_channel = grpc.aio.insecure_channel(self.target, options=self._options)
        else:
            self._open_channel = grpc.aio.secure_channel(
                self.target, self._credentials, options=self._options
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open_channel is not None:
            channel, self._open_channel = self._open_channel, None
            for session in list(self._sessions):
                await session.end()
            await channel.close()

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._open_channel is None:
            raise RuntimeError("the client is used outside its `async with` block")
        return self._open_channel

    def session(
        self,
        *,
        default_priority: PriorityLike | None = None,
        default_credit_tokens: int | None = None,
        keep_credit: bool = True,
        resume_token: str = "",
        client_name: str = "vorrang-python",
        open_timeout_s: float = 30.0,
        reconnect_s: float = 10.0,
    ) -> Session:
        """A session, to be entered with ``async with``; see ``Session``.

        Args:
            default_priority: level or class of starts that carry none.
            default_credit_tokens: output tokens a request may be ahead of its reader; None = the server's
                choice. A request that nobody reads stands still then, and fails in the end.
            keep_credit: grant what was read, and acknowledge it; False = the caller does, with
                ``Session.credit``.
            resume_token: ``info.session_token`` of a session whose stream was lost; its requests can
                be taken up with ``Session.resume``. A stream it still has is ended.
            client_name: name and version of the calling program, for the server's logs.
            open_timeout_s: longest wait for the server's answer.
            reconnect_s: how long a lost connection is looked for before everybody gets ``ConnectionLost``;
                servers keep the requests of a lost session for 10 s by default. 0 = not at all.

        Raises:
            ValueError: ``reconnect_s`` is negative.
        """
        method = self._channel.stream_stream(
            f"/{SERVICE}/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )
        session = Session(
            functools.partial(method, metadata=self._metadata, wait_for_ready=self._wait_for_ready),
            client_name=client_name,
            default_priority=default_priority,
            default_credit_tokens=default_credit_tokens,
            keep_credit=keep_credit,
            resume_token=resume_token,
            open_timeout_s=open_timeout_s,
            reconnect_s=reconnect_s,
        )
        self._sessions.add(session)
        return session

    def generate_stream(
        self,
        prompt: str | None = None,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> CallStream:
        """One request as a call of its own; its events, to be iterated over.

        Use it as an async context manager, or read it to the end: a call that is abandoned half-read
        keeps running.

        Args:
            prompt: plain text; or give ``messages`` or ``token_ids``.
            request_id: unique in the tenant; empty = made by the server.
            timeout_s: deadline of the call; None = none.
            **options: see ``RequestOptions``.

        Raises:
            ValueError: not exactly one form of prompt, or a value the wire can't carry.
        """
        spec = encode_spec(prompt, options)
        method = self._channel.unary_stream(
            f"/{SERVICE}/GenerateStream",
            request_serializer=pb.GenerateStreamRequest.SerializeToString,
            response_deserializer=pb.GenerateStreamResponse.FromString,
        )
        sent_at_s = asyncio.get_running_loop().time()
        call = method(
            pb.GenerateStreamRequest(spec=spec, request_id=request_id),
            timeout=timeout_s,
            metadata=self._metadata,
            wait_for_ready=self._wait_for_ready,
        )
        return CallStream(request_id, sent_at_s, call)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """One request, one answer. Arguments as for ``generate_stream``; ``Result.ttft_s`` is None.

        Raises:
            RequestFailed: the server refused the request or it failed.
            ConnectionLost: the server can't be reached.
            ValueError: not exactly one form of prompt, or a value the wire can't carry.

        Cancellation: cancels the request on the server.
        """
        loop = asyncio.get_running_loop()
        sent_at_s = loop.time()
        request = pb.GenerateRequest(spec=encode_spec(prompt, options), request_id=request_id)
        response = await self._unary("Generate", request, pb.GenerateResponse, timeout_s)
        finished = decode_finished(response.finished)
        return Result(
            text=response.text,
            token_ids=tuple(response.token_ids),
            finish_reason=finished.reason,
            usage=finished.usage,
            logprobs=decode_logprobs(response.logprobs),
            accepted=decode_accepted(response.accepted) if response.HasField("accepted") else None,
            duration_s=loop.time() - sent_at_s,
            prompt_logprobs=decode_logprobs(response.prompt_logprobs),
            outputs=decode_outputs(response),
        )

    async def tokenize(
        self, prompt: str | None = None, *, messages: Messages | None = None, timeout_s: float | None = 30.0
    ) -> list[int]:
        """Token ids of a text or conversation; raises as ``generate`` does."""
        request = pb.TokenizeRequest(prompt=encode_prompt(prompt, messages=messages))
        response = await self._unary("Tokenize", request, pb.TokenizeResponse, timeout_s)
        return list(response.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout_s: float | None = 30.0
    ) -> str:
        """Text of token ids; raises as ``generate`` does."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        response = await self._unary("Detokenize", request, pb.DetokenizeResponse, timeout_s)
        text: str = response.text
        return text

    async def get_model(self, *, timeout_s: float | None = 30.0) -> Model:
        """The model that is served, and the limits of the server; raises as ``generate`` does."""
        response = await self._unary("GetModel", pb.GetModelRequest(), pb.GetModelResponse, timeout_s)
        return Model(
            name=response.name,
            context_tokens=response.context_tokens,
            vocabulary_size=response.vocabulary_size,
            has_chat_template=response.has_chat_template,
            eos_token_ids=tuple(response.eos_token_ids),
            architecture=response.architecture,
            adapters=tuple(response.adapters),
            limits=decode_limits(response.limits),
        )

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the server's health is SERVING.

        Raises:
            NotReady: it was not within ``timeout_s``.
        """
        # grpcio-health-checking is not in the base install, and this is all that is needed of it.
        check = self._channel.unary_unary(
            _HEALTH_CHECK, request_serializer=bytes, response_deserializer=bytes
        )
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        seen = "no answer"
        while (left_s := end_s - loop.time()) > 0:
            try:
                answer = await check(b"", timeout=left_s, metadata=self._metadata, wait_for_ready=True)
                if answer == _SERVING:
                    return
                seen = "not serving"
            except grpc.aio.AioRpcError as error:
                # The deadline running out says less than what was seen before.
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    seen = error_from_call(error).message
            await asyncio.sleep(min(_HEALTH_POLL_S, max(0.0, end_s - loop.time())))
        raise NotReady(f"{self.target} is not ready after {timeout_s:g} s: {seen}")

    async def _unary(self, name: str, request: Any, response_type: Any, timeout_s: float | None) -> Any:
        method = self._channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        call = method(
            request, timeout=timeout_s, metadata=self._metadata, wait_for_ready=self._wait_for_ready
        )
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error) from error
        finally:
            call.cancel()
