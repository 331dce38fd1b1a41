"""Where outputs stand in one grammar, and what may come next: what is done beside the steps.

What is kept of an output is a function of its tokens. So one that is behind catches up, and one
that is ahead, since a step was computed in vain, begins anew.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.runner.grammars.compiled import Grammar, Matcher, num_mask_words


class Fill(NamedTuple):
    """An output whose next token is asked for.

    Attributes:
        key: of the output.
        turn: comes back with the answer.
        num_kept: tokens of it that are known already; 0 = begin anew.
        tokens: those that follow them.
        budget_s: seconds of a processor that it may take.
    """

    key: int
    turn: int
    num_kept: int
    tokens: Sequence[int]
    budget_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What may come next.

    Attributes:
        key: of the output.
        turn: as asked.
        text: the mask of ids that may come as text, as bytes (``compiled.Mask``); empty if refused.
        has_text: whether there is any.
        may_end: whether the output is a whole text of the grammar.
        refused_at: the first token of the output that the grammar does not allow; None = it allows all.
        spent_s: seconds of a processor that it took.
        failure: what the library raised instead of an answer, in words; empty = nothing.
    """

    key: int
    turn: int
    text: bytes
    has_text: bool
    may_end: bool
    refused_at: int | None
    spent_s: float
    failure: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may follow."""
        return self.may_end and not self.has_text


class Outputs:
    """Outputs under one grammar.

    Args:
        grammar: which.
        vocab_size: ids that logits are computed for.
    """

    def __init__(self, grammar: Grammar, vocab_size: int) -> None:
        self._grammar = grammar
        self._matchers: dict[int, tuple[Matcher, int]] = {}
        self._mask = np.zeros(num_mask_words(vocab_size), dtype=np.int32)

    def drop(self, key: int) -> None:
        """An output is asked for no more."""
        self._matchers.pop(key, None)

    def answer(self, fill: Fill) -> Answer:
        """What may come next in an output."""
        began = time.process_time()
        try:
            refused_at = self._follow(fill)
            if refused_at is not None:
                return Answer(fill.key, fill.turn, b"", False, False, refused_at, _since(began))
            matcher, _ = self._matchers[fill.key]
            matcher.fill(self._mask)
            may_end, has_text = matcher.may_end, bool(self._mask.any())
        except Exception as error:  # such as a lack of memory; the output can't go on
            self.drop(fill.key)
            words = type(error).__name__
            return Answer(fill.key, fill.turn, b"", False, False, None, _since(began), words)
        return Answer(fill.key, fill.turn, self._mask.tobytes(), has_text, may_end, None, _since(began))

    def _follow(self, fill: Fill) -> int | None:
        matcher, num_accepted = self._matchers.get(fill.key, (None, 0))
        if matcher is None:
            assert fill.num_kept == 0
            matcher = self._grammar.matcher()
        elif fill.num_kept == 0 and num_accepted:
            matcher.reset()
            num_accepted = 0
        assert num_accepted == fill.num_kept
        for place, token_id in enumerate(fill.tokens, start=num_accepted):
            if not matcher.accept(token_id):
                self.drop(fill.key)
                return place
        self._matchers[fill.key] = (matcher, num_accepted + len(fill.tokens))
        return None


def _since(began: float) -> float:
    return time.process_time() - began
