"""Compiled grammars, where the model computes: made on threads of their own, kept by what was asked for.

No step waits for a grammar that was prepared. One that is needed and is not there any more (many others
were compiled meanwhile, or the process is another one) is compiled while the step waits.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from engine.errors import QueueFull
from engine.grammar import GrammarSpec
from engine.runner.base import ModelInfo
from engine.runner.grammars.compiled import Grammar, GrammarCompiler

#: Compiled grammars that are kept; those used last stay.
MAX_CACHED = 128
#: Grammars that are compiled at one time.
NUM_THREADS = 2
#: Grammars that are being compiled or wait for it.
MAX_COMPILING = 128


class Grammars:
    """Compiles and keeps grammars. Thread-safe.

    Args:
        make_compiler: called once, on a thread, when the first grammar comes; may be slow.
        max_cached: compiled grammars that are kept.
        max_compiling: grammars that may be compiled, or wait for it, at one time.
    """

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        *,
        max_cached: int = MAX_CACHED,
        max_compiling: int = MAX_COMPILING,
    ) -> None:
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._max_cached = max_cached
        self._max_compiling = max_compiling
        self._known: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._compiling: dict[GrammarSpec, Future[Grammar]] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def num_cached(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._known)

    def prepare(self, spec: GrammarSpec) -> "Future[Grammar]":
        """Have a grammar compiled, unless it is; several who ask for the same share one compilation.

        Returns:
            The grammar, later, or what ``GrammarCompiler.compile`` raises.

        Raises:
            QueueFull: as many are compiled as may.
        """
        with self._lock:
            if (known := self._find(spec)) is not None:
                done: Future[Grammar] = Future()
                done.set_result(known)
                return done
            if (running := self._compiling.get(spec)) is not None:
                return running
            if len(self._compiling) >= self._max_compiling:
                raise QueueFull("queue of grammars to be compiled", "grammars", self._max_compiling)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="vorrang-grammar")
            future = self._compiling[spec] = self._threads.submit(self._compile, spec)
        future.add_done_callback(lambda done: self._compiled(spec, done))
        return future

    def grammar(self, spec: GrammarSpec) -> Grammar:
        """A grammar that is needed now; compiled on the spot when nobody has prepared it.

        Raises:
            GrammarRefused: it can't be compiled.
        """
        with self._lock:
            known = self._find(spec)
            running = self._compiling.get(spec)
        if known is not None:
            return known
        return self._compile(spec) if running is None else running.result()

    def close(self) -> None:
        """Let its threads end, each with what it compiles; others begin when another grammar comes."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, spec: GrammarSpec) -> Grammar | None:
        known = self._known.get(spec)
        if known is not None:
            self._known.move_to_end(spec)
        return known

    def _compile(self, spec: GrammarSpec) -> Grammar:
        with self._compiler_lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
        grammar = self._compiler.compile(spec)
        with self._lock:
            self._known[spec] = grammar
            self._known.move_to_end(spec)
            while len(self._known) > self._max_cached:
                self._known.popitem(last=False)
        return grammar

    def _compiled(self, spec: GrammarSpec, future: "Future[Grammar]") -> None:
        with self._lock:
            if self._compiling.get(spec) is future:
                del self._compiling[spec]


def grammars_of(info: ModelInfo, folder: Path) -> Grammars:
    """Grammars over the vocabulary of a model; its tokenizer is read when the first of them comes."""

    def make_compiler() -> GrammarCompiler:
        from engine.runner.grammars.xgrammar_compiler import XGrammarCompiler

        return XGrammarCompiler(folder, info.vocab_size, info.eos_token_ids)

    return Grammars(make_compiler)
