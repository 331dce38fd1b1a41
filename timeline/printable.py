"""Text as it may be shown: what others chose must not steer a terminal, forge a line, or turn one round."""

import re

#: Controls, separators of lines, halves of surrogate pairs, what turns the direction or is invisible (but
#: for the joiners inside words and emoji, U+200C and U+200D).
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
#: Of what a model says: invisible characters are a part of some languages, steering is of none.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NAMED = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def has_controls(text: str) -> bool:
    """Whether ``printable`` would change it."""
    return _CONTROL.search(text) is not None


def printable(text: str) -> str:
    """One line of text: every control character, line end and direction mark as its escape."""
    return _CONTROL.sub(_escape, text)


def printable_lines(text: str) -> str:
    """Text of several lines, such as a model's output: line ends and tabs stay, what steers is escaped."""
    return _STEERING.sub(_escape, text)


def _escape(match: "re.Match[str]") -> str:
    code = ord(match[0])
    if code <= 0xFF:
        return _NAMED.get(match[0], f"\\x{code:02x}")
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
