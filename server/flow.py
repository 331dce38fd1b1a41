"""What keeps a request from being computed: no credit, a reader that lags, a pause.

Any of them parks it; only when none does is it unparked. Pure but for one timer: a
request that waits for its reader longer than it may fails. Knows no stream and no frame.
"""

import asyncio
from collections.abc import Callable

from engine.errors import SlowConsumer
from engine.handle import Handle


class Flow:
    """Credit and pauses of one request.

    Invariant: a request never has more output tokens than it was granted, and at most
    ``max_unsent_tokens`` (and those of the step in flight) that were not handed to the transport.

    Args:
        handle: the request's.
        granted_tokens: output tokens its client is ready for; None = as many as it can read.
        max_unsent_tokens: output tokens that may wait for the transport.
        slow_client_timeout_s: seconds without credit, or with as many waiting as may, until it fails.
        on_stall: called whenever want of credit parks it.
        on_park: called whenever it is parked, with the reason: ``credit``, ``reader`` or ``paused``.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        granted_tokens: int | None,
        max_unsent_tokens: int,
        slow_client_timeout_s: float,
        on_stall: Callable[[], None] = lambda: None,
        on_park: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._handle = handle
        self._on_stall = on_stall
        self._on_park = on_park
        self._granted_tokens = granted_tokens
        self._max_unsent_tokens = max_unsent_tokens
        self._timeout_s = slow_client_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._num_unsent_tokens = 0
        self._full = False
        self._paused = False
        self._unbound = False
        self._watched = True
        self._parked = False
        self._allow()
        self.update(0)

    @property
    def parked(self) -> bool:
        """Whether it is told not to be computed."""
        return self._parked

    @property
    def paused(self) -> bool:
        """Whether its client paused it."""
        return self._paused

    @property
    def held(self) -> bool:
        """Whether only its client can let it go on."""
        return self.out_of_credit or (self._paused and not self._unbound)

    @property
    def out_of_credit(self) -> bool:
        """Whether it has as many output tokens as were granted."""
        granted = self._granted_tokens
        return granted is not None and not self._unbound and self._handle.num_output_tokens >= granted

    def grant(self, num_tokens: int) -> None:
        """Let it produce more."""
        if self._granted_tokens is not None:
            self._granted_tokens += num_tokens
            self._allow()
            self.update(self._num_unsent_tokens)

    def renew(self, granted_tokens: int) -> None:
        """Replace all that was granted: tokens counted from the first of the output."""
        self._granted_tokens = granted_tokens
        self._allow()
        self.update(self._num_unsent_tokens)

    def pause(self) -> None:
        """Compute it no more until ``unpause``, however much credit it has."""
        self._paused = True
        self.update(self._num_unsent_tokens)

    def unpause(self) -> None:
        """Lift a pause."""
        self._paused = False
        self.update(self._num_unsent_tokens)

    def unbind(self, unbound: bool) -> None:
        """Whether pause and credit count for nothing, because its client can send no more frames."""
        self._unbound = unbound
        self._allow()
        self.update(self._num_unsent_tokens)

    def watch(self, watched: bool) -> None:
        """Whether somebody is there who could read; without anybody nobody is too slow."""
        self._watched = watched
        self.update(self._num_unsent_tokens)

    def update(self, num_unsent_tokens: int) -> None:
        """Look again, after an event or a write.

        Args:
            num_unsent_tokens: output tokens that wait for the transport.
        """
        self._num_unsent_tokens = num_unsent_tokens
        if self._flows_freely(num_unsent_tokens):
            return
        if self._handle.finished:
            self._stop_timer()
            return
        # Half of them must be gone before it goes on: a seat is not worth a single token.
        limit = self._max_unsent_tokens // 2 + 1 if self._full else self._max_unsent_tokens
        self._full = num_unsent_tokens >= limit
        waits_for_reader = self.out_of_credit or self._full
        paused = self._paused and not self._unbound
        if (parked := waits_for_reader or paused) is not self._parked:
            self._parked = parked
            (self._handle.park if parked else self._handle.unpark)()
            if parked:
                self._on_park("credit" if self.out_of_credit else "reader" if self._full else "paused")
                if self.out_of_credit:
                    self._on_stall()
        if not (waits_for_reader and self._watched and not paused):
            self._stop_timer()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def _allow(self) -> None:
        """Tell the engine what was granted, where a step could bring more."""
        self._handle.allow(None if self._unbound else self._granted_tokens)

    def _flows_freely(self, num_unsent_tokens: int) -> bool:
        """Whether nothing holds it or held it: what is true nearly always, and quick to tell."""
        if self._parked or self._full or self._paused or self._timer is not None:
            return False
        granted = self._granted_tokens
        return num_unsent_tokens < self._max_unsent_tokens and (
            granted is None or self._handle.num_output_tokens < granted
        )

    def close(self) -> None:
        """Leave no timer behind."""
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        what = "for credit" if self.out_of_credit else "to be read"
        self._handle.fail(
            SlowConsumer(f"its output waited {what} for {self._timeout_s:g} s, as long as it may")
        )
