"""Who calls: a tenant, by its bearer token or its client certificate. Metadata never says it.

Knows no engine and no wire messages.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from engine.priority import LEVEL_MIN
from server.errors import Unauthenticated
from server.sections import TenantSection

AUTHORIZATION_KEY = "authorization"
HASH_PREFIX = "sha256:"
_BEARER = re.compile(r"(?i:bearer) +([!-~]{1,4096})", re.ASCII)

#: As grpc's ``auth_context`` gives it.
AuthContext = Mapping[str, Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and what it may do.

    Attributes:
        tenant: name from the settings; empty where nobody is named.
        operator: may call ControlService.
        most_urgent_level: most urgent level of its requests.
        default_level: priority of its requests that carry none; None = the server's.
    """

    tenant: str = ""
    operator: bool = False
    most_urgent_level: int = LEVEL_MIN
    default_level: int | None = None

    def allowed(self, level: int) -> int:
        """The level it gets when it asks for one."""
        return max(level, self.most_urgent_level)


#: Everybody, where no tenant has credentials.
EVERYBODY = Caller(operator=True)
_NOBODY = Caller()
#: Set by the guard for the handler's task, and inherited by the tasks it makes.
CALLER: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)


class Authenticator:
    """Finds the tenant of a call.

    Args:
        tenants: by name.
    """

    def __init__(self, tenants: Mapping[str, TenantSection]) -> None:
        self._callers = {
            name: Caller(name, t.operator, t.most_urgent_level, t.default_level)
            for name, t in tenants.items()
        }
        self._token_hashes = [(h, name) for name, t in tenants.items() for h in t.token_hashes]
        self._subjects = {s: name for name, t in tenants.items() for s in t.certificate_subjects}
        anonymous = [name for name, t in tenants.items() if t.anonymous]
        self.required = any(t.has_credentials for t in tenants.values())
        self._anonymous = self._callers[anonymous[0]] if anonymous else None

    def identify(
        self, metadata: Iterable[tuple[str, str | bytes]], auth_context: Callable[[], AuthContext]
    ) -> Caller:
        """Who calls. A token counts before a certificate; a bad token is never passed over.

        Args:
            metadata: of the call.
            auth_context: gives what the transport knows of the peer; costs a little.

        Raises:
            Unauthenticated: no credential, or one that nobody has; the message never holds it.
        """
        if not self.required:
            return self._anonymous or EVERYBODY
        values = [value for key, value in metadata if key == AUTHORIZATION_KEY]
        if len(values) > 1:
            raise Unauthenticated("authorization must be given once")
        name = self._by_token(values[0]) if values else self._by_certificate(auth_context())
        if name is not None:
            return self._callers[name]
        if self._anonymous is None:
            raise Unauthenticated("a bearer token or a client certificate of a known tenant is needed")
        return self._anonymous

    def _by_token(self, value: str | bytes) -> str:
        match = _BEARER.fullmatch(value.decode("ascii", "replace") if isinstance(value, bytes) else value)
        if match is None:
            raise Unauthenticated("authorization must be a bearer token")
        given, found = hash_of(match[1]), None
        for known, name in self._token_hashes:  # all of them: the time must not say which was close
            if hmac.compare_digest(given, known):
                found = name
        if found is None:
            raise Unauthenticated("the bearer token is not known")
        return found

    def _by_certificate(self, auth: AuthContext) -> str | None:
        if tuple(auth.get("transport_security_type", ())) != (b"ssl",):
            return None
        subject = _text(auth, "x509_subject")
        name = self._subjects.get(subject) if subject else None
        common_name = _text(auth, "x509_common_name")
        return name or (self._subjects.get(f"CN={common_name}") if common_name else None)


def hash_of(token: str) -> str:
    """What the settings hold of a token. Tokens are long and random, so one round of SHA-256 is enough."""
    return HASH_PREFIX + hashlib.sha256(token.encode()).hexdigest()


def _text(auth: AuthContext, key: str) -> str:
    values = auth.get(key, ())
    return values[0].decode("utf-8", "replace") if len(values) == 1 else ""
