"""TLS of the gRPC ports: certificates from files, read again whenever the files change.

Connections that are open keep what they were made with; new ones get the new
certificate. Files that do not fit together are logged and passed over, so that a
renewal may write them one after the other.
"""

import ssl
import stat
from pathlib import Path

import grpc
import structlog
import watchfiles

from engine.descriptors import RESERVE
from engine.failure import trace_of
from server.sections import TlsSection
from server.settings import SettingsError

#: Milliseconds in which changes of several files count as one.
DEBOUNCE_MS = 200
#: A group may read a key, as orchestrators mount secrets for one.
_TOO_OPEN = stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP

log = structlog.get_logger("vorrang.server")


class _Port:
    """Credentials of one port: what its next handshake gets, if that is new."""

    def __init__(self, reloader: "TlsFiles") -> None:
        self._files = reloader
        self._version = reloader.version
        self.credentials = grpc.dynamic_ssl_server_credentials(
            reloader.configuration,
            self._fetch,  # type: ignore[arg-type]  # the stubs do not know that None means "as before"
            reloader.requires_client_certificate,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by grpc's threads, before every handshake."""
        version, configuration = self._files.version, self._files.configuration
        if version == self._version:
            return None
        self._version = version
        return configuration


class TlsFiles:
    """Certificate, key and client authorities as they are in their files.

    Args:
        section: where they are; it must name a certificate.

    Raises:
        SettingsError: they can't be read or do not fit together.

    Attributes:
        configuration: what new connections get.
        version: rises with every change of it.
    """

    def __init__(self, section: TlsSection) -> None:
        assert section.certificate is not None
        assert section.private_key is not None
        self._certificate, self._private_key = section.certificate, section.private_key
        self._client_ca = section.client_ca
        self.version = 0
        self._ports: list[_Port] = []
        try:
            self._content = self._read()
        except (OSError, ValueError) as error:
            raise SettingsError(f"tls: {error}") from None
        self.configuration = self._configuration(self._content)
        self._warn_of_readers()

    @property
    def requires_client_certificate(self) -> bool:
        """Whether every client must show a certificate."""
        return self._client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """What one port is given; every port needs its own.

        They are kept: grpc calls back into them and holds no reference of its own.
        """
        self._ports.append(_Port(self))
        return self._ports[-1].credentials

    async def watch(self) -> None:
        """Read the files again whenever they change, until cancelled.

        Their folders are watched, so that files may be replaced, and symbolic links too.
        """
        paths = {self._certificate, self._private_key, *([self._client_ca] if self._client_ca else [])}
        folders = {path.absolute().parent for path in paths}
        changes = watchfiles.awatch(*folders, watch_filter=None, debounce=DEBOUNCE_MS, recursive=False)
        try:
            async for _ in changes:
                self.reload()
        except Exception as error:  # a server with the certificates it has is better than none
            log.error("tls.not_watched", exception=trace_of(error, with_text=True))

    def reload(self) -> bool:
        """Read the files again; returns whether they hold something new that is in order."""
        try:
            with RESERVE.lent():
                content = self._read()
        except (OSError, ValueError) as error:
            log.warning("tls.not_reloaded", reason=str(error))
            return False
        if content == self._content:
            return False
        self._content = content
        self.configuration = self._configuration(content)
        self.version += 1
        self._warn_of_readers()
        log.info("tls.reloaded", certificate=str(self._certificate))
        return True

    def _warn_of_readers(self) -> None:
        """Say so where more than the key's owner and group may read it, or more than its owner write it."""
        try:
            mode = self._private_key.stat().st_mode
        except OSError:  # it is being replaced
            return
        if mode & _TOO_OPEN:
            shown = f"{stat.S_IMODE(mode):04o}"
            log.warning("tls.key_open_to_others", private_key=str(self._private_key), mode=shown)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        """What the files hold.

        Raises:
            OSError: a file can't be read.
            ValueError: they do not fit together; names the file.
        """
        content = self._bytes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._private_key, password=_no_password)
        except ssl.SSLError:
            names = f"{self._certificate} and {self._private_key}"
            raise ValueError(f"{names} must be a certificate and its key, in PEM") from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except ssl.SSLError:
                raise ValueError(f"{self._client_ca} must hold certificates, in PEM") from None
        if content != self._bytes():
            raise ValueError("the files changed while they were read")
        return content

    def _bytes(self) -> tuple[bytes, bytes, bytes | None]:
        client_ca = _bytes_of(self._client_ca) if self._client_ca is not None else None
        return _bytes_of(self._certificate), _bytes_of(self._private_key), client_ca

    @staticmethod
    def _configuration(content: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
        certificate, private_key, client_ca = content
        return grpc.ssl_server_certificate_configuration([(private_key, certificate)], client_ca)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}") from None


def _no_password() -> str:
    """Without it OpenSSL would ask at the terminal."""
    raise ValueError("the private key must not be encrypted")
