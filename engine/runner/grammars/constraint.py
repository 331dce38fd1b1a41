"""Where each request stands in its grammar, and which tokens that leaves.

What is kept is a function of the grammar and of the output's tokens. It is compared with them at every
use: a matcher that is behind (new, or its process is) catches up, and one that is ahead (a step was
computed in vain) begins anew. So preemption, batching and a runner's death change nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.grammar import GrammarRefused, GrammarSpec
from engine.runner.grammars.cache import Grammars
from engine.runner.grammars.compiled import Mask, num_mask_words
from engine.sampling import SamplingParams


class Constraint:
    """One output under its grammar.

    Args:
        params: of its request, with a grammar.
        ending: ids that end the output.
        grammars: compiles it, unless that has been done.
        vocab_size: ids that logits are computed for.

    Raises:
        GrammarRefused: the grammar can't be compiled.
    """

    def __init__(
        self, params: SamplingParams, ending: frozenset[int], grammars: Grammars, vocab_size: int
    ) -> None:
        assert params.grammar is not None
        self._spec: GrammarSpec = params.grammar
        self._matcher = grammars.grammar(self._spec).matcher()
        self._accepted: list[int] = []
        self._ending = [token_id for token_id in ending if token_id < vocab_size]
        self._text = np.zeros(num_mask_words(vocab_size), dtype=np.int32)
        self._is_filled = False

    def follow(self, output: Sequence[int]) -> None:
        """Stand behind the tokens of ``output``.

        Raises:
            GrammarRefused: the grammar does not allow one of them.
        """
        accepted = self._accepted
        num_known = len(accepted)
        if num_known > len(output) or accepted != list(output[:num_known]):
            self._matcher.reset()
            accepted.clear()
            num_known, self._is_filled = 0, False
        for token_id in output[num_known:]:
            if not self._matcher.accept(token_id):
                rule = "must allow what was said under it, and does not at this token of the output"
                raise GrammarRefused(self._spec, rule, len(accepted))
            accepted.append(token_id)
            self._is_filled = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may follow."""
        return self._matcher.may_end and not self._text_mask().any()

    def mask(self, banned: Sequence[int] | NDArray[np.int64], allowed: Sequence[int]) -> Mask:
        """What may be sampled next, ``[ceil(vocab / 32)]`` int32; ids that end the output only where it may.

        Args:
            banned: ids that may not be sampled whatever the grammar says.
            allowed: ids of which alone one may be; empty = any.

        Raises:
            GrammarRefused: nothing is left.
        """
        mask = self._text_mask().copy()
        bits = mask.view(np.uint32)
        if self._matcher.may_end:
            for token_id in self._ending:
                bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if len(banned) or len(allowed):
            left = np.unpackbits(mask.view(np.uint8), bitorder="little")
            left[np.asarray(banned, dtype=np.int64)] = 0
            has_any = left[np.asarray(allowed, dtype=np.int64)].any() if len(allowed) else left.any()
        else:
            has_any = mask.any()
        if not has_any:
            rule = "must leave a token that is not banned at this place of the output"
            raise GrammarRefused(self._spec, rule, len(self._accepted))
        return mask

    def _text_mask(self) -> Mask:
        if not self._is_filled:
            self._matcher.fill(self._text)
            self._is_filled = True
        return self._text
