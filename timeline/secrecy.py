"""What is secret, in one list, and how it is taken out of whatever is shown or logged.

Three things keep secrets inside: a setting whose name is listed here is never shown; text
that looks like a secret is taken out of every log line, failure and table (``redacted``); and
the text of an exception that a request caused is never logged, since it may hold the prompt
(``engine.failure``). What a request says and gets (prompts, tools, outputs) has no form by which
it could be known: it is not logged at all.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

#: Stands where something secret was.
HIDDEN = "[hidden]"
#: What the names of session tokens begin with, so that one is known wherever it turns up.
SESSION_TOKEN_PREFIX = "vst_"


@dataclass(frozen=True, slots=True)
class Secret:
    """A kind of secret that is known by its form.

    Attributes:
        name: what it is.
        pattern: what it looks like; the group ``kept``, if there is one, is left standing before it.
    """

    name: str
    pattern: "re.Pattern[str]"


SECRETS = (
    Secret(
        "private key",
        re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}-----|\Z)", re.DOTALL),
    ),
    Secret(
        "bearer token", re.compile(r"(?P<kept>\b(?:bearer|basic)\s+)[^\s'\"\\,;()\[\]{}]{8,}", re.IGNORECASE)
    ),
    Secret("hash of a token", re.compile(r"(?P<kept>\bsha256:)[0-9A-Fa-f]{32,}")),
    Secret("session token", re.compile(rf"\b{SESSION_TOKEN_PREFIX}[A-Za-z0-9_-]{{16,}}")),
    Secret("token of the hub", re.compile(r"\bhf_[A-Za-z0-9]{16,}")),
    # Of a URL, up to the last @ before its path.
    Secret(
        "user and password of a URL", re.compile(r"(?P<kept>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/?#'\"]*@")
    ),
)

#: Settings that are never shown, however wrong they are; * stands for one name.
SECRET_SETTINGS = ("tenants.*.token_hashes",)
#: Words in the names of settings, and of variables, that make them secret: for those there will be.
_SECRET_WORDS = re.compile(
    r"(?:^|[._])(?:token|token_hash(?:es)?|password|secret|api_key)(?:$|[._])", re.IGNORECASE
)
#: Text beyond this is cut before it is searched: nothing that is shown is as long.
_SEARCHED_CHARACTERS = 1_000_000


def redacted(text: str) -> str:
    """Text without what looks like a secret."""
    text = text[:_SEARCHED_CHARACTERS]
    for secret in SECRETS:
        text = secret.pattern.sub(_hide, text)
    return text


def is_secret_setting(path: str) -> bool:
    """Whether the value of a setting, or of anything below it, is secret.

    Args:
        path: of the setting, such as ``tenants.acme.token_hashes.0``.
    """
    parts = path.split(".")
    shortened = {".".join(parts[: length + 1]) for length in range(len(parts))}
    if any(fnmatchcase(part, pattern) for part in shortened for pattern in SECRET_SETTINGS):
        return True
    return bool(_SECRET_WORDS.search(path))


def shown_setting(path: str, value: object) -> object:
    """The value of a setting as it may be shown."""
    if value is None or value == () or value == []:
        return value
    if is_secret_setting(path):
        return f"{len(value)} {HIDDEN}" if isinstance(value, tuple | list) else HIDDEN
    if isinstance(value, str):
        return redacted(value)
    return value


def _hide(match: "re.Match[str]") -> str:
    kept = match.groupdict().get("kept") or ""
    return kept + (f"{HIDDEN}@" if match[0].endswith("@") else HIDDEN)
