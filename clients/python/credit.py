"""The output tokens of one request between server, client and reader. Pure."""


class Credit:
    """Counts what is granted, received and read.

    Invariant, with credit that is kept up: tokens that the server may still send and tokens that wait to be
    read are at most the window together.

    Args:
        start_tokens: what the server grants by itself at the start and after each resumption.
        window_tokens: how far the request may be ahead of its reader; 0 = credit is granted by hand.
    """

    def __init__(self, start_tokens: int, window_tokens: int) -> None:
        self._start_tokens = start_tokens
        self.window_tokens = window_tokens
        self._num_granted = start_tokens
        self._num_received = 0
        self._num_read = 0
        self._num_due = 0
        self._num_excess = 0

    def receive(self, num_tokens: int) -> None:
        """Tokens arrived."""
        self._num_received += num_tokens

    def grant(self, num_tokens: int) -> None:
        """Tokens were granted by hand."""
        self._num_granted += num_tokens

    def read(self, num_tokens: int) -> int:
        """Tokens were read; returns what is to be granted now.

        Nothing until half of the window was read: a frame a token would cost too much.
        """
        self._num_read += num_tokens
        num_repaid = min(self._num_excess, num_tokens)
        self._num_excess -= num_repaid
        self._num_due += num_tokens - num_repaid
        if not self.window_tokens or self._num_due * 2 < self.window_tokens:
            return 0
        due, self._num_due = self._num_due, 0
        return due

    def renew(self) -> int:
        """Adapt to a resumption; returns what is to be granted on top of what the server grants by itself.

        The server counts anew from the last event that arrived. What was granted by hand is not to be lost;
        what waits to be read was granted twice now, and is paid back by granting nothing for it.
        """
        if self.window_tokens:
            self._num_due = 0
            self._num_excess = self._num_received - self._num_read
            return max(0, self.window_tokens - self._start_tokens)
        num_at_server = self._num_received + self._start_tokens
        num_missing = max(0, self._num_granted - num_at_server)
        self._num_granted = num_at_server + num_missing
        return num_missing
