"""The model's tokenizer and chat template, from the files of a Hugging Face folder.

Ids and text go through ``tokenizers``; ``transformers``, whose import takes
about a second, is loaded by the first chat prompt or by ``warm_up``, and renders
the template alone.
"""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from engine.errors import InvalidRequest
from engine.grammar import shown
from engine.models.errors import InvalidCheckpoint
from engine.models.special_text import Guarded, Spellings, guarded_tokens, json_escape, unused_character
from engine.models.values import check_size, read_json
from engine.text import ChatMessage, StreamDecoder

#: Prompt tokens a stream decoder sees, so that the first piece of output is spelt as a continuation.
CONTEXT_TOKENS = 8

#: A character has at most four bytes, so after as many tokens without text the output is no text.
PENDING_TOKENS_MAX = 8

#: Of ``tokenizer.json``; those of the largest vocabularies have 40 MB.
_TOKENIZER_BYTES_MAX = 256 * 2**20

_REPLACEMENT = "\ufffd"


class HfTokenizer:
    """A ``tokenizer.json`` with its chat template, as an ``engine.text.Tokenizer``. Thread-safe.

    The library's batch calls are used for single texts, too: they alone let go of the GIL.

    Args:
        folder: holds ``tokenizer.json`` and, for chats, ``tokenizer_config.json``.
        special_in_chat: special tokens spelt in messages are recognised, instead of staying text.

    Raises:
        InvalidCheckpoint: ``tokenizer.json`` is missing or damaged.
    """

    def __init__(self, folder: Path, *, special_in_chat: bool = False) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidCheckpoint(f"tokenizer.json is missing in {folder}")
        check_size(path, _TOKENIZER_BYTES_MAX)
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise InvalidCheckpoint(f"{path} is no readable tokenizer") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._silent = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._guarded_tokens = guarded_tokens(self._tokenizer)
        self._spellings = Spellings(self._guarded_tokens)
        self._chat_spellings = Spellings(()) if special_in_chat else self._spellings
        self._guarded: Guarded | None = None
        self._max_token_bytes = 0
        self.folder = folder
        self._has_chat_template = _has_chat_template(folder)
        self._chat: Any = None  # transformers has no types
        self._chat_lock = threading.Lock()

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works."""
        return self._has_chat_template

    @property
    def max_token_bytes(self) -> int:
        """Bytes of text that the longest token stands for."""
        if not self._max_token_bytes:
            is_byte_level = "ByteLevel" in str(self._tokenizer.decoder)  # then a byte is spelt as a character
            spellings = self._tokenizer.get_vocab(with_added_tokens=True)
            self._max_token_bytes = max(len(s) if is_byte_level else len(s.encode()) for s in spellings)
        return self._max_token_bytes

    def warm_up(self) -> None:
        """Load what the first chat prompt would have to wait for, about a second. From any thread."""
        if self._has_chat_template:
            self._chat_tokenizer()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, begun as the model wants it; special tokens spelt in it are recognised."""
        return _ids(self._tokenizer, text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a piece of text as it stands in the middle of others; nothing is put before or after it.

        Special tokens spelt in it stay text.
        """
        is_plain = not self._spellings.are_in(text)
        return _ids(self._tokenizer if is_plain else self._guard().tokenizer, text)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools_json: str = "",
        check_text: Callable[[str], object] | None = None,
    ) -> list[int]:
        """Ids of a conversation by the model's template; special tokens spelt in it stay text.

        Raises:
            InvalidRequest: no template, no message, a role or tools that the template refuses or can't
                write, or tools that are no JSON array of objects.
        """
        if not self._has_chat_template:
            raise InvalidRequest("messages", "need a model with a chat template", len(messages))
        if not messages:
            raise InvalidRequest("messages", "must hold at least one message", 0)
        tools = _tools(tools_json)
        chat = self._chat_tokenizer()
        own = (text for message in messages for text in (message.role, message.content))
        # Not in the tools as they are written either: there a character may be spelt by its number.
        breaker = unused_character([*own, tools_json, _escaped(tools), str(chat.chat_template)])
        if breaker is None:
            raise InvalidRequest("messages", "must leave a character for private use unused", len(messages))
        conversation = [
            {
                "role": self._chat_spellings.broken_up(message.role, breaker),
                "content": self._chat_spellings.broken_up(message.content, breaker),
            }
            for message in messages
        ]
        text = self._written(
            conversation, self._tools_broken_up(tools, breaker), breaker, add_generation_prompt
        )
        if check_text is not None:
            check_text(text)
        if breaker not in text and json_escape(breaker) not in text:
            return _ids(self._tokenizer, text)
        guard = self._guard()
        text = self._spellings.respelt(text, guard.names)
        return _ids(guard.tokenizer, text.replace(breaker, "").replace(json_escape(breaker), ""))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        texts = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        text: str = texts[0]
        return text

    def stream_decoder(self, prompt_token_ids: Sequence[int]) -> StreamDecoder:
        """A fresh decoder for the output that follows ``prompt_token_ids``."""
        return HfStreamDecoder(self._tokenizer, self._silent, prompt_token_ids[-CONTEXT_TOKENS:])

    def _written(
        self, conversation: list[dict[str, str]], tools: list[Any] | None, breaker: str, opening: bool
    ) -> str:
        """A conversation by the template, as text that can be encoded."""
        from jinja2 import TemplateError

        try:
            text: str = self._chat_tokenizer().apply_chat_template(
                conversation, tools=tools, add_generation_prompt=opening, tokenize=False
            )
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("tools_json", "must hold no half of a surrogate pair", None) from None
        except RecursionError:
            raise InvalidRequest("tools_json", "must not be nested so deep", None) from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            # What the template does with them.
            raise InvalidRequest(
                "messages",
                f"must suit the model's chat template ({shown(str(error).replace(breaker, ''))})",
                [message["role"].replace(breaker, "") for message in conversation[:8]],
            ) from error
        return text

    def _tools_broken_up(self, tools: list[Any] | None, breaker: str) -> list[Any] | None:
        def broken_up(value: Any) -> Any:
            if isinstance(value, str):
                return self._chat_spellings.broken_up(value, breaker)
            if isinstance(value, list):
                return [broken_up(item) for item in value]
            if isinstance(value, dict):
                return {broken_up(key): broken_up(item) for key, item in value.items()}
            return value

        try:
            return None if tools is None else [broken_up(tool) for tool in tools]
        except RecursionError:
            raise InvalidRequest("tools_json", "must not be nested so deep", None) from None

    def _guard(self) -> Guarded:
        with self._chat_lock:
            if self._guarded is None:
                self._guarded = Guarded(self._tokenizer, self._guarded_tokens)
            return self._guarded

    def _chat_tokenizer(self) -> Any:
        with self._chat_lock:
            if self._chat is None:
                from transformers import PreTrainedTokenizerFast

                try:
                    self._chat = PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
                except Exception as error:  # theirs are of any kind
                    what = f"the tokenizer's configuration in {self.folder} can't be used"
                    raise InvalidCheckpoint(f"{what}: {type(error).__name__}: {error}") from error
            return self._chat


class HfStreamDecoder:
    """Text of one output, token by token.

    Args:
        tokenizer: whose ids come.
        silent: ids of special tokens, which have no text.
        context: the last ids before the output.
    """

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._pending: list[int] = []
        self._stream = self._fresh_stream([token_id for token_id in context if token_id not in silent])

    def push(self, token_id: int) -> str:
        """Text completed by this token; empty while a character is incomplete. Special tokens give none."""
        if token_id in self._silent or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library's bare class: what was text before this token is none with it
            return self._restart()
        if text is not None:
            self._pending.clear()
            return text
        return self._restart() if len(self._pending) >= PENDING_TOKENS_MAX else ""

    def flush(self) -> str:
        """What is left at the end; an incomplete character appears as U+FFFD."""
        return self._restart()

    def _restart(self) -> str:
        """Give out what is pending as it is, and begin anew after it."""
        text: str = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._pending.clear()
        self._stream = self._fresh_stream([])
        return text

    def _fresh_stream(self, context: list[int]) -> DecodeStream:
        # Half a character at the end of the context would be spelt otherwise once completed.
        if self._tokenizer.decode(context, skip_special_tokens=True).endswith(_REPLACEMENT):
            context = []
        return DecodeStream(ids=context, skip_special_tokens=True)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))


def _tools(tools_json: str) -> list[Any] | None:
    if not tools_json:
        return None
    try:
        tools = json.loads(tools_json)
    except ValueError as error:
        raise InvalidRequest("tools_json", "must be a JSON array", tools_json[:100]) from error
    except RecursionError:
        raise InvalidRequest("tools_json", "must not be nested so deep", tools_json[:100]) from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("tools_json", "must be a JSON array of objects", tools_json[:100])
    return tools


def _escaped(tools: list[Any] | None) -> str:
    try:
        return json.dumps(tools)
    except RecursionError:
        raise InvalidRequest("tools_json", "must not be nested so deep", None) from None


def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text; the GIL is let go of meanwhile, but for the making of the list."""
    encoded = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoded[0].ids
    return ids
