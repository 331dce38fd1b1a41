"""What may come next in every output under a grammar, made beside the steps.

``Masks`` is asked as soon as a token is sampled, and has the answer, as a rule, before the next
one is: the step that computes it gives the time. Whatever is not there by then costs its own
output a step, and nobody else more than a bounded wait. Where an output stands in its grammar is a
function of its tokens, which come with every question; so preemption, batching, and the death of
whoever answers change no token.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from engine.errors import InternalError, QueueFull, VorrangError
from engine.grammar import GrammarRefused, GrammarSpec
from engine.request import RequestId
from engine.runner.grammars.compile_queue import CompileQueue
from engine.runner.grammars.following import Answer, Fill
from engine.runner.grammars.host import Ended, GrammarHost
from engine.runner.grammars.limits import GrammarLimits

#: Seconds in the quick lane of those that compile; seconds of a turn in the slow one.
QUICK_S, TURN_S = 0.25, 1.0
#: An output one of whose last masks took longer is not waited for.
SLOW_S = 0.004
#: Masks after a late one for which the output is not waited for.
LATE_TURNS = 16
#: Times that whoever answers may be killed from outside before one of its outputs is blamed for it.
MAX_DEATHS = 3

#: Is told of outputs whose next token may be sampled now, and of its place in the output.
Ready = Callable[[Sequence[tuple[RequestId, int]]], None]

log = structlog.get_logger("vorrang.runner")


@dataclass(slots=True, eq=False)
class Output:
    """One output under a grammar.

    Attributes:
        request_id: whose.
        key: its name at the host.
        grammar: of the output.
        tokens: those it had when it was last asked for.
        turn: how often that was.
        num_sent: how many of them the host knows; None = it knows nothing of this output.
        is_replay: whether it was told of tokens that it had been told of before.
        answer: what may come next; None = not known yet.
        error: why nothing ever will.
        spent_s: seconds of a processor so far.
        recent_s: those of the dearest of the last masks.
        late_turns: masks for which it is not waited for, since one was late.
        is_awaited: whether ``Ready`` is to be told.
    """

    request_id: RequestId
    key: int
    grammar: "_Grammar"
    tokens: list[int] = field(default_factory=list)
    turn: int = 0
    num_sent: int | None = None
    is_replay: bool = False
    answer: Answer | None = None
    error: VorrangError | None = None
    spent_s: float = 0.0
    recent_s: float = 0.0
    late_turns: int = 0
    is_awaited: bool = False

    @property
    def is_known(self) -> bool:
        """Whether there is an answer, or never will be."""
        return self.answer is not None or self.error is not None

    @property
    def is_slow(self) -> bool:
        """Whether nobody waits for its masks."""
        return self.recent_s > SLOW_S or self.late_turns > 0


@dataclass(slots=True, eq=False)
class _Grammar:
    spec: GrammarSpec
    number: int = 0  # of its place; 0 = it has none
    is_compiled: bool = False
    level: int = 0
    began: float = 0.0  # its compilation, or its turn in the slow lane
    waiters: list[Future[None]] = field(default_factory=list)
    outputs: dict[int, Output] = field(default_factory=dict)
    asked: "OrderedDict[int, int]" = field(default_factory=OrderedDict)  # key: turn, in the host's order
    num_deaths: int = 0
    gives_way: bool = False


class Masks:
    """Compiles grammars and follows outputs. Thread-safe; no method but ``wait`` waits for anything.

    Args:
        host: where that is done.
        limits: what a grammar may cost.
        clock: seconds.
    """

    def __init__(
        self,
        host: GrammarHost,
        limits: GrammarLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_compiling: int = 128,
    ) -> None:
        self._host = host
        self._limits = limits or GrammarLimits()
        self._clock = clock
        self._lock = threading.RLock()
        self._known = threading.Condition(self._lock)
        self._queue = CompileQueue(max_waiting=max_compiling)
        self._grammars: OrderedDict[GrammarSpec, _Grammar] = OrderedDict()
        self._places: dict[int, _Grammar] = {}
        self._outputs: dict[RequestId, Output] = {}
        self._num_numbers = 0
        self._num_keys = 0
        self._is_started = self._is_loaded = False
        self._load_error: BaseException | None = None
        self._ready: Ready = lambda _: None

    @property
    def num_compiled(self) -> int:
        """Grammars that are compiled."""
        with self._lock:
            return sum(grammar.is_compiled for grammar in self._grammars.values())

    @property
    def num_outputs(self) -> int:
        """Outputs that are followed."""
        return len(self._outputs)

    def watch(self, ready: Ready) -> None:
        """Have ``ready`` told, on any thread, of outputs that were awaited."""
        self._ready = ready

    def start(self) -> None:
        """Load what compiles, beside whatever else goes on; else the first grammar does. Harmless again."""
        with self._lock:
            is_first, self._is_started = not self._is_started, True
        if is_first:
            self._host.start(self)

    def close(self) -> None:
        """Give up everything. May be called twice; whatever is asked afterwards begins anew."""
        if self._is_started:
            self._host.close()
        with self._lock:
            waiters = [waiter for grammar in self._grammars.values() for waiter in grammar.waiters]
            self._queue = CompileQueue(max_waiting=self._queue.max_waiting)
            self._grammars.clear()
            self._places.clear()
            self._outputs.clear()
            self._is_started = self._is_loaded = False
        for waiter in waiters:
            waiter.cancel()

    # Compiling.

    def prepare(self, spec: GrammarSpec, level: int = 0) -> "Future[None]":
        """Have a grammar compiled, unless it is; several who ask for the same share one compilation.

        Returns:
            Done when it is; holds what refuses it. Cancelled by whoever does not want it any more; when
            nobody does, it is not compiled.

        Raises:
            QueueFull: as many wait to be compiled as may.
        """
        self.start()
        done: Future[None] = Future()
        with self._lock:
            if self._load_error is not None:
                done.set_exception(self._load_error)
                return done
            grammar = self._grammars.get(spec)
            if grammar is not None and grammar.is_compiled:
                self._grammars.move_to_end(spec)
                done.set_result(None)
                return done
            if grammar is None or not grammar.number:
                if not self._queue.has_room(spec.owner):
                    name = "queue of grammars to be compiled"
                    raise QueueFull(name, "grammars", self._queue.max_waiting)
                grammar = self._push(spec, level)
            else:
                self._queue.hurry(grammar.number, level)
            grammar.waiters.append(done)
            self._pump()
        done.add_done_callback(lambda _: self._given_up(spec, done))
        return done

    def _push(self, spec: GrammarSpec, level: int) -> _Grammar:
        grammar = self._grammars.get(spec)
        if grammar is None:
            grammar = self._grammars[spec] = _Grammar(spec)
        self._num_numbers += 1
        grammar.number, grammar.level, grammar.is_compiled = self._num_numbers, level, False
        grammar.began = 0.0
        self._places[grammar.number] = grammar
        self._queue.push(grammar.number, spec.owner, level)
        return grammar

    def _given_up(self, spec: GrammarSpec, waiter: "Future[None]") -> None:
        """Stop what nobody waits for any more."""
        if not waiter.cancelled():
            return
        with self._lock:
            grammar = self._grammars.get(spec)
            if grammar is None or waiter not in grammar.waiters:
                return
            grammar.waiters.remove(waiter)
            if not grammar.waiters and not grammar.outputs and grammar.number in self._queue:
                self._forget(grammar)
                self._pump()

    def _pump(self) -> None:
        """Begin, or go on with, whatever may be compiled now."""
        if not self._is_loaded:
            return
        while (number := self._queue.begin()) is not None:
            grammar = self._places[number]
            grammar.began = self._clock()
            self._host.compile(number, grammar.spec)
        while (number := self._queue.go_on()) is not None:
            self._places[number].began = self._clock()
            self._host.go_on(number)

    def _forget(self, grammar: _Grammar) -> None:
        """A grammar is known no more; what it had is given back."""
        if grammar.number:
            has_place = bool(grammar.began)
            self._queue.remove(grammar.number)
            del self._places[grammar.number]
            if has_place:
                self._host.end(grammar.number)
        if self._grammars.get(grammar.spec) is grammar:
            del self._grammars[grammar.spec]

    def _let_go(self) -> None:
        """Keep no more grammars than may be that no output follows; of the tenant with the most goes one."""
        while True:
            idle = [g for g in self._grammars.values() if g.is_compiled and not g.outputs and not g.waiters]
            if len(idle) <= self._limits.num_idle_max:
                return
            owners = [grammar.spec.owner for grammar in idle]
            self._forget(max(idle, key=lambda grammar: owners.count(grammar.spec.owner)))

    def _refuse(self, grammar: _Grammar, error: BaseException) -> None:
        """Nobody gets a grammar who wants it now."""
        waiters, grammar.waiters = grammar.waiters, []
        known = error if isinstance(error, VorrangError) else InternalError("grammar")
        for output in grammar.outputs.values():
            output.error = known
            self._tell(output)
        self._known.notify_all()
        if self._grammars.get(grammar.spec) is grammar:
            del self._grammars[grammar.spec]
        if not waiters:
            return
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(error)

    # Following.

    def follow(self, request_id: RequestId, spec: GrammarSpec, tokens: list[int]) -> Output:
        """Ask what may come after the tokens of an output, unless that is asked or known already."""
        self.start()
        with self._lock:
            output = self._outputs.get(request_id)
            if output is None:
                grammar = self._grammars.get(spec)
                if grammar is None:
                    grammar = self._push(spec, -100)
                    self._pump()
                self._num_keys += 1
                output = self._outputs[request_id] = Output(request_id, self._num_keys, grammar)
                grammar.outputs[output.key] = output
                self._grammars.move_to_end(spec)
                if self._load_error is not None:
                    output.error = InternalError("grammars")
            elif output.turn and output.tokens == tokens:
                return output
            if not output.grammar.number and output.error is None:  # whoever followed it is gone
                self._push(spec, -100)
                self._pump()
            output.is_replay = output.num_sent is None or output.tokens != tokens[: len(output.tokens)]
            if output.is_replay:
                output.num_sent = None
            output.tokens = tokens
            output.turn += 1
            output.answer = None
            output.is_awaited = False
            if output.grammar.is_compiled and output.error is None:
                self._send(output)
            return output

    def _send(self, output: Output) -> None:
        grammar, num_kept = output.grammar, output.num_sent or 0
        left_s = self._limits.mask_s_max if output.is_replay else self._limits.mask_s_max - output.spent_s
        fill = Fill(output.key, output.turn, num_kept, output.tokens[num_kept:], max(0.001, left_s))
        output.num_sent = len(output.tokens)
        grammar.asked[output.key] = output.turn
        grammar.asked.move_to_end(output.key)
        self._host.fill(grammar.number, fill)

    def wait(self, outputs: Sequence[Output], wait_s: float) -> None:
        """Wait until those that are not slow are known, for at most so long; those that are not were late."""
        deadline = self._clock() + wait_s
        with self._known:
            while any(not output.is_known and not output.is_slow for output in outputs):
                left_s = deadline - self._clock()
                if left_s <= 0 or not self._known.wait(left_s):
                    break
            for output in outputs:
                if not output.is_known and not output.is_slow:
                    output.late_turns = LATE_TURNS

    def awaits(self, output: Output) -> bool:
        """Whether an output is still asked for; ``Ready`` is told when it is not."""
        with self._lock:
            output.is_awaited = not output.is_known
            return output.is_awaited

    def forget(self, request_id: RequestId) -> None:
        """An output has ended, or is not asked for for the time being."""
        with self._lock:
            output = self._outputs.pop(request_id, None)
            if output is None:
                return
            grammar = output.grammar
            del grammar.outputs[output.key]
            grammar.asked.pop(output.key, None)
            if grammar.is_compiled and output.num_sent is not None:
                self._host.drop(grammar.number, output.key)
            if not grammar.outputs and not grammar.waiters and (grammar.gives_way or not grammar.is_compiled):
                self._forget(grammar)  # the next one under it begins on equal terms
            self._let_go()

    def _tell(self, output: Output) -> None:
        if output.is_awaited:
            output.is_awaited = False
            self._ready([(output.request_id, len(output.tokens))])

    # What the host tells.

    def loaded(self, error: BaseException | None) -> None:
        """See ``Told``."""
        with self._lock:
            self._is_loaded, self._load_error = error is None, error
            if error is None:
                for number in (*self._queue.quick, *self._queue.slow):  # what loads again is not theirs
                    self._places[number].began = self._clock()
                self._pump()
                return
            for grammar in list(self._grammars.values()):
                self._refuse(grammar, error)

    def compiled(self, number: int, error: BaseException | None) -> None:
        """See ``Told``."""
        with self._lock:
            grammar = self._places.get(number)
            if grammar is None:
                return
            may_be_paused = number not in self._queue.quick
            self._queue.remove(number)
            if error is not None:
                del self._places[number]
                grammar.number = 0
                self._refuse(grammar, error)
            else:
                if may_be_paused:  # while it said this
                    self._host.go_on(number)
                grammar.is_compiled, grammar.gives_way = True, False
                waiters, grammar.waiters = grammar.waiters, []
                for output in grammar.outputs.values():
                    if output.turn and not output.is_known:
                        output.num_sent = None
                        self._send(output)
                for waiter in waiters:
                    if waiter.set_running_or_notify_cancel():
                        waiter.set_result(None)
                self._let_go()
            self._pump()

    def filled(self, number: int, answer: Answer) -> None:
        """See ``Told``."""
        with self._known:
            grammar = self._places.get(number)
            output = None if grammar is None else grammar.outputs.get(answer.key)
            if grammar is None or output is None or output.turn != answer.turn:
                if grammar is not None and grammar.asked.get(answer.key) == answer.turn:
                    del grammar.asked[answer.key]
                return
            grammar.asked.pop(answer.key, None)
            grammar.num_deaths = 0
            spec, limits = grammar.spec, self._limits
            output.late_turns = max(0, output.late_turns - 1)
            if not output.is_replay:
                output.spent_s += answer.spent_s
                output.recent_s = max(answer.spent_s, 0.9 * output.recent_s)
            if answer.refused_at is not None:
                rule = "must allow what was said under it, and does not at this token of the output"
                output.error = GrammarRefused(spec, rule, answer.refused_at)
            elif answer.failure:
                rule = f"must be followed within {limits.bytes_max >> 20} MiB ({answer.failure})"
                output.error = GrammarRefused(spec, rule, len(output.tokens))
            elif output.spent_s > limits.mask_s_max:
                output.error = _too_dear(spec, limits, output)
            else:
                output.answer = answer
            self._tell(output)
            self._known.notify_all()

    def ended(self, number: int, ended: Ended) -> None:
        """See ``Told``."""
        with self._known:
            grammar = self._places.pop(number, None)
            if grammar is None:
                return
            self._queue.remove(number)
            was_compiled, grammar.is_compiled, grammar.number = grammar.is_compiled, False, 0
            log.warning("grammar.ended", cause=ended.cause, grammar=grammar.spec.field, compiled=was_compiled)
            rule = ended.rule
            if not rule:
                grammar.num_deaths += 1
                if grammar.num_deaths >= MAX_DEATHS:
                    rule = "must not be what again and again was killed with it"
            if rule and not was_compiled:
                self._refuse(grammar, GrammarRefused(grammar.spec, rule, grammar.spec.text))
            elif rule and grammar.asked:
                guilty = grammar.outputs[next(iter(grammar.asked))]
                guilty.error = GrammarRefused(grammar.spec, rule, len(guilty.tokens))
                self._tell(guilty)
            grammar.asked.clear()
            for output in grammar.outputs.values():
                output.num_sent = None
                output.is_replay = True
            if grammar.waiters or any(not output.is_known for output in grammar.outputs.values()):
                self._push(grammar.spec, -100 if grammar.outputs else grammar.level)
            elif not grammar.outputs and self._grammars.get(grammar.spec) is grammar:
                del self._grammars[grammar.spec]
            self._pump()
            self._known.notify_all()

    def tick(self) -> None:
        """See ``Told``."""
        with self._lock:
            now = self._clock()
            for number in list(self._queue.quick):
                grammar = self._places[number]
                if now - grammar.began > QUICK_S:
                    if self._queue.demote(number):
                        self._host.demote(number)
                    else:
                        self._give_up(grammar)
            for number in list(self._queue.slow):
                if now - self._places[number].began > TURN_S and self._queue.rotate(number):
                    self._host.pause(number)
            self._pump()
            for grammar in self._places.values():
                if grammar.asked and not grammar.gives_way:
                    grammar.gives_way = self._host.give_way(grammar.number)

    def _give_up(self, grammar: _Grammar) -> None:
        """As many are paused as may be: to be tried again later."""
        self._host.end(grammar.number)
        self._queue.remove(grammar.number)
        del self._places[grammar.number]
        grammar.number = 0
        self._refuse(grammar, QueueFull("queue of grammars that take long to compile", "grammars", 8))


def _too_dear(spec: GrammarSpec, limits: GrammarLimits, output: Output) -> GrammarRefused:
    rule = f"must not take more than {limits.mask_s_max:g} s of a processor for the masks of one output"
    return GrammarRefused(spec, rule, f"{output.spent_s:.1f} after {len(output.tokens)} tokens")
