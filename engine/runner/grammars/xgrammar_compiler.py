"""Grammars through xgrammar (Dong et al., "XGrammar", 2024), for the tokenizer in a model's folder.

Loaded in a process of its own, in which there is neither torch nor transformers (``library``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.grammar import GrammarKind, GrammarRefused, GrammarSpec, shown
from engine.runner.grammars import library
from engine.runner.grammars.compiled import Grammar, Mask, num_mask_words
from engine.runner.grammars.json_schema import check_schema
from engine.runner.grammars.utf8 import BETWEEN, STATES, State, after, allowed_from


class XGrammarCompiler:
    """A ``GrammarCompiler``.

    JSON is compact: one space after a colon and a comma, none elsewhere, properties in the order of the
    schema, and none that it does not name unless ``additionalProperties`` says so. Special tokens have no
    text, so none of them is ever part of one.

    Args:
        folder: of the model, with its ``tokenizer.json``.
        vocab_size: ids that logits are computed for.
        end_token_ids: the model's.
        alone: whether this process uses neither torch nor transformers; then the library goes without.

    Raises:
        Unimplemented: xgrammar is not installed.
    """

    def __init__(
        self, folder: Path, vocab_size: int, end_token_ids: Iterable[int], *, alone: bool = False
    ) -> None:
        xgrammar = library.load_alone() if alone else library.load()
        self._library: Any = xgrammar
        self._info = _tokenizer_info(xgrammar, folder, vocab_size, sorted(end_token_ids))
        texts: list[bytes] = self._info.decoded_vocab
        ends = {token_id for token_id in self._info.stop_token_ids if token_id < vocab_size}
        is_text = _mask_of([bool(text) and token_id not in ends for token_id, text in enumerate(texts)])
        self._vocabulary = _Vocabulary(
            texts, {state: is_text & _mask_of(allowed_from(state, texts)) for state in STATES}
        )
        # JSON on one line holds no control character; the library lets them into strings of bounded length.
        self._printable = _mask_of([min(text, default=0) >= ord(" ") for text in texts])

    def compile(self, spec: GrammarSpec) -> Grammar:
        """See ``GrammarCompiler``."""
        # One for each grammar: what is kept, and how many are compiled at once, is decided elsewhere.
        compiler = self._library.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        try:
            compiled = self._compile(compiler, spec)
        except GrammarRefused:
            raise
        except (RuntimeError, ValueError, TypeError) as error:  # the library's own, by its converters
            rule = f"must compile ({_reason(error)})"
            raise GrammarRefused(spec, rule, spec.text or spec.choices) from error
        only = self._printable if spec.kind is GrammarKind.JSON_SCHEMA else None
        return _Compiled(self._library, compiled, self._vocabulary, only)

    def _compile(self, compiler: Any, spec: GrammarSpec) -> Any:
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                check_schema(spec)
                return compiler.compile_json_schema(spec.text, any_whitespace=False)
            case GrammarKind.REGEX:
                return compiler.compile_regex(spec.text)
            case GrammarKind.EBNF:
                return compiler.compile_grammar(spec.text)
            case GrammarKind.CHOICE:
                answers = " | ".join(_literal(answer) for answer in dict.fromkeys(spec.choices))
                return compiler.compile_grammar(f"root ::= {answers}")


@dataclass(frozen=True, slots=True, eq=False)
class _Vocabulary:
    """Bytes of every id, and which may be text at all in each state of a character."""

    texts: Sequence[bytes]
    allowed: Mapping[State, Mask]


class _Compiled:
    """A ``Grammar``; ``only`` are ids outside of which none is allowed."""

    def __init__(self, library: Any, compiled: Any, vocabulary: _Vocabulary, only: Mask | None) -> None:
        self._library = library
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._only = only

    def matcher(self) -> "_Matcher":
        return _Matcher(self._library.GrammarMatcher(self._compiled), self._vocabulary, self._only)


class _Matcher:
    """A ``Matcher``. The library is never told of an end: who has ended is not asked again."""

    def __init__(self, matcher: Any, vocabulary: _Vocabulary, only: Mask | None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._only = only
        self._state: State = BETWEEN

    def accept(self, token_id: int) -> bool:
        vocabulary = self._vocabulary
        is_text = bool(vocabulary.allowed[self._state][token_id >> 5] >> (token_id & 31) & 1)
        if not is_text or not self._matcher.accept_token(token_id):
            return False
        state = after(self._state, vocabulary.texts[token_id])
        assert state is not None, "the mask of the state allowed it"
        self._state = state
        return True

    def fill(self, mask: Mask) -> None:
        mask.fill(-1)  # the library writes nothing where all may come
        self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))
        mask &= self._vocabulary.allowed[self._state]
        if self._only is not None:
            mask &= self._only

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def reset(self) -> None:
        self._matcher.reset()
        self._state = BETWEEN


def _tokenizer_info(library: Any, folder: Path, vocab_size: int, end_token_ids: list[int]) -> Any:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = end_token_ids or [vocab_size - 1]  # it wants one; that no end is sampled is seen to elsewhere
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    encoded = [""] * vocab_size  # what has no text is never part of one
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for token, token_id in vocabulary.items():
        if token_id < vocab_size and token_id not in special:
            encoded[token_id] = token
    found = library.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
    kind, has_prefix = found["vocab_type"], found["add_prefix_space"]
    told = library.TokenizerInfo._detect_vocab_type_from_vocab(vocabulary)
    if told is not None and told != kind:  # what the words look like is the better evidence
        kind = told
        space = "\u2581" if told == library.VocabType.BYTE_FALLBACK else "\u0120"
        words = tokenizer.encode("a", add_special_tokens=False).tokens
        has_prefix = bool(words) and words[0].startswith(space)
    return library.TokenizerInfo(
        encoded, kind, vocab_size=vocab_size, stop_token_ids=ends, add_prefix_space=has_prefix
    )


def _mask_of(flags: Sequence[bool]) -> Mask:
    bits = np.zeros(num_mask_words(len(flags)) * 32, dtype=np.bool_)
    bits[: len(flags)] = flags
    return np.packbits(bits, bitorder="little").view(np.int32)


def _literal(text: str) -> str:
    """A string of the EBNF: every character by its number, so that none can mean anything else."""
    return '"' + "".join(f"\\U{ord(character):08x}" for character in text) + '"'


def _reason(error: Exception) -> str:
    """The library's words without the place in its source."""
    text = shown(error)
    _, _, rest = text.partition(": ") if text.startswith("[") else ("", "", text)
    return rest or text
