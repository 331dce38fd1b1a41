"""Several outputs of one prompt: requests of their own in the engine, one to whoever asked.

They share the prompt's full blocks by way of the prefix cache: the first to be admitted
computes them, the others wait for it (``RequestSpec.family``). Each is preempted and resumed
by itself; cancel, pause and priority hold for all.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from engine.errors import VorrangError
from engine.events import TERMINAL, Failed, Finished, LevelChanged, OutputFinished, RequestEvent
from engine.handle import Handle, RequestHandle
from engine.request import FinishReason, RequestId, RequestSpec, Usage
from engine.sampling import sibling_seed

#: Reasons of which the first that any output has is that of the request: what cut an output off comes before
#: what it ended with itself. It does not depend on which output ends last.
GRAVITY = (
    FinishReason.CANCELLED,
    FinishReason.TIME_LIMIT,
    FinishReason.CAPACITY,
    FinishReason.LENGTH,
    FinishReason.STOP_STRING,
    FinishReason.STOP_TOKEN,
    FinishReason.STOP,
)
#: What of the usage is said of the prompt.
_OF_FIRST = ("prompt_tokens", "cached_tokens")


class Submits(Protocol):
    """What takes requests: see ``Engine``."""

    def submit_together(
        self, specs: Sequence[RequestSpec], on_ready: Callable[[RequestHandle], None] | None = None
    ) -> list[RequestHandle]:
        """Queue requests, all of them or none."""
        ...

    def check_levels(self, request_ids: Iterable[RequestId], level: int) -> None:
        """Refuse a new level unless all of these can have it."""
        ...


def submit_siblings(
    engine: Submits,
    spec: RequestSpec,
    num_outputs: int,
    on_ready: Callable[[Handle], None] | None = None,
) -> "SiblingsHandle":
    """Queue ``num_outputs`` requests for one prompt, all of them or none.

    The first has the id of ``spec`` and its seed; the others have ids and seeds made of these,
    and nothing of the prompt is said to them again.

    Raises:
        VorrangError: as ``Engine.submit_together``.
    """
    siblings = SiblingsHandle(engine, spec, on_ready)
    specs = [sibling_spec(spec, index) for index in range(num_outputs)]
    for handle in engine.submit_together(specs, siblings.on_event):
        siblings.add(handle)
    return siblings


def sibling_spec(spec: RequestSpec, output_index: int) -> RequestSpec:
    """What is asked for as the output of this index."""
    sampling = dataclasses.replace(
        spec.sampling,
        seed=sibling_seed(spec.sampling.seed, output_index),
        prompt_logprobs=None if output_index else spec.sampling.prompt_logprobs,
    )
    request_id = RequestId(f"{spec.request_id}.{output_index}") if output_index else spec.request_id
    return dataclasses.replace(spec, request_id=request_id, sampling=sampling, family=spec.request_id)


class SiblingsHandle:
    """A ``Handle`` of several requests.

    The end of each is an ``OutputFinished``; once all have ended ``Finished`` follows, with the
    gravest of their reasons (``GRAVITY``). When one fails all do, and ``Failed`` is the only end.

    Args:
        engine: where they are.
        spec: what was asked for.
        on_ready: see ``Engine.submit``.
    """

    def __init__(self, engine: Submits, spec: RequestSpec, on_ready: Callable[[Handle], None] | None) -> None:
        self.spec = spec
        self._engine = engine
        self._on_ready = on_ready
        self._handles: list[RequestHandle] = []
        self._index_of: dict[RequestId, int] = {}
        self._ends: list[Finished | Failed] = []
        self._error: VorrangError | None = None
        self._is_told = False
        self._filled = asyncio.Event()

    def add(self, handle: RequestHandle) -> None:
        """One more."""
        self._index_of[handle.request_id] = len(self._handles)
        self._handles.append(handle)

    @property
    def request_id(self) -> RequestId:
        """That of the first."""
        return self.spec.request_id

    @property
    def queue_position(self) -> int:
        """Of the first, when it arrived."""
        return self._handles[0].queue_position

    @property
    def level(self) -> int:
        """Level in force."""
        return self._alive()[0].level if self._alive() else self._handles[-1].level

    @property
    def num_buffered_tokens(self) -> int:
        """Output tokens of all that wait to be taken."""
        return sum(handle.num_buffered_tokens for handle in self._handles)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all."""
        return sum(handle.num_output_tokens for handle in self._handles)

    @property
    def started(self) -> bool:
        """Whether any was ever admitted."""
        return any(handle.started for handle in self._handles)

    @property
    def finished(self) -> bool:
        """Whether all have ended."""
        return all(handle.finished for handle in self._handles)

    def output_index(self, event: RequestEvent) -> int:
        """Which output an event is about."""
        return self._index_of[event.request_id]

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End all before the next step, with the outputs so far."""
        for handle in self._handles:
            handle.cancel(reason)

    def fail(self, error: VorrangError) -> None:
        """End all before the next step, with an error."""
        for handle in self._handles:
            handle.fail(error)

    def set_level(self, level: int) -> None:
        """Give all another level, or none; one ``LevelChanged`` acknowledges.

        Raises:
            InvalidRequest, QueueFull: see ``RequestHandle.set_level``.
        """
        self._engine.check_levels([handle.request_id for handle in self._alive()], level)
        for handle in self._handles:
            handle.set_level(level)

    def park(self) -> None:
        """Compute none any more until ``unpark``."""
        for handle in self._handles:
            handle.park()

    def unpark(self) -> None:
        """Let all go on."""
        for handle in self._handles:
            handle.unpark()

    def allow(self, num_output_tokens: int | None) -> None:
        """See ``RequestHandle``. It is the length of all outputs together, so none may guess."""
        for handle in self._handles:
            handle.allow(None if num_output_tokens is None else 0)

    @property
    def has_events(self) -> bool:
        """Whether events wait to be taken."""
        return any(handle.has_events for handle in self._handles)

    def take(self) -> list[RequestEvent]:
        """All events that wait, output by output, each one's oldest first; never blocks."""
        events: list[RequestEvent] = []
        for index, handle in enumerate(self._handles):
            for event in handle.take():
                if isinstance(event, Finished | Failed):
                    self._ends.append(event)
                    if isinstance(event, Finished) and self._error is None:
                        events.append(OutputFinished(event.request_id, event))
                elif not isinstance(event, LevelChanged) or all(h.finished for h in self._handles[:index]):
                    events.append(event)
        if self.finished and not self._is_told:
            self._is_told = True
            events.append(self._end())
        self._filled.clear()
        return events

    async def events(self) -> AsyncIterator[RequestEvent]:
        """Events until the terminal one, which is included. One reader at a time.

        Cancellation: leaves the requests running and no event lost; call ``cancel`` to end them.
        """
        while True:
            await self._filled.wait()
            for event in self.take():
                yield event
                if isinstance(event, TERMINAL):
                    return

    def on_event(self, handle: RequestHandle) -> None:
        """For the engine alone: one of them has an event."""
        if handle.error is not None and self._error is None:
            self._error = handle.error
            self.fail(handle.error)
        self._filled.set()
        if self._on_ready is not None:
            self._on_ready(self)

    def _alive(self) -> list[RequestHandle]:
        return [handle for handle in self._handles if not handle.finished]

    def _end(self) -> Finished | Failed:
        by_index = sorted(self._ends, key=lambda end: self._index_of[end.request_id])
        usage = usage_of_all(end.usage for end in by_index)
        if self._error is not None:
            return Failed(self.request_id, self._error, usage)
        reasons = {end.reason for end in by_index if isinstance(end, Finished)}
        return Finished(self.request_id, min(reasons, key=GRAVITY.index), usage)


def usage_of_all(usages: Iterable[Usage]) -> Usage:
    """What several outputs have cost together, the first of them first.

    The prompt counts once, as the first output met it; tokens and preemptions add up; of times,
    which pass side by side, each is the longest.
    """
    every = tuple(usages)
    of_first = {name: getattr(every[0], name) for name in _OF_FIRST}
    together = {
        field.name: (max if field.name.endswith("_s") else sum)(getattr(usage, field.name) for usage in every)
        for field in dataclasses.fields(Usage)
    }
    return Usage(**together | of_first)
