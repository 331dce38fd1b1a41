"""When, and for how long, a lost stream is tried again. Pure; knows no stream."""

import random

import grpc

from clients.python.errors import Overloaded, VorrangError

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 1.0
#: Codes of a broken connection, when no reason of the server's comes with them.
_BROKEN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
}


def is_broken(loss: VorrangError) -> bool:
    """Whether a stream ended because of the connection, and not because the server wanted so."""
    return not loss.reason and loss.code in _BROKEN


class Attempts:
    """The attempts to find one lost connection again.

    The waits double from 50 ms to a second, each shortened by up to a half by chance, so that the clients
    of a server that was gone don't come back all at once.

    Args:
        now_s: when it was lost.
        patience_s: how long it is looked for.
        chance: between 0 and 1, each time anew.
    """

    def __init__(self, now_s: float, patience_s: float, chance: "random.Random | None" = None) -> None:
        self.give_up_at_s = now_s + patience_s
        self._chance = chance or random.Random()  # Nothing secret.
        self._backoff_s = _BACKOFF_FIRST_S

    def next_wait_s(self, now_s: float, last: VorrangError) -> float | None:
        """How long to wait before the next attempt.

        Args:
            now_s: the time.
            last: how the stream was lost, or how the last attempt failed.

        Returns:
            Seconds; None = no attempt is worth while: the answer won't change, or the time is over.
        """
        if not (is_broken(last) or last.code is grpc.StatusCode.UNAVAILABLE or isinstance(last, Overloaded)):
            return None
        wait_s = self._backoff_s * (1 - self._chance.random() / 2)
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S)
        wait_s = max(wait_s, last.retry_after_s or 0.0)
        return wait_s if now_s + wait_s < self.give_up_at_s else None
