"""Between tokens and text: the tokenizer border, incremental text, stop strings.

Knows nothing of requests, scheduling or the wire. The real tokenizer lives in
``engine.models.tokenizer``, the scripted one in ``engine.runner.scripted``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


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

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens spelt in it are recognised."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a piece of text as it stands in the middle of others; nothing is put before or after it."""
        ...

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, tools_json: str = ""
    ) -> list[int]:
        """Ids of a conversation by the model's template.

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
    concatenated are the whole text.

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
        self._stop_strings = tuple(stop_strings)
        self._include = include_stop_string
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        """Add a token.

        Args:
            token_id: the token.
            may_stop: False while stop strings don't count yet (``min_tokens``).
        """
        new = self._decoder.push(token_id)
        if not self._stop_strings:
            return TextPiece(new)
        return self._release(new, may_stop=may_stop)

    def flush(self) -> TextPiece:
        """All that is held back, at the end of the output."""
        text = self._held + self._decoder.flush()
        self._held = ""
        return TextPiece(text)

    def _release(self, new: str, *, may_stop: bool) -> TextPiece:
        known = len(self._held)
        text = self._held + new
        # What is complete while nothing may stop never stops, but its tail may begin a later match.
        found = self._find(text, known) if may_stop else None
        if found is not None:
            start, stop_string = found
            self._held = ""
            return TextPiece(text[: start + len(stop_string) * self._include], stop_string)
        num_held = max(_overlap(text, stop_string) for stop_string in self._stop_strings)
        cut = len(text) - num_held
        self._held = text[cut:]
        return TextPiece(text[:cut])

    def _find(self, text: str, known: int) -> tuple[int, str] | None:
        """Start and string of the match that ends first, the longest of those that end together."""
        matches = []
        for stop_string in self._stop_strings:
            start = text.find(stop_string, max(0, known - len(stop_string) + 1))
            if start >= 0:
                matches.append((start + len(stop_string), -len(stop_string), start, stop_string))
        if not matches:
            return None
        _, _, start, stop_string = min(matches)
        return start, stop_string


def _overlap(text: str, stop_string: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop_string``."""
    for size in range(min(len(text), len(stop_string) - 1), 0, -1):
        if text.endswith(stop_string[:size]):
            return size
    return 0
