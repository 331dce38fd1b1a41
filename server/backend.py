"""What every call shares: the engine once it is there, limits, and the register of live calls.

The one place where a valid draft becomes a request of the engine. Knows wire
messages only as far as limits are announced in them.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog

from engine.errors import Draining, VorrangError
from engine.grammar import MAX_CHOICES, MAX_GRAMMAR_BYTES
from engine.handle import Handle
from engine.lives.recorder import LifeRecorder
from engine.loop import Engine
from engine.request import FinishReason, RequestId
from engine.runner.base import ModelInfo
from engine.sampling import (
    MAX_BANNED_SEQUENCES,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    MAX_PROMPT_LOGPROBS,
    MAX_SEQUENCE_TOKENS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from engine.siblings import submit_siblings
from engine.text import PromptLimit, PromptTooLong
from engine.text_work.jobs import TextJob
from server import convert
from server.convert import Draft
from server.convert_sampling import banned_by_words, pieces_of
from server.errors import EngineStarting, row_of
from server.identity import CALLER
from server.isolation import TextWork
from server.live_request import LiveRequest
from server.metadata import MAX_REQUEST_ID_BYTES
from server.metrics import Metrics
from server.registry import Registry
from server.sections import ServerSection, SessionSection
from server.slots import Turn
from server.ticket import Ticket
from server.token_rates import TokenRates
from server.wire_shape import check_shape
from vorrang.v1 import types_pb2 as types

Result = TypeVar("Result")

log = structlog.get_logger("vorrang.server")


class Drainable(Protocol):
    """A session, as the shutdown sees it."""

    def go_away(self, time_left_s: float) -> None:
        """Tell the client that the stream ends soon."""
        ...

    def end(self) -> None:
        """End the stream when its requests have ended."""
        ...


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """A look at the live calls.

    Attributes:
        num_sessions: session streams open.
        num_calls: session streams and single-request calls open.
        num_requests: requests that are submitted and have not ended, or whose call has not.
    """

    num_sessions: int
    num_calls: int
    num_requests: int


class Backend:
    """Shared by all servicers. All methods are for the event loop's thread.

    Args:
        settings: limits and defaults.
        model_name: name under which the model is served; None = its own.
        sessions: what sessions may cost, and how long lost ones are kept.
        rates: tokens a second by tenant; None = no limits.
        metrics: is told of refusals; None = its own.
        lives: keeps where the time of requests went; None = nobody does.
        grammar_wait_s_max: seconds a request may wait for its grammar, its turn included.
    """

    def __init__(
        self,
        settings: ServerSection,
        model_name: str | None = None,
        *,
        sessions: SessionSection | None = None,
        rates: TokenRates | None = None,
        metrics: Metrics | None = None,
        lives: LifeRecorder | None = None,
        grammar_wait_s_max: float = 60.0,
    ) -> None:
        self.settings = settings
        self.session_settings = sessions or SessionSection()
        self.registry = Registry(self.session_settings)
        self.metrics = metrics or Metrics()
        self.lives = lives
        self._rates = rates or TokenRates({}, time.monotonic)
        self._model_name = model_name
        self._grammar_wait_s_max = grammar_wait_s_max
        self.sessions: set[Drainable] = set()
        self._engine: Engine | None = None
        self._text: TextWork | None = None
        self._tickets: dict[RequestId, Ticket] = {}
        self._num_calls = 0
        self._no_calls = asyncio.Event()
        self._no_calls.set()
        self._ids = itertools.count(1)

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            EngineStarting: the model is still being loaded.
        """
        if self._engine is None:
            raise EngineStarting
        return self._engine

    @property
    def info(self) -> ModelInfo:
        """The model, under the name by which it is served.

        Raises:
            EngineStarting: the model is still being loaded.
        """
        info = self.engine.info
        return info if self._model_name is None else dataclasses.replace(info, name=self._model_name)

    def set_engine(self, engine: Engine, text: TextWork | None = None) -> None:
        """From now on requests can be submitted.

        Args:
            engine: computes them.
            text: works on their texts; None = threads of this process do.
        """
        self._text = text or TextWork.on_threads(engine.tokenizer)
        self._engine = engine

    @property
    def text(self) -> TextWork:
        """What works on callers' texts.

        Raises:
            EngineStarting: the model is still being loaded.
        """
        if self._text is None:
            raise EngineStarting
        return self._text

    @property
    def prompt_limit(self) -> PromptLimit:
        """How long a prompt may be.

        Raises:
            EngineStarting: the model is still being loaded.
        """
        engine = self.engine
        return PromptLimit(engine.config.max_context_tokens, engine.tokenizer.max_token_bytes)

    def statistics(self) -> ServerStatistics:
        """How things stand."""
        return ServerStatistics(len(self.sessions), self._num_calls, len(self._tickets))

    def draft(self, spec: types.GenerationSpec) -> Draft:
        """Validate a wire spec but for its prompt's tokens.

        Raises:
            EngineStarting, InvalidRequest, Unimplemented, UnknownModel: see ``convert.draft_of``.
        """
        with self._refusals_counted():
            draft = convert.draft_of(
                spec,
                info=self.info,
                limit=self.prompt_limit,
                default_max_tokens=self.settings.default_max_tokens,
                now=self.engine.now(),
                max_request_s=self.session_settings.max_request_s,
            )
        tenant = CALLER.get().tenant
        if not tenant or draft.sampling.grammar is None:
            return draft
        grammar = dataclasses.replace(draft.sampling.grammar, owner=tenant)
        return dataclasses.replace(draft, sampling=dataclasses.replace(draft.sampling, grammar=grammar))

    async def prepare(self, draft: Draft, level: int) -> None:
        """Have the grammar of a draft compiled, if it has one; other requests are served meanwhile.

        The most urgent come first, and no tenant keeps the others from compiling.

        Raises:
            GrammarRefused, Unimplemented, QueueFull: see ``Engine.prepare``.

        Cancellation: at once.
        """
        grammar = draft.sampling.grammar
        if grammar is not None:
            with self._refusals_counted():
                await self.engine.prepare(grammar, self._grammar_wait_s_max, self.allowed_level(level))

    def check_shape(self, raw: bytes, message_class: Any) -> None:
        """Refuse a message that is made of too many things, before it is parsed.

        Raises:
            InvalidRequest, MalformedFrame: see ``wire_shape.check_shape``.
        """
        # A prompt that is a little too long is the scheduler's to refuse.
        max_token_ids = 2**20 if self._engine is None else 2 * self.engine.config.max_context_tokens
        check_shape(raw, message_class, max_token_ids=max(MAX_LISTED_TOKEN_IDS, max_token_ids))

    def turn(self, level: Callable[[], int]) -> Turn:
        """The caller's turn at work on its texts; ``level`` is what it asks for."""
        caller = CALLER.get()
        return Turn(lambda: caller.allowed(level()), caller.tenant)

    async def work_on(self, job: TextJob[Result], turn: Turn) -> Result:
        """Do a job on a caller's text when it is its turn, unless its tenant is in debt.

        Raises:
            TokenRateExceeded: its tenant has used its tokens.
            VorrangError: see ``TextWork.run``.

        Cancellation: see ``TextWork.run``.
        """
        with self._refusals_counted():
            self._rates.check(turn.tenant)
            try:
                return await self.text.run(job, turn)
            except PromptTooLong as error:
                self._rates.spend(turn.tenant, error.num_tokens)
                raise

    async def token_ids_of(self, draft: Draft, turn: Turn) -> Sequence[int]:
        """The prompt's token ids; text is tokenised off the event loop.

        Raises:
            VorrangError: see ``work_on``.

        Cancellation: see ``TextWork.run``.
        """
        return draft.prompt if isinstance(draft.prompt, tuple) else await self.work_on(draft.prompt, turn)

    async def with_bad_words(self, draft: Draft, turn: Turn) -> Draft:
        """The draft with its bad words banned as ids; they are tokenised off the event loop.

        Raises:
            InvalidRequest: see ``convert_sampling.banned_by_words``.
            VorrangError: see ``work_on``.

        Cancellation: see ``TextWork.run``.
        """
        if not draft.bad_words:
            return draft
        ids = await self.work_on(pieces_of(draft.bad_words), turn)
        return dataclasses.replace(draft, sampling=banned_by_words(draft.sampling, draft.bad_words, ids))

    async def ready(
        self, draft: Draft, level: int, turn: Turn, before: asyncio.Event | None = None
    ) -> tuple[Draft, Sequence[int]] | None:
        """The draft, its grammar compiled and its bad words as ids, with its prompt's ids; after ``before``.

        Returns:
            None when the draft's own time ran out first.

        Raises:
            VorrangError: see ``prepare``, ``with_bad_words`` and ``token_ids_of``.

        Cancellation: see those.
        """
        deadlines = [time for time in (draft.queue_deadline, draft.total_deadline) if time is not None]
        left_s = min(deadlines) - self.engine.now() if deadlines else None
        try:
            async with asyncio.timeout(left_s) as time_limit:
                await self.prepare(draft, level)
                draft = await self.with_bad_words(draft, turn)
                token_ids = await self.token_ids_of(draft, turn)
                if before is not None:
                    await before.wait()
                return draft, token_ids
        except TimeoutError:
            if not time_limit.expired():
                raise
            return None

    def spend(self, num_tokens: int) -> None:
        """Tokens were made for the caller, and no request of it will be charged with them."""
        self._rates.spend(CALLER.get().tenant, num_tokens)

    @property
    def default_level(self) -> int:
        """Priority of the caller's requests that carry none."""
        own = CALLER.get().default_level
        return self.settings.default_level if own is None else own

    def allowed_level(self, level: int) -> int:
        """The level the caller's requests get when they ask for one."""
        return CALLER.get().allowed(level)

    def find(self, request_id: RequestId) -> Ticket | None:
        """A request whose caller has not seen the end, by the server's id or that of one of its outputs."""
        return self._tickets.get(RequestId(request_id.partition(".")[0]))

    @contextlib.contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except VorrangError as error:
            self.metrics.refused(CALLER.get().tenant, row_of(error).reason)
            raise

    def submit(
        self,
        draft: Draft,
        token_ids: Sequence[int],
        level: int,
        client_request_id: str,
        on_ready: Callable[[Handle], None] | None = None,
        *,
        deadline: float | None = None,
        received_at: float | None = None,
    ) -> Ticket:
        """Give a request of the caller's to the engine, at the level its tenant may have.

        ``deadline`` is the caller's own, ``received_at`` is when it asked, on the engine's clock.

        Raises:
            TokenRateExceeded: its tenant has used its tokens.
            VorrangError: the engine refuses it, see ``Engine.submit``.
        """
        try:
            with self._refusals_counted():
                return self._submit(
                    draft, token_ids, level, client_request_id, on_ready, deadline, received_at
                )
        except VorrangError:
            if not isinstance(draft.prompt, tuple):  # it was tokenised for nothing
                self.spend(len(token_ids))
            raise

    def _submit(
        self,
        draft: Draft,
        token_ids: Iterable[int],
        level: int,
        client_request_id: str,
        on_ready: Callable[[Handle], None] | None,
        deadline: float | None,
        received_at: float | None,
    ) -> Ticket:
        engine, caller = self.engine, CALLER.get()
        self._rates.check(caller.tenant)
        request_id = RequestId(f"r{next(self._ids)}")
        spec = convert.request_spec(
            draft,
            token_ids,
            request_id,
            caller.allowed(level),
            info=self.info,
            context_tokens=engine.config.max_context_tokens,
            deadline=deadline,
        )
        if caller.tenant:
            spec = dataclasses.replace(spec, tenant=caller.tenant, cache_salt=caller.tenant)
        handle: Handle
        if draft.num_outputs == 1:
            handle = engine.submit(spec, on_ready)
        else:
            handle = submit_siblings(engine, spec, draft.num_outputs, on_ready)
        if self.lives is not None:
            came = engine.now() if received_at is None else received_at
            self.lives.named(request_id, client_request_id, handle.queue_position, came)
        log.debug("request.submitted", request_id=request_id, client_request_id=client_request_id)
        ticket = Ticket(
            handle,
            convert.accepted(
                spec,
                requested_level=level,
                queue_position=handle.queue_position,
                priority_ignored=not engine.uses_level,
            ),
            client_request_id,
        )
        self._tickets[request_id] = ticket
        return ticket

    def settle(self, ticket: Ticket, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Forget a request; one that has not ended is ended for ``reason``. May be called twice."""
        ticket.handle.cancel(reason)
        self._tickets.pop(ticket.handle.request_id, None)

    def parking(self, request_id: RequestId, why: str) -> None:
        """A request is about to be parked."""
        if self.lives is not None:
            self.lives.parking(request_id, why)

    def delivered(self, request_id: RequestId) -> None:
        """The last event of a request was written."""
        if self.lives is not None:
            self.lives.delivered(request_id, self.engine.now())

    def ended(self, tenant: str, request: LiveRequest) -> None:
        """A request of a session has its last frame; it is kept for a while, unless it was refused."""
        if request.ticket is not None:
            self.settle(request.ticket)
        elif not request.left:
            self.registry.forget(tenant, request)
            return
        self.registry.retain(tenant, request)

    async def close(self) -> None:
        """No call is open any more: end what works on texts."""
        if self._text is not None:
            await self._text.close()

    def fail_queued(self) -> None:
        """Fail, as retryable, every request that has not been seen to start."""
        for ticket in self._tickets.values():
            if not ticket.handle.started:
                ticket.handle.fail(Draining())

    def enter(self) -> None:
        """A call has begun; ``leave`` must follow."""
        self._num_calls += 1
        self._no_calls.clear()

    def leave(self) -> None:
        """A call has ended."""
        self._num_calls -= 1
        if self._num_calls == 0:
            self._no_calls.set()

    async def wait_until_no_calls(self) -> None:
        """Return when no call is open."""
        await self._no_calls.wait()

    def limits(self) -> types.Limits:
        """What this server accepts, as it announces it.

        Raises:
            EngineStarting: the model is still being loaded.
        """
        engine, session = self.engine, self.session_settings
        longest_s = session.max_request_s
        return types.Limits(
            max_request_tokens=engine.max_request_tokens,
            max_output_tokens=engine.config.max_context_tokens - 1,
            max_stop_strings=MAX_STOP_STRINGS,
            max_stop_string_bytes=MAX_STOP_STRING_BYTES,
            max_stop_token_ids=MAX_STOP_TOKEN_IDS,
            max_logprobs=MAX_LOGPROBS,
            max_frame_bytes=self.settings.max_frame_bytes,
            max_session_requests=self.settings.max_session_requests,
            max_bad_frames=self.settings.max_bad_frames,
            max_request_id_bytes=MAX_REQUEST_ID_BYTES,
            max_buffered_tokens=engine.max_buffered_tokens,
            max_label_bytes=convert.MAX_LABEL_BYTES,
            max_prompt_logprobs=MAX_PROMPT_LOGPROBS,
            max_outputs=min(MAX_OUTPUTS, engine.config.max_waiting_requests),
            max_logit_biases=MAX_LOGIT_BIASES,
            max_listed_token_ids=MAX_LISTED_TOKEN_IDS,
            max_banned_sequences=MAX_BANNED_SEQUENCES,
            max_sequence_tokens=MAX_SEQUENCE_TOKENS,
            max_grammar_bytes=MAX_GRAMMAR_BYTES,
            max_choices=MAX_CHOICES,
            slow_client_timeout=convert.duration(session.slow_client_timeout_s),
            resume_grace=convert.duration(session.resume_grace_s),
            retention=convert.duration(session.retention_s),
            max_request_time=None if longest_s is None else convert.duration(longest_s),
            reprioritize_burst=session.reprioritize_burst,
            reprioritize_per_s=session.reprioritize_per_s,
        )


@functools.cache
def server_version() -> str:
    """Version of the server program."""
    return importlib.metadata.version("vorrang")
