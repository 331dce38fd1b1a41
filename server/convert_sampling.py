"""Sampling parameters and outputs, from the wire to the engine. What each means: docs/SAMPLING.md."""

import dataclasses
import secrets
from collections.abc import Iterable, Sequence

from engine.errors import InvalidRequest
from engine.grammar import MAX_CHOICES, GrammarKind, GrammarSpec
from engine.runner.base import ModelInfo
from engine.sampling import (
    MAX_BANNED_SEQUENCES,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_OUTPUTS,
    MAX_SEQUENCE_TOKENS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from engine.text_work.jobs import EncodePieces
from vorrang.v1 import types_pb2 as types

MAX_BAD_WORD_BYTES = 256
_PLAIN = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "include_stop_string",
    "ignore_eos", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs",
    "prompt_logprobs",
)  # fmt: skip
#: Most entries of what is repeated.
_LENGTHS = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "stop_strings": MAX_STOP_STRINGS,
    "logit_bias": MAX_LOGIT_BIASES,
    "allowed_token_ids": MAX_LISTED_TOKEN_IDS,
    "banned_token_ids": MAX_LISTED_TOKEN_IDS,
    "banned_sequences": MAX_BANNED_SEQUENCES,
    "bad_words": MAX_BANNED_SEQUENCES,
}


def sampling_of(params: types.SamplingParams, default_max_tokens: int) -> SamplingParams:
    """Sampling parameters; what is absent has its default, and a seed is chosen.

    Raises:
        InvalidRequest: a field breaks a rule.
    """
    for name, limit in _LENGTHS.items():  # before anything is made of them
        length = len(getattr(params, name))
        if length > limit:
            raise InvalidRequest(f"sampling.{name}", f"must hold at most {limit} entries", length)
    given = {name: getattr(params, name) for name in _PLAIN if params.HasField(name)}
    given.setdefault("max_tokens", max(default_max_tokens, given.get("min_tokens", 0)))
    if "seed" not in given:
        given["seed"] = secrets.randbits(64)
    return SamplingParams(
        **given,
        stop_token_ids=tuple(params.stop_token_ids),
        stop_strings=tuple(params.stop_strings),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in params.logit_bias),
        allowed_token_ids=tuple(params.allowed_token_ids),
        banned_token_ids=tuple(params.banned_token_ids),
        banned_sequences=tuple(tuple(sequence.ids) for sequence in params.banned_sequences),
    )


def check_sampling_ids(sampling: SamplingParams, info: ModelInfo) -> None:
    """Refuse ids outside the vocabulary, wherever they stand.

    Raises:
        InvalidRequest: names the first bad id.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        check_token_ids(getattr(sampling, name), info, field=f"sampling.{name}")
    for index, (token_id, _) in enumerate(sampling.logit_bias):
        if token_id >= info.vocab_size:
            field = f"sampling.logit_bias[{index}].token_id"
            raise InvalidRequest(field, f"must be less than {info.vocab_size}", token_id)
    for index, sequence in enumerate(sampling.banned_sequences):
        check_token_ids(sequence, info, field=f"sampling.banned_sequences[{index}].ids")


def check_allowed(sampling: SamplingParams, ending: frozenset[int]) -> None:
    """An allowed id must be left while the output may not end.

    Raises:
        InvalidRequest: none is.
    """
    if sampling.allowed_token_ids and sampling.min_tokens:
        banned = ending.union(sampling.stop_token_ids, sampling.always_banned())
        if banned.issuperset(sampling.allowed_token_ids):
            rule = "must be 0 when all that is allowed ends the output"
            raise InvalidRequest("sampling.min_tokens", rule, sampling.min_tokens)


def check_token_ids(token_ids: Sequence[int], info: ModelInfo, *, field: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequest: names the first bad id.
    """
    if max(token_ids, default=0) < info.vocab_size:  # nearly always, and much quicker
        return
    for index, token_id in enumerate(token_ids):
        if token_id >= info.vocab_size:
            raise InvalidRequest(f"{field}[{index}]", f"must be less than {info.vocab_size}", token_id)


def grammar_of(grammar: types.Grammar) -> GrammarSpec:
    """What the output must match; whether it compiles is seen later.

    Raises:
        InvalidRequest: no form is set, or it is empty or too large.
    """
    form = grammar.WhichOneof("value")
    if form is None:
        raise InvalidRequest("grammar", "must be a json_schema, regex, ebnf or choice", None)
    if form == "choice":
        if len(grammar.choice.options) > MAX_CHOICES:
            rule, length = f"must hold 1 to {MAX_CHOICES} answers", len(grammar.choice.options)
            raise InvalidRequest("grammar.choice.options", rule, length)
        return GrammarSpec(GrammarKind.CHOICE, choices=tuple(grammar.choice.options))
    return GrammarSpec(GrammarKind(form), getattr(grammar, form))


def num_outputs_of(spec: types.GenerationSpec, sampling: SamplingParams) -> int:
    """How many outputs are wanted.

    Raises:
        InvalidRequest: none, too many, or several that would be the same.
    """
    count = int(spec.num_outputs) if spec.HasField("num_outputs") else 1
    if not 1 <= count <= MAX_OUTPUTS:
        raise InvalidRequest("num_outputs", f"must be between 1 and {MAX_OUTPUTS}", count)
    if count > 1 and sampling.temperature == 0:
        raise InvalidRequest(
            "num_outputs", "must be 1 at temperature 0, where all outputs are the same", count
        )
    return count


def bad_words_of(params: types.SamplingParams) -> tuple[str, ...]:
    """Words that must not be said.

    Raises:
        InvalidRequest: they are too many, too long, or none.
    """
    if len(params.bad_words) > MAX_BANNED_SEQUENCES:
        rule = f"must hold at most {MAX_BANNED_SEQUENCES} entries"
        raise InvalidRequest("sampling.bad_words", rule, len(params.bad_words))
    for index, word in enumerate(params.bad_words):
        size = len(word.encode())
        if not word.strip() or size > MAX_BAD_WORD_BYTES:
            rule = f"must be a word of at most {MAX_BAD_WORD_BYTES} bytes"
            raise InvalidRequest(f"sampling.bad_words[{index}]", rule, word)
    return tuple(params.bad_words)


def pieces_of(bad_words: Iterable[str]) -> EncodePieces:
    """What has to be tokenised of words that must not be said: each as it is, and with a space before it."""
    return EncodePieces(tuple(text for word in bad_words for text in (word.lstrip(), f" {word.lstrip()}")))


def banned_by_words(
    sampling: SamplingParams, bad_words: Sequence[str], ids_of_pieces: Iterable[tuple[int, ...]]
) -> SamplingParams:
    """Parameters that ban words as ids.

    Args:
        sampling: what else is asked for.
        bad_words: the words.
        ids_of_pieces: what ``pieces_of`` makes of them.

    Raises:
        InvalidRequest: a word, or all that is banned, is longer than may be.
    """
    sequences = dict.fromkeys(sampling.banned_sequences)
    for place, ids in enumerate(ids_of_pieces):
        if not 1 <= len(ids) <= MAX_SEQUENCE_TOKENS:
            rule = f"must be 1 to {MAX_SEQUENCE_TOKENS} tokens long"
            raise InvalidRequest(f"sampling.bad_words[{place // 2}]", rule, bad_words[place // 2])
        sequences[ids] = None
    return dataclasses.replace(sampling, banned_sequences=tuple(sequences))
