"""The tokenizer in a GGUF file's metadata, written as Hugging Face files.

GGUF names the pre-tokenizer and leaves its rules to the reader: a few are spelt out
here, the others are those that transformers knows. What neither lists is refused: a
wrong split would give wrong ids without any error.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.models.errors import InvalidCheckpoint, UnsupportedModel

_CONTROL = 3
_USER_DEFINED = 4

#: What is split off, by the name of the rules, before words become bytes.
_OWN_SPLITS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [],
    "default": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
}


def write_tokenizer(fields: dict[str, Any], folder: Path, *, max_tokens: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``.

    Args:
        fields: the file's metadata by name.
        folder: an existing folder.
        max_tokens: longest context.

    Raises:
        InvalidCheckpoint: the vocabulary is missing or inconsistent.
        UnsupportedModel: another kind of tokenizer or pre-tokenizer.
    """
    tokens: list[str] = fields.get("tokenizer.ggml.tokens", [])
    types: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise InvalidCheckpoint(f"GGUF vocabulary of {len(tokens)} tokens has {len(types)} token types")
    try:
        tokenizer = _tokenizer(fields, tokens, types)
    except UnsupportedModel:
        raise
    except Exception as error:  # the library raises the bare class for a merge of unknown tokens
        raise InvalidCheckpoint("GGUF merges do not fit the vocabulary") from error
    vocabulary = {token: index for index, token in enumerate(tokens)}
    named = {
        f"{name}_token": tokens[fields[key]]
        for name, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if fields.get(key, len(tokens)) < len(tokens)
    }
    # llama.cpp: SentencePiece begins with it, unless the file says otherwise.
    adds_bos = fields.get("tokenizer.ggml.add_bos_token", fields.get("tokenizer.ggml.model") == "llama")
    if adds_bos and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        **named,
    }
    if "tokenizer.chat_template" in fields:
        template = config["chat_template"] = fields["tokenizer.chat_template"]
        if not isinstance(template, str):
            raise InvalidCheckpoint(f"GGUF tokenizer.chat_template must be text, got {template!r}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8"
    )


def _tokenizer(fields: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """The tokenizer, without the beginning of a text."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind == "gpt2" and pre in _OWN_SPLITS:
        vocabulary = {token: index for index, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        splits = [*_OWN_SPLITS[pre], byte_level]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits) if len(splits) > 1 else byte_level
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(
            [
                AddedToken(token, special=type_ == _CONTROL, normalized=False)
                for token, type_ in zip(tokens, types, strict=True)
                if type_ in (_CONTROL, _USER_DEFINED)
            ]
        )
        return tokenizer
    return _tokenizer_of_transformers(fields, kind, pre)


def _tokenizer_of_transformers(fields: dict[str, Any], kind: str | None, pre: str) -> Tokenizer:
    """SentencePiece vocabularies, and byte-level ones whose split transformers knows by name."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel("GGUF tokenizer.ggml.model", "gpt2 or llama", kind)
    if kind == "gpt2" and pre not in theirs.GGUF_PRE_TOKENIZER_SPLITS:
        known = " or ".join([*_OWN_SPLITS, *theirs.GGUF_PRE_TOKENIZER_SPLITS])
        raise UnsupportedModel("GGUF tokenizer.ggml.pre", known, pre)
    named = {
        name: fields[f"tokenizer.{key}"]
        for key, name in theirs.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in fields
    }
    tokenizer: Tokenizer
    tokenizer, _ = theirs.convert_gguf_tokenizer(fields["general.architecture"], named)
    return tokenizer
