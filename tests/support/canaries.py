"""Secrets that tests plant, and the search for them wherever nothing secret may come out.

``tests/conftest.py`` looks for them in what every test of the suite prints and logs,
``server_process`` in the logs of servers, ``wire.status_in`` in every status. A test that
wants one shown would have to say so; none does.
"""

TOKEN = "canary-token-0123456789abcdefghij"
OPERATOR_TOKEN = "canary-operator-0123456789abcdefghij"
PROMPT = "canary prompt about the patient"
PASSWORD = "canary-password"
URL = f"http://canary-user:{PASSWORD}@127.0.0.1:4317"
TOKENS = (TOKEN, OPERATOR_TOKEN)
_ALL = (*TOKENS, PROMPT, PASSWORD)
#: Parts are as bad as the whole.
_MARK = "canary"


def leaks(text: str) -> list[str]:
    """The places at which text holds something planted, a few words around each."""
    found, at = [], text.find(_MARK)
    while at >= 0 and len(found) < 5:
        found.append(text[max(0, at - 60) : at + 60])
        at = text.find(_MARK, at + 1)
    return found


def check(text: str, where: str) -> None:
    """Fail where something planted has come out."""
    assert not (found := leaks(text)), f"{where} holds a secret: {found}"
