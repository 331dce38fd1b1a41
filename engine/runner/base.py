"""The border between the loop and the model.

A runner computes what a plan grants and decides nothing: no order, no
admission, no ending. ``StepModel`` is the synchronous half that a model
implements; ``Runner`` is what the loop awaits. This module knows no torch.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from engine.grammar import GrammarSpec
from engine.request import RequestId
from engine.scheduler.plan import Plan, StepResult


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served.

    Attributes:
        name: under which it is served.
        architecture: as in the model's config, such as ``LlamaForCausalLM``.
        vocab_size: number of token ids.
        context_tokens: longest prompt + output.
        eos_token_ids: ids that end an output.
        computed_by: kernels, weights and threads, in words; empty where there is nothing to say.
        adapters: names of the adapters that requests may ask for.
    """

    name: str
    architecture: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    computed_by: str = ""
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Size of the KV pool: ``num_blocks`` blocks of ``block_size`` tokens."""

    num_blocks: int
    block_size: int


class StepModel(Protocol):
    """A model with its KV pool, computing one plan at a time on the calling thread."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        ...

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        ...

    def run(self, plan: Plan) -> StepResult:
        """Compute every grant of ``plan``; called by one thread at a time."""
        ...


class Ticket(Protocol):
    """A plan that was launched."""

    @property
    def is_computed(self) -> bool:
        """Whether its result can be had without waiting."""
        ...


TicketT = TypeVar("TicketT", bound=Ticket)


@runtime_checkable
class LaunchingModel(StepModel, Protocol[TicketT]):
    """A model that computes while the thread that launched a plan goes on, such as one on a device."""

    def launch(self, plan: Plan) -> TicketT:
        """Begin a plan, which has grants, after those launched before.

        A grant may lack its last token (``Grant.has_unknown_token``) where the plan launched
        before is not collected; the model then takes what that one samples for the request,
        and any id if that fails. At most ``MAX_STEPS_IN_FLIGHT`` are launched and not collected.

        Raises:
            Exception: as ``run``; it then counts as not launched.
        """
        ...

    def collect(self, ticket: TicketT) -> StepResult:
        """Wait for the oldest plan that was launched; what ``run`` returns or raises."""
        ...


class Runner(Protocol):
    """What the loop awaits."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        ...

    @property
    def pool(self) -> PoolShape:
        """Size of the KV pool."""
        ...

    async def execute(self, plan: Plan) -> StepResult:
        """Compute every grant of ``plan`` off the event loop.

        Raises:
            RunnerLost: what computes is gone, and all KV with it; see there.
            Exception: the whole step failed; the loop has everything computed again, and finds the guilty.

        Cancellation: returns only after the computation in flight has ended.
        """
        ...

    async def close(self) -> None:
        """Release threads and memory; no ``execute`` afterwards."""
        ...


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """A runner that takes the next plan while it computes one; any other gets one plan at a time."""

    def submit(self, plan: Plan) -> "asyncio.Future[StepResult]":
        """Hand in a plan; at most ``MAX_STEPS_IN_FLIGHT`` may be unanswered.

        Plans are computed, and answered, in the order in which they are handed in. A
        token that a grant does not know (``Grant.has_unknown_token``) is what the plan
        handed in before sampled for that request. If that one failed, it is any id:
        the request has failed too, and nobody looks at what comes of it.

        Returns:
            The result, later; or what ``execute`` raises. A loss of the runner is the
            outcome of every plan it leaves unanswered, and ``step_begun`` is set for
            the one that was being computed.

        Cancellation of the future: as for ``execute``; it is done only then.
        """
        ...


@runtime_checkable
class ConstrainingRunner(Runner, Protocol):
    """A runner that can hold outputs to a grammar; any other fails a request that has one."""

    def watch_masks(self, ready: Callable[[Sequence[tuple[RequestId, int]]], None]) -> None:
        """Have ``ready`` told, on the event loop, of requests that a result said await a mask.

        With each comes the place in its output of the token that may be sampled now.
        """
        ...

    async def prepare(self, grammar: GrammarSpec, level: int = 0) -> None:
        """Have a grammar compiled beside the steps, which do not wait for it.

        It is kept for a while; a request whose grammar is not there (any more) sits steps out.

        Raises:
            GrammarRefused: it can't be compiled.
            Unimplemented: the model offers none, or none of this kind.
            QueueFull: too many are being compiled.
            InternalError: what compiles died of it.

        Cancellation: at once; it is not compiled if nobody else wants it.
        """
        ...


#: Plans that a pipelined runner may have unanswered: the one it computes and the next.
MAX_STEPS_IN_FLIGHT = 2


class RunnerDead(Exception):
    """What computes is gone for good; the message says why it could not be brought back."""


class RunnerLost(Exception):
    """What computes is gone, and all KV with it; a new one is on its way.

    Steps in flight count as never made. Nothing may be computed before
    ``recovery`` is done.

    Args:
        cause: in words, such as ``killed by SIGKILL``.
        from_outside: somebody killed or stopped it, as far as one can tell; what it
            computed is hardly to blame.
        recovery: done when a new one can compute; holds ``RunnerDead`` when none ever will.

    Attributes:
        step_begun: whether it had been given the step that it never answered.
    """

    def __init__(self, cause: str, *, from_outside: bool, recovery: "asyncio.Future[None]") -> None:
        super().__init__(f"the runner was lost: {cause}")
        self.cause = cause
        self.from_outside = from_outside
        self.recovery = recovery
        self.step_begun = False


@runtime_checkable
class MortalRunner(Runner, Protocol):
    """A runner whose computing part may die between two steps, too."""

    @property
    def pid(self) -> int | None:
        """The process that computes; None while there is none."""
        ...

    def take_loss(self) -> RunnerLost | None:
        """A loss that ``execute`` has not raised; it is given out once."""
        ...

    def watch(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, on the event loop, whenever there is a loss to take."""
        ...


class ModelBroken(Exception):
    """What computes can't go on, and its process must end: a rank is gone, or the device failed.

    Raised by a ``StepModel``. A process that computes ends on it, which its runner sees as its death.

    Args:
        cause: in words.
        from_outside: somebody killed or stopped a rank, as far as one can tell; see ``RunnerLost``.
    """

    def __init__(self, cause: str, *, from_outside: bool = False) -> None:
        super().__init__(cause)
        self.from_outside = from_outside
