"""What is to be done with a text, as values that can be sent to another process.

A job knows its size before it is begun and its bound in tokens, so that what a caller can
make it cost follows the context of the model, not the size of the caller's message.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.text import ChatMessage, PromptLimit, Tokenizer

#: Of a text that is longer, a part is tried first.
FIRST_PART_BYTES = 64 * 1024

Result = TypeVar("Result", covariant=True)


class TextJob(Protocol[Result]):
    """Something to be done by a tokenizer. Picklable."""

    @property
    def num_bytes(self) -> int:
        """Size of what it works on, in bytes of UTF-8."""
        ...

    def run(self, tokenizer: Tokenizer) -> Result:
        """Do it. May be slow.

        Raises:
            VorrangError: the caller's fault.
        """
        ...


@dataclass(frozen=True, slots=True)
class EncodeText:
    """A plain prompt to ids.

    Attributes:
        text: the prompt.
        limit: how long it may be.
    """

    text: str
    limit: PromptLimit

    @property
    def num_bytes(self) -> int:
        """See ``TextJob``."""
        return len(self.text.encode())

    def run(self, tokenizer: Tokenizer) -> "array[int]":
        """The ids.

        Raises:
            ContextExceeded: there are too many.
        """
        _check_parts(self.text, self.limit, tokenizer)
        return _ids(tokenizer.encode(self.text), self.limit)


@dataclass(frozen=True, slots=True)
class EncodeChat:
    """A conversation to ids.

    Attributes:
        messages: oldest first.
        add_generation_prompt: whether the assistant's turn is opened.
        tools_json: tools as a JSON array; empty = none.
        limit: how long the prompt may be.
    """

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool
    tools_json: str
    limit: PromptLimit

    @property
    def num_bytes(self) -> int:
        """See ``TextJob``; what the template adds to every message is guessed."""
        own = sum(len(m.role.encode()) + len(m.content.encode()) + 32 for m in self.messages)
        return own + len(self.tools_json.encode())

    def run(self, tokenizer: Tokenizer) -> "array[int]":
        """The ids.

        Raises:
            InvalidRequest: the template refuses it, or it is too long.
        """
        ids = tokenizer.encode_chat(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            tools_json=self.tools_json,
            check_text=lambda text: _check_parts(text, self.limit, tokenizer),
        )
        return _ids(ids, self.limit)


@dataclass(frozen=True, slots=True)
class EncodePieces:
    """Pieces of text to ids, each by itself.

    Attributes:
        pieces: a bounded number of them, of a bounded size.
    """

    pieces: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """See ``TextJob``."""
        return sum(len(piece.encode()) for piece in self.pieces)

    def run(self, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
        """Ids of each."""
        return [tuple(tokenizer.encode_plain(piece)) for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class Decode:
    """Ids to text.

    Attributes:
        token_ids: of the vocabulary.
        skip_special_tokens: leave these out.
    """

    token_ids: "array[int]"
    skip_special_tokens: bool

    @property
    def num_bytes(self) -> int:
        """See ``TextJob``: four an id."""
        return 4 * len(self.token_ids)

    def run(self, tokenizer: Tokenizer) -> str:
        """The text."""
        return tokenizer.decode(self.token_ids, skip_special_tokens=self.skip_special_tokens)


def _check_parts(text: str, limit: PromptLimit, tokenizer: Tokenizer) -> None:
    """Refuse a text that is too long without tokenising all of it.

    Where a text is cut, what its tokens are may change; that it takes back half of those of a
    part that is far too long by itself does not happen. Parts grow fourfold, so what trying them
    costs is a third of what the whole does at most.
    """
    limit.check_bytes(len(text.encode()))
    size = FIRST_PART_BYTES
    while size <= len(text) // 2:
        num_tokens = len(tokenizer.encode(text[:size]))
        if num_tokens > 2 * limit.max_tokens:
            limit.check_tokens(num_tokens)
        size *= 4


def _ids(token_ids: Sequence[int], limit: PromptLimit) -> "array[int]":
    limit.check_tokens(len(token_ids))
    return array("I", token_ids)
