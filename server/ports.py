"""The gRPC ports: which services are on which, TLS, and the limits of the transport.

A misspelt option of grpc is silently ignored, so tests look at the effect of each.
"""

import asyncio
import contextlib
import ipaddress
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2_grpc

from engine import descriptors
from server import control, generation
from server.health import Health
from server.reflection import add_reflection
from server.settings import Settings, SettingsError
from server.tls import TlsFiles

_HEALTH = "grpc.health.v1.Health"

#: Descriptors that connections must leave to everything else: other processes, files, scrapes.
NUM_OTHER_DESCRIPTORS = 128
#: A further port gets this share of the connections at most, and the clients' port the rest.
SIDE_PORT_SHARE = 8

log = structlog.get_logger("vorrang.server")


class Ports:
    """One port; others where ControlService or health have their own. Make it inside the running event loop.

    Args:
        settings: all of them.

    Attributes:
        tls: certificates in use; None before ``open``, and without TLS.
        health_address: of the port for probes; empty without one.
        connections: how many the ports may have open at once.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._servers: list[grpc.aio.Server] = []
        self.tls: TlsFiles | None = None
        self.health_address = ""
        self._watching: asyncio.Task[None] | None = None
        has_own = settings.control.enabled and settings.control.listen is not None
        self._num_side_ports = has_own + (settings.health.listen is not None)
        self.connections = connections_of_ports(
            settings.admission.max_connections,
            self._num_side_ports,
            limit=descriptors.limit(),
            num_open=descriptors.num_open(),
        )

    @property
    def transport(self) -> str:
        """``plaintext``, ``TLS`` or ``mTLS``."""
        if self.tls is None:
            return "plaintext"
        return "mTLS" if self.tls.requires_client_certificate else "TLS"

    async def open(
        self, health: Health, service: grpc.GenericRpcHandler, operators: grpc.GenericRpcHandler
    ) -> tuple[str, str]:
        """Listen.

        Args:
            health: on every port.
            service: of the clients.
            operators: ControlService; on its own port, on the same, or nowhere, as the settings say.

        Returns:
            The addresses of the clients' and of the operators' port; the latter is empty without one.

        Raises:
            SettingsError: an address can't be used, or a certificate.
        """
        settings = self._settings
        self._tell_connections()
        if settings.tls.certificate is not None:
            self.tls = TlsFiles(settings.tls)
            self._watching = asyncio.create_task(self.tls.watch(), name="tls-files")
        has_own_port = settings.control.enabled and settings.control.listen is not None
        handlers = {generation.SERVICE: service}
        if settings.control.enabled and not has_own_port:
            handlers[control.SERVICE] = operators
        if settings.health.listen is not None:
            self.health_address = await self._open_for_probes(settings.health.listen, health)
        most = self.connections
        address = await self._open("server.listen", settings.server.listen, health, handlers, most.clients)
        if not settings.control.enabled:
            return address, ""
        if settings.control.listen is None:
            return address, address
        own = await self._open(
            "control.listen", settings.control.listen, health, {control.SERVICE: operators}, most.side
        )
        return address, own

    async def close(self, grace_s: float) -> None:
        """Listen no more; calls get ``grace_s`` seconds to write their last."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    def _tell_connections(self) -> None:
        most, wanted = self.connections, self._settings.admission.max_connections
        if most.clients < wanted or (self._num_side_ports and most.side < wanted):
            log.warning(
                "server.connections_limited",
                max_connections=wanted,
                of_clients=most.clients,
                of_other_ports=most.side,
                open_files=descriptors.limit(),
            )

    async def _open(
        self,
        setting: str,
        listen: str,
        health: Health,
        handlers: dict[str, grpc.GenericRpcHandler],
        max_connections: int,
    ) -> str:
        if self.tls is None:
            check_plaintext(setting, listen, allowed=self._settings.server.insecure)
        server = grpc.aio.server(options=options(self._settings, max_connections))
        if self._settings.control.reflection:
            add_reflection(server, (*handlers, _HEALTH))
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        server.add_generic_rpc_handlers(tuple(handlers.values()))
        return await self._start(setting, listen, server, self.tls)

    async def _open_for_probes(self, listen: str, health: Health) -> str:
        """Plaintext wherever it is: it tells no more than a port that is open or closed does."""
        server = grpc.aio.server(options=options(self._settings, self.connections.side))
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        return await self._start("health.listen", listen, server, None)

    async def _start(self, setting: str, listen: str, server: grpc.aio.Server, tls: TlsFiles | None) -> str:
        host, _, port = listen.rpartition(":")
        if int(port) > 65535:
            raise SettingsError(f"{setting}: the port must be at most 65535, got {port}")
        try:
            if tls is None:
                bound = server.add_insecure_port(listen)
            else:
                bound = server.add_secure_port(listen, tls.credentials())
        except RuntimeError:
            raise SettingsError(f"{setting}: can't listen on {listen}; is it in use?") from None
        self._servers.append(server)
        await server.start()
        return f"{host}:{bound}"


def check_plaintext(setting: str, listen: str, *, allowed: bool) -> None:
    """Refuse plaintext that others could read.

    Raises:
        SettingsError: the address is not loopback, and nobody said that this is meant.
    """
    host = listen.rpartition(":")[0]
    if not allowed and not _is_loopback(host.strip("[]")):
        rule = "is not loopback, and this port speaks plaintext; set up TLS, or say --insecure"
        raise SettingsError(f"{setting}: {host} {rule}")


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections open at once.

    Attributes:
        clients: on the port of the clients.
        side: on each other gRPC port.
    """

    clients: int
    side: int


def connections_of_ports(wanted: int, num_side_ports: int, *, limit: int, num_open: int) -> Connections:
    """What each port may have, so that all of them together leave descriptors to everything else.

    Args:
        wanted: on each port, by the settings.
        num_side_ports: ports beside the clients'.
        limit: descriptors this process may have open.
        num_open: those it has.

    Raises:
        SettingsError: there is not even one connection for each port.
    """
    free = limit - num_open - NUM_OTHER_DESCRIPTORS
    least = 1 + num_side_ports
    if free < least:
        needed = limit + least - free
        raise SettingsError(f"the limit on open files (ulimit -n) must be at least {needed}, got {limit}")
    side = max(1, min(wanted, free // SIDE_PORT_SHARE))
    return Connections(min(wanted, free - num_side_ports * side), side)


def options(settings: Settings, max_connections: int) -> list[tuple[str, int]]:
    """Options of the transport.

    Args:
        settings: all of them.
        max_connections: open at once on the port.
    """
    admission = settings.admission
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", settings.server.max_concurrent_streams),
        ("grpc.max_receive_message_length", settings.server.max_frame_bytes),
        # Between the two limits grpc refuses at random.
        ("grpc.max_metadata_size", admission.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", admission.max_metadata_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.keepalive_time_ms", round(admission.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(admission.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", round(admission.keepalive_timeout_s * 1000)),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            round(admission.min_ping_interval_s * 1000),
        ),
        ("grpc.server_handshake_timeout_ms", round(admission.handshake_timeout_s * 1000)),
    ]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
