"""How many calls may be open, and how quickly a peer may begin them.

``maximum_concurrent_rpcs`` of grpc would turn away health checks as well, and grpc
has no limit on resets; so calls are counted here, where their handlers begin.
Knows neither engine nor messages.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from server.bucket import Bucket
from server.errors import TooManyCalls
from server.sections import AdmissionSection

#: Peers that are remembered; those without open calls are forgotten first, the longest unseen of them first.
MAX_PEERS = 10_000


class _Peer:
    __slots__ = ("num_calls", "starts")

    def __init__(self, starts: Bucket) -> None:
        self.num_calls = 0
        self.starts = starts


class Door:
    """Counts calls. All methods are for the event loop's thread.

    Args:
        limits: what may be.
        now: seconds of a monotonic clock.
    """

    def __init__(self, limits: AdmissionSection, now: Callable[[], float]) -> None:
        self._limits = limits
        self._now = now
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._num_calls = 0
        self._num_sessions = 0

    @property
    def num_peers(self) -> int:
        """Peers that are remembered."""
        return len(self._peers)

    def enter(self, peer: str, *, is_session: bool) -> None:
        """Let a call in; ``leave`` must follow.

        Raises:
            TooManyCalls: it would break a limit; then ``leave`` must not follow.
        """
        limits, known = self._limits, self._known(host_of(peer))
        if known.starts.take(self._now()) > 0:
            rate = limits.max_peer_starts_per_s
            raise TooManyCalls(
                "starts of this peer", f"{rate:g} a second", retry_after_s=math.ceil(1000 / rate) / 1000
            )
        if known.num_calls >= limits.max_peer_calls:
            raise TooManyCalls("open calls of this peer", str(limits.max_peer_calls))
        if self._num_calls >= limits.max_calls:
            raise TooManyCalls("open calls", str(limits.max_calls))
        if is_session and self._num_sessions >= limits.max_sessions:
            raise TooManyCalls("open sessions", str(limits.max_sessions))
        known.num_calls += 1
        self._num_calls += 1
        self._num_sessions += is_session

    def leave(self, peer: str, *, is_session: bool) -> None:
        """A call that was let in has ended."""
        self._peers[host_of(peer)].num_calls -= 1
        self._num_calls -= 1
        self._num_sessions -= is_session

    def _known(self, host: str) -> _Peer:
        limits = self._limits
        known = self._peers.get(host)
        if known is None:
            if len(self._peers) >= MAX_PEERS:
                self._forget_one()
            known = self._peers[host] = _Peer(Bucket(limits.max_peer_starts_per_s, limits.peer_start_burst))
        self._peers.move_to_end(host)
        return known

    def _forget_one(self) -> None:
        for host, peer in self._peers.items():
            if peer.num_calls == 0:
                del self._peers[host]
                return
        raise TooManyCalls("peers with open calls", str(MAX_PEERS))


def host_of(peer: str) -> str:
    """``ipv4:127.0.0.1:4242`` without its port; what has none stays whole."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
