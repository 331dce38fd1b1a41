"""Bearer tokens: what a server's settings hold of them."""

import hashlib

MIN_TOKEN_CHARACTERS = 16


def hash_token(token: str) -> str:
    """The hash of a token for ``token_hashes`` of a tenant.

    One round of SHA-256 protects what can't be guessed, so short tokens are refused.

    Raises:
        ValueError: it is short, or holds what a header can't.
    """
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"a token must have at least {MIN_TOKEN_CHARACTERS} characters, this has {len(token)}"
        )
    if not all("!" <= character <= "~" for character in token):
        raise ValueError("a token must be printable ASCII without spaces")
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()
