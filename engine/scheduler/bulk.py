"""Decodes made together, without a grant, a result and an event for each: for who simulates.

A runner has to be told what each request computes, and tells what became of it. A
model of one knows without: every decode gets its next token, and ends by length
alone. So a step is its decodes, as they stand, and grants for whoever else computes;
what is decided, and in which order blocks are handed out, is what ``plan`` and
``commit`` make of it. Steps in which nobody else computes may be made many at a
time (``engine.scheduler.stretch``). Tests hold simulations to the results of planned ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from engine.events import SchedulerEvent
from engine.request import Request, RequestId, RequestSpec
from engine.scheduler.commands import Command
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.draft import Gate
from engine.scheduler.grants import other_grants
from engine.scheduler.plan import Grant
from engine.scheduler.scheduler import Booked, Fields, Scheduler
from engine.scheduler.stretch import Stretch, pass_stretch, stretch_of
from kv.block_manager import BlockManager


@dataclass(slots=True)
class BulkStep:
    """What one step does.

    Attributes:
        now: when it was planned.
        decodes: who computes a token, in policy order.
        grants: what others compute.
        events: what planning decided, in order.
        gate: what kept the first request out that could not be admitted; None when nothing waits.
    """

    now: float
    decodes: Sequence[Request]
    grants: Sequence[Grant]
    events: Sequence[SchedulerEvent]
    gate: Gate | None


class BulkScheduler(Scheduler):
    """A scheduler that can be driven step by step, too: by ``begin`` and ``end``.

    Args:
        config: without guessed tokens.
        blocks: the pool.
        output: what the model says, whoever asks: the token of each output index.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, output: Sequence[int]) -> None:
        assert not config.speculation_tokens
        super().__init__(config, blocks)
        self._output = output
        self._gate: Gate | None = None  # of the last step
        self._known_hashes: dict[RequestId, list[bytes]] = {}
        self._is_quiet = False  # it held decodes alone, decided nothing, and nobody ended or came since

    def submit(
        self, spec: RequestSpec, now: float, block_hashes: list[bytes] | None = None
    ) -> list[SchedulerEvent]:
        """As in ``Scheduler``; no token may end its output.

        Args:
            spec: what is asked for.
            now: the time.
            block_hashes: of its blocks, as many as are known; whatever is made more is added.
        """
        assert not spec.eos_token_ids
        assert not spec.sampling.stop_token_ids
        self._is_quiet = False
        events = super().submit(spec, now)
        if block_hashes is not None:
            # A look into the cache makes those of its prompt that leave a token to compute.
            num_blocks = (len(spec.prompt_token_ids) - 1) // self.blocks.block_size
            self._state.requests[spec.request_id].block_hashes += block_hashes[:num_blocks]
            self._known_hashes[spec.request_id] = block_hashes
        return events

    def apply(self, command: Command, now: float) -> list[SchedulerEvent]:
        """As in ``Scheduler``."""
        self._is_quiet = False
        return super().apply(command, now)

    def begin(self, now: float) -> BulkStep:
        """Decide the next step, as ``plan`` does; the one before must have ended."""
        draft = self._filled(now)
        self._gate = draft.gate
        self._is_quiet = not (draft.granted or draft.events)
        return BulkStep(now, draft.decodes, other_grants(draft), draft.events, draft.gate)

    def end(self, step: BulkStep, now: float) -> list[SchedulerEvent]:
        """Book what a step has computed, as ``commit`` does.

        Returns:
            The tokens of those that are not decodes, in the order of the grants, then the ends.
        """
        state, block_size, output, planned_at = self._state, self.blocks.block_size, self._output, step.now
        ended: list[Request] = []
        for request in step.decodes:
            request.num_computed_tokens = num_computed = request.num_computed_tokens + 1
            request.token_ids.append(output[num_computed - request.num_prompt_tokens])
            request.idle_since = planned_at
            if num_computed + 1 >= request.num_tokens_max:
                ended.append(request)
            if not num_computed % block_size:
                state.filled_block(request)
        self.policy.produced(step.decodes)
        booked = Booked([])
        if step.grants:
            said = {
                grant.request_id: output[i] for grant in step.grants if (i := grant.output_index) is not None
            }
            self._book(cast("Sequence[Fields]", step.grants), said, now, booked)
            self.policy.produced(booked.producers)
        for request in (*ended, *booked.ended):
            self._is_quiet = False
            booked.events.extend(self._end(request, now))
        return booked.events

    def _end(self, request: Request, now: float) -> list[SchedulerEvent]:
        """As in ``Scheduler``."""
        known = self._known_hashes.pop(request.request_id, None)
        if known is None:
            return super()._end(request, now)
        hashes = request.block_hashes
        hashes += known[len(hashes) : request.num_computed_tokens // self.blocks.block_size]
        events = super()._end(request, now)
        known += hashes[len(known) :]
        return events

    def stretch(self) -> Stretch:
        """Steps that may be made at once from here, after a step's end; see ``engine.scheduler.stretch``."""
        stretch = stretch_of(self._state, self._gate, was_quiet=self._is_quiet)
        return stretch._replace(until=min(stretch.until, self._deadlines.next_due))

    def pass_stretch(self, num_steps: int, planned_at: float, now: float) -> list[SchedulerEvent]:
        """Make so many steps of the stretch at once.

        Args:
            num_steps: at most those of ``stretch``, which must just have been asked for.
            planned_at: when the last of them was planned, before the stretch's end.
            now: when it ends.

        Returns:
            The ends that the last of them causes.
        """
        ended = pass_stretch(self._state, num_steps, planned_at, self._output)
        self._step += num_steps
        self.policy.produced(self._state.decoding, num_steps)
        self._discipline.repeated(num_steps)
        if ended:
            self._is_quiet = False
        return [event for request in ended for event in self._end(request, now)]
