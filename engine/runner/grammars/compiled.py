"""What a compiled grammar can do, whatever compiles it."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.grammar import GrammarSpec

#: One bit for each id of the vocabulary, 32 in a word.
Mask = NDArray[np.int32]


class Matcher(Protocol):
    """Where an output stands in its grammar. A function of the tokens accepted since ``reset``."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token that is no end; whether the grammar allows it. If not, nothing changes."""
        ...

    def fill(self, mask: Mask) -> None:
        """Say what may come next.

        Args:
            mask: ``[ceil(vocab / 32)]`` int32, overwritten: bit ``i % 32`` of word ``i // 32`` tells
                whether token ``i`` may come as text. Ids that end an output are left out.
        """
        ...

    @property
    def may_end(self) -> bool:
        """Whether what was accepted is a whole text of the grammar."""
        ...

    def reset(self) -> None:
        """Back to the beginning."""
        ...


class Grammar(Protocol):
    """A compiled grammar. Immutable; matchers of it share nothing that changes."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for one vocabulary. Thread-safe."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile a grammar; may be slow.

        Raises:
            GrammarRefused: it can't be compiled; the message says why.
            Unimplemented: grammars of this kind are not offered here.
        """
        ...


def num_mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)
