"""What an output must match, as it was asked for.

How it is compiled and followed, where the model computes: ``engine.runner.grammars``.
"""

import enum
from dataclasses import dataclass

from engine.errors import InvalidRequest, QueueFull

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 1024


class GrammarKind(enum.Enum):
    """The form of a grammar; the value is its field on the wire."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an output must match. Hashable: what is compiled is kept by it.

    Attributes:
        kind: its form.
        text: the schema, expression or grammar; empty for a choice.
        choices: the answers of a choice, else empty.
        owner: the tenant that asks; nothing that is compiled is shared with another one.

    Raises:
        InvalidRequest: it is empty or too large.
    """

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()
    owner: str = ""

    def __post_init__(self) -> None:
        size = sum(len(text.encode(errors="surrogatepass")) for text in (self.text, *self.choices))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(self.field, f"must be at most {MAX_GRAMMAR_BYTES} bytes", size)
        if self.kind is GrammarKind.CHOICE:
            count = len(self.choices)
            if not 1 <= count <= MAX_CHOICES:
                raise InvalidRequest(f"{self.field}.options", f"must hold 1 to {MAX_CHOICES} answers", count)
            if "" in self.choices:
                at = self.choices.index("")
                raise InvalidRequest(f"{self.field}.options[{at}]", "must not be empty", "")
        elif not self.text:
            raise InvalidRequest(self.field, "must not be empty", "")

    @property
    def field(self) -> str:
        """Path of the field it came in."""
        return f"grammar.{self.kind.value}"


class GrammarRefused(InvalidRequest):
    """A grammar can't be compiled, or nothing may follow what was said under it.

    Args:
        spec: the grammar.
        rule: what it must be, with the reason.
        value: what it was.
    """

    def __init__(self, spec: GrammarSpec, rule: str, value: object) -> None:
        super().__init__(spec.field, rule, value)

    @property
    def log_text(self) -> str:
        """The field alone: a library's reason quotes the grammar."""
        return f"{self.field} was refused"


class GrammarsBusy(QueueFull):
    """A grammar's turn to be compiled did not come in time; it may the next time.

    Args:
        wait_s: seconds it has waited.
    """

    def __init__(self, wait_s: float) -> None:
        super().__init__("queue of grammars to be compiled", "grammars", 0)
        self.args = (f"the grammar was not compiled within {wait_s:g} s, since others were before it",)


def shown(error: object) -> str:
    """A library's reason as one short line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."
