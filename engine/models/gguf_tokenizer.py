"""The tokenizer in a GGUF file's metadata, written as Hugging Face files.

GGUF names the pre-tokenizer and leaves its rules to the reader, so each is
spelt out here. What is not listed is refused: a wrong split would give wrong
ids without any error.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.models.errors import InvalidCheckpoint, UnsupportedModel

_CONTROL = 3
_USER_DEFINED = 4


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
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel("GGUF tokenizer.ggml.model", "gpt2 (byte-level BPE)", kind)
    tokens: list[str] = fields.get("tokenizer.ggml.tokens", [])
    types: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    if not tokens or len(types) != len(tokens):
        raise InvalidCheckpoint(f"GGUF vocabulary of {len(tokens)} tokens has {len(types)} token types")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    except Exception as error:  # the library raises the bare class for a merge of unknown tokens
        raise InvalidCheckpoint("GGUF merges do not fit the vocabulary") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(fields.get("tokenizer.ggml.pre", "gpt-2"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
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
    if fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
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
        config["chat_template"] = fields["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8"
    )


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The splitting rules that GGUF knows by ``name``."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise UnsupportedModel("GGUF tokenizer.ggml.pre", "smollm or gpt-2", name)
