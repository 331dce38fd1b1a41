"""Between tokens and text: the tokenizer border, incremental text, stop strings.

Knows nothing of requests, scheduling or the wire. The real tokenizer lives in
``engine.models.tokenizer``, the scripted one in ``engine.runner.scripted``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import ContextExceeded


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


class PromptTooLong(ContextExceeded):
    """A prompt has more tokens than the context.

    Attributes:
        num_tokens: how many were made before it was refused.
    """

    num_tokens = 0


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """How long a prompt may be, so that one that is too long is refused before it is tokenised.

    Attributes:
        max_tokens: tokens of the context.
        max_token_bytes: bytes of text that the longest token stands for.
    """

    max_tokens: int
    max_token_bytes: int

    def check_bytes(self, num_bytes: int) -> None:
        """Refuse a text that can't be so few tokens.

        Raises:
            ContextExceeded: it has too many bytes.
        """
        limit = self.max_tokens * self.max_token_bytes
        if num_bytes > limit:
            rule = f"must be shorter than the context of {self.max_tokens} tokens, {limit} bytes at most"
            raise ContextExceeded("prompt", rule, num_bytes)

    def check_tokens(self, num_tokens: int, *, field: str = "prompt") -> None:
        """Refuse a prompt of too many tokens.

        Raises:
            PromptTooLong: it has.
        """
        if num_tokens > self.max_tokens:
            rule = f"must be shorter than the context of {self.max_tokens} tokens"
            error = PromptTooLong(field, rule, num_tokens)
            error.num_tokens = num_tokens
            raise error


class StreamDecoder(Protocol):
    """Turns the tokens of one output into text, one by one."""

    def push(self, token_id: int) -> str:
        """Text completed by this token; empty while a character is incomplete. Special tokens give none."""
        ...

    def flush(self) -> str:
        """What is left at the end; an incomplete character appears as U+FFFD."""
        ...


class Tokenizer(Protocol):
    """The model's tokenizer and chat template. Thread-safe; ``encode*`` may be slow (call off the loop)."""

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works."""
        ...

    @property
    def max_token_bytes(self) -> int:
        """Bytes of text that the longest token stands for."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens spelt in it are recognised."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a piece of text as it stands in the middle of others; nothing is put before or after it.

        Special tokens spelt in it stay text.
        """
        ...

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools_json: str = "",
        check_text: Callable[[str], object] | None = None,
    ) -> list[int]:
        """Ids of a conversation by the model's template.

        Args:
            messages: oldest first.
            add_generation_prompt: whether the assistant's turn is opened.
            tools_json: tools as a JSON array; empty = none.
            check_text: is called with what the template wrote, before that is tokenised; may refuse it.

        Raises:
            InvalidRequest: no template, no message, a role the template refuses, or
                tools that are no JSON array.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        ...

    def stream_decoder(self, prompt_token_ids: Sequence[int]) -> StreamDecoder:
        """A fresh decoder for the output that follows ``prompt_token_ids``."""
        ...


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is ready to be sent, and the stop string that ended it, if one did."""

    text: str
    stop_string: str | None = None


class OutputText:
    """Text of one output: decodes tokens and watches for stop strings.

    Text that might be the beginning of a stop string is held back until it is
    clear; an incomplete character is held back by the decoder. Pieces
    concatenated are the whole text. The time a character takes does not depend on
    how long the stop strings are, nor on how far the text goes along with them.

    Args:
        decoder: a fresh decoder for this output.
        stop_strings: strings that end the output; the one that ends first wins,
            the longest of those that end together.
        include_stop_string: keep the stop string in the text.
    """

    def __init__(
        self, decoder: StreamDecoder, stop_strings: Sequence[str] = (), *, include_stop_string: bool = False
    ) -> None:
        self._decoder = decoder
        # The longest first: of those that end together it is the first that is found.
        self._matches = [_Match(text) for text in sorted(set(stop_strings), key=len, reverse=True)]
        self._include = include_stop_string
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        """Add a token.

        Args:
            token_id: the token.
            may_stop: False while stop strings don't count yet (``min_tokens``).
        """
        new = self._decoder.push(token_id)
        if not self._matches:
            return TextPiece(new)
        return self._release(new, may_stop=may_stop)

    def flush(self) -> TextPiece:
        """All that is held back, at the end of the output."""
        text = self._held + self._decoder.flush()
        self._held = ""
        return TextPiece(text)

    def _release(self, new: str, *, may_stop: bool) -> TextPiece:
        # What is complete while nothing may stop never stops, but its tail may begin a later match.
        ends = [(match.read(new, may_stop=may_stop), match) for match in self._matches]
        end, first = min(ends, key=lambda found: found[0])
        text = self._held + new
        if end <= len(new):
            begin = len(self._held) + end - len(first.text)
            self._held = ""
            return TextPiece(text[: begin + len(first.text) * self._include], first.text)
        cut = len(text) - max(match.num_held for match in self._matches)
        self._held = text[cut:]
        return TextPiece(text[:cut])


class _Match:
    """How much of a stop string a text ends with, character by character.

    The failure function of Knuth, Morris and Pratt (1977), made as far as it is needed: a
    text that never goes along costs nothing, and no text more than two steps a character.

    Attributes:
        text: the stop string.
        num_held: characters at the end of what was read that begin it.
    """

    __slots__ = ("_borders", "num_held", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_held = 0
        #: By length of a beginning, less one: its longest end that begins it, too.
        self._borders = [0]

    def read(self, new: str, *, may_stop: bool) -> int:
        """Where in ``new`` the stop string ends; more than its length when it does not, or may not stop."""
        text, held = self.text, self.num_held
        if not held and text[0] not in new:
            return len(new) + 1
        for place, character in enumerate(new, start=1):
            while held and text[held] != character:
                held = self._border(held)
            if text[held] == character:
                held += 1
                if held == len(text):
                    if may_stop:
                        return place
                    held = self._border(held)
        self.num_held = held
        return len(new) + 1

    def _border(self, length: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) < length:
            border = borders[-1]
            while border and text[border] != text[len(borders)]:
                border = borders[border - 1]
            borders.append(border + (text[border] == text[len(borders)]))
        return borders[length - 1]
