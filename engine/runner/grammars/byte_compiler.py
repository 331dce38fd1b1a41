"""Choices over bytes, for the scripted model: a grammar small enough to be followed by hand."""

import numpy as np

from engine.errors import Unimplemented
from engine.grammar import GrammarKind, GrammarSpec
from engine.runner.grammars.compiled import Mask

_NUM_BYTES = 256


class ByteCompiler:
    """A ``GrammarCompiler`` for ids that are bytes; it knows choices alone."""

    def compile(self, spec: GrammarSpec) -> "ByteChoice":
        """See ``GrammarCompiler``.

        Raises:
            Unimplemented: it is no choice.
        """
        if spec.kind is not GrammarKind.CHOICE:
            raise Unimplemented(spec.field)
        return ByteChoice(tuple(choice.encode() for choice in spec.choices))


class ByteChoice:
    """A ``Grammar``: one of several byte strings."""

    def __init__(self, choices: tuple[bytes, ...]) -> None:
        self._choices = choices

    def matcher(self) -> "ByteMatcher":
        """See ``Grammar``."""
        return ByteMatcher(self._choices)


class ByteMatcher:
    """A ``Matcher``: what was said, and the choices that begin with it."""

    def __init__(self, choices: tuple[bytes, ...]) -> None:
        self._choices = choices
        self._said = b""

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        if token_id >= _NUM_BYTES:
            return False
        longer = self._said + bytes([token_id])
        if not any(choice.startswith(longer) for choice in self._choices):
            return False
        self._said = longer
        return True

    def fill(self, mask: Mask) -> None:
        """See ``Matcher``."""
        mask.fill(0)
        bits, at = mask.view(np.uint32), len(self._said)
        for choice in self._choices:
            if len(choice) > at and choice.startswith(self._said):
                bits[choice[at] >> 5] |= np.uint32(1 << (choice[at] & 31))

    @property
    def may_end(self) -> bool:
        """See ``Matcher``."""
        return self._said in self._choices

    def reset(self) -> None:
        """See ``Matcher``."""
        self._said = b""


def allowed_byte(mask: Mask, wanted: int) -> int:
    """The first id from ``wanted`` on that is in ``mask``, going round after the last one."""
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
    later = allowed[allowed >= wanted]
    return int(later[0] if later.size else allowed[0])
