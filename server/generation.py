"""GenerationService: single-request calls, tokens and the model; sessions live in ``server.session``.

The methods are registered by hand, because they must get raw bytes: a frame that can't
be decoded may not cost the stream, and a request that can't be gets a status of ours.
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from engine.errors import DeadlineExceeded, InvalidRequest
from engine.events import Delta, Failed, Finished, OutputFinished, PromptLogProbs
from engine.handle import Handle
from engine.request import FinishReason, RequestId, Usage
from engine.text_work.jobs import Decode
from server import convert
from server.backend import Backend
from server.convert_sampling import check_token_ids
from server.errors import EndedCall
from server.flow import Flow
from server.guard import Guard
from server.identity import CALLER
from server.metadata import check_request_id, level_of, request_id_of
from server.session import Session
from server.session_writer import PeerGone
from server.slots import Turn
from server.ticket import Ticket
from vorrang.v1 import generation_pb2 as gen

SERVICE = "vorrang.v1.GenerationService"
#: How a request ends whose time runs out while its text waits.
_OUT_OF_TIME = convert.finished(Finished(RequestId(""), FinishReason.TIME_LIMIT, Usage()))


class GenerationService:
    """The calls of the service.

    Args:
        backend: engine, limits and register.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def rpc_handler(self, guard: Guard) -> grpc.GenericRpcHandler:
        """What a server is given."""
        stream, unary = grpc.unary_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        methods: dict[str, Any] = {
            "Session": grpc.stream_stream_rpc_method_handler(guard.wrap(self.session, is_session=True)),
            "GenerateStream": stream(
                guard.wrap(self.generate_stream, gen.GenerateStreamRequest),
                response_serializer=gen.GenerateStreamResponse.SerializeToString,
            ),
        }
        for name, call, request_class in (
            ("Generate", self.generate, gen.GenerateRequest),
            ("Tokenize", self.tokenize, gen.TokenizeRequest),
            ("Detokenize", self.detokenize, gen.DetokenizeRequest),
            ("GetModel", self.get_model, gen.GetModelRequest),
        ):
            methods[name] = unary(guard.wrap(call, request_class), response_serializer=_serialized)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def session(self, _: Any, context: Any) -> None:
        """Many requests on one stream; see ``server.session``."""
        await Session(self._backend, context, CALLER.get().tenant).run()

    async def generate_stream(self, request: gen.GenerateStreamRequest, context: Any) -> None:
        """One request, its events as a stream.

        Raises:
            VorrangError: it was refused or failed; the status of the call.

        Cancellation: the request is cancelled before the next step.
        """
        flows: list[Flow] = []
        ticket = await self._start(
            request, context, lambda handle: flows[0].update(handle.num_buffered_tokens)
        )
        if isinstance(ticket, gen.AcceptedEvent):
            for frame in (
                gen.GenerateStreamResponse(sequence=1, accepted=ticket),
                gen.GenerateStreamResponse(sequence=2, finished=_OUT_OF_TIME),
            ):
                await _write(context, frame)
            return
        flow = Flow(
            ticket.handle,
            granted_tokens=None,  # a call has no frames to grant with: what it does not read parks it
            max_unsent_tokens=self._backend.engine.max_buffered_tokens,
            slow_client_timeout_s=self._backend.session_settings.slow_client_timeout_s,
            on_park=lambda why: self._backend.parking(ticket.handle.request_id, why),
        )
        flows.append(flow)
        try:
            sequence = 1  # the first write sends the initial metadata: only now the call is committed
            await _write(context, gen.GenerateStreamResponse(sequence=sequence, accepted=ticket.accepted))
            async for event in ticket.handle.events():
                flow.update(ticket.handle.num_buffered_tokens)
                if isinstance(event, Failed):
                    self._backend.delivered(ticket.handle.request_id)  # as the call's status
                    raise EndedCall(event.error, convert.usage(event.usage))
                if isinstance(event, Finished):
                    _check_time(event, context)
                sequence += 1
                frame = gen.GenerateStreamResponse(sequence=sequence)
                frame.output_index = ticket.handle.output_index(event)
                ignored = ticket.accepted.priority_ignored
                convert.fill_event(frame, event, priority_ignored=ignored)
                await _write(context, frame)
            self._backend.delivered(ticket.handle.request_id)
        finally:
            flow.close()
            self._settle(ticket, context)

    async def generate(self, request: gen.GenerateRequest, context: Any) -> gen.GenerateResponse:
        """One request, one answer.

        Raises:
            VorrangError: it was refused or failed; the status of the call.

        Cancellation: the request is cancelled before the next step.
        """
        ticket = await self._start(request, context)
        if isinstance(ticket, gen.AcceptedEvent):
            output = gen.GenerateOutput(finished=_OUT_OF_TIME)
            num_outputs = request.spec.num_outputs
            outputs = [output] * num_outputs if num_outputs > 1 else []
            return gen.GenerateResponse(accepted=ticket, finished=_OUT_OF_TIME, outputs=outputs)
        response = gen.GenerateResponse(accepted=ticket.accepted)
        outputs = [gen.GenerateOutput() for _ in range(max(1, request.spec.num_outputs))]
        pieces: list[list[str]] = [[] for _ in outputs]
        try:
            await context.send_initial_metadata(())  # accepted: from now on a retry would not be safe
            async for event in ticket.handle.events():
                index = ticket.handle.output_index(event)
                match event:
                    case Delta():
                        pieces[index].append(event.text)
                        outputs[index].token_ids.extend(event.token_ids)
                        outputs[index].logprobs.extend(map(convert.position_logprobs, event.logprobs))
                    case OutputFinished():
                        outputs[index].finished.CopyFrom(convert.finished(event.finished))
                    case PromptLogProbs():
                        response.prompt_logprobs.extend(map(convert.position_logprobs, event.positions))
                        await asyncio.sleep(0)  # others' turn: it was a thousand positions at most
                    case Finished():
                        _check_time(event, context)
                        response.finished.CopyFrom(convert.finished(event))
                    case Failed():
                        self._backend.delivered(ticket.handle.request_id)  # as the call's status
                        raise EndedCall(event.error, convert.usage(event.usage))
        finally:
            self._settle(ticket, context)
        for output, texts in zip(outputs, pieces, strict=True):
            output.text = "".join(texts)
        response.text = outputs[0].text
        response.token_ids.extend(outputs[0].token_ids)
        response.logprobs.extend(outputs[0].logprobs)
        if len(outputs) > 1:
            response.outputs.extend(outputs)
        self._backend.delivered(ticket.handle.request_id)
        return response

    async def tokenize(self, request: gen.TokenizeRequest, context: Any) -> gen.TokenizeResponse:
        """Text or a conversation to token ids, which its tenant pays for.

        Raises:
            InvalidRequest: the prompt has no form or the template refuses it.
            ContextExceeded: it is longer than the context.
            VorrangError: see ``Backend.work_on``.

        Cancellation: at once.
        """
        backend = self._backend
        prompt = convert.prompt_of(request.prompt, backend.prompt_limit, backend.engine.info)
        if isinstance(prompt, tuple):
            return gen.TokenizeResponse(token_ids=prompt)
        ids = await backend.work_on(prompt, self._turn(context))
        backend.spend(len(ids))
        return gen.TokenizeResponse(token_ids=ids)

    async def detokenize(self, request: gen.DetokenizeRequest, context: Any) -> gen.DetokenizeResponse:
        """Token ids to text; its tenant pays for them.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
            ContextExceeded: there are more than a context holds.
            VorrangError: see ``Backend.work_on``.

        Cancellation: at once.
        """
        backend = self._backend
        backend.prompt_limit.check_tokens(len(request.token_ids), field="token_ids")
        ids = array("I", request.token_ids)
        check_token_ids(ids, backend.engine.info, field="token_ids")
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await backend.work_on(Decode(ids, skip), self._turn(context))
        backend.spend(len(ids))
        return gen.DetokenizeResponse(text=text)

    def _turn(self, context: Any) -> Turn:
        level = level_of(context.invocation_metadata() or ())
        return self._backend.turn(lambda: self._backend.default_level if level is None else level)

    async def get_model(self, _request: gen.GetModelRequest, _: Any) -> gen.GetModelResponse:
        """The model that is served, and the limits of this server."""
        engine, info = self._backend.engine, self._backend.info
        return gen.GetModelResponse(
            name=info.name,
            context_tokens=info.context_tokens,
            vocabulary_size=info.vocab_size,
            has_chat_template=engine.tokenizer.has_chat_template,
            eos_token_ids=sorted(info.eos_token_ids),
            limits=self._backend.limits(),
            architecture=info.architecture,
            adapters=info.adapters,
        )

    async def _start(
        self,
        request: gen.GenerateStreamRequest | gen.GenerateRequest,
        context: Any,
        on_ready: Callable[[Handle], None] | None = None,
    ) -> Ticket | gen.AcceptedEvent:
        """Submit what a call asks for; its first event alone when its time ran out while its text waited."""
        received_at = self._backend.engine.now()
        metadata = context.invocation_metadata() or ()
        metadata_level = level_of(metadata)
        client_id = request_id_of(metadata) or ""
        if request.request_id:
            client_id = check_request_id(request.request_id)
        if not request.HasField("spec"):
            raise InvalidRequest("spec", "must be given", None)
        draft = self._backend.draft(request.spec)
        if draft.credit_tokens is not None:
            raise InvalidRequest("credit_tokens", "must be given in sessions alone", draft.credit_tokens)
        remaining_s = context.time_remaining()
        deadline = None if remaining_s is None else self._backend.engine.now() + remaining_s
        levels = (draft.level, metadata_level, self._backend.default_level)
        level = next(level for level in levels if level is not None)
        ready = await self._backend.ready(draft, level, self._backend.turn(lambda: level))
        if ready is None:
            allowed = self._backend.allowed_level(level)
            return gen.AcceptedEvent(level=allowed, requested_level=level, capped=allowed != level)
        draft, token_ids = ready
        return self._backend.submit(
            draft, token_ids, level, client_id, on_ready, deadline=deadline, received_at=received_at
        )

    def _settle(self, ticket: Ticket, context: Any) -> None:
        remaining_s = context.time_remaining()
        expired = remaining_s is not None and remaining_s <= 0
        reason = FinishReason.TIME_LIMIT if expired else FinishReason.CANCELLED
        self._backend.settle(ticket, reason)


def _check_time(event: Finished, context: Any) -> None:
    """A request whose time ran out has its output so far, unless it is the call's own time that did.

    Raises:
        DeadlineExceeded: that is so.
    """
    remaining_s = context.time_remaining()
    if event.reason is FinishReason.TIME_LIMIT and remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceeded("the call's deadline has passed")


async def _write(context: Any, frame: gen.GenerateStreamResponse) -> None:
    try:
        await context.write(frame)
    except grpc.aio.BaseError as error:
        raise PeerGone from error


def _serialized(message: Any) -> bytes:
    raw: bytes = message.SerializeToString()
    return raw
