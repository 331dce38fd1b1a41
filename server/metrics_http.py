"""HTTP for scrapes, bounded: so many connections, and none for long, whatever a client does or does not."""

import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog

from engine.descriptors import is_shortage

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

#: Scrapes at once; a further connection is closed.
MAX_CONNECTIONS = 16
#: Seconds a client may say nothing, and read nothing.
SILENCE_S_MAX = 10.0
#: Seconds a connection may last.
CONNECTION_S_MAX = 30.0
#: Seconds after which another connection is looked for, when there was no descriptor for one.
SHORTAGE_S = 0.1

log = structlog.get_logger("vorrang.server")


class BoundedServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are not many. ``serve_forever`` closes those that last.

    Args:
        host: name or address.
        port: 0 = any free one.
        app: what answers.

    Raises:
        OSError: the address can't be used.
        OverflowError: the port is none.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, app: "WSGIApplication") -> None:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        self._since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    @property
    def num_connections(self) -> int:
        """Connections open now."""
        return len(self._since)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept; without a descriptor for it, after a while rather than again and again."""
        try:
            return super().get_request()
        except OSError as error:
            if is_shortage(error):
                time.sleep(SHORTAGE_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more."""
        with self._lock:
            if len(self._since) >= MAX_CONNECTIONS:
                return False
            self._since[request] = time.monotonic()
        return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what lasts too long; called twice a second. Its thread closes it."""
        now = time.monotonic()
        with self._lock:
            for connection, since in self._since.items():
                if now - since > CONNECTION_S_MAX:
                    _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was too slow is nobody's concern, and leaves no traceback."""
        log.debug("metrics.connection_lost")


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_S_MAX

    def log_message(self, *_: Any) -> None:
        """Scrapes are no news."""


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed already
        return
