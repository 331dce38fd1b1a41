"""Text that spells special tokens and is to stay text.

A tokenizer finds its special tokens wherever they are spelt, so a message could end its
own turn and begin another's. Here the spellings in what a caller wrote are broken up
before the chat template writes it among special tokens of its own; what the template wrote
is then told to a second tokenizer, in which those tokens are spelt as nobody can guess.
Both tokenizers are the library's, so the rest of a text becomes the ids it always becomes.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from tokenizers import AddedToken, Tokenizer

#: A token spelt so is a turn's mark, whether its file calls it special or not.
_MARK = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)  # noqa: RUF001 - the bars that tokenizers use
_PRIVATE_USE = range(0xE000, 0xF900)


def guarded_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Spelling and id of the tokens that callers' text must not become: special ones, and marks of turns."""
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return {
        token.content: token_id
        for token_id, token in added.items()
        if len(token.content) > 1 and (token.special or _MARK.fullmatch(token.content))
    }


class Spellings:
    """Finds spellings in a text, and breaks them up.

    Args:
        spellings: at least two characters each.
    """

    def __init__(self, spellings: Collection[str]) -> None:
        self._any = re.compile(_either(spellings)) if spellings else None
        self._starts = re.compile(f"(?={_either(spellings)})(.)", re.DOTALL) if spellings else None
        self._heads = frozenset(text[:size] for text in spellings for size in range(1, len(text)))
        self._tails = frozenset(text[size:] for text in spellings for size in range(1, len(text)))
        self._max_size = max(map(len, spellings), default=0)

    def are_in(self, text: str) -> bool:
        """Whether any is spelt in the text."""
        return self._any is not None and self._any.search(text) is not None

    def broken_up(self, text: str, breaker: str) -> str:
        """The text with ``breaker`` wherever it spells one, or could with what is written beside it."""
        if self._starts is None or not text:
            return text
        broken = self._starts.sub(lambda found: found[1] + breaker, text)
        sizes = range(1, min(len(text) + 1, self._max_size))
        if any(text[:size] in self._tails for size in sizes):
            broken = breaker + broken
        if any(text[-size:] in self._heads for size in sizes):
            broken += breaker
        return broken

    def respelt(self, text: str, names: dict[str, str]) -> str:
        """The text with every spelling replaced by its name; the first counts, the longest of several."""
        return text if self._any is None else self._any.sub(lambda found: names[found[0]], text)


class Guarded:
    """A tokenizer in which the spellings of special tokens are text.

    Args:
        tokenizer: the model's; a copy is made.
        tokens: spelling and id of each that is guarded.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: dict[str, int]) -> None:
        nonce = secrets.token_hex(16)
        self.names = {text: f"special{nonce}n{index:06d}x" for index, text in enumerate(tokens)}
        self.tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(self._renamed(tokenizer)))
        for text, token_id in tokens.items():
            assert self.tokenizer.token_to_id(self.names[text]) == token_id, "a special token has another id"

    def _renamed(self, tokenizer: Tokenizer) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(tokenizer.to_str())
        names, model = self.names, content["model"]
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
        else:  # Unigram: pairs of text and score, in the order of the ids
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        content["post_processor"] = None  # what begins a text is the template's business
        return content


def unused_character(texts: Iterable[str]) -> str | None:
    """A character that no text has, nor spells as JSON would; None when they have all that could be used."""
    whole = "\n".join(texts)
    known = set(whole)
    for code in _PRIVATE_USE:
        if chr(code) not in known and json_escape(chr(code)) not in whole:
            return chr(code)
    return None


def json_escape(character: str) -> str:
    """A character as JSON writes it in ASCII."""
    return json.dumps(character)[1:-1]


def _either(texts: Collection[str]) -> str:
    """A pattern for the longest of some texts, which takes no longer where there are thousands of them."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
    branches = []
    for first, followers in rests.items():
        if len(followers) == 1:
            branches.append(re.escape(first + followers[0]))
        else:
            branches.append(re.escape(first) + _either(followers))
    together = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{together})?" if "" in texts else together
