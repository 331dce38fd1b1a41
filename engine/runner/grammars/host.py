"""Where grammars are compiled and followed: the border, and the plain way, on threads of this process.

Each grammar has a place of its own, by number: it is compiled there, and the outputs under it are
followed there, one after the other. ``engine.runner.grammars.forking`` has processes for that, which
can be killed.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.grammar import GrammarSpec
from engine.runner.grammars.compiled import GrammarCompiler
from engine.runner.grammars.following import Answer, Fill, Outputs


@dataclass(frozen=True, slots=True)
class Ended:
    """A place is gone, and what was there.

    Attributes:
        cause: in words, for the log.
        rule: what the grammar, or the output it was busy with, must do and did not; empty = nobody in
            there is to blame.
    """

    cause: str
    rule: str = ""


class Told(Protocol):
    """Who is told of what comes of it, on a thread of the host; must be quick and must not raise."""

    def loaded(self, error: BaseException | None) -> None:
        """What compiles is there from now on, or can't be had."""
        ...

    def compiled(self, number: int, error: BaseException | None) -> None:
        """A grammar is compiled, or refused: then its place is gone."""
        ...

    def filled(self, number: int, answer: Answer) -> None:
        """What may come next in an output."""
        ...

    def ended(self, number: int, ended: Ended) -> None:
        """A place is gone by itself."""
        ...

    def tick(self) -> None:
        """Some time has passed; called now and then while anything is compiled or asked for."""
        ...


class GrammarHost(Protocol):
    """Places for grammars. No method waits for anything; all may be called by any thread."""

    def start(self, told: Told) -> None:
        """Load what compiles; ``told.loaded`` follows. Called once, before anything else."""
        ...

    def compile(self, number: int, spec: GrammarSpec) -> None:
        """Begin to compile a grammar in a new place."""
        ...

    def demote(self, number: int) -> None:
        """Let what is compiled there give way to everything else on the machine, and pause it."""
        ...

    def pause(self, number: int) -> None:
        """Compute nothing there for now."""
        ...

    def go_on(self, number: int) -> None:
        """Let a paused one go on."""
        ...

    def fill(self, number: int, fill: Fill) -> None:
        """Ask what may come next in an output under a compiled grammar."""
        ...

    def drop(self, number: int, key: int) -> None:
        """An output is asked for no more."""
        ...

    def give_way(self, number: int) -> bool:
        """Let a place give way to everything else on the machine if it is busy for long.

        Returns:
            Whether it does from now on.
        """
        ...

    def end(self, number: int) -> None:
        """Give a place up, whatever it does; nothing is told of it any more."""
        ...

    def close(self) -> None:
        """Give up everything. May be called twice."""
        ...


class ThreadHost:
    """A ``GrammarHost`` with a thread for each place. It can stop none of them, so it is for what is quick.

    Args:
        make_compiler: called once.
        vocab_size: ids that logits are computed for.
    """

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], vocab_size: int) -> None:
        self._make_compiler = make_compiler
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self._places: dict[int, queue.SimpleQueue[Fill | int | None]] = {}

    def start(self, told: Told) -> None:
        """See ``GrammarHost``."""
        self._told = told
        self._compiler = self._make_compiler()
        told.loaded(None)

    def compile(self, number: int, spec: GrammarSpec) -> None:
        """See ``GrammarHost``."""
        place = self._places[number] = queue.SimpleQueue()
        arguments = (number, spec, place)
        threading.Thread(target=self._serve, args=arguments, name=f"grammar-{number}", daemon=True).start()

    def demote(self, number: int) -> None:
        """See ``GrammarHost``; nothing can be done."""

    def pause(self, number: int) -> None:
        """See ``GrammarHost``; nothing can be done."""

    def go_on(self, number: int) -> None:
        """See ``GrammarHost``; nothing can be done."""

    def fill(self, number: int, fill: Fill) -> None:
        """See ``GrammarHost``."""
        self._places[number].put(fill)

    def drop(self, number: int, key: int) -> None:
        """See ``GrammarHost``."""
        self._places[number].put(key)

    def give_way(self, number: int) -> bool:
        """See ``GrammarHost``; nothing can be done."""
        return False

    def end(self, number: int) -> None:
        """See ``GrammarHost``; the thread ends when it is done with what it does."""
        self._places.pop(number).put(None)

    def close(self) -> None:
        """See ``GrammarHost``."""
        for number in list(self._places):
            self.end(number)

    def _serve(self, number: int, spec: GrammarSpec, place: "queue.SimpleQueue[Fill | int | None]") -> None:
        assert self._compiler is not None
        told = self._told
        try:
            outputs = Outputs(self._compiler.compile(spec), self._vocab_size)
        except BaseException as error:
            if self._places.pop(number, None) is not None:
                told.compiled(number, error)
            return
        told.compiled(number, None)
        while (asked := place.get()) is not None:
            if isinstance(asked, Fill):
                answer = outputs.answer(asked)
                if number in self._places:
                    told.filled(number, answer)
            else:
                outputs.drop(asked)
