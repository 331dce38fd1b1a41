"""Masks over the vocabulary of a model, by a library that has a process of its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.runner.base import ModelInfo
from engine.runner.grammars.compiled import GrammarCompiler
from engine.runner.grammars.forking import ForkingHost
from engine.runner.grammars.limits import GrammarLimits
from engine.runner.grammars.masks import Masks


@dataclass(frozen=True, slots=True)
class CompilerSource:
    """Makes the compiler of a model's grammars, in a process that has nothing else to do. Picklable.

    Attributes:
        folder: of the model, with its ``tokenizer.json``.
        vocab_size: ids that logits are computed for.
        end_token_ids: the model's.
    """

    folder: Path
    vocab_size: int
    end_token_ids: Iterable[int]

    def __call__(self) -> GrammarCompiler:
        """The compiler.

        Raises:
            Unimplemented: the library is not installed.
        """
        from engine.runner.grammars.xgrammar_compiler import XGrammarCompiler

        return XGrammarCompiler(self.folder, self.vocab_size, self.end_token_ids, alone=True)


def masks_of(info: ModelInfo, folder: Path, limits: GrammarLimits | None = None) -> Masks:
    """Masks of a model's outputs; the library is loaded by ``Masks.start``, or by the first grammar."""
    limits = limits or GrammarLimits()
    source = CompilerSource(folder, info.vocab_size, info.eos_token_ids)
    return Masks(ForkingHost(source, info.vocab_size, limits), limits)
